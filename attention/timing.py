"""Seconds of single calls. On a GPU every call finds a cold L2, and the host's time is not in it.

    clock = clock_of("cuda")
    clock.times(Rotation(calls), min_s=0.01)        # raw samples, one a call

A GPU call is timed by a pair of events. The L2 is cold because the calls rotate over copies of their inputs that
together no cache can hold, and go on where the block before ended; `attention.contender` makes the copies and proves
it, since a cold L2 that was asked for may not be one (flashinfer#4468). What a kernel reads in every call, its code
above all, stays warm, as in a service. The device sleeps while the host queues a block of calls, so that it never waits
for a launch.

On the CPU a call is timed as it is: caches there are shared with everything else that runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

#: Calls of one block: fewer say little of the tail, and more would fill the launch queue (about 1,000 entries).
LEAST_CALLS, MOST_CALLS = 5, 48
_CYCLES_PER_S = 2.0e9  # of `torch.cuda._sleep`, about; only how long the device waits hangs on it
_QUEUE_MARGIN = 1.25  # sleep this much longer than the host needed for the block before
_HOST_S = 2e-4  # seconds to queue a call of which nothing is known
_MOST_SLEEP_S = 0.03  # a call that waits for the device would have it sleep ever longer
_MIN_SPIN_CYCLES = 1
_SAMPLES_TO_CALIBRATE = 15


@dataclass
class Rotation:
    """Calls that take turns, and whose turn it is. `replicas`: call i has the buffers of replica i modulo this."""

    calls: Sequence[Call]
    replicas: int = 1
    at: int = 0
    host_s: float | None = None  # that the host needs to queue one; None before the first block
    call_s: float | None = None
    num_waited: int = 0  # blocks in which the device waited for the host: its time is in their seconds

    def take(self, num: int) -> list[Call]:
        """The next calls, a multiple of the replicas."""
        num = math.ceil(num / self.replicas) * self.replicas
        taken = [self.calls[(self.at + i) % len(self.calls)] for i in range(num)]
        self.at = (self.at + num) % len(self.calls)
        return taken


class Clock(Protocol):
    """Times calls on one device."""

    def times(self, rotation: Rotation, *, min_s: float) -> list[float]:
        """Seconds of each of the next calls, as many as last `min_s` together: LEAST_CALLS to MOST_CALLS, rounded up to
        a multiple of the replicas."""
        ...

    def slowed(self, call: Call, share: float) -> Call:
        """A call that takes `share` longer, for drills; at least what the device's shortest kernel takes."""
        ...


class CpuClock:
    """Wall time of calls, one after the other."""

    def times(self, rotation: Rotation, *, min_s: float) -> list[float]:
        taken: list[float] = []
        clock = time.perf_counter
        while sum(taken) < min_s or len(taken) < LEAST_CALLS:
            for call in rotation.take(rotation.replicas):
                started = clock()
                call()
                taken.append(clock() - started)
            if len(taken) >= MOST_CALLS or taken[0] >= min_s:
                break  # long calls are their own block
        return taken

    def slowed(self, call: Call, share: float) -> Call:
        for _ in range(2):
            call()
        extra_s = share * median(self.times(Rotation([call]), min_s=0.05))

        def slower() -> None:
            call()
            end = time.perf_counter() + extra_s
            while time.perf_counter() < end:
                pass

        return slower


class CudaClock:
    """Device time of calls that rotate."""

    def __init__(self, device: str) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)

    def times(self, rotation: Rotation, *, min_s: float) -> list[float]:
        if rotation.call_s is None:
            self.block(rotation, LEAST_CALLS)
        assert rotation.call_s is not None
        return self.block(rotation, min(MOST_CALLS, max(LEAST_CALLS, math.ceil(min_s / rotation.call_s))))

    def block(self, rotation: Rotation, num: int) -> list[float]:
        """Seconds of the next `num` calls, or a few more; fewer where the host queues no more while the device sleeps.
        Once more where the host was too slow; a block that it was too slow for twice is counted in the rotation."""
        for _ in range(2):
            queued = num if rotation.host_s is None else int(_MOST_SLEEP_S / (_QUEUE_MARGIN * rotation.host_s))
            seconds, waited = self._block(rotation, min(num, max(LEAST_CALLS, queued)))
            if not waited:
                return seconds
        rotation.num_waited += 1
        return seconds

    def _block(self, rotation: Rotation, num: int) -> tuple[list[float], bool]:
        calls = rotation.take(num)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        guess_s = _HOST_S if rotation.host_s is None else rotation.host_s
        sleep_s = min(_MOST_SLEEP_S, _QUEUE_MARGIN * len(calls) * guess_s)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))
        began = time.perf_counter()
        for call, (start, end) in zip(calls, events, strict=True):
            start.record()
            call()
            end.record()
        host_s = time.perf_counter() - began
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
        waited = rotation.host_s is None or sleep_s < host_s
        rotation.host_s, rotation.call_s = host_s / len(calls), median(seconds)
        return seconds, waited

    def slowed(self, call: Call, share: float) -> Call:
        """A spin kernel follows the call; how many cycles it takes is found by two measurements of both."""

        def seconds(one: Call) -> float:
            return median(self.block(Rotation([one]), _SAMPLES_TO_CALIBRATE))

        base_s, low = seconds(call), _MIN_SPIN_CYCLES
        high = int(0.2 * base_s * _CYCLES_PER_S) + 2
        low_s, high_s = seconds(_spinning(call, low)), seconds(_spinning(call, high))
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
