"""AttentionCase: one attention problem as a kernel sees it, and the arithmetic of it.

Conventions, fixed here once:

- Causal is bottom-right aligned: query row i of Sq sees keys 0 .. Sk - Sq + i.
- `window = (left, right)` is inclusive on both sides and relative to the bottom-right diagonal;
  None on a side means unbounded. A Hugging Face window of W tokens is `(W - 1, 0)`: its W counts
  the current token (`window_of_hf`).
- The softmax scale is 1 / sqrt(head_dim_qk) unless given.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.errors import UserError

Phase = Literal["prefill", "decode", "extend"]
DType = Literal["float32", "float16", "bfloat16"]
Layout = Literal["contiguous", "ragged", "paged_nhd", "paged_hnd"]
Execution = Literal["eager", "compile", "cuda_graph"]

#: Shapes of the tensor replay, (phase, batch). Lengths sit on and beside page and tile borders, where kernels go wrong.
REPLAY_SHAPES: tuple[tuple[Phase, str], ...] = (
    ("prefill", "q17"),
    ("prefill", "q64_q33"),
    ("prefill", "q257"),
    ("decode", "q1s63"),
    ("decode", "4q1s129"),
    ("decode", "q1s16_q1s255_q1s1000"),
    ("extend", "q16s144"),
    ("extend", "q48s49_q5s300"),
)
Inputs = Literal["normal", "needle", "large_logit"]
REPLAY_INPUTS: tuple[Inputs, ...] = ("normal", "needle", "large_logit")

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class Sequence(BaseModel):
    """Query and KV length of one member of a batch, in tokens."""

    model_config = ConfigDict(frozen=True)

    q_len: int = Field(ge=0)
    kv_len: int = Field(ge=0)


_TOKEN = re.compile(r"^(?:(?P<count>\d+))?q(?P<q>\d+)(?P<qk>k?)(?:s(?P<kv>\d+)(?P<kvk>k?))?$")


def parse_batch(text: str) -> tuple[Sequence, ...]:
    """Members of a batch in the grammar of vLLM's attention benchmark: `[count]q<q>[k][s<kv>[k]]`, joined by `_`.

    `q512` is one prefill of 512 tokens, `32q1s1k` are 32 decodes over 1024 keys each, `2q2k_32q1s1k`
    is both in one batch; `k` multiplies by 1024. Without `s` the KV length is the query length.

    Raises UserError for text outside the grammar.
    """
    members: list[Sequence] = []
    for part in text.split("_"):
        match = _TOKEN.match(part)
        if match is None:
            raise UserError(
                f"batch {text!r}: {part!r} is not `[count]q<len>[k][s<kv len>[k]]`, for example 2q2k_32q1s1k"
            )
        q_len = int(match["q"]) * (1024 if match["qk"] else 1)
        kv_len = q_len if match["kv"] is None else int(match["kv"]) * (1024 if match["kvk"] else 1)
        members.extend([Sequence(q_len=q_len, kv_len=kv_len)] * int(match["count"] or 1))
    return tuple(members)


def replay_shapes(max_kv_len: int) -> list[tuple[Phase, str]]:
    """The shapes whose longest member fits into `max_kv_len`."""
    return [(phase, batch) for phase, batch in REPLAY_SHAPES if max(m.kv_len for m in parse_batch(batch)) <= max_kv_len]


def window_of_hf(sliding_window: int) -> tuple[int, int]:
    """A Hugging Face window of W tokens, which counts the current one, as inclusive (left, right)."""
    return sliding_window - 1, 0


class AttentionCase(BaseModel):
    """One attention problem. Immutable and hashable; JSON through pydantic both ways."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase
    batch: str
    heads_q: int = Field(ge=1)
    heads_kv: int = Field(ge=1)
    head_dim_qk: int = Field(ge=1)
    head_dim_vo: int = Field(ge=1)
    dtype: DType
    kv_dtype: str = "auto"  # auto: as dtype
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    alibi: bool = False
    custom_mask: bool = False
    sinks: bool = False
    layout: Layout = "paged_nhd"
    page_size: int | None = 16
    execution: Execution = "eager"

    @field_validator("batch")
    @classmethod
    def _parses(cls, value: str) -> str:
        parse_batch(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> AttentionCase:
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q={self.heads_q} is no multiple of heads_kv={self.heads_kv}")
        if self.layout.startswith("paged") != (self.page_size is not None):
            raise ValueError(f"layout={self.layout} and page_size={self.page_size} do not go together")
        return self

    @property
    def members(self) -> tuple[Sequence, ...]:
        return parse_batch(self.batch)

    @property
    def case_id(self) -> str:
        """Readable and unique: the shape, then eight hex digits of everything."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]
        return f"{self.phase}-{self.batch}-h{self.heads_q}/{self.heads_kv}-d{self.head_dim_qk}-{self.dtype}-{digest}"

    @property
    def gqa_ratio(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features in use, as policies and metrics spell them."""
        used = {
            "causal": self.causal,
            "sliding_window": self.window != (None, None),
            "softcap": self.softcap is not None,
            "alibi": self.alibi,
            "custom_mask": self.custom_mask,
            "sinks": self.sinks,
        }
        return tuple(name for name, on in used.items() if on)

    def num_pairs(self) -> int:
        """Query-key pairs that the mask leaves, over the batch (one head)."""
        return sum(self._pairs(m.q_len, m.kv_len) for m in self.members)

    def _pairs(self, q_len: int, kv_len: int) -> int:
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        total = 0
        for row in range(q_len):
            diagonal = kv_len - q_len + row
            low = 0 if left is None else max(0, diagonal - left)
            high = kv_len - 1 if right is None else min(kv_len - 1, diagonal + right)
            total += max(0, high - low + 1)
        return total

    def flops(self) -> int:
        """2 * heads * pairs * (d_qk + d_vo): both matrix products, as FlashAttention counts them."""
        return 2 * self.heads_q * self.num_pairs() * (self.head_dim_qk + self.head_dim_vo)

    def num_bytes(self) -> int:
        """Least traffic: q and output once, each sequence's K and V once."""
        size = DTYPE_BYTES[self.dtype]
        q_tokens = sum(m.q_len for m in self.members)
        kv_tokens = sum(m.kv_len for m in self.members)
        per_dim = self.head_dim_qk + self.head_dim_vo
        return size * per_dim * (q_tokens * self.heads_q + kv_tokens * self.heads_kv)

    def num_exps(self) -> int:
        return self.heads_q * self.num_pairs()

    def limit_seconds(self, *, flops_per_s: float, bytes_per_s: float, exps_per_s: float = math.inf) -> float:
        """Roofline: no kernel is faster than max(FLOPs / peak, bytes / bandwidth, exps / rate)."""
        return max(self.flops() / flops_per_s, self.num_bytes() / bytes_per_s, self.num_exps() / exps_per_s)

    @property
    def shape_bucket(self) -> str:
        """`<phase>/kv<=<power of two>`: the bucket of the longest member's KV length."""
        return shape_bucket(self.phase, max((m.kv_len for m in self.members), default=0))


def shape_bucket(phase: str, kv_len: int) -> str:
    """`decode/kv<=1024`: phase and KV length rounded up to a power of two, at least 16."""
    return f"{phase}/kv<={max(16, 1 << max(0, kv_len - 1).bit_length())}"


def phase_of(q_len: int, kv_len: int) -> Phase:
    """`decode` for one query token over a cache, `prefill` for a whole prompt, else `extend`."""
    if q_len == kv_len:
        return "prefill"
    return "decode" if q_len == 1 else "extend"
