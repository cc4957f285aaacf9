"""The OpenAI API as this server speaks it: bodies of requests, answers and errors.

What would change the result and is not supported is refused by name (`n=2`, penalties, a `tool_choice`
that cannot be guaranteed, unknown fields); what has no bearing on the result (`user`, `metadata`) is
accepted. Nothing is ignored silently.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attention.errors import nearest
from attention.serve.tool_calls import ToolCall

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

# Values that ask for nothing: sent by clients that spell out every default. Where an endpoint has a field of the
# name, the field counts.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form. `message` is for the client: never a traceback."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    """Strict: `"max_tokens": true` is no 1 and "4" no 4."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(_Strict):
    include_usage: bool = True


class _Body(_Strict):
    """What both endpoints take."""

    model: str = ""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)  # vLLM's extension
    # No bearing on the result.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def usage_wanted(self) -> bool:
        """A stream ends with a usage chunk unless the client declines it."""
        return self.stream_options is None or self.stream_options.include_usage

    @model_validator(mode="after")
    def _whole_prompt_logprobs(self) -> _Body:
        if self.stream and self.prompt_logprobs is not None:
            text = "prompt_logprobs comes with whole answers only; leave out stream"
            raise ApiError(400, text, param="prompt_logprobs", code="unsupported_parameter")
        return self


class CompletionBody(_Body):
    """POST /v1/completions: one prompt, as text or as token ids.

    With `echo` the answer begins with the prompt; `max_tokens` 0 then scores the prompt alone.
    """

    prompt: str | list[int] | list[str]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None

    @property
    def num_top(self) -> int | None:
        """Alternatives to tell for each token; None when no logprobs are wanted."""
        return self.logprobs

    @model_validator(mode="after")
    def _something_to_answer(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            text = "max_tokens=0 answers nothing; send at least 1, or echo or prompt_logprobs to score the prompt"
            raise ApiError(400, text, param="max_tokens", code="invalid_value")
        return self


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is text, what is absent is left out, and `developer`, OpenAI's
        newer name of the role, is `system`."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        found = {**self.model_dump(exclude_none=True), "role": role, "content": text}
        if self.tool_calls:
            found["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return found


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    """An earlier call as templates expect it: the API writes its arguments as JSON text, they read an object."""
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        message = f"messages: the arguments of an earlier tool call are not JSON: {error}"
        raise ApiError(400, message, param="messages", code="invalid_value") from error
    return {**call, "function": {**function, "arguments": arguments}}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None  # false: of several calls in an answer the first counts
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def num_top(self) -> int | None:
        """Alternatives to tell for each token; None when no logprobs are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_names(self) -> tuple[str, ...]:
        functions = [tool.get("function") for tool in self.tools or []]
        return tuple(str(function.get("name")) for function in functions if isinstance(function, dict))

    @model_validator(mode="after")
    def _top_of_something(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            text = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise ApiError(400, text, param="top_logprobs", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("send max_tokens or max_completion_tokens, not both")
        return self


_BodyT = TypeVar("_BodyT", bound=_Body)


def parse(raw: bytes, kind: type[_BodyT]) -> tuple[_BodyT, Mapping[str, Any]]:
    """A body and the neutral fields that came with it. Raises ApiError 400 naming field and remedy."""
    try:
        data = json.loads(raw, parse_constant=_no_constant)
        if b"\\ud" in raw.lower():
            # Half a surrogate pair is valid JSON and no text; this raises what decoding would.
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}", code="invalid_json")
    neutral = {name: data.pop(name) for name in tuple(data) if name in _NEUTRAL and name not in kind.model_fields}
    for name, value in neutral.items():
        _require_neutral(name, value)
    try:
        return kind.model_validate(data), neutral
    except ValidationError as error:
        _refuse(error, kind)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _require_neutral(name: str, value: Any) -> None:
    allowed = _NEUTRAL[name]
    if value is None or any(value == known and type(value) is type(known) for known in allowed):
        return
    raise ApiError(
        400,
        f"{name}={json.dumps(value)} is not supported and would change the result; leave it out or send "
        + " or ".join(json.dumps(known) for known in allowed),
        param=name,
        code="unsupported_parameter",
    )


def _refuse(error: ValidationError, kind: type[_Body]) -> NoReturn:
    first = error.errors(include_url=False, include_input=False)[0]
    # The branch of a union (`prompt.list[int].0`) is no part of what the client wrote; `stream` is.
    parts = [str(part) for part in first["loc"]]
    where = ".".join(part for part in parts if part not in ("str", "int") and not part.startswith("list["))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        hint = nearest(where, kind.model_fields)
        raise ApiError(400, f"unknown field {where!r}; {hint}", param=where, code="unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    raise ApiError(400, f"{where or 'body'}: {message}", param=where or None, code="invalid_value")


class Answer(BaseModel):
    """How one answer is written, whole or as a stream, for either endpoint."""

    model_config = ConfigDict(frozen=True)

    id: str
    chat: bool
    model: str
    fingerprint: str
    created: int = Field(default_factory=lambda: int(time.time()))

    def whole(
        self,
        text: str,
        reason: str,
        usage: dict[str, Any],
        *,
        calls: Sequence[ToolCall] = (),
        logprobs: dict[str, Any] | None = None,
        prompt_logprobs: list[dict[str, Any] | None] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": _reason(reason, bool(calls))}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message = {**message, "content": text or None, "tool_calls": [_tool_call(call) for call in calls]}
        choice |= {"message": message} if self.chat else {"text": text}
        if prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage}

    def opening(self) -> bytes | None:
        """The first chunk of a chat names the role; a completion has none."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        return self._chunk({"content": text} if self.chat else text, None, logprobs)

    def call(self, index: int, call: ToolCall, logprobs: dict[str, Any] | None = None) -> bytes:
        """A whole call in one delta."""
        return self._chunk({"tool_calls": [{"index": index, **_tool_call(call)}]}, None, logprobs)

    def closing(self, reason: str, *, called: bool = False) -> bytes:
        return self._chunk({} if self.chat else "", _reason(reason, called))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return server_event({**self._head(self._chunk_kind), "choices": [], "usage": usage})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(self, said: dict[str, Any] | str, reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        name = "delta" if self.chat else "text"
        choice = {"index": 0, name: said, "logprobs": logprobs, "finish_reason": reason}
        return server_event({**self._head(self._chunk_kind), "choices": [choice]})


def _reason(reason: str, called: bool) -> str:
    """An answer that was cut off says so, whatever it called before."""
    return "tool_calls" if called and reason == "stop" else reason


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


DONE = b"data: [DONE]\n\n"


def server_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_of(num_prompt: int, num_output: int, num_reused: int) -> dict[str, Any]:
    """Tokens of an answer; `num_reused` of the prompt's were in the cache already."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_reused},
    }
