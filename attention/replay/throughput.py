"""Where the time of a tensor replay goes: cases a minute, and the shares of the device's work and of the oracle in it.

On a GPU a span of work is what lies between two CUDA events, and nothing waits for them before the end. In one that the
device began before the host had enqueued all of it, the device may have waited, at most for as long as the host took.
That counts as idle, so `busy_share` is a lower bound; `oracle_share` counts every span of the oracle whole and is an
upper one. On the CPU both are of the time that the calls took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attention.backends.base import AttentionSpec
from attention.backends.oracle import Truth
from attention.replay.members import Member
from attention.replay.truths import Oracle

ORACLE = "oracle"


@dataclass(frozen=True)
class Throughput:
    """Shares are of the wall time."""

    num_cases: int
    wall_s: float
    cases_per_minute: float
    busy_share: float  # device at work on inputs, oracle, kernels and comparison
    oracle_share: float
    shares: dict[str, float]  # of every part's spans, gaps too

    def row(self) -> dict[str, Any]:
        return asdict(self)


class Meter:
    """Spans of a replay from now on. One span is enqueued at a time, whichever thread it belongs to."""

    def __init__(self, device: str = "cpu") -> None:
        self._is_cuda = device.startswith("cuda")
        self._lock = threading.RLock()
        self._began = time.perf_counter()
        self._host: list[tuple[str, float]] = []  # part, seconds
        self._device: list[tuple[str, Any, Any, float]] = []  # part, two events, seconds it may have waited

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """A piece of the device's work; a span that raises is not counted."""
        with self._lock:
            if not self._is_cuda:
                began = time.perf_counter()
                yield
                self._host.append((part, time.perf_counter() - began))
                return
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            began = time.perf_counter()
            yield
            end.record()
            waited = time.perf_counter() - began if start.query() else 0.0
            self._device.append((part, start, end, waited))

    def oracle(self, compute: Oracle) -> Oracle:
        """The same oracle, its work counted."""

        def timed(members: Sequence[Member], spec: AttentionSpec, device: str) -> Truth:
            with self.span(ORACLE):
                return compute(members, spec, device)

        return timed

    def summary(self, num_cases: int) -> Throughput:
        """Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        spans = [(part, start.elapsed_time(end) / 1e3, waited) for part, start, end, waited in self._device]
        spans += [(part, seconds, 0.0) for part, seconds in self._host]
        busy = sum(max(0.0, seconds - waited) for _, seconds, waited in spans)
        shares = dict.fromkeys((ORACLE, *(part for part, _, _ in spans)), 0.0)
        for part, seconds, _ in spans:
            shares[part] += seconds / wall
        return Throughput(num_cases, wall, 60 * num_cases / wall, busy / wall, shares[ORACLE], shares)
