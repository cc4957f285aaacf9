"""What the kernels' own interfaces leave to the caller: bounds of a window, rows that see no key, empty batches."""

from __future__ import annotations

import torch

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.errors import UserError


def bounds(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """How far a query looks left and right of the bottom-right diagonal, causal folded in; None: no end.

    Raises UserError for a negative side: the libraries here read that as no end.
    """
    left, right = spec.window
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise UserError(f"window {spec.window}: a negative side is not served")
    return left, right


def blind_rows(batch: Batch, spec: AttentionSpec) -> list[int]:
    """Rows of the packed queries that see no key at all, custom masks aside."""
    _, right = bounds(spec)
    found: list[int] = []
    for start, q_len, kv_len in zip(starts(batch.q_lens), batch.q_lens, batch.kv_lens, strict=False):
        before = 0 if right is None else max(0, q_len - kv_len - right)  # rows that end before the first key
        found.extend(range(start, start + (q_len if kv_len == 0 else min(q_len, before))))
    return found


def starts(lengths: tuple[int, ...]) -> list[int]:
    """Where each member begins, and the end: one entry more than members."""
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def table_rows(batch: Batch, width: int) -> list[list[int]]:
    """Block tables as rows of `width` pages; the places that no key needs name page 0."""
    return [[*table[:width], *([0] * (width - len(table)))] for table in batch.block_tables]


def has_nothing_to_read(batch: Batch) -> bool:
    return not any(batch.q_lens) or not any(batch.kv_lens)


class PlannedBlind(Planned):
    """A batch without queries or without keys: nothing is launched."""

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, *, lse: bool = True) -> None:
        super().__init__(backend, batch, spec)
        self._lse = lse

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        shape = (q_THD.shape[0], self.spec.heads_q)
        out = q_THD.new_zeros(*shape, self.spec.head_dim_vo)
        if not self._lse:
            return out, None
        lse = q_THD.new_full(shape, float("-inf"), dtype=torch.float32)
        if self.spec.sinks is not None:
            lse = torch.tensor(self.spec.sinks, dtype=torch.float32, device=q_THD.device).expand(shape)
        return out, lse
