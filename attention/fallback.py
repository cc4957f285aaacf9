"""Fallback while serving: what is told of it, how much of it a policy bears, and who should have a pool of their own.

A request falls back when another backend than the one chosen at start serves a phase of it: its shape or features are
beyond that one, or that one failed. The budget counts requests, not steps. It has room for one falling request at
least, unless its share is 0: with few requests any share would be less than one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from attention.policy import Budget
from attention.reasons import Reason

_SLOTS = 30  # of a window: it moves by one of them
#: So many requests of a class within the window keep falling back, and are not a few special shapes any more.
KEEPS_FALLING = 10


@dataclass(frozen=True)
class FallbackEvent:
    """A backend gave way to another: at start, or for the requests of one step."""

    kind: str  # startup_fallback | request_fallback | backend_mismatch | backend_failed
    phase: str
    from_backend: str
    to_backend: str
    reasons: tuple[Reason, ...]
    bucket: str = ""  # of a request's fallback: the first shape bucket in which it falls

    @property
    def reason(self) -> str:
        """The first reason's code: a bounded label for metrics."""
        return str(self.reasons[0].code) if self.reasons else "UNCONFIRMED"


class FallbackRefusedError(Exception):
    """The policy has no room for a request that would fall back (HTTP 503). The text says why."""


@dataclass
class _Slot:
    begins: float
    requests: int = 0
    falling: int = 0


class FallbackBudget:
    """Requests of the last `window_s` seconds, and whether one more may fall back. Any thread may ask."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._slots: deque[_Slot] = deque()
        self._lock = threading.Lock()
        self._since: float | None = None  # when the present spell of falling requests began
        self._last = -math.inf  # when a request last fell, or would have
        self.num_refused = 0
        self.num_fallen = 0

    def take(self, *, falls: bool) -> None:
        """Count a request that is admitted. Raises FallbackRefusedError for one that falls beyond the budget."""
        with self._lock:
            now = self._clock()
            slot = self._slot(now)
            if falls:
                self._wished(now)
                if why := self._exceeded(now):
                    self.num_refused += 1
                    raise FallbackRefusedError(why)
                self.num_fallen += 1
            slot.requests += 1
            slot.falling += falls

    def fall(self) -> None:
        """An admitted request comes to fall while it runs. Raises FallbackRefusedError beyond the budget."""
        with self._lock:
            now = self._clock()
            slot = self._slot(now)
            self._wished(now)
            if why := self._exceeded(now, more=0):
                self.num_refused += 1
                raise FallbackRefusedError(why)
            self.num_fallen += 1
            slot.falling += 1

    @property
    def share(self) -> float:
        """Of the window's requests, those that fell back; 0.0 without any."""
        with self._lock:
            self._slot(self._clock())
            requests, falling = self._sums()
        return falling / max(1, requests)

    @property
    def is_exceeded(self) -> bool:
        """Whether one more falling request would be refused now, after some that fell."""
        with self._lock:
            now = self._clock()
            self._slot(now)
            return now - self._last <= self._budget.window_s and self._exceeded(now) is not None

    def _slot(self, now: float) -> _Slot:
        """The slot of now; those that the window has left are forgotten."""
        while self._slots and now - self._slots[0].begins >= self._budget.window_s:
            self._slots.popleft()
        if not self._slots or now - self._slots[-1].begins >= self._budget.window_s / _SLOTS:
            self._slots.append(_Slot(now))
        return self._slots[-1]

    def _sums(self) -> tuple[int, int]:
        return sum(slot.requests for slot in self._slots), sum(slot.falling for slot in self._slots)

    def _wished(self, now: float) -> None:
        if self._since is None or now - self._last > self._budget.window_s:
            self._since = now
        self._last = now

    def _exceeded(self, now: float, more: int = 1) -> str | None:
        requests, falling = self._sums()
        bears = self._budget.max_share * (requests + more)
        room = max(1, math.floor(bears)) if bears > 0 else 0
        if falling >= room:
            return (
                f"{falling} of {requests} requests of the last {self._budget.window_s:g} s fell back; the policy "
                f"bears {self._budget.max_share:.2%}"
            )
        lasted = 0.0 if self._since is None else now - self._since
        if lasted > self._budget.max_duration_s:
            bears_s = self._budget.max_duration_s
            return f"requests have been falling back for {lasted:.0f} s; the policy bears {bears_s:g} s"
        return None


@dataclass(frozen=True)
class FallenClass:
    """Requests of one kind that fall back: which, and for what reason."""

    phase: str
    bucket: str
    from_backend: str
    to_backend: str
    reason: str


@dataclass(frozen=True)
class PoolAdvice:
    """A class that keeps falling back, and should have instances of its own."""

    fallen: FallenClass
    num: int  # of its requests within the window, refused ones too
    share: float  # of all requests of the window
    added_s: float | None  # by which its part made a step longer, on average; None where none was served

    def __str__(self) -> str:
        added = "none was served" if self.added_s is None else f"each adds {1e3 * self.added_s:.2g} ms to a step"
        one = self.fallen
        return (
            f"give {one.bucket} its own pool: {self.num} requests, {self.share:.0%} of all, wanted to fall back from "
            f"{one.from_backend} to {one.to_backend} ({one.reason}); {added}"
        )


@dataclass
class _Seen:
    times: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))
    seconds: float = 0.0
    steps: int = 0
    advised: float = -math.inf


class FallenClasses:
    """Which classes of requests keep falling back. On the engine thread, but for `wished`."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._seen: dict[FallenClass, _Seen] = {}
        self._requests: deque[float] = deque(maxlen=100_000)
        self._lock = threading.Lock()

    def request(self, fallen: FallenClass | None) -> PoolAdvice | None:
        """Count a request, and its class where it falls back or would have: the advice, once a window, for one that
        keeps doing so."""
        with self._lock:
            now = self._clock()
            self._requests.append(now)
            if fallen is None:
                return None
            one = self._seen.setdefault(fallen, _Seen())
            one.times.append(now)
            for times in (self._requests, one.times):
                while times and now - times[0] > self._window_s:
                    times.popleft()
            if len(one.times) < KEEPS_FALLING or now - one.advised < self._window_s:
                return None
            one.advised = now
            added_s = one.seconds / one.steps if one.steps else None
            return PoolAdvice(fallen, len(one.times), len(one.times) / len(self._requests), added_s)

    def ran(self, fallen: FallenClass, seconds: float) -> None:
        """Seconds of a step that the part of such a class took beside the rest."""
        with self._lock:
            one = self._seen.setdefault(fallen, _Seen())
            one.seconds += seconds
            one.steps += 1
