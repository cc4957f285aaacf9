"""One exchange with a client: from a parsed body to the answer and the row in the lake.

However it ends (answered, refused, failed, client gone, shutdown), `close` runs exactly once: it frees
what the engine holds and writes the row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from attention.fallback import FallbackRefusedError
from attention.scheduler import FinishReason, Generation, QueueFullError
from attention.serve.engine import CLIENT_GONE_TEXT, SHUTTING_DOWN, Ticket
from attention.serve.protocol import DONE, Answer, ApiError, server_event, usage_of
from attention.serve.service import Call, Service

CLIENT_GONE = 499  # as nginx writes it; nobody reads this answer


class Exchange:
    """Holds one request's ticket and writes its answer."""

    def __init__(
        self,
        service: Service,
        call: Call,
        ticket: Ticket,
        answer: Answer,
        *,
        prompt_text: str,
        stream: bool,
        usage_wanted: bool,
    ) -> None:
        self._service = service
        self._call = call
        self._ticket = ticket
        self._answer = answer
        self._prompt_text = prompt_text
        self._stream = stream
        self._usage_wanted = usage_wanted
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
            raise ApiError(429, str(error), code="queue_full") from error
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
            usage = usage_of(self._generation.prompt_ids, self._generation.output_ids)
            return self._answer.whole(self._ticket.text.text, self._generation.finish_reason or "stop", usage)
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

    async def _events(self, first: str | None) -> AsyncIterator[bytes]:
        if opening := self._answer.opening():
            yield opening
        piece = first
        while piece is not None:
            yield self._answer.piece(piece)
            piece = await self._ticket.pieces.get()
        try:
            self._raise_failure()
        except ApiError as error:
            yield server_event(error.body())
        else:
            yield self._answer.closing(self._generation.finish_reason or "stop")
            if self._usage_wanted:
                usage = usage_of(self._generation.prompt_ids, self._generation.output_ids)
                yield self._answer.usage(usage)
        yield DONE

    async def _next(self, request: Request) -> str | None:
        """The next piece of text, None at the end. Raises ApiError once the client has gone."""
        piece = asyncio.ensure_future(self._ticket.pieces.get())
        gone = asyncio.ensure_future(request.receive())  # the body is read: only a disconnect is left
        try:
            await asyncio.wait((piece, gone), return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                raise ApiError(CLIENT_GONE, CLIENT_GONE_TEXT)
            return piece.result()
        finally:
            piece.cancel()
            gone.cancel()

    def _raise_failure(self) -> None:
        generation = self._generation
        if generation.finish_reason == "cancelled":
            raise ApiError(503, generation.error or "cancelled", code="cancelled")
        if generation.refused:
            raise ApiError(503, str(generation.error), code="fallback_refused")
        if generation.finish_reason == "error":
            text = f"request {self._call.request_id} failed: {generation.error}"
            raise ApiError(500, text, code="generation_failed")

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
        if reason is None:
            # The engine ends it on its own thread; the row need not wait for that.
            self._service.engine.cancel(self._ticket)
            reason, error = "cancelled", SHUTTING_DOWN if self._service.draining else CLIENT_GONE_TEXT
        self._complete_text()
        row = self._service.row(
            self._call,
            generation,
            finish_reason=reason,
            error=error,
            status=status or _status_of(reason, error),
            stream=self._stream,
            seconds=time.perf_counter() - self._call.arrived,
            prompt_text=self._prompt_text,
            output_text=self._ticket.text.text,
        )
        self._service.log.add(row)
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
