"""A backend that is right by construction: the oracle's float64 arithmetic, rounded once to the output dtype.

It takes every feature and layout, so that a mutant of it has one defect and nothing else (SDPA has no softcap,
sinks, ALiBi or float8 KV to lose).
"""

from __future__ import annotations

import torch

from attention.backends.base import AttentionSpec, Batch, Planned, member_keys, positions_mask
from attention.backends.oracle import attend
from attention.cases import AttentionCase
from attention.reasons import Reason


class Sound:
    """The oracle as a Backend; each plan serves a graph too, since it reads its batch anew at every run."""

    name = "oracle:fp64"

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False) -> Planned:
        return _PlannedSound(self.name, batch, spec)


class _PlannedSound(Planned):
    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out_THD = q_THD.new_zeros(q_THD.shape[0], self.spec.heads_q, self.spec.head_dim_vo)
        lse_TH = q_THD.new_zeros(q_THD.shape[:2], dtype=torch.float32)
        row = 0
        for i, q_len in enumerate(self.batch.q_lens):
            if not q_len:
                continue
            rows = slice(row, row + q_len)
            row += q_len
            mask = None if self.batch.masks is None else self.batch.masks[i]
            keys, values = keys_of(k_NPGD, self.batch, i), keys_of(v_NPGD, self.batch, i)
            seen_QL = positions_mask(q_len, len(keys), self.spec, keys.device)
            if seen_QL is not None:
                # What no query sees may hold NaN, and the oracle's weight of zero times NaN is NaN.
                values = values.clone()
                values.view(torch.uint8)[~seen_QL.any(0)] = 0  # by bytes: the CPU fills no float8
            truth = attend(q_THD[rows], keys, values, self.spec, mask)
            out_THD[rows] = truth.out_QHD.to(q_THD.dtype)
            lse_TH[rows] = truth.lse_QH.float()
        return out_THD, lse_TH

    def replan(self, batch: Batch) -> None:
        self._check_fits(batch)
        self.batch = batch


def keys_of(cache: torch.Tensor, batch: Batch, member: int) -> torch.Tensor:
    """`member_keys` that takes float8 too: the CPU has no indexed copy of it, and bytes are bytes."""
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return member_keys(raw, batch, member).view(cache.dtype)
