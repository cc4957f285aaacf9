"""Faults for drills: what a deliberately faulty instance does wrong.

A drill proves that a gate stops what it is there to stop. A fault is switched on by `--fault NAME`
alone, is logged, and shows in `/health` and `/fingerprint`, so that nobody takes the instance for a
sound one. `wrong_scale` is applied where the softmax scale is (the dispatcher), `slow_decode` in the
scheduler, which knows whether a step decodes a live request, and those of a backend between the dispatcher and the
backend that was chosen at start: it starts sound, and fails once the instance is ready (`arm`).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from attention.errors import UserError, nearest

if TYPE_CHECKING:  # torch, which those who only name a fault do not need
    import torch

    from attention.backends.base import AttentionSpec, Backend, Batch, Planned

WRONG_SCALE = "wrong_scale"
SLOW_DECODE = "slow_decode"
BACKEND_RAISES = "backend_raises"
BACKEND_NAN = "backend_nan"
BACKEND_HANGS = "backend_hangs"
PROBE_CRASH = "probe_crash"

FAULTS: dict[str, str] = {
    WRONG_SCALE: "the softmax scale is 1.05 times what it should be",
    SLOW_DECODE: "numerically right, but a step that decodes a live request takes four times as long",
    BACKEND_RAISES: "the backend chosen at start raises once the instance is ready",
    BACKEND_NAN: "the backend chosen at start gives NaN once the instance is ready",
    BACKEND_HANGS: "the backend chosen at start never returns once the instance is ready",
    PROBE_CRASH: "the process that probes the first backend of the chain dies",
}

SLOW_DECODE_FACTOR = 4.0
SLOW_DECODE_MIN_S = 0.060

_OF_A_BACKEND = (BACKEND_RAISES, BACKEND_NAN, BACKEND_HANGS)
_armed = threading.Event()


def check_fault(name: str | None) -> str | None:
    """`name` itself if it is a fault or None. Raises UserError with the nearest names."""
    if name is not None and name not in FAULTS:
        raise UserError(f"fault {name!r} is unknown; {nearest(name, FAULTS)}")
    return name


def slow_decode_pause_s(step_s: float) -> float:
    """Seconds to sleep after a step of `step_s` seconds, so that it takes four times as long, at least
    60 ms longer: offline measuring and shadow traffic never see it, only users do."""
    return max((SLOW_DECODE_FACTOR - 1.0) * step_s, SLOW_DECODE_MIN_S)


def arm() -> None:
    """The instance is ready: faults of a backend begin."""
    _armed.set()


def faulty(backend: Backend, fault: str | None, target: str) -> Backend:
    """The backend itself; with a fault of a backend, and for its target, one that fails once `arm` was called."""
    if fault not in _OF_A_BACKEND or backend.name != target:
        return backend
    return _Faulty(backend, fault)


class _Faulty:
    def __init__(self, backend: Backend, fault: str) -> None:
        self.name = backend.name
        self.check = backend.check
        self._backend = backend
        self._fault = fault

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = self._backend.plan(batch, spec, graph=graph, lse=lse)
        if not _armed.is_set():
            return planned
        sound = planned.run

        def run(
            q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if self._fault == BACKEND_RAISES:
                raise RuntimeError("a drill's fault: the kernel cannot be launched")
            while self._fault == BACKEND_HANGS:
                time.sleep(60)
            out_THD, lse_TH = sound(q_THD, k_NPGD, v_NPGD)
            return out_THD.fill_(float("nan")), lse_TH

        planned.run = run  # type: ignore[method-assign]
        return planned
