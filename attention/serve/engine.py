"""The engine thread: starts the model, then steps the scheduler, and hands text to the event loop.

Everything that touches the model runs on this one thread, from the start-up probes to the last step.
The event loop submits and cancels through an inbox; text goes back once a step, in one call. While nobody asks, the
execution layer is asked again what the backends run, so that no user's step is held up by that.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attention import faults
from attention.confirmations import CONFIRMATION_TTL_S
from attention.dispatch import BackendFailedError
from attention.fallback import FallbackRefusedError
from attention.limits import Limits
from attention.model import Chunk, Runner
from attention.request_fallback import RequestFallback
from attention.scheduler import FinishReason, Generation, QueueFullError, Scheduler, StepResult
from attention.serve.detokenize import Detokenizer
from attention.serve.fallbacks import FallbackNotice
from attention.serve.log import event
from attention.serve.metrics import Metrics

if TYPE_CHECKING:
    from attention.startup import Started

SHUTTING_DOWN = "the server is shutting down"
CLIENT_GONE_TEXT = "the client went away"
# A device that fails this many steps in a row has likely lost its context: say so in /health.
FAILING_STEPS = 3
# How often an idle engine looks whether a confirmation grows old, and what is old then.
IDLE_S, OLD_S = 5.0, CONFIRMATION_TTL_S / 3


@dataclass(frozen=True)
class Piece:
    """Text that became final, and how many tokens of the answer begin in the text so far."""

    text: str
    num_tokens: int


@dataclass(eq=False)
class Ticket:
    """One request between the event loop and the engine. `pieces` ends with None."""

    generation: Generation
    text: Detokenizer
    incremental: bool  # text is wanted as it comes: a stream, stop strings to look for, or places of tokens
    pieces: asyncio.Queue[Piece | None] = field(default_factory=asyncio.Queue)


@dataclass
class _Delivery:
    pieces: list[tuple[Ticket, Piece | None]] = field(default_factory=list)

    def __call__(self) -> None:
        for ticket, piece in self.pieces:
            ticket.pieces.put_nowait(piece)


class Engine:
    """Runs `prepare`, then serves until `stop`.

    `started` is set once the probes passed and every phase is resolved; `failure` holds what kept
    the model from starting. `on_change` is called on the engine thread when either is set.
    """

    def __init__(
        self,
        prepare: Callable[[], Started],
        limits: Limits,
        metrics: Metrics,
        notice: FallbackNotice,
        *,
        fault: str | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.started: Started | None = None
        self.failure: Exception | None = None
        self.num_failed_steps = 0  # in a row
        self.fallback: RequestFallback | None = None
        self._step_began: float | None = None
        self._prepare = prepare
        self._metrics = metrics
        self._notice = notice
        self._fault = fault
        self._on_change = on_change
        self._scheduler: Scheduler | None = None
        self._tickets: dict[Generation, Ticket] = {}
        self._inbox: list[Ticket] = []
        self._cancelled: list[tuple[Ticket, FinishReason, str]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon: a model that hangs while it starts must not keep a stopped process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def halt(self) -> None:
        """End what still runs as cancelled; the thread ends with its present step. From any thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self, timeout_s: float) -> None:
        """`halt`, and wait for the thread, unless it still starts the model: that cannot be interrupted."""
        self.halt()
        if self.started is not None:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + (self._scheduler.num_waiting if self._scheduler else 0)

    @property
    def kv_pages(self) -> dict[str, int]:
        """Pages of the KV cache, free and in all; without a request under way all are free, or some leaked. Prefixes
        that nobody uses count as free."""
        if self.started is None or self._scheduler is None:
            return {}
        return {"free": self._scheduler.num_free_pages, "total": self.started.runner.pool.num_pages}

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running if self._scheduler else 0

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises UserError for a request that could never run (see Scheduler.check)."""
        if self._scheduler is None:
            raise RuntimeError("the engine has not started")
        self._scheduler.check(num_prompt_tokens, max_tokens)

    def largest_answer(self, num_prompt_tokens: int) -> int:
        """The most tokens that an answer to such a prompt may have (see Scheduler.largest_answer)."""
        if self._scheduler is None:
            raise RuntimeError("the engine has not started")
        return self._scheduler.largest_answer(num_prompt_tokens)

    def submit(self, ticket: Ticket) -> None:
        """Queue a request that `check` lets through. Raises QueueFullError when the queue is full, FallbackRefusedError
        for one that would have to fall back and may not."""
        with self._wake:
            if self._stopping:
                raise QueueFullError(SHUTTING_DOWN)
            if self.num_waiting >= self.limits.max_queue:
                raise QueueFullError(f"{self.num_waiting} requests wait already; try again later")
            self._take(ticket.generation)
            self._inbox.append(ticket)
            self._wake.notify()

    def _take(self, generation: Generation) -> None:
        assert self.fallback is not None and self.started is not None
        try:
            advice = self.fallback.take(generation)
        except FallbackRefusedError as error:
            self._notice.refused(str(error))
            raise
        if advice is not None:
            self._notice.advise(advice)

    @property
    def over_budget(self) -> str | None:
        """Why the policy has drained this instance: its budget was exceeded once. None where it has not."""
        if self.started is None or self.fallback is None:
            return None
        drains = self.started.dispatcher.policy.runtime_fallback_budget.on_exceeded == "drain"
        return self.fallback.exceeded if drains else None

    def step_seconds(self) -> float:
        """How long the present step has been running; 0.0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def at_work(self) -> tuple[str, ...]:
        """Backends that may be what the present step waits for: the one whose call is under way, else, on a device that
        works on after calls have returned, those of the step."""
        if self.started is None:
            return ()
        dispatcher = self.started.dispatcher
        if dispatcher.at_work is not None:
            return (dispatcher.at_work,)
        is_async = self.started.runner.device.startswith("cuda")
        return tuple({run.resolved for run in dispatcher.last_step().phases}) if is_async else ()

    def abandon(self, reason: FinishReason, error: str) -> None:
        """End every request from the event loop, for an engine thread that never comes back from a step."""
        self._stopping = True
        for ticket in [*self._tickets.values(), *self._inbox]:
            if ticket.generation.finish_reason is None:
                ticket.generation.finish_reason, ticket.generation.error = reason, error
            ticket.pieces.put_nowait(None)

    def cancel(self, ticket: Ticket, reason: FinishReason, error: str) -> None:
        """Drop a request that nobody waits for any more; nothing for one that has ended."""
        with self._wake:
            self._cancelled.append((ticket, reason, error))
            self._wake.notify()

    # On the engine thread from here on.

    def _run(self) -> None:
        try:
            started = self._prepare()
            self._metrics.observe_startup(dtype=str(started.runner.dtype).removeprefix("torch."), probes=started.probes)
            warm_up(started.runner)
            dispatcher = started.dispatcher
            self.fallback = RequestFallback.of(dispatcher, dispatcher.policy, self.limits.prefill_chunk)
            self._scheduler = Scheduler(started.runner, self.limits, fault=self._fault, fallback=self.fallback)
            faults.arm()
            self.started = started
        except Exception as error:
            self.failure = error
            self._on_change()
            return
        self._on_change()
        with torch.inference_mode():
            while self._turn(self._scheduler):
                pass

    def _turn(self, scheduler: Scheduler) -> bool:
        """Wait for work, run one step, deliver; False when it is time to stop."""
        with self._wake:
            while not (self._stopping or self._inbox or self._cancelled or scheduler.has_work):
                if not self._wake.wait(IDLE_S):
                    break
            stopping = self._stopping
            cancelled, self._cancelled = self._cancelled, []
            self._accept(scheduler)
        delivery = _Delivery()
        for ticket, reason, error in cancelled:
            self._end(scheduler, ticket, reason, error, delivery)
        if stopping:
            self._end_all(scheduler, "cancelled", SHUTTING_DOWN, delivery)
        elif scheduler.has_work:
            self._step(scheduler, delivery)
        else:
            self._confirm_idle()
        if delivery.pieces and self._loop is not None:
            self._loop.call_soon_threadsafe(delivery)
        return not stopping

    def _accept(self, scheduler: Scheduler) -> None:
        for ticket in self._inbox:
            self._tickets[ticket.generation] = ticket
            scheduler.submit(ticket.generation)
        self._inbox.clear()

    def _confirm_idle(self) -> None:
        assert self.started is not None and self.fallback is not None
        self._step_began = time.monotonic()
        try:
            self.started.runner.confirm_idle(OLD_S)
        except BackendFailedError as error:
            self._backend_failed(error)
            self.fallback.retire(error)
        finally:
            self._step_began = None

    def _backend_failed(self, error: BackendFailedError) -> None:
        event(
            "backend_raised",
            severity="critical",
            backend=error.backend,
            phase=error.phase,
            error=str(error),
            traceback=traceback.format_exception(error),
        )

    def _step(self, scheduler: Scheduler, delivery: _Delivery) -> None:
        self._step_began = time.monotonic()
        try:
            result = scheduler.step()
            self._note(result)
            self._deliver(scheduler, result, delivery)
        except Exception as error:
            # Not the model but our own book-keeping failed: leave no request in an unknown state.
            self._note(StepResult(finished=list(self._tickets), failure=error))
            self._end_all(scheduler, "error", "internal error", delivery)
        finally:
            self._step_began = None

    def _deliver(self, scheduler: Scheduler, result: StepResult, delivery: _Delivery) -> None:
        for generation, token in result.tokens:
            ticket = self._tickets[generation]
            if not ticket.incremental:
                continue
            if text := ticket.text.push(token):
                delivery.pieces.append((ticket, Piece(text, ticket.text.num_told())))
            if ticket.text.stopped and generation.finish_reason is None:
                scheduler.cancel(generation, "stop")
                result.finished.append(generation)
        for generation in result.finished:
            self._finish(self._tickets.pop(generation), delivery)

    def _note(self, result: StepResult) -> None:
        for fallback in result.fallbacks:
            self._notice(fallback)
        for error in result.backend_failures:
            self._backend_failed(error)
        for refusal in result.refusals:
            self._notice.refused(str(refusal))
        if result.record is not None:
            self.num_failed_steps = 0
            self._metrics.observe_step(result.record)
        if result.failure is not None:
            self.num_failed_steps += 1
            event(
                "step_failed",
                severity="critical",
                requests=[g.request_id for g in result.finished],
                error=str(result.failure),
                traceback=traceback.format_exception(result.failure),
            )

    def _end_all(self, scheduler: Scheduler, reason: FinishReason, error: str, delivery: _Delivery) -> None:
        for ticket in list(self._tickets.values()):
            self._end(scheduler, ticket, reason, error, delivery)

    def _end(self, scheduler: Scheduler, ticket: Ticket, reason: FinishReason, error: str, delivery: _Delivery) -> None:
        if self._tickets.pop(ticket.generation, None) is not None:
            scheduler.cancel(ticket.generation, reason, error)
            delivery.pieces.append((ticket, None))
            self._metrics.observe_finished(ticket.generation)

    def _finish(self, ticket: Ticket, delivery: _Delivery) -> None:
        generation = ticket.generation
        if ticket.incremental:
            text = ticket.text.finish()
            if text or generation.params.logprobs is not None:
                delivery.pieces.append((ticket, Piece(text, ticket.text.num_told(last=True))))
        if ticket.text.stopped:
            generation.finish_reason = "stop"
        delivery.pieces.append((ticket, None))
        self._metrics.observe_finished(generation)


def warm_up(runner: Runner) -> None:
    """One prefill, extend and decode before the first user, who does not pay for first calls, and so that
    the confirmed backends are known. Raises what a step raises, and RuntimeError for NaN or Inf."""
    ends = (16, 24, 25)
    pages = runner.pool.alloc(-(-ends[-1] // runner.page_size))
    try:
        start = 0
        for end in ends:
            table = tuple(pages[: -(-end // runner.page_size)])
            chunk = Chunk(token_ids=tuple(range(start, end)), start=start, block_table=table)
            if not torch.isfinite(runner.logits(runner.forward([chunk]))).all():
                raise RuntimeError(f"warm-up: the logits after {end} tokens hold NaN or Inf")
            start = end
    finally:
        runner.pool.free(pages)
