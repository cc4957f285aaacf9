"""Request-level fallback: which requests may fall back, and what becomes of a backend that fails while it serves.

A request is asked about before it is queued: whether the dispatcher will have to serve a phase of it on another backend
than the one chosen at start, and whether the policy's budget has room for that. When a backend fails later, by an
exception or by logits without numbers, it is retired, and every request under way that needs another one is asked about
again. Who finds no room is refused with the reason; nobody falls back unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from attention.dispatch import BackendFailedError, PhaseRun
from attention.errors import UserError, one_line
from attention.fallback import (
    FallbackBudget,
    FallbackEvent,
    FallbackRefusedError,
    FallenClass,
    FallenClasses,
    PoolAdvice,
)
from attention.policy import Policy
from attention.reasons import Code, Reason


class Request(Protocol):
    """What is asked of a request under way (attention.scheduler.Generation)."""

    falls: bool
    avoid: Mapping[str, Reason]

    @property
    def num_cached(self) -> int: ...

    @property
    def num_prefill(self) -> int: ...

    @property
    def max_cached(self) -> int: ...


class Foreseeing(Protocol):
    """What is asked of a dispatcher."""

    def foresee(
        self, start: int, num_prompt: int, num_cached: int, chunk: int, avoid: Mapping[str, Reason]
    ) -> FallbackEvent | None: ...

    def retire(self, backend: str, reason: Reason) -> None: ...


@dataclass
class RequestFallback:
    """Of one scheduler. `take` is for the thread that queues, the rest for the one that steps. Without a budget, as
    where nobody is served, any request may fall back."""

    dispatcher: Foreseeing
    chunk: int  # most tokens of a prompt in one piece
    budget: FallbackBudget | None = None
    classes: FallenClasses | None = None
    exceeded: str | None = None  # why the budget last had no room

    @classmethod
    def of(cls, dispatcher: Foreseeing, policy: Policy, chunk: int) -> RequestFallback:
        budget = policy.runtime_fallback_budget
        return cls(dispatcher, chunk, FallbackBudget(budget), FallenClasses(budget.window_s))

    def take(self, request: Request) -> PoolAdvice | None:
        """Count a request that is to be queued. Raises FallbackRefusedError for one that may not fall back and must."""
        event = self._foreseen(request)
        advice = None if self.classes is None else self.classes.request(None if event is None else class_of(event))
        if self.budget is not None:
            with self._noting():
                self.budget.take(falls=event is not None)
        request.falls = event is not None
        return advice

    def ask_again(self, request: Request) -> None:
        """Of a request that is to run, or to run on, after a backend may have been retired. Raises
        FallbackRefusedError."""
        event = self._foreseen(request)
        if event is None or request.falls:
            return
        if self.classes is not None:
            self.classes.request(class_of(event))
        if self.budget is not None:
            with self._noting():
                self.budget.fall()
        request.falls = True

    def note(self, run: PhaseRun) -> None:
        """What a part of a step that fell back cost it."""
        if run.fallback is not None and self.classes is not None:
            self.classes.ran(class_of(run.fallback), run.kernel_seconds)

    def retire(self, error: BackendFailedError) -> None:
        """The backend raised: nobody runs on it any more."""
        cause = error.__cause__ or error
        text = f"{type(cause).__name__}: {one_line(cause)}"[:300]
        self.dispatcher.retire(error.backend, _reason(Code.LAUNCH_FAILED, error.phase, "an exception", text))

    def retire_for_numbers(self, backend: str) -> None:
        """The backend gave logits without numbers where another gave numbers."""
        self.dispatcher.retire(backend, not_finite("and another backend's were finite"))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except FallbackRefusedError as error:
            self.exceeded = str(error)
            raise

    def _foreseen(self, request: Request) -> FallbackEvent | None:
        try:
            return self.dispatcher.foresee(
                request.num_cached, request.num_prefill, request.max_cached, self.chunk, request.avoid
            )
        except UserError as error:
            raise FallbackRefusedError(str(error)) from error


def class_of(event: FallbackEvent) -> FallenClass:
    return FallenClass(event.phase, event.bucket, event.from_backend, event.to_backend, event.reason)


def not_finite(more: str = "") -> Reason:
    """Why a request that met NaN or Inf avoids the backend that it ran on."""
    text = "the logits held NaN or Inf"
    return _reason(Code.NUMERIC_DRIFT, "logits", "NaN or Inf", f"{text}, {more}" if more else text)


def _reason(code: Code, dimension: str, observed: str, message: str) -> Reason:
    return Reason(
        code=code, dimension=dimension, observed=observed, allowed="a result", source="serving", message=message
    )
