"""The HTTP side of an instance: OpenAI endpoints, health, metrics, fingerprint.

    app = create_app(service)

Handlers parse, check and hand over; `Exchange` answers, the engine thread generates. Every response
says who served it; every error has OpenAI's form and no traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention.errors import UserError
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.serve.admin import Admin
from attention.serve.detokenize import Detokenizer, Vocabulary
from attention.serve.engine import Ticket
from attention.serve.exchange import CLIENT_GONE, Exchange, Wanted
from attention.serve.log import event
from attention.serve.logprob_forms import LogprobWriter
from attention.serve.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    Answer,
    ApiError,
    ChatBody,
    CompletionBody,
    parse,
)
from attention.serve.service import Call, Service
from attention.serve.tool_calls import CallParser, form_of

DRAIN_S = 10.0
# The rest of a body that is too large is read and dropped up to here, so that its sender gets the answer and not
# a reset connection.
_MAX_DROPPED_BYTES = 64 << 20
# Tokenising more text than this would hold up every stream of the event loop.
_INLINE_CHARS = 4096
_ROLES = frozenset({"champion", "control", "candidate"})
_PLAIN_ID = re.compile(r"[!-~]{1,128}")


def create_app(service: Service, admin_token: str | None = None) -> FastAPI:
    """The ASGI application of one instance; its lifespan starts and stops the engine and the log.

    Without a token there is no admin surface: its paths are not there.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start(asyncio.get_running_loop())
        yield
        await _shut_down(service)

    # The interactive docs load scripts from elsewhere: none here.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_WhoServed, service=service)
    handlers = _Handlers(service)
    app.add_api_route("/v1/completions", handlers.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", handlers.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", handlers.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", handlers.health, methods=["GET"], response_model=None)
    app.add_api_route("/health/live", handlers.live, methods=["GET"], response_model=None)
    app.add_api_route("/health/ready", handlers.ready, methods=["GET"], response_model=None)
    app.add_api_route("/policy", handlers.policy, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", handlers.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/fingerprint", handlers.fingerprint, methods=["GET"], response_model=None)
    if admin_token is not None:
        admin = Admin(service, admin_token)
        app.add_api_route("/admin/drain", admin.drain, methods=["POST"], response_model=None)
        app.add_api_route("/admin/resume", admin.resume, methods=["POST"], response_model=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    return app


async def _shut_down(service: Service) -> None:
    """End what the grace period left, wait for its rows, write them."""
    service.draining = True
    await asyncio.to_thread(service.engine.stop, DRAIN_S)
    for _ in range(50):
        if service.num_open == 0:
            break
        await asyncio.sleep(0.02)
    await asyncio.to_thread(service.log.close)


class _Handlers:
    """One method an endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._told_about_tools = False
        self._known_vocabulary: Vocabulary | None = None

    async def completions(self, request: Request) -> Response:
        call = _call_of(request)
        self._require_ready()
        body, _ = parse(await self._read(request), CompletionBody)
        self._require_model(body.model)
        text, ids = await self._prompt(body.prompt)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        wanted = Wanted(stream=bool(body.stream), usage=body.usage_wanted, echo=text if body.echo else "")
        return await self._answer(request, call, body, text, ids, max_tokens, wanted)

    async def chat(self, request: Request) -> Response:
        call = _call_of(request)
        self._require_ready()
        body, neutral = parse(await self._read(request), ChatBody)
        self._require_model(body.model)
        tools = None if neutral.get("tool_choice") == "none" else body.tools or None
        text = self._render(body, tools)
        ids = await self._encode(text, add_special_tokens=False)
        max_tokens = body.max_tokens or body.max_completion_tokens or self._largest_answer(len(ids))
        form = form_of(str(self._tokenizer.chat_template)) if tools else None
        wanted = Wanted(
            stream=bool(body.stream),
            usage=body.usage_wanted,
            calls=CallParser(form, body.tool_names) if form else None,
            parallel_calls=body.parallel_tool_calls is not False,
        )
        return await self._answer(request, call, body, text, ids, max_tokens, wanted)

    async def models(self) -> Response:
        model = {
            "id": self._service.instance.model,
            "object": "model",
            "created": self._created,
            "owned_by": "attention-release",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        health = self._service.health()
        return JSONResponse(health, status_code=200 if health["ready"] else 503)

    async def live(self) -> Response:
        return _state("live", self._service.reasons_not_live())

    async def ready(self) -> Response:
        return _state("ready", self._service.reasons_not_ready())

    async def policy(self) -> Response:
        if self._service.engine.started is None:
            raise self._not_ready()
        return JSONResponse({**self._service.about(), **self._service.policy()})

    async def metrics(self) -> Response:
        self._service.observe_state()
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def fingerprint(self) -> Response:
        started = self._service.engine.started
        if started is None:
            raise self._not_ready()
        return JSONResponse({**self._service.about(), **started.fingerprint.model_dump(mode="json")})

    def _not_ready(self) -> ApiError:
        return ApiError(503, "; ".join(self._service.reasons_not_ready()) or "not ready", code="not_ready")

    def _require_ready(self) -> None:
        # A model whose steps fail is still tried: only a step that succeeds can make it ready again.
        engine = self._service.engine
        closed = self._service.draining or self._service.paused or engine.over_budget is not None
        if closed or engine.started is None or not engine.alive:
            raise self._not_ready()

    def _require_model(self, name: str) -> None:
        known = self._service.instance.model
        if name not in ("", known):
            text = f"model {name!r} is not served here; this server has {known!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    @property
    def _tokenizer(self) -> Any:
        assert self._service.engine.started is not None
        return self._service.engine.started.runner.tokenizer

    @property
    def _vocabulary(self) -> Vocabulary:
        if self._known_vocabulary is None:
            self._known_vocabulary = Vocabulary(self._tokenizer)
        return self._known_vocabulary

    async def _read(self, request: Request) -> bytes:
        """The body, ApiError 413 for one that is too large, which is not kept."""
        bound = self._service.engine.limits.max_body_bytes
        declared = request.headers.get("content-length", "0")
        size, body = 0, bytearray()
        async for piece in request.stream():
            size += len(piece)
            if size <= bound:
                body += piece
            elif size > _MAX_DROPPED_BYTES:
                break
        if size > bound or (declared.isdigit() and int(declared) > bound):
            raise ApiError(413, f"the body exceeds {bound} bytes", code="body_too_large")
        return bytes(body)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return encode() if len(text) <= _INLINE_CHARS else await asyncio.to_thread(encode)

    async def _prompt(self, prompt: str | list[int] | list[str]) -> tuple[str, list[int]]:
        """Text and tokens of a completion's prompt, whichever of them it gave."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                text = f"{len(prompt)} prompts in one request are not supported; send one a request"
                raise ApiError(400, text, param="prompt", code="unsupported_parameter")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt, await self._encode(prompt, add_special_tokens=True)
        ids = [int(token) for token in prompt]
        vocabulary = len(self._tokenizer)
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ApiError(
                    400,
                    f"prompt: token {token} is outside the vocabulary 0..{vocabulary - 1}",
                    param="prompt",
                )
        return str(self._tokenizer.decode(ids)), ids

    def _render(self, body: ChatBody, tools: list[dict[str, Any]] | None) -> str:
        """The chat as the model's template writes it."""
        template = self._tokenizer.chat_template
        if not template:
            raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        if tools and "tools" not in str(template) and not self._told_about_tools:
            self._told_about_tools = True
            event(
                "tools_not_rendered",
                severity="warning",
                message="the model's chat template has no place for tools",
            )
        messages = [message.for_template() for message in body.messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            )
        except Exception as error:
            # Templates raise errors of their own about the order of roles and the like.
            text = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, text, param="messages", code="template_error") from error

    def _largest_answer(self, num_prompt_tokens: int) -> int:
        return max(1, self._service.engine.largest_answer(num_prompt_tokens))

    async def _answer(
        self,
        request: Request,
        call: Call,
        body: CompletionBody | ChatBody,
        prompt_text: str,
        prompt_ids: list[int],
        max_tokens: int,
        wanted: Wanted,
    ) -> Response:
        try:
            self._service.engine.check(len(prompt_ids), max_tokens)
        except UserError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        echo_top = body.num_top if wanted.echo else None
        prompt_tops = [top for top in (echo_top, body.prompt_logprobs) if top is not None]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            logprobs=body.num_top if max_tokens else None,
            prompt_logprobs=max(prompt_tops, default=None),
        )
        generation = Generation(call.request_id, tuple(prompt_ids), params, call.shadow, call.arrived)
        text = Detokenizer(self._tokenizer, body.stop_strings)
        ticket = Ticket(generation, text, wanted.stream or bool(body.stop_strings) or params.logprobs is not None)
        chat = isinstance(body, ChatBody)
        answer = Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            chat=chat,
            model=self._service.instance.model,
            fingerprint=self._service.fingerprint_id,
        )
        logprobs = LogprobWriter(
            generation,
            text,
            self._vocabulary,
            self._tokenizer,
            chat,
            echo_top=echo_top,
            prompt_top=body.prompt_logprobs,
            shift=len(wanted.echo),
        )
        exchange = Exchange(self._service, call, ticket, answer, logprobs, wanted, prompt_text=prompt_text)
        exchange.submit()
        if wanted.stream:
            return await exchange.streamed(request)
        return JSONResponse(await exchange.whole(request))


def _state(name: str, reasons: list[str]) -> Response:
    return JSONResponse({name: not reasons, "reasons": reasons}, status_code=503 if reasons else 200)


def _call_of(request: Request) -> Call:
    role = request.headers.get("x-attention-role")
    return Call(
        request_id=request.state.request_id,
        session_id=_plain(request.headers.get("x-session-id")),
        role=role if role in _ROLES else None,
        shadow=is_shadow(request.headers),
        endpoint=request.url.path,
        arrived=request.state.arrived,
        traceparent=request.headers.get("traceparent"),
    )


def is_shadow(headers: Mapping[str, str]) -> bool:
    """A mirrored request: Envoy ends its Host in `-shadow`, before the port if there is one."""
    host = re.sub(r":\d+$", "", headers.get("host", ""))
    return host.endswith("-shadow") or headers.get("x-attention-role") == "shadow"


def _plain(text: str | None) -> str | None:
    """An id from outside, or None for one that is too long or no plain ASCII."""
    return text if text is not None and _PLAIN_ID.fullmatch(text) else None


class _WhoServed:
    """Adds the response headers that say who served, and gives each request its id.

    Also the last resort: an exception that no handler knows becomes a 500 with the request's id; its
    traceback goes to the log.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _plain(Headers(scope=scope).get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, arrived=time.perf_counter())
        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers.update({"x-request-id": request_id, **self._service.headers()})
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            event(
                "request_crashed",
                severity="critical",
                request_id=request_id,
                error=str(error),
                traceback=traceback.format_exc(),
            )
            if not begun:
                failed = ApiError(500, f"request {request_id} failed: internal error", code="internal_error")
                await _respond(failed)(scope, receive, send_with_headers)


def _respond(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 504:
        headers = {"x-should-retry": "false"}  # OpenAI's clients would ask again for what took too long already
    return JSONResponse(error.body(), status_code=error.status, headers={**headers, **error.headers})


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _respond(ApiError(error.status_code, text, code="invalid_request"))


async def _client_gone(_: Request, error: Exception) -> Response:
    return _respond(ApiError(CLIENT_GONE, "the client went away"))
