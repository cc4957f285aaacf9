"""The OpenAI API as this server speaks it: bodies of requests, answers and errors.

What would change the result and is not supported is refused by name (`n=2`, `logprobs`, penalties,
unknown fields); what has no bearing on the result (`user`, `metadata`) is accepted. Nothing is ignored
silently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attention.errors import nearest

if TYPE_CHECKING:  # it stands beside torch, which those who only check a body do not load
    from attention.scheduler import FinishReason

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

# Values that ask for nothing: sent by clients that spell out every default.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
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

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

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


class CompletionBody(_Body):
    """POST /v1/completions: one prompt, as text or as token ids."""

    prompt: str | list[int] | list[str]
    max_tokens: int | None = Field(default=None, ge=1)


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
        return {**self.model_dump(exclude_none=True), "role": role, "content": text}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None  # the answer is text: there is nothing to call in parallel

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
    neutral = {name: data.pop(name) for name in tuple(data) if name in _NEUTRAL}
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

    def whole(self, text: str, reason: FinishReason, usage: dict[str, int]) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": reason}
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [{**choice, **said}], "usage": usage}

    def opening(self) -> bytes | None:
        """The first chunk of a chat names the role; a completion has none."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, text: str) -> bytes:
        return self._chunk({"content": text} if self.chat else text, None)

    def closing(self, reason: FinishReason) -> bytes:
        return self._chunk({} if self.chat else "", reason)

    def usage(self, usage: dict[str, int]) -> bytes:
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

    def _chunk(self, said: dict[str, str] | str, reason: FinishReason | None) -> bytes:
        name = "delta" if self.chat else "text"
        choice = {"index": 0, name: said, "logprobs": None, "finish_reason": reason}
        return server_event({**self._head(self._chunk_kind), "choices": [choice]})


DONE = b"data: [DONE]\n\n"


def server_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_of(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(output_ids),
        "total_tokens": len(prompt_ids) + len(output_ids),
    }
