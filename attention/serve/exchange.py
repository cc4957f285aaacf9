"""One exchange with a client: from a parsed body to the answer and the row in the lake.

However it ends (answered, refused, failed, client gone, shutdown), `close` runs exactly once: it frees
what the engine holds and writes the row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from attention.fallback import FallbackRefusedError
from attention.scheduler import FinishReason, Generation, QueueFullError
from attention.serve.engine import CLIENT_GONE_TEXT, SHUTTING_DOWN, Piece, Ticket
from attention.serve.log import event
from attention.serve.logprob_forms import LogprobWriter
from attention.serve.protocol import DONE, Answer, ApiError, server_event, usage_of
from attention.serve.request_line import request_line
from attention.serve.service import Call, Service
from attention.serve.tool_calls import CallParser, ToolCall

CLIENT_GONE = 499  # as nginx writes it; nobody reads this answer


@dataclass(frozen=True)
class Wanted:
    """What the client asked for beside the text."""

    stream: bool
    usage: bool
    echo: str = ""  # what the answer begins with: the prompt, or nothing
    calls: CallParser | None = None
    parallel_calls: bool = True


class Exchange:
    """Holds one request's ticket and writes its answer."""

    def __init__(
        self,
        service: Service,
        call: Call,
        ticket: Ticket,
        answer: Answer,
        logprobs: LogprobWriter,
        wanted: Wanted,
        *,
        prompt_text: str,
    ) -> None:
        self._service = service
        self._call = call
        self._ticket = ticket
        self._answer = answer
        self._logprobs = logprobs
        self._wanted = wanted
        self._prompt_text = prompt_text
        self._num_calls = 0
        self._timed_out = False
        self._open = True
        service.num_open += 1

    @property
    def _generation(self) -> Generation:
        return self._ticket.generation

    def submit(self) -> None:
        """Hand the request to the engine. Raises ApiError 429 when the queue is full."""
        try:
            self._service.engine.submit(self._ticket)
        except QueueFullError as error:
            self._generation.finish_reason, self._generation.error = "error", str(error)
            self.close(429)
            headers = {"retry-after": str(self._service.retry_after_s())}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from error
        except FallbackRefusedError as error:
            self._generation.finish_reason, self._generation.error = "error", str(error)
            self.close(503)
            raise ApiError(503, str(error), code="fallback_refused") from error

    async def whole(self, request: Request) -> dict[str, Any]:
        """The complete answer. Raises ApiError where there is none."""
        try:
            while await self._next(request) is not None:
                pass
            self._raise_failure()
            self._complete_text()
            parts = self._parts(self._ticket.text.text, last=True)
            logprobs = prompt_logprobs = None
            if self._logprobs.wanted:
                # A long prompt has many tokens to write: not on the event loop.
                logprobs = await asyncio.to_thread(self._logprobs.whole)
                prompt_logprobs = await asyncio.to_thread(self._logprobs.prompt)
            return self._answer.whole(
                self._wanted.echo + "".join(part for part in parts if isinstance(part, str)),
                self._generation.finish_reason or "stop",
                self._usage(),
                calls=[part for part in parts if isinstance(part, ToolCall)],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        finally:
            self.close()

    async def streamed(self, request: Request) -> StreamingResponse:
        """The answer as server-sent events. Its start waits for the first text, so that a request which
        fails at once gets a status and not a broken stream."""
        try:
            first = await self._next(request)
            if first is None:
                self._raise_failure()
        except BaseException:
            self.close()
            raise
        return _EventStream(self, self._events(first))

    async def _events(self, first: Piece | None) -> AsyncIterator[bytes]:
        if opening := self._answer.opening():
            yield opening
        try:
            if self._wanted.echo:
                yield self._answer.piece(self._wanted.echo, await asyncio.to_thread(self._logprobs.echoed))
            piece = first
            while piece is not None:
                for chunk in self._chunks(piece.text, piece.num_tokens):
                    yield chunk
                piece = await self._piece()
            self._raise_failure()
            for chunk in self._chunks("", self._logprobs.num_told, last=True):
                yield chunk
        except ApiError as error:
            yield server_event(error.body())
        else:
            yield self._answer.closing(self._generation.finish_reason or "stop", called=self._num_calls > 0)
            if self._wanted.usage:
                yield self._answer.usage(self._usage())
        yield DONE

    def _chunks(self, text: str, num_tokens: int, *, last: bool = False) -> list[bytes]:
        """Events of text as it comes; the first of them carries the logprobs of its tokens."""
        parts = self._parts(text, last=last)
        if not parts:
            if num_tokens == self._logprobs.num_told or self._generation.params.logprobs is None:
                return []
            parts = [""]
        told = self._logprobs.until(num_tokens)
        chunks = []
        for part in parts:
            if isinstance(part, ToolCall):
                chunks.append(self._answer.call(self._num_calls, part, told))
                self._num_calls += 1
            else:
                chunks.append(self._answer.piece(part, told))
            told = None
        return chunks

    def _parts(self, text: str, *, last: bool) -> list[str | ToolCall]:
        """Text and calls of tools in an answer, as far as they are final."""
        parser = self._wanted.calls
        if parser is None:
            return [text] if text else []
        parts = parser.push(text) + (parser.finish() if last else [])
        if self._wanted.parallel_calls:
            return parts
        calls = [part for part in parts if isinstance(part, ToolCall)]
        dropped = calls[0 if self._num_calls else 1 :]
        return [part for part in parts if not any(part is call for call in dropped)]

    async def _next(self, request: Request) -> Piece | None:
        """The next piece, None at the end. Raises ApiError once the client has gone or the time is up."""
        piece = asyncio.ensure_future(self._piece())
        gone = asyncio.ensure_future(request.receive())  # the body is read: only a disconnect is left
        try:
            await asyncio.wait((piece, gone), return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                raise ApiError(CLIENT_GONE, CLIENT_GONE_TEXT)
            return piece.result()
        finally:
            piece.cancel()
            gone.cancel()

    async def _piece(self) -> Piece | None:
        """The next piece, None at the end. Raises ApiError 504 when the request's time is up."""
        left = self._call.arrived + self._service.engine.limits.request_timeout_s - time.perf_counter()
        try:
            return await asyncio.wait_for(self._ticket.pieces.get(), max(left, 0.0))
        except TimeoutError:
            self._timed_out = True
            raise ApiError(504, self._service.timeout_text, code="timeout") from None

    def _raise_failure(self) -> None:
        generation = self._generation
        if generation.finish_reason == "cancelled":
            raise ApiError(503, generation.error or "cancelled", code="cancelled")
        if generation.refused:
            raise ApiError(503, str(generation.error), code="fallback_refused")
        if generation.finish_reason != "error" and self._logprobs.broken:
            generation.finish_reason, generation.error = "error", "logits of the prompt hold NaN or Inf"
            generation.num_nonfinite += 1
        if generation.finish_reason == "error":
            text = f"request {self._call.request_id} failed: {generation.error}"
            raise ApiError(500, text, code="generation_failed")

    def _usage(self) -> dict[str, Any]:
        one = self._generation
        return usage_of(len(one.prompt_ids), len(one.output_ids), one.num_reused)

    def _complete_text(self) -> None:
        """Text of an answer that nobody needed piece by piece, decoded at once."""
        if not self._ticket.incremental:
            self._ticket.text.decode_all(self._generation.output_ids)

    def close(self, status: int | None = None) -> None:
        """Free and record. The first call counts."""
        if not self._open:
            return
        self._open = False
        generation = self._generation
        reason, error = generation.finish_reason, generation.error
        if self._timed_out:
            reason, error, status = "error", self._service.timeout_text, 504
            self._service.engine.cancel(self._ticket, reason, error)
        elif reason is None:
            # The engine ends it on its own thread; the row need not wait for that.
            reason, error = "cancelled", SHUTTING_DOWN if self._service.draining else CLIENT_GONE_TEXT
            self._service.engine.cancel(self._ticket, reason, error)
        else:
            self._service.observe_seconds(generation)
        self._complete_text()
        row = self._service.row(
            self._call,
            generation,
            finish_reason=reason,
            error=error,
            status=status or (503 if generation.refused else _status_of(reason, error)),
            stream=self._wanted.stream,
            seconds=time.perf_counter() - self._call.arrived,
            prompt_text=self._prompt_text,
            output_text=self._ticket.text.text,
        )
        self._service.log.add(row)
        started = self._service.engine.started
        event("request_finished", **request_line(row, generation, started.fingerprint.identity if started else None))
        self._service.trace(row, generation, self._call.traceparent)
        self._service.num_open -= 1


class _EventStream(StreamingResponse):
    """Closes its exchange even when the client goes before the first event is asked for."""

    def __init__(self, exchange: Exchange, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()


def _status_of(reason: FinishReason, error: str | None) -> int:
    """The status that the answer had, or would have had before its stream began."""
    if reason == "cancelled":
        return 503 if error == SHUTTING_DOWN else CLIENT_GONE
    return 500 if reason == "error" else 200
