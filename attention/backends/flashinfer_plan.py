"""What FlashInfer's plans share: keys as its pages, a spec in its terms, scratch memory, LSE, re-planning."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from attention.backends.base import (
    AttentionSpec,
    Batch,
    Planned,
    alibi_slopes,
    positions_mask,
    wants_own_buffers,
)
from attention.errors import UserError

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
LN_2 = math.log(2)

_workspaces: dict[tuple[torch.device, bool], torch.Tensor] = {}


def workspace(device: torch.device, *, counters: bool = False) -> torch.Tensor:
    """FlashInfer's scratch memory of a device, uint8 [WORKSPACE_BYTES], made once a process (and for each plan that
    wants buffers of its own).

    xqa and trtllm-gen keep counters in theirs, which start at zero and which they reset themselves; no other
    kernel may write there, so that they have one of their own (`counters`).
    """
    key = (device, counters)
    if key in _workspaces and not wants_own_buffers():
        return _workspaces[key]
    made = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return made if wants_own_buffers() else _workspaces.setdefault(key, made)


def imported(backend: str, module: str = "flashinfer") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{backend}: {module} cannot be imported ({error}); pip install flashinfer-python") from error


# The keys of a batch, as pages.


@dataclass(frozen=True)
class Pages:
    """int32, on the CPU: FlashInfer's plan reads lengths there and copies them itself."""

    page_size: int
    layout: str  # NHD or HND
    indptr: torch.Tensor  # [B + 1] into indices
    indices: torch.Tensor
    last_page_len: torch.Tensor  # [B]; 0 for a member without keys

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device), self.last_page_len.to(device)


def pages_of(batch: Batch, rows: int) -> Pages:
    """The pages that hold the batch's keys; `rows` is the padded length L of a contiguous cache.

    A contiguous cache [B, L, G, D] is one of pages of any size that divides L. FlashInfer splits a long member
    at pages, so that they are small (gcd of L and 16), not L. Ragged keys are pages of one token.
    """
    size = batch.page_size or (math.gcd(rows, 16) if batch.layout == "contiguous" else 1)
    counts = [-(-kv // size) for kv in batch.kv_lens]
    if batch.paged:
        used = (table[:n] for table, n in zip(batch.block_tables, counts, strict=True))
        indices = torch.tensor(list(chain.from_iterable(used)), dtype=torch.int32)
    else:
        stride = rows // size
        starts = [i * stride for i in range(len(counts))] if batch.layout == "contiguous" else starts_of(counts)
        ranges = [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, counts, strict=False)]
        indices = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int32)
    last = [kv - max(0, n - 1) * size for kv, n in zip(batch.kv_lens, counts, strict=True)]
    layout = "HND" if batch.layout == "paged_hnd" else "NHD"
    return Pages(size, layout, int32(starts_of(counts)), indices, int32(last))


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Meaning of a spec and a batch in FlashInfer's terms.


def is_causal(spec: AttentionSpec) -> bool:
    """Whether keys end at the diagonal. UserError for any other bound on the right."""
    right = spec.window[1]
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if right not in (None, 0):
        raise UserError(f"flashinfer: a window bounded on the right at {right} cannot be asked for, only causal")
    return right == 0


def window_left(spec: AttentionSpec) -> int:
    return -1 if spec.window[0] is None else spec.window[0]


def features_of(batch: Batch, spec: AttentionSpec) -> set[str]:
    used = {
        "window": spec.window[0] is not None,
        "softcap": spec.softcap is not None,
        "ALiBi": spec.alibi_slopes is not None,
        "custom mask": batch.masks is not None,
        "sinks": spec.sinks is not None,
        "quantised KV": spec.kv_dtype is not None,
    }
    return {name for name, on in used.items() if on}


def flat_mask(batch: Batch, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
    """What every member's queries may see, bool [sum of q_len * kv_len]: FlashInfer reads its mask instead of
    causal and window, not beside them."""
    parts = []
    for mask_QL, q_len, kv_len in zip(batch.masks or (), batch.q_lens, batch.kv_lens, strict=True):
        allowed_QL = positions_mask(q_len, kv_len, spec, device)
        mask_QL = mask_QL.to(device)
        parts.append((mask_QL if allowed_QL is None else mask_QL & allowed_QL).flatten())
    return torch.cat(parts)


def _blind_rows(batch: Batch, spec: AttentionSpec) -> list[int]:
    """Rows of q that see no key: FlashInfer's output there is 0 and its LSE about -5e4, which stands for -inf."""
    causal, rows, start = is_causal(spec), [], 0
    for i, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        if batch.masks is not None and kv_len:
            allowed_QL = positions_mask(q_len, kv_len, spec, torch.device("cpu"))
            seen_QL = batch.masks[i].cpu() if allowed_QL is None else batch.masks[i].cpu() & allowed_QL
            rows += [start + row for row in (~seen_QL.any(-1)).nonzero()[:, 0].tolist()]
        else:
            blind = q_len if not kv_len else max(0, q_len - kv_len) if causal else 0
            rows += range(start, start + blind)
        start += q_len
    return rows


class PlannedFlashInfer(Planned, ABC):
    """What all kernels share: which features a call takes, the LSE, and re-planning."""

    features: frozenset[str] = frozenset()
    returns_lse = True
    lse_scale: float | None = LN_2  # None: natural already
    _pages: Pages

    def __init__(
        self, kernel: str, batch: Batch, spec: AttentionSpec, device: torch.device, graph: bool, lse: bool
    ) -> None:
        super().__init__(backend=f"flashinfer:{kernel}", batch=batch, spec=spec)
        ignored = sorted(features_of(batch, spec) - self.features)
        if ignored:
            raise UserError(f"{self.backend}: no call for this batch takes {', '.join(ignored)}")
        self._kernel, self._device, self._graph = kernel, device, graph
        self._causal = is_causal(spec)
        self._check_alibi()
        # FlashInfer's ALiBi bias is slope * (key - row), off the diagonal's by a constant a row.
        self._lse = lse and self.returns_lse and spec.alibi_slopes is None
        self._rows = max(batch.kv_lens, default=0)  # L of a contiguous cache
        self._kv_dtype = spec.kv_dtype or spec.dtype
        self._sinks = None if spec.sinks is None else torch.tensor(spec.sinks, dtype=torch.float32, device=device)
        self._set_blind_rows(batch)
        if graph and self._lse and self._blind is not None:
            raise UserError(f"{self.backend}: the LSE of rows that see no key is not kept in a CUDA graph")
        self._make(batch)
        self._schedule(batch)
        self._captured = self._schedule_key()

    def replan(self, batch: Batch) -> None:
        if not self._graph:
            super().replan(batch)
        self._check_fits(batch)
        if (batch.masks is None) != (self.batch.masks is None):
            raise ValueError("a captured batch keeps its custom mask, or its lack of one")
        self._set_blind_rows(batch)
        if self._lse and self._blind is not None:
            raise UserError(f"{self.backend}: the LSE of rows that see no key is not kept in a CUDA graph")
        self._schedule(batch)
        if self._schedule_key() != self._captured:
            raise UserError(f"{self.backend}: this batch needs another launch than the captured one; capture it anew")
        self.batch = batch

    @abstractmethod
    def _make(self, batch: Batch) -> None:
        """Once: buffers, wrapper, module."""

    @abstractmethod
    def _schedule(self, batch: Batch) -> None:
        """For every batch: lengths and pages into the buffers, and FlashInfer's own plan."""

    def _schedule_key(self) -> list[int]:
        """What a captured launch depends on, beside the contents of buffers."""
        return []

    def _check_alibi(self) -> None:
        slopes = self.spec.alibi_slopes
        if slopes is None:
            return
        own = alibi_slopes(self.spec.heads_q)
        if not self._causal or self.spec.softcap is not None:
            raise UserError(f"{self.backend}: ALiBi is right under a causal mask and without softcap only")
        if any(not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(slopes, own, strict=True)):
            raise UserError(
                f"{self.backend}: FlashInfer derives its ALiBi slopes from the number of heads "
                f"({own[0]:g}, {own[1] if len(own) > 1 else own[0]:g}, ...) and takes no others"
            )

    def _set_blind_rows(self, batch: Batch) -> None:
        blind = _blind_rows(batch, self.spec) if self._lse else []
        self._blind = torch.tensor(blind, device=self._device) if blind else None

    def _natural(self, lse_TH: torch.Tensor) -> torch.Tensor:
        """FlashInfer's LSE in place as a natural logarithm; rows without keys as `base` has them."""
        if self.lse_scale is not None:
            lse_TH.mul_(self.lse_scale)
        if self._blind is not None:
            lse_TH[self._blind] = -math.inf if self._sinks is None else self._sinks
        return lse_TH

    def _buffer(self, length: int) -> torch.Tensor:
        return torch.zeros(max(1, length), dtype=torch.int32, device=self._device)

    def _as_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """A contiguous cache [B, L, G, D] as pages [N, P, G, D], a view."""
        if self.batch.layout != "contiguous":
            return cache
        if cache.shape[1] != self._rows:
            raise ValueError(
                f"{self.backend}: planned for a contiguous cache of {self._rows} rows, not {cache.shape[1]}"
            )
        return cache.view(-1, self._pages.page_size, *cache.shape[2:])
