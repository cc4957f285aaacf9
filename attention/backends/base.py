"""The small interface of a backend: say what is possible, plan a batch once, run it per layer.

Shape legend: T query tokens of all members together, H query heads, G KV heads, D head dim,
N pages, P tokens a page, S key tokens of all members together, B members, L keys of the longest member.

K and V come in the layout that the batch names:

    paged_nhd    [N, P, G, D]   member i's keys are the first kv_lens[i] slots of its pages
    paged_hnd    [N, G, P, D]
    ragged       [S, G, D]      members one after the other
    contiguous   [B, L, G, D]   member i's keys are the first kv_lens[i] rows of its own block

With quantised KV (`AttentionSpec.kv_dtype`) a key is the stored number times `k_scale`, a value the stored
number times `v_scale`. Slots beyond a member's kv_len may hold anything, NaN too; within it all numbers are finite,
also of keys that window or mask hide: kernels multiply those by 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch

from attention.cases import AttentionCase, Layout
from attention.errors import UserError
from attention.reasons import Reason


@dataclass(frozen=True)
class Batch:
    """What one step attends over: packed queries, and keys in one of the layouts.

    `q_lens[i]` query tokens of member i are rows `sum(q_lens[:i]) ..` of `q_THD`; its `kv_lens[i]` keys
    include the query's own tokens (the caller writes K and V into the cache before it runs attention).
    A length may be 0, and a query may be longer than its keys: rows that see no key give 0 and LSE -inf.
    `block_tables` and `page_size` belong to the paged layouts. `masks[i]`, boolean [q_len, kv_len], True
    where a query may look, narrows what causal and window leave (the feature `custom_mask`). ValueError for what
    does not fit together: kernels would read past the end.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...] = ()
    page_size: int | None = None
    layout: Layout = "paged_nhd"
    masks: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError("q_lens and kv_lens must have one entry a member")
        if not self.q_lens or min(*self.q_lens, *self.kv_lens) < 0:
            raise ValueError("a batch has a member at least, and no length is negative")
        if self.masks is not None:
            shapes = tuple(zip(self.q_lens, self.kv_lens, strict=True))
            if tuple(tuple(mask.shape) for mask in self.masks) != shapes:
                raise ValueError("masks must have one entry a member, [q_len, kv_len]")
            if any(mask.dtype != torch.bool for mask in self.masks):
                raise ValueError("masks must be boolean, True where a query may look")
        if not self.paged:
            if self.block_tables or self.page_size is not None:
                raise ValueError(f"layout {self.layout} has no pages")
            return
        if not self.page_size or self.page_size < 0 or len(self.block_tables) != len(self.kv_lens):
            raise ValueError(f"layout {self.layout} needs a page size and a block table a member")
        for i, (kv_len, table) in enumerate(zip(self.kv_lens, self.block_tables, strict=True)):
            if len(table) * self.page_size < kv_len:
                raise ValueError(f"member {i}: {len(table)} pages of {self.page_size} cannot hold {kv_len} keys")

    @property
    def paged(self) -> bool:
        return self.layout.startswith("paged")


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """One slope a head, as models with ALiBi have them (Press et al., "Train short, test long", and their code for
    numbers of heads that are no power of two). FlashInfer takes no others."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return tuple(slopes)


@dataclass(frozen=True)
class AttentionSpec:
    """What stays the same for every layer of a model: heads, dims, dtype and features.

    KV of q's own dtype is not quantised, whether named or not. ValueError for what no kernel means: heads that do not
    divide, a scale or softcap that is not positive and finite, KV scales without quantised KV, slopes or sinks for
    another number of heads.
    """

    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: torch.dtype
    scale: float
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None  # None: as dtype; else a float8, with the scales below
    k_scale: float = 1.0
    v_scale: float = 1.0
    alibi_slopes: tuple[float, ...] | None = None  # one a query head; bias -slope * |diagonal - key|
    sinks: tuple[float, ...] | None = None  # one logit a query head, in the softmax's sum and in the LSE

    def __post_init__(self) -> None:
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", None)
        if min(self.heads_q, self.heads_kv, self.head_dim_qk, self.head_dim_vo) < 1 or self.heads_q % self.heads_kv:
            raise ValueError(f"{self.heads_q} query heads over {self.heads_kv} KV heads: not a whole number each")
        for name in ("scale", "softcap", "k_scale", "v_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {value}")
        if self.kv_dtype is None and (self.k_scale, self.v_scale) != (1, 1):
            raise ValueError("k_scale and v_scale belong to quantised KV: name its kv_dtype")
        for name in ("alibi_slopes", "sinks"):
            values = getattr(self, name)
            if values is not None and len(values) != self.heads_q:
                raise ValueError(f"{name} must have one entry a query head: {self.heads_q}, not {len(values)}")


@dataclass
class Planned:
    """A planned batch. `run` may be called once per layer; `forced_copies` names what the layout cost.

    Planned with `graph=True`, `run` may be captured in a CUDA graph: everything that depends on lengths and
    pages lies in buffers of fixed address, which `replan` fills anew.
    """

    backend: str
    batch: Batch
    spec: AttentionSpec
    forced_copies: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._query_tokens = sum(self.batch.q_lens)
        self._largest = self.batch  # what `replan` measures another batch by, however small the last one was

    def _check_tokens(self, q_THD: torch.Tensor) -> None:
        """ValueError for more or fewer rows than were planned: those of the output would be left as they were."""
        if q_THD.shape[0] != self._query_tokens:
            raise ValueError(f"{self.backend}: planned for {self._query_tokens} query tokens, not {q_THD.shape[0]}")

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [T, H, D_vo] in q's dtype, and the natural-log LSE [T, H] in float32 (None where the
        backend does not give it). T is the sum of the batch's q_lens; a ragged cache may have rows to spare."""
        raise NotImplementedError("a backend's own Planned implements run")

    def replan(self, batch: Batch) -> None:
        """Make the captured graph serve another batch: as many members, the same q_lens, no longer kv_lens.

        Raises ValueError for a batch that does not fit, and UserError where a backend cannot do it.
        """
        raise UserError(f"{self.backend}: was not planned for a CUDA graph")

    def _check_fits(self, batch: Batch) -> None:
        same = (batch.q_lens, batch.layout, batch.page_size) == (
            self._largest.q_lens,
            self._largest.layout,
            self._largest.page_size,
        )
        if not same or any(new > old for new, old in zip(batch.kv_lens, self._largest.kv_lens, strict=True)):
            raise ValueError("a captured batch keeps members, q_lens and layout; no kv_len is above the captured one")


_own_buffers: ContextVar[bool] = ContextVar("own_buffers", default=False)


@contextmanager
def own_buffers() -> Iterator[None]:
    """Plans made inside share no buffer with others of this process, where they otherwise would: for measurement, to
    which it matters where a buffer lies."""
    token = _own_buffers.set(True)
    try:
        yield
    finally:
        _own_buffers.reset(token)


def wants_own_buffers() -> bool:
    return _own_buffers.get()


class Backend(Protocol):
    """One attention implementation, `family:kernel`."""

    name: str

    def check(self, case: AttentionCase) -> list[Reason]:
        """Every dimension of the case that this backend cannot serve here; empty when it can.

        Static: evaluates declared rules and imports, launches nothing.
        """
        ...

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        """Schedule one batch that `check` allows: page tables, masks, workspace.

        With `graph`, sizes and buffers are those of the longest batch that `replan` will see: this one.
        Without `lse`, `run` gives None for it and makes the library's own call and nothing else; with it, a
        backend may need a small kernel more (another base, another layout).
        """
        ...


def case_of(batch: Batch, spec: AttentionSpec, *, graph: bool = False) -> AttentionCase:
    """The case that one step of a model is: its phase is that of its longest query."""
    from attention.cases import phase_of

    longest = max(range(len(batch.q_lens)), key=lambda i: batch.q_lens[i])
    members = "_".join(f"q{q}s{kv}" for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True))
    return AttentionCase(
        phase=phase_of(batch.q_lens[longest], batch.kv_lens[longest]),
        batch=members,
        heads_q=spec.heads_q,
        heads_kv=spec.heads_kv,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        dtype=str(spec.dtype).removeprefix("torch."),
        causal=spec.causal,
        window=spec.window,
        softcap=spec.softcap,
        kv_dtype="auto" if spec.kv_dtype is None else str(spec.kv_dtype).removeprefix("torch."),
        alibi=spec.alibi_slopes is not None,
        sinks=spec.sinks is not None,
        custom_mask=batch.masks is not None,
        layout=batch.layout,
        page_size=batch.page_size,
        execution="cuda_graph" if graph else "eager",
    )


def positions_mask(q_len: int, kv_len: int, spec: AttentionSpec, device: torch.device) -> torch.Tensor | None:
    """Boolean [q_len, kv_len], True where a query may look; None when nothing is masked."""
    left, right = spec.window
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    if q_len == 1 and right == 0 and (left is None or left >= kv_len - 1):
        return None
    diagonal = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    keys = torch.arange(kv_len, device=device)[None, :]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if right is not None:
        mask &= keys <= diagonal + right
    if left is not None:
        mask &= keys >= diagonal - left
    return mask


def gather_pages(cache_NPGD: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first kv_len keys (or values) of one member as [kv_len, G, D]; a copy that pages force."""
    return cache_NPGD.index_select(0, pages).reshape(-1, *cache_NPGD.shape[2:])[:kv_len]


def member_keys(cache: torch.Tensor, batch: Batch, member: int) -> torch.Tensor:
    """Keys (or values) of one member as [kv_len, G, D], from any layout; a copy only where pages force one."""
    kv_len = batch.kv_lens[member]
    if batch.layout == "contiguous":
        return cache[member, :kv_len]
    if batch.layout == "ragged":
        start = sum(batch.kv_lens[:member])
        return cache[start : start + kv_len]
    pages = torch.tensor(batch.block_tables[member], dtype=torch.long, device=cache.device)
    paged = cache if batch.layout == "paged_nhd" else cache.transpose(1, 2)
    return gather_pages(paged, pages, kv_len)
