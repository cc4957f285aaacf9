"""Basic replay: before an instance is ready, is its attention as exact on this model as plain math?

A few seeded texts go through the model three times: with attention as resolved, as plain math in the same dtype, and as
the float64 oracle. Each is prefilled, extended and then decoded, so that every phase counts. What is compared are the
final hidden states: the relative error of the resolved backends may be `MAX_RATIO` times that of plain math. No golden
answers, no second environment: for those see `python -m flows qualify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.backends.base import AttentionSpec
from attention.dispatch import PHASES, Dispatcher
from attention.oracle_dispatcher import OracleDispatcher
from attention.policy import Policy
from attention.reasons import Code, Reason

if TYPE_CHECKING:
    from attention.model import Chunk, Runner

#: `source` of a reason that it gives.
REPLAY = "basic replay"
#: Sound kernels of one dtype differ by the order of their sums. With SmolLM2-135M on a CPU flash was at 1.01 in float32
#: and 1.19 in bfloat16, and with a softmax scale 5 % off at 24,000 and 2.96.
MAX_RATIO = 2.0
#: Below this share of the hidden states' size a difference says nothing, whatever plain math makes.
_LEAST = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_NUM_TEXTS, _PROMPT, _EXTENSION, _DECODES = 3, 48, 16, 6
_MATH = "torch_sdpa:math"


@dataclass(frozen=True)
class Replayed:
    """Relative errors of the final hidden states against the oracle, by phase: of what serves, and of plain math."""

    served: dict[str, float]
    math: dict[str, float]

    @property
    def ratio(self) -> float:
        """The worst phase's error over plain math's; NaN where there is no number."""
        return max((self.served[phase] / self.math[phase] for phase in self.served), key=lambda r: (r != r, r))

    def reason(self) -> Reason | None:
        """Why the backends that served may not; None where they may."""
        if self.ratio <= MAX_RATIO:
            return None
        worst = max(self.served, key=lambda phase: (self.served[phase] != self.served[phase], self.served[phase]))
        return Reason(
            code=Code.NUMERIC_DRIFT,
            dimension=f"hidden states after {worst}",
            observed=f"{self.ratio:.3g} times plain math's error",
            allowed=f"<= {MAX_RATIO:g}",
            source=REPLAY,
            message="the model's hidden states are further from the float64 oracle than plain math's",
        )


def replay(runner: Runner, specs: list[AttentionSpec]) -> Replayed:
    """Three executions of the same texts. `specs`: of the model's layers, as they should be. The runner's dispatcher is
    what is judged, and in its place again afterwards."""
    policy = Policy(mode="pinned", preferred=(_MATH,))
    plain = Dispatcher(policy, specs, device=runner.device, page_size=runner.page_size)
    served = _states(runner)
    with _instead(runner, plain):
        math = _states(runner)
    with _instead(runner, OracleDispatcher(specs)):
        truth = _states(runner)
    least = _LEAST[runner.dtype]
    return Replayed(
        served={phase: _error(served[phase], truth[phase], least) for phase in PHASES},
        math={phase: _error(math[phase], truth[phase], least) for phase in PHASES},
    )


@contextmanager
def _instead(runner: Runner, other: Dispatcher | OracleDispatcher) -> Iterator[None]:
    own = runner.dispatcher
    runner.dispatcher = other  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.dispatcher = own


def _error(states_RD: torch.Tensor, truth_RD: torch.Tensor, least: float) -> float:
    """Root mean square of the difference over that of the truth, not below `least`; NaN stays."""
    error = float((states_RD.double() - truth_RD.double()).norm() / truth_RD.double().norm())
    return error if error != error else max(error, least)


def _states(runner: Runner) -> dict[str, torch.Tensor]:
    """Final hidden states by phase, of all texts; every token is forced."""
    found: dict[str, list[torch.Tensor]] = {phase: [] for phase in PHASES}
    length = _PROMPT + _EXTENSION + _DECODES
    generator = torch.Generator().manual_seed(0)
    highest = min(10_000, len(runner.tokenizer))
    texts = torch.randint(10, highest, (_NUM_TEXTS, length), generator=generator).tolist()
    table = tuple(runner.pool.alloc(-(-length // runner.page_size)))
    try:
        for text in texts:
            at = 0
            for phase, num in (("prefill", _PROMPT), ("extend", _EXTENSION), *[("decode", 1)] * _DECODES):
                chunk = _chunk(text, at, num, table, runner.page_size)
                found[phase].append(runner.forward([chunk], rows="all").float())
                at += num
    finally:
        runner.pool.free(table)
    return {phase: torch.cat(states) for phase, states in found.items()}


def _chunk(text: list[int], start: int, num: int, table: tuple[int, ...], page_size: int) -> Chunk:
    from attention.model import Chunk

    end = start + num
    return Chunk(tuple(text[start:end]), start, table[: -(-end // page_size)])
