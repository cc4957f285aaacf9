"""The small interface of a backend: say what is possible, plan a batch once, run it per layer.

Shape legend: T query tokens of all members together, H query heads, G KV heads, D head dim,
N pages, P tokens a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from attention.cases import AttentionCase
from attention.reasons import Reason


@dataclass(frozen=True)
class Batch:
    """What one step attends over: packed queries on a paged NHD cache.

    `q_lens[i]` query tokens of member i are rows `sum(q_lens[:i]) ..` of `q_THD`; its keys are the
    first `kv_lens[i]` slots of the pages `block_tables[i]`, the query's own tokens included (the
    caller writes K and V into the cache before it runs attention).
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    page_size: int

    def __post_init__(self) -> None:
        if not len(self.q_lens) == len(self.kv_lens) == len(self.block_tables):
            raise ValueError("q_lens, kv_lens and block_tables must have one entry a member")
        for i, (kv_len, table) in enumerate(zip(self.kv_lens, self.block_tables, strict=True)):
            if len(table) * self.page_size < kv_len:
                raise ValueError(f"member {i}: {len(table)} pages of {self.page_size} cannot hold {kv_len} keys")


@dataclass(frozen=True)
class AttentionSpec:
    """What stays the same for every layer of a model: heads, dims, dtype and features."""

    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: torch.dtype
    scale: float
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None


@dataclass
class Planned:
    """A planned batch. `run` may be called once per layer; `forced_copies` names what the layout cost."""

    backend: str
    batch: Batch
    spec: AttentionSpec
    forced_copies: list[str] = field(default_factory=list)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [T, H, D_vo] in q's dtype, and the natural-log LSE [T, H] in float32 (None where the
        backend does not give it)."""
        raise NotImplementedError("a backend's own Planned implements run")


class Backend(Protocol):
    """One attention implementation, `family:kernel`."""

    name: str

    def check(self, case: AttentionCase) -> list[Reason]:
        """Every dimension of the case that this backend cannot serve here; empty when it can.

        Static: evaluates declared rules and imports, launches nothing.
        """
        ...

    def plan(self, batch: Batch, spec: AttentionSpec) -> Planned:
        """Schedule one batch that `check` allows: page tables, masks, workspace."""
        ...


def case_of(batch: Batch, spec: AttentionSpec) -> AttentionCase:
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
        page_size=batch.page_size,
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
