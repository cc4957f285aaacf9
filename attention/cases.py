"""AttentionCase: one attention problem as a kernel sees it, and the arithmetic of it.

Conventions, fixed here once:

- Causal is bottom-right aligned: query row i of Sq sees keys 0 .. Sk - Sq + i.
- `window = (left, right)` is inclusive on both sides and relative to the bottom-right diagonal;
  None on a side means unbounded. A Hugging Face window of W tokens is `(W - 1, 0)`: its W counts
  the current token (`window_of_hf`).
- The softmax scale is 1 / sqrt(head_dim_qk) unless given.
- The LSE is a natural logarithm.

Other libraries count otherwise; what they mean is converted here and nowhere else (`window_of_*`,
`causal_of_top_left`, `natural_lse`). The shapes that an engine launches for a model: `attention.engine_cases`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.errors import UserError, nearest, shown

Phase = Literal["prefill", "decode", "extend"]
DType = Literal["float32", "float16", "bfloat16"]
Layout = Literal["contiguous", "ragged", "paged_nhd", "paged_hnd"]
Execution = Literal["eager", "compile", "cuda_graph"]

Window = tuple[int | None, int | None]

#: Bytes of one number; the names are torch's. `kv_dtype` may be any of them, `dtype` one of the first three.
DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

#: Engines' names of a KV dtype (vLLM --kv-cache-dtype, SGLang --kv-cache-dtype) -> torch's. vLLM's plain
#: `fp8` is e4m3 on CUDA.
KV_DTYPE_ALIASES: dict[str, str] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

#: Shapes of the tensor replay, (phase, batch). Lengths sit on and beside page and tile borders, where kernels go wrong.
REPLAY_SHAPES: tuple[tuple[Phase, str], ...] = (
    ("prefill", "q17"),
    ("prefill", "q64_q33"),
    ("prefill", "q257"),
    ("prefill", "q2k"),
    ("prefill", "8q256"),
    ("decode", "q1s63"),
    ("decode", "4q1s129"),
    ("decode", "q1s16_q1s255_q1s1000"),
    ("decode", "q1s4k_q1s63"),
    ("decode", "q1s8k"),
    ("decode", "16q1s8k"),
    ("decode", "64q1s2k"),
    ("extend", "q16s144"),
    ("extend", "q48s49_q5s300"),
    ("extend", "q33s4k"),
    ("extend", "16q16s4k"),
    ("extend", "4q64s8k"),
)
#: Kinds of inputs, attention/replay/inputs.py. A plan names those that it runs (data/plans); the probes run the first
#: three, which need neither a window nor a model.
Inputs = Literal["normal", "needle", "large_logit", "window_edge", "sink", "activations"]
REPLAY_INPUTS: tuple[Inputs, ...] = ("normal", "needle", "large_logit")
#: Those that need no model's prompts.
DRAWN_INPUTS: tuple[Inputs, ...] = tuple(kind for kind in get_args(Inputs) if kind != "activations")


class Sequence(BaseModel):
    """Query and KV length of one member of a batch, in tokens."""

    model_config = ConfigDict(frozen=True)

    q_len: int = Field(ge=0)
    kv_len: int = Field(ge=0)


#: The most members of a batch: more is a slip of the pen, and would only end in a MemoryError.
MAX_MEMBERS = 1_000_000

# At most 12 digits: lengths stay far inside 64 bits.
_TOKEN = re.compile(r"(?P<count>[1-9][0-9]{0,11})?q(?P<q>[0-9]{1,12})(?P<qk>k?)(?:s(?P<kv>[0-9]{1,12})(?P<kvk>k?))?")


@lru_cache(maxsize=4096)
def parse_batch(text: str) -> tuple[Sequence, ...]:
    """Members of a batch in the grammar of vLLM's attention benchmark: `[count]q<q>[k][s<kv>[k]]`, joined by `_`.

    `q512` is one prefill of 512 tokens, `32q1s1k` are 32 decodes over 1024 keys each, `2q2k_32q1s1k`
    is both in one batch; `k` multiplies by 1024. Without `s` the KV length is the query length.

    Raises UserError for text outside the grammar, and for more than MAX_MEMBERS members.
    """
    members: list[Sequence] = []
    for part in text.split("_"):
        match = _TOKEN.fullmatch(part)
        if match is None:
            raise UserError(
                f"batch {shown(text)}: {shown(part)} is not `[count]q<len>[k][s<kv len>[k]]` of whole numbers up to "
                "12 digits, for example 2q2k_32q1s1k"
            )
        count = int(match["count"] or 1)
        if len(members) + count > MAX_MEMBERS:
            raise UserError(f"batch {shown(text)}: more than {MAX_MEMBERS} members; name fewer")
        q_len = int(match["q"]) * (1024 if match["qk"] else 1)
        kv_len = q_len if match["kv"] is None else int(match["kv"]) * (1024 if match["kvk"] else 1)
        members.extend([Sequence(q_len=q_len, kv_len=kv_len)] * count)
    return tuple(members)


@lru_cache(maxsize=4096)
def canonical_batch(text: str) -> str:
    """The one text of a batch, so that equal cases have one id: runs counted, `k` where it divides, no needless `s`.

    `q1s1024_1q1s1k` is `2q1s1k`, `q512s512` is `q512`. Raises UserError as parse_batch.
    """
    parts = []
    for member, run in groupby(parse_batch(text)):
        count = sum(1 for _ in run)
        keys = "" if member.kv_len == member.q_len else f"s{_length(member.kv_len)}"
        parts.append(f"{count if count > 1 else ''}q{_length(member.q_len)}{keys}")
    return "_".join(parts)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def replay_shapes(max_kv_len: int) -> list[tuple[Phase, str]]:
    """The shapes with at most `max_kv_len` keys in a member, and as many queries in all."""
    return [(phase, batch) for phase, batch in REPLAY_SHAPES if _largest(parse_batch(batch)) <= max_kv_len]


def _largest(members: tuple[Sequence, ...]) -> int:
    return max(sum(m.q_len for m in members), *(m.kv_len for m in members))


def window_of_hf(sliding_window: int) -> Window:
    """A Hugging Face window of W tokens, which counts the current one, as inclusive (left, right)."""
    if sliding_window < 1:
        raise UserError(f"sliding_window={sliding_window}: a Hugging Face window counts the current token, so >= 1")
    return sliding_window - 1, 0


def window_of_vllm(sliding_window: int | None, *, encoder_only: bool = False) -> Window:
    """vLLM's per-layer `sliding_window`: Hugging Face's W (None: no window); both ways in an encoder.

    Source: FlashAttentionImpl.__init__, vllm/v1/attention/backends/flash_attn.py.
    """
    if sliding_window is None:
        return None, None
    left, _ = window_of_hf(sliding_window)
    return left, left if encoder_only else 0


def window_of_sglang(sliding_window_size: int | None) -> Window:
    """SGLang's `sliding_window_size`, which leaves the current token out (W - 1); None or -1: no window.

    Source: get_attention_sliding_window_size, sglang/srt/models/gemma3_causal.py ("SGLang assumes exclusive").
    """
    if sliding_window_size is None:
        return None, None
    left = _side(sliding_window_size, "sliding_window_size")
    return left, None if left is None else 0


def window_of_flash_attention(window_size: tuple[int, int]) -> Window:
    """FlashAttention's `window_size=(left, right)`: inclusive and bottom-right as here; -1 means unlimited."""
    left, right = (_side(value, "window_size") for value in window_size)
    return left, right


def window_of_flashinfer(window_left: int) -> Window:
    """FlashInfer's `window_left`: inclusive, -1 means unlimited; the right side is the causal flag's alone."""
    return _side(window_left, "window_left"), None


def _side(value: int, name: str) -> int | None:
    if value < -1:
        raise UserError(f"{name}={value}: -1 means unlimited, other negative numbers mean nothing")
    return None if value == -1 else value


def causal_of_top_left(q_len: int, kv_len: int) -> tuple[bool, Window]:
    """A causal mask that is aligned top-left (row i sees keys 0 .. i), as our `(causal, window)`.

    So PyTorch's `is_causal` and cuDNN's default mask read. The same for a square problem; with more queries than
    keys the diagonal lies `q_len - kv_len` to the right of ours. With fewer, row i of a decode over a cache
    would see the oldest keys only: UserError, since nobody means that (pytorch#110144).
    """
    if q_len == kv_len:
        return True, (None, None)
    if q_len > kv_len:
        return False, (None, q_len - kv_len)
    raise UserError(
        f"top-left causal mask with q_len={q_len} < kv_len={kv_len}: the last {kv_len - q_len} keys are seen by no "
        f"query; cut the keys to {q_len} if that is meant, else use a bottom-right mask (CAUSAL_ALIGNMENT)"
    )


def kv_dtype_of(name: str) -> str:
    """`auto` or torch's name of a KV dtype, by that name or an engine's. UserError for an unknown one."""
    found = KV_DTYPE_ALIASES.get(name, name)
    if found != "auto" and found not in DTYPE_BYTES:
        raise UserError(f"kv_dtype {name!r}: {nearest(name, ['auto', *DTYPE_BYTES, *KV_DTYPE_ALIASES])}")
    return found


def natural_lse(lse_base2: Any) -> Any:
    """A base-2 LSE, as FlashInfer's native kernels give it, as a natural logarithm; a number or a tensor."""
    return lse_base2 * math.log(2)


class AttentionCase(BaseModel):
    """One attention problem. Immutable and hashable; JSON through pydantic both ways."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    phase: Phase
    batch: str
    heads_q: int = Field(ge=1)
    heads_kv: int = Field(ge=1)
    head_dim_qk: int = Field(ge=1)
    head_dim_vo: int = Field(ge=1)
    dtype: DType
    kv_dtype: str = "auto"  # auto: as dtype; else a key of DTYPE_BYTES, or an engine's name of one
    causal: bool = True
    window: Window = (None, None)
    softcap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    alibi: bool = False
    custom_mask: bool = False
    sinks: bool = False
    layout: Layout = "paged_nhd"
    page_size: int | None = Field(default=16, ge=1)  # tokens of a page
    execution: Execution = "eager"

    @field_validator("batch")
    @classmethod
    def _one_text(cls, value: str) -> str:
        return canonical_batch(value)

    @field_validator("kv_dtype")
    @classmethod
    def _known(cls, value: str) -> str:
        return kv_dtype_of(value)

    @field_validator("window")
    @classmethod
    def _bounded(cls, value: Window) -> Window:
        if any(side is not None and side < 0 for side in value):
            raise ValueError(f"window={value}: None means unbounded; convert -1 with window_of_flash_attention")
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

    @property
    def windowed(self) -> bool:
        """Whether the window hides a key of some member that causal masking alone leaves."""
        left, right = self.window
        return any(
            (left is not None and left < m.kv_len - 1) or (right is not None and not self.causal) for m in self.members
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the KV cache."""
        return DTYPE_BYTES[self.dtype if self.kv_dtype == "auto" else self.kv_dtype]

    @property
    def shares_latent(self) -> bool:
        """Absorbed MLA decode: the value is the first head_dim_vo columns of the one key, read once."""
        return self.heads_kv == 1 and self.head_dim_qk > self.head_dim_vo >= 256

    def num_pairs(self) -> int:
        """Query-key pairs that causal and window leave, over the batch (one head); a custom mask leaves fewer."""
        return sum(count * self._pairs(m.q_len, m.kv_len) for m, count in Counter(self.members).items())

    def _pairs(self, q_len: int, kv_len: int) -> int:
        # Row d (its diagonal) sees keys max(0, d - left) .. min(kv_len - 1, d + right), for
        # d = kv_len - q_len .. kv_len - 1: a difference of two sums of numbers clamped to 0 .. kv_len.
        left, right = self._bounds()
        first, last = kv_len - q_len, kv_len - 1
        seen = q_len * kv_len if right is None else _clamped_sum(first + right + 1, last + right + 1, kv_len)
        return seen - (0 if left is None else _clamped_sum(first - left, last - left, kv_len))

    def _bounds(self) -> Window:
        """Window with the causal bound in it; both sides are >= 0 or None."""
        left, right = self.window
        return left, 0 if self.causal else right

    def flops(self) -> int:
        """2 * heads * pairs * (d_qk + d_vo): both matrix products, as FlashAttention counts them."""
        return 2 * self.heads_q * self.num_pairs() * (self.head_dim_qk + self.head_dim_vo)

    def num_bytes(self) -> int:
        """Least traffic: q and output once, each key and value that some query sees once.

        Quantised KV counts with its own width (fp8: 1); scales, page tables and the LSE are left out.
        """
        left, _ = self.window
        q_tokens = sum(m.q_len for m in self.members)
        kv_tokens = sum(_keys_seen(m.q_len, m.kv_len, left) for m in self.members)
        per_key = self.head_dim_qk + (0 if self.shares_latent else self.head_dim_vo)
        queries = q_tokens * self.heads_q * (self.head_dim_qk + self.head_dim_vo) * DTYPE_BYTES[self.dtype]
        return queries + kv_tokens * self.heads_kv * per_key * self.kv_bytes

    def num_exps(self) -> int:
        """One exponential a pair and head."""
        return self.heads_q * self.num_pairs()

    def limit_seconds(self, *, flops_per_s: float, bytes_per_s: float, exps_per_s: float = math.inf) -> float:
        """Roofline: no kernel is faster than max(FLOPs / peak, bytes / bandwidth, exps / rate).

        The ceilings are the caller's, measured or stated, in units a second; a custom mask may beat it.
        """
        return max(self.flops() / flops_per_s, self.num_bytes() / bytes_per_s, self.num_exps() / exps_per_s)

    @property
    def shape_bucket(self) -> str:
        """`<phase>/kv<=<power of two>`: the bucket of the longest member's KV length."""
        return shape_bucket(self.phase, max((m.kv_len for m in self.members), default=0))


def _clamped_sum(first: int, last: int, top: int) -> int:
    """Sum of min(max(x, 0), top) for x = first .. last; 0 for an empty range."""

    def below(x: int) -> int:
        inside = min(max(x, 0), top)
        return inside * (inside + 1) // 2 + max(0, x - top) * top

    return below(last) - below(first - 1) if first <= last else 0


def _keys_seen(q_len: int, kv_len: int, left: int | None) -> int:
    """Keys that at least one query of a member sees: a window hides those before the first row's."""
    if q_len == 0:
        return 0
    return kv_len if left is None else kv_len - max(0, kv_len - q_len - left)


def shape_bucket(phase: str, kv_len: int) -> str:
    """`decode/kv<=1024`: phase and KV length rounded up to a power of two, at least 16."""
    return f"{phase}/kv<={max(16, 1 << max(0, kv_len - 1).bit_length())}"


def phase_of(q_len: int, kv_len: int) -> Phase:
    """`decode` for one query token over a cache, `prefill` for a whole prompt, else `extend`."""
    if q_len == kv_len:
        return "prefill"
    return "decode" if q_len == 1 else "extend"
