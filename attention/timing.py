"""Seconds of single calls. On a GPU every call finds a cold L2, and the host's time is not in it.

    clock = clock_of("cuda")
    clock.times([call], min_s=0.01)        # raw samples, one a call

A GPU call is timed by a pair of events. Before it the L2 is filled with other data: a read of four times its size,
since lines that were written would have to be written back during the call. That this works is proven for every case
(`attention.contender`), because a cold L2 that was asked for may not be one (flashinfer#4468). The device sleeps while
the host queues a block of calls, so that it never waits for a launch.

On the CPU a call is timed as it is: caches there are shared with everything else that runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

#: Calls of one block: fewer say little of the tail, and more would fill the launch queue (about 1,000 entries).
LEAST_CALLS, MOST_CALLS = 5, 40
_CYCLES_PER_S = 2.0e9  # of `torch.cuda._sleep`, about; only how long the device waits hangs on it
_QUEUE_MARGIN = 1.25  # sleep this much longer than the host needed for the block before
_MOST_SLEEP_S = 0.03  # a call that waits for the device would have it sleep ever longer
_MIN_SPIN_CYCLES = 1
_SAMPLES_TO_CALIBRATE = 15


class Clock(Protocol):
    """Times calls on one device."""

    def times(self, calls: Sequence[Call], *, min_s: float) -> list[float]:
        """Seconds of each of as many calls as last `min_s` together, LEAST_CALLS to MOST_CALLS; `calls` in turn."""
        ...

    def slowed(self, call: Call, share: float) -> Call:
        """A call that takes `share` longer, for drills; at least what the device's shortest kernel takes."""
        ...


class CpuClock:
    """Wall time of calls, one after the other."""

    def times(self, calls: Sequence[Call], *, min_s: float) -> list[float]:
        taken: list[float] = []
        clock = time.perf_counter
        while sum(taken) < min_s or len(taken) < LEAST_CALLS:
            call = calls[len(taken) % len(calls)]
            started = clock()
            call()
            taken.append(clock() - started)
            if len(taken) >= MOST_CALLS or taken[0] >= min_s:
                break  # a long call is its own block
        return taken

    def slowed(self, call: Call, share: float) -> Call:
        for _ in range(2):
            call()
        extra_s = share * median(self.times([call], min_s=0.05))

        def slower() -> None:
            call()
            end = time.perf_counter() + extra_s
            while time.perf_counter() < end:
                pass

        return slower


class CudaClock:
    """Device time of calls, with a cold L2."""

    def __init__(self, device: str) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._other = torch.randn(self.l2_bytes, device=device)  # float32: four times the L2
        self._sum = torch.empty((), device=device)
        self._host_s: dict[int, float] = {}  # seconds that the host needs to queue one call, by call
        self._call_s: dict[int, float] = {}

    def flush(self) -> None:
        torch.sum(self._other, dim=0, out=self._sum)

    def times(self, calls: Sequence[Call], *, min_s: float) -> list[float]:
        key = id(calls[0])
        if key not in self._call_s:
            self._call_s[key] = median(self.block(calls, LEAST_CALLS))
        num = min(MOST_CALLS, max(LEAST_CALLS, math.ceil(min_s / self._call_s[key])))
        return self.block(calls, math.ceil(num / len(calls)) * len(calls))

    def forget(self) -> None:
        """Calls that were timed are gone: their ids may come again for others."""
        self._host_s.clear()
        self._call_s.clear()

    def block(self, calls: Sequence[Call], num: int, *, flush: bool = True) -> list[float]:
        """Seconds of `num` calls, taken from `calls` in turn. Once more where the host was too slow to queue them."""
        for _ in range(2):
            seconds, waited = self._block(calls, num, flush)
            if not waited:
                break
        return seconds

    def _block(self, calls: Sequence[Call], num: int, flush: bool) -> tuple[list[float], bool]:
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(num)] for _ in range(2))
        key = id(calls[0])
        sleep_s = min(_MOST_SLEEP_S, _QUEUE_MARGIN * num * self._host_s.get(key, 2e-4))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))
        began = time.perf_counter()
        for i in range(num):
            if flush:
                self.flush()
            starts[i].record()
            calls[i % len(calls)]()
            ends[i].record()
        host_s = time.perf_counter() - began
        torch.cuda.synchronize()
        known = self._host_s.get(key)
        self._host_s[key] = host_s / num
        seconds = [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]
        return seconds, known is None or sleep_s < min(host_s, _MOST_SLEEP_S)

    def slowed(self, call: Call, share: float) -> Call:
        """A spin kernel follows the call; how many cycles it takes is found by two measurements of both."""
        base_s = median(self.block([call], _SAMPLES_TO_CALIBRATE))
        points = []
        for cycles in (_MIN_SPIN_CYCLES, int(0.2 * base_s * _CYCLES_PER_S) + 2):
            points.append((cycles, median(self.block([_spinning(call, cycles)], _SAMPLES_TO_CALIBRATE))))
        (low, low_s), (high, high_s) = points
        per_cycle_s = max((high_s - low_s) / (high - low), 1e-12)
        return _spinning(call, max(_MIN_SPIN_CYCLES, int(low + (base_s * (1 + share) - low_s) / per_cycle_s)))


def _spinning(call: Call, cycles: int) -> Call:
    def slower() -> None:
        call()
        torch.cuda._sleep(cycles)

    return slower


def clock_of(device: str) -> CpuClock | CudaClock:
    return CudaClock(device) if device.startswith("cuda") else CpuClock()


def num_copies(num_bytes: int, cache_bytes: int) -> int:
    """Copies of a call's inputs that no cache can hold: three times its size beside the one in use, two at least."""
    return max(2, 1 + math.ceil(3 * cache_bytes / max(1, num_bytes)))
