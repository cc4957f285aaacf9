"""Traffic: what a recorded request is, scaled to what a machine can carry, weighed by its shapes.

traffic = read_traffic(path)  # data/recorded.py
requests = scale(traffic, plan.traffic, tokenizer)
buckets = shape_weights(lengths(requests, tokenizer))
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.cases import shape_bucket
from attention.errors import UserError
from attention.serve.protocol import ApiError, ChatBody, CompletionBody, parse
from data.features import features
from data.jsonl import Rejected
from data.plan import TrafficScale
from data.synthetic import PromptShape, single_token_words, synthetic_prompt

if TYPE_CHECKING:
    from data.sample import SampleReport

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Family = Literal["prefill", "decode", "extend"]

MIN_TOKENS = 8  # what scaling leaves of a message: below this a text says nothing
MIN_OUTPUT = 2  # time per output token needs two tokens


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], /) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any: ...


class Message(BaseModel):
    """One turn. Keys beyond these (`tool_calls`, `tool_call_id`, `name`) are kept as they came."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""  # null beside tool_calls reads as ""; a list of text parts is joined

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
            raise ValueError("only text parts can be replayed")
        return "".join(part["text"] for part in value)

    def for_template(self) -> dict[str, Any]:
        """As the server hands it to the chat template: `developer` is `system`."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role}


class RequestBody(BaseModel):
    """What the client posts. Keys beyond these (`top_p`, `seed`, `stop`, ...) are kept as they came."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: int = Field(ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    temperature: float = Field(default=0.0, ge=0)
    stream: bool = False


class TrafficRequest(BaseModel):
    """One recorded request."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
    )

    custom_id: str = Field(min_length=1)
    method: Literal["POST"] = "POST"
    endpoint: Endpoint = Field(alias="url")
    body: RequestBody
    t_s: float = Field(ge=0)  # arrival, seconds since the start of the file
    session_id: str = Field(min_length=1)  # the turns of one conversation share it
    category: str
    language: str  # ISO 639-1, or `und` if it was not determined
    shape: PromptShape | None = None  # instead of body.prompt, until scaling makes one of that length

    @model_validator(mode="after")
    def _has_a_prompt(self) -> TrafficRequest:
        if self.shape is not None:
            if self.endpoint != "/v1/completions" or self.body.prompt is not None:
                raise ValueError("shape: only a /v1/completions without body.prompt has one")
            return self
        wanted = "messages" if self.endpoint == "/v1/chat/completions" else "prompt"
        if not getattr(self.body, wanted):
            raise ValueError(f"body.{wanted} is missing or empty, and {self.endpoint} needs it")
        return self

    @model_validator(mode="after")
    def _is_taken_by_the_server(self) -> TrafficRequest:
        kind = ChatBody if self.endpoint == "/v1/chat/completions" else CompletionBody
        payload = self.payload() if self.shape is None else {**self.payload(), "prompt": "to be made"}
        try:
            parse(json.dumps(payload).encode(), kind)
        except ApiError as error:
            raise ValueError(f"body: the server refuses it: {error.message}") from error
        return self

    @property
    def exact(self) -> bool:
        """Whether two answers can be compared token by token; a sampled one without a seed is a draw of many."""
        return self.body.temperature == 0 or (self.body.model_extra or {}).get("seed") is not None

    @property
    def features(self) -> tuple[str, ...]:
        """`tools`, `json`, `multi_turn`, `stream`: those that it has."""
        return features(self.payload(), self.category)

    def payload(self) -> dict[str, Any]:
        """The body as it goes over the wire."""
        return self.body.model_dump(mode="json", exclude_none=True)

    def render(self, tokenizer: Tokenizer) -> str:
        """The text that the model reads: the prompt, or the messages through the chat template."""
        assert self.shape is None, "a prompt of which only the length is known is made by `scale` or `with_texts`"
        if self.endpoint == "/v1/completions":
            return self.body.prompt or ""
        return _render(self.body.messages or (), self.body.tools, tokenizer)


@dataclass(frozen=True)
class Traffic:
    requests: list[TrafficRequest]  # in order of arrival
    rejected: list[Rejected]  # in order of the file
    format: str  # a name of data.readers.FORMATS
    sample: SampleReport | None = None  # what `requests` stand for, if they were drawn


@dataclass(frozen=True)
class RequestLength:
    """Tokens of one request; `output_tokens` is its limit, which an early end may undercut.

    Raises UserError for a prompt that a cache holds whole (its last token at least is computed), and for a count that
    is no positive number.
    """

    custom_id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    count: float = 1.0  # requests that it stands for

    def __post_init__(self) -> None:
        if self.cached_tokens and not 0 < self.cached_tokens < self.prompt_tokens:
            raise UserError(
                f"request {self.custom_id}: cached_tokens {self.cached_tokens} of a prompt of {self.prompt_tokens}; "
                "give 0 to prompt_tokens - 1"
            )
        if not 0 < self.count < math.inf:
            raise UserError(f"request {self.custom_id}: count {self.count}; give a positive number")


@dataclass(frozen=True)
class Bucket:
    """Share of a family's attention work in one range of KV lengths, and a call that is typical of it."""

    family: Family
    kv_len: int  # upper end of the range, a power of two
    shape_bucket: str  # as attention.cases.shape_bucket spells it
    weight: float  # 0..1; the buckets of a family sum to 1
    q_len: int = 1  # query tokens of the typical call: prefill kv_len, decode 1, extend a power of two below kv_len
    # Work of 1000 requests in one layer: query-key pairs of one head (prefill, extend), steps of one sequence (decode).
    units: float = 0.0


def with_texts(requests: Sequence[TrafficRequest], tokenizer: Tokenizer, divide_by: int = 1) -> list[TrafficRequest]:
    """The requests with a synthetic prompt where only its length is known, `divide_by` times as short."""
    if all(request.shape is None for request in requests):
        return list(requests)
    words = single_token_words(tokenizer)
    return [
        request if request.shape is None else _with_text(request, request.shape, divide_by, words, tokenizer)
        for request in requests
    ]


def _with_text(
    request: TrafficRequest, shape: PromptShape, divide_by: int, words: Sequence[str], tokenizer: Tokenizer
) -> TrafficRequest:
    """Blocks are divided as the length is: what was shared stays shared."""
    num_tokens = max(min(MIN_TOKENS, shape.prompt_tokens), shape.prompt_tokens // divide_by)
    block_tokens = max(1, shape.block_tokens // divide_by)
    made = PromptShape(prompt_tokens=num_tokens, blocks=shape.blocks, block_tokens=block_tokens)
    prompt = synthetic_prompt(made, request.custom_id, words, tokenizer)
    return request.model_copy(update={"body": request.body.model_copy(update={"prompt": prompt}), "shape": None})


def scale(traffic: Traffic, plan: TrafficScale, tokenizer: Tokenizer) -> list[TrafficRequest]:
    """The traffic as the plan plays it: lengths divided, output capped, arrivals at the plan's mean rate.

    A prompt is cut in tokens, template included, to `length / divide_lengths_by`: the earliest turns go
    first, then every text that is left is shortened in proportion, to no fewer than 8 tokens. The last
    turn and a plain prompt keep their ends (the question stands there), all else its head. A prompt of which
    only the length is known is made at the length that it is played with.
    """
    arrivals = _rescale([request.t_s for request in traffic.requests], plan.requests_per_s)
    made = with_texts(traffic.requests, tokenizer, plan.divide_lengths_by)
    return [
        request.model_copy(update={"body": _shrink(request, plan, tokenizer, read.shape is not None), "t_s": t_s})
        for read, request, t_s in zip(traffic.requests, made, arrivals, strict=True)
    ]


def addressed(requests: Sequence[TrafficRequest], model: str) -> list[TrafficRequest]:
    """The requests as the server of `model` takes them: by the name in their log it would answer 404."""
    return [r.model_copy(update={"body": r.body.model_copy(update={"model": model})}) for r in requests]


def _rescale(arrivals: Sequence[float], requests_per_s: float) -> list[float]:
    """Arrivals from 0 on with the same pattern of gaps; evenly spread if the file has no gaps."""
    span = arrivals[-1] - arrivals[0]
    if span == 0:
        return [index / requests_per_s for index in range(len(arrivals))]
    factor = (len(arrivals) - 1) / requests_per_s / span
    return [(t_s - arrivals[0]) * factor for t_s in arrivals]


def _shrink(request: TrafficRequest, plan: TrafficScale, tokenizer: Tokenizer, is_short: bool) -> RequestBody:
    body, divisor = request.body, plan.divide_lengths_by
    max_tokens = max(MIN_OUTPUT, body.max_tokens // divisor) if divisor > 1 else body.max_tokens
    if plan.max_output_tokens is not None:
        max_tokens = min(max_tokens, plan.max_output_tokens)
    changed: dict[str, Any] = {"max_tokens": max_tokens}
    if divisor == 1 or is_short:
        return body.model_copy(update=changed)
    if request.endpoint == "/v1/completions":
        ids = _encode(body.prompt or "", tokenizer)
        changed["prompt"] = _cut(body.prompt or "", ids, max(MIN_TOKENS, len(ids) // divisor), "tail", tokenizer)
    else:
        changed["messages"] = _shrink_chat(body, divisor, tokenizer)
    return body.model_copy(update=changed)


def _shrink_chat(body: RequestBody, divisor: int, tokenizer: Tokenizer) -> tuple[Message, ...]:
    messages = body.messages or ()
    ids = {id(message): _encode(message.content, tokenizer) for message in messages}
    budget = (_num_template_tokens(messages, body.tools, tokenizer) + sum(map(len, ids.values()))) // divisor
    for kept in _shortened(messages):
        room = budget - _num_template_tokens(kept, body.tools, tokenizer)
        if room >= MIN_TOKENS * len(kept):
            break
    quotas = _share_out([len(ids[id(message)]) for message in kept], room)
    return tuple(
        _cut_message(message, ids[id(message)], quota, "tail" if message is kept[-1] else "head", tokenizer)
        for message, quota in zip(kept, quotas, strict=True)
    )


def _cut_message(
    message: Message, ids: list[int], quota: int, keep: Literal["head", "tail"], tokenizer: Tokenizer
) -> Message:
    return message.model_copy(update={"content": _cut(message.content, ids, quota, keep, tokenizer)})


def _shortened(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation without its first 0, 1, 2, ... turns; it always opens with a user after the system."""
    head = [message for message in messages if message.role in ("system", "developer")]
    turns = [message for message in messages if message.role not in ("system", "developer")]
    starts = [index for index, message in enumerate(turns) if message.role == "user"]
    return [head + turns[start:] for start in starts] or [list(messages)]


def _share_out(counts: Sequence[int], room: int) -> list[int]:
    """Tokens for each text: its least, then what is left of `room` in proportion to what it lacks."""
    least = [min(MIN_TOKENS, count) for count in counts]
    lacking = [count - low for count, low in zip(counts, least, strict=True)]
    spare = min(max(0, room - sum(least)), sum(lacking))
    return [low + (spare * lack // sum(lacking) if lack else 0) for low, lack in zip(least, lacking, strict=True)]


def _cut(text: str, ids: list[int], num_tokens: int, keep: Literal["head", "tail"], tokenizer: Tokenizer) -> str:
    """The first or last tokens of a text whose token ids are `ids`; the text itself if it is short enough."""
    if len(ids) <= num_tokens:
        return text
    part = ids[:num_tokens] if keep == "head" else ids[-num_tokens:]
    return tokenizer.decode(part).strip("\N{REPLACEMENT CHARACTER}")  # half a character at the cut


def _num_template_tokens(
    messages: Sequence[Message], tools: tuple[dict[str, Any], ...] | None, tokenizer: Tokenizer
) -> int:
    """What the chat template adds around the texts."""
    bare = [message.model_copy(update={"content": ""}) for message in messages]
    return len(_encode(_render(bare, tools, tokenizer), tokenizer))


def _render(messages: Sequence[Message], tools: tuple[dict[str, Any], ...] | None, tokenizer: Tokenizer) -> str:
    return str(
        tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def lengths(requests: Sequence[TrafficRequest], tokenizer: Tokenizer) -> list[RequestLength]:
    """Tokens of every request: its rendered prompt, and its output limit."""
    return [
        RequestLength(r.custom_id, len(_encode(r.render(tokenizer), tokenizer)), r.body.max_tokens) for r in requests
    ]


def shape_weights(measured: Sequence[RequestLength]) -> list[Bucket]:
    """Where the attention work of this traffic lies: families apart, heaviest bucket of a family first.

    A prompt's work is its causal query-key pairs, in the bucket of its length: a prefill, or an extend where the
    prefix cache holds a part, whose queries are the rest. A decode step weighs 1 and belongs to the KV length that it
    sees: prompt + 1 for the first, since the prompt itself gives the first output token.
    """
    work: dict[tuple[Family, int], float] = defaultdict(float)
    queries: dict[int, float] = defaultdict(float)  # of extends: new tokens, times their pairs
    for one in measured:
        new, end = one.prompt_tokens - one.cached_tokens, bucket_end(one.prompt_tokens)
        pairs = one.count * (new * one.prompt_tokens - new * (new - 1) // 2)
        work["extend" if one.cached_tokens else "prefill", end] += pairs
        if one.cached_tokens:
            queries[end] += pairs * new
        for end, steps in _decode_steps(one.prompt_tokens + 1, one.prompt_tokens + one.output_tokens - 1):
            work["decode", end] += one.count * steps
    total = {family: sum(w for (f, _), w in work.items() if f == family) for family, _ in work}
    per_thousand = 1000 / sum(one.count for one in measured) if measured else 0.0
    buckets = [
        Bucket(
            family,
            kv_len,
            shape_bucket(family, kv_len),
            units / total[family],
            _typical_q_len(family, kv_len, queries[kv_len] / units),
            units * per_thousand,
        )
        for (family, kv_len), units in work.items()
        if units
    ]
    return sorted(buckets, key=lambda b: (get_args(Family).index(b.family), -b.weight, b.kv_len))


def _decode_steps(first: int, last: int) -> Iterator[tuple[int, int]]:
    """(bucket, steps in it) of steps that see first, first + 1, .. last keys."""
    while first <= last:
        end = bucket_end(first)
        yield end, min(last, end) - first + 1
        first = end + 1


def _typical_q_len(family: Family, kv_len: int, mean_new: float) -> int:
    """Query tokens of a bucket's typical call; of an extend the nearest power of two to its mean of new tokens.

    2 at least, since one is a decode, and half of the keys at most, since all of them are a prefill.
    """
    if family != "extend":
        return kv_len if family == "prefill" else 1
    return min(1 << round(math.log2(max(2.0, mean_new))), kv_len // 2)


def bucket_end(kv_len: int) -> int:
    """Upper end of the bucket that `shape_bucket` puts a KV length in."""
    return int(shape_bucket("decode", kv_len).rpartition("=")[2])
