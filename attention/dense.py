"""The dispatcher over dense keys, as a model of transformers has them, instead of pages.

Shape legend beyond base: B sequences of the padded batch, Q queries and L keys of each, as transformers pads them.

Where every sequence has all Q queries and as many keys, K and V are read where they lie (layout contiguous). Padding
is left out: queries and keys are packed (ragged), one copy of K and V a layer, as transformers' own call of
FlashAttention makes one. What lengths do not say is a custom mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attention.backends.base import AttentionSpec, Batch
from attention.cases import Layout
from attention.custom_op import Runs
from attention.dispatch import Avoid, Dispatcher, _Group
from attention.policy import Policy, Resolution

#: Families that read keys of any strides; the others get rows that lie one after the other, which is a copy.
_ANY_STRIDES = ("torch_sdpa", "flex_attention", "triton")


@dataclass(frozen=True, eq=False)
class Rows:
    """What of a padded batch is attended over, and how it is handed to a backend."""

    batch: Batch
    queries: torch.Tensor | None = None  # rows of [B * Q] that are queries; None for all
    keys: tuple[torch.Tensor, torch.Tensor] | None = None  # (sequence, place) of each key; None for all


@lru_cache(maxsize=256)
def all_rows(num_sequences: int, num_queries: int, num_keys: int) -> Rows:
    """No padding: every sequence has that many queries and keys, the first `num_keys` of its rows."""
    return Rows(Batch((num_queries,) * num_sequences, (num_keys,) * num_sequences, layout="contiguous"))


def packed_rows(real_BL: np.ndarray[Any, Any], num_queries: int, device: torch.device) -> Rows | None:
    """Only what is no padding: `real_BL` is True at real keys; its last `num_queries` columns are the queries' own.

    None where no query is real. A sequence without one is no member.
    """
    real_BQ = real_BL[:, -num_queries:]
    real_BL = real_BL & real_BQ.any(1, keepdims=True)
    used = real_BQ.any(1)
    if not used.any():
        return None
    queries, keys = (torch.from_numpy(np.stack(np.nonzero(real))).to(device) for real in (real_BQ, real_BL))
    q_lens, kv_lens = (tuple(real[used].sum(1).tolist()) for real in (real_BQ, real_BL))
    return Rows(Batch(q_lens, kv_lens, layout="ragged"), queries[0] * num_queries + queries[1], (keys[0], keys[1]))


def masked_rows(mask_BQL: torch.Tensor) -> Rows:
    """Exactly what a boolean mask says, True where a query may look; nothing is causal besides."""
    num_sequences, num_queries, num_keys = mask_BQL.shape
    lens = ((num_queries,) * num_sequences, (num_keys,) * num_sequences)
    return Rows(Batch(*lens, layout="contiguous", masks=tuple(mask_BQL)))


class DenseDispatcher(Dispatcher):
    """A Dispatcher whose batches are `Rows`: resolved for their layout, planned in it. `masked`: with custom masks."""

    def __init__(
        self, policy: Policy, specs: list[AttentionSpec], *, layout: Layout, masked: bool, **options: Any
    ) -> None:
        self._layout: Layout = layout
        self._masked = masked
        self._keys: dict[int, torch.Tensor] = {}  # by part of a step, where it is not the whole: its rows of the keys
        self._copies = False
        super().__init__(policy, specs, **options)

    def _resolve(self, batch: Batch) -> Resolution:
        q_len, kv_len = batch.q_lens[0], batch.kv_lens[0]
        masks = (torch.ones(1, 1, dtype=torch.bool).expand(q_len, kv_len),) if self._masked else None
        return super()._resolve(Batch((q_len,), (kv_len,), layout=self._layout, masks=masks))

    def plan(self, batch: Batch, avoid: Sequence[Avoid] | None = None) -> None:
        """Plan one step over dense keys."""
        # The parts are those of a batch with the same lengths over pages; each is then planned as what it is.
        page_size = max(batch.kv_lens)
        super().plan(Batch(batch.q_lens, batch.kv_lens, ((0,),) * len(batch.kv_lens), page_size), avoid)
        self._copies = not all(run.resolved.startswith(_ANY_STRIDES) for run in self._record.phases)
        self._keys = {}
        if len(self._groups) == 1:
            self._groups[0].batch = batch
            return
        if batch.layout != "ragged":
            raise RuntimeError("sequences of equal lengths were given to several backends")
        ends = np.cumsum(batch.kv_lens)
        for group in self._groups:
            members = [i for i, run in enumerate(self._record.members) if run is group.run]
            rows = np.concatenate([np.arange(ends[i] - batch.kv_lens[i], ends[i]) for i in members])
            self._keys[id(group)] = torch.from_numpy(rows).to(self.device)
            q_lens, kv_lens = (tuple(lens[i] for i in members) for lens in (batch.q_lens, batch.kv_lens))
            group.batch = Batch(q_lens, kv_lens, layout="ragged")

    def add_layer(self, spec: AttentionSpec) -> int:
        """One more layer, of a model whose layers are known only when they run; its number."""
        self.specs.append(spec)
        if spec not in self._kinds:
            self._kinds.append(spec)
            for group in self._groups:
                group.plans.append(None)
        self._kind_of.append(self._kinds.index(spec))
        return len(self.specs) - 1

    def run(self, layer: int, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._copies:
            k, v = k.contiguous(), v.contiguous()
        return super().run(layer, q_THD, k, v)

    def _run_group(
        self, group: _Group, kind: int, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self._keys:
            k, v = (cache.index_select(0, self._keys[id(group)]) for cache in (k, v))
        return super()._run_group(group, kind, q_THD, k, v)


def attend(
    dispatcher: Runs, layer: int, rows: Rows, q_BHQD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor
) -> torch.Tensor:
    """Attention of one layer of the planned step, [B, Q, H, D_vo]; rows that are padding give 0."""
    sequences, heads, queries, _ = q_BHQD.shape
    k, v = k_BGLD.transpose(1, 2), v_BGLD.transpose(1, 2)
    q_THD = q_BHQD.transpose(1, 2).reshape(sequences * queries, heads, -1)
    if rows.keys is not None:
        k, v = k[rows.keys], v[rows.keys]
    else:
        num_keys = rows.batch.kv_lens[0]
        k, v = k[:, :num_keys], v[:, :num_keys]
    if rows.queries is None:
        out_THD = dispatcher.run(layer, q_THD, k, v)
    else:
        found = dispatcher.run(layer, q_THD.index_select(0, rows.queries), k, v)
        out_THD = found.new_zeros(sequences * queries, *found.shape[1:]).index_copy_(0, rows.queries, found)
    return out_THD.view(sequences, queries, heads, -1)
