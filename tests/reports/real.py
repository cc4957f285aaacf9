"""Calls of installed libraries as the reports make them: no defect is added here, the library shows its own.

Each is a small backend over `torch.nn.functional.scaled_dot_product_attention` (SDPA), one call a member.
Shape legend: attention/backends/base.py; W tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.backends.base import AttentionSpec, Batch, Planned, member_keys, positions_mask
from attention.cases import AttentionCase
from attention.reasons import Reason

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
#: q [1, H, Q, D], k and v [1, G, L, D] of one member, its kv_len, the spec -> output [1, H, Q, D].
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, AttentionSpec], torch.Tensor]


class Sdpa:
    """SDPA as one report calls it; `padded` hands it whole pages, as an engine with a fixed-size cache does."""

    def __init__(self, name: str, call: Call, *, padded: bool = False) -> None:
        self.name = name
        self._call = call
        self._padded = padded

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return _PlannedCalls(self.name, batch, spec, self._call, self._padded)


class _PlannedCalls(Planned):
    def __init__(self, name: str, batch: Batch, spec: AttentionSpec, call: Call, padded: bool) -> None:
        super().__init__(name, batch, spec)
        self._call = call
        self._read = batch
        if padded and batch.paged:
            whole = tuple(len(table) * (batch.page_size or 1) for table in batch.block_tables)
            self._read = replace(batch, kv_lens=whole)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        outs, row = [], 0
        for i, q_len in enumerate(self.batch.q_lens):
            q = q_THD[row : row + q_len].transpose(0, 1)[None]
            row += q_len
            k, v = (member_keys(x, self._read, i).transpose(0, 1)[None] for x in (k_NPGD, v_NPGD))
            outs.append(self._call(q, k, v, self.batch.kv_lens[i], self.spec)[0].transpose(0, 1))
        return torch.cat(outs), None


def is_causal(kernel: str) -> Sdpa:
    """The flag alone, for a query that continues a cache."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
        with sdpa_kernel([_KERNELS[kernel]]):
            return _sdpa(q, k, v, spec, is_causal=spec.causal)

    return Sdpa(f"sdpa:{kernel} is_causal", call)


def masked(kernel: str, *, padded: bool = False, lowest: bool = False) -> Sdpa:
    """A full mask: boolean, or with `lowest` a bias of the dtype's lowest number, which is not -inf."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
        seen_QL = positions_mask(q.shape[2], kv_len, spec, q.device)
        if seen_QL is None:
            seen_QL = torch.ones(q.shape[2], kv_len, dtype=torch.bool)
        mask = F.pad(seen_QL, (0, k.shape[2] - kv_len), value=False)
        if lowest:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        with sdpa_kernel([_KERNELS[kernel]]):
            return _sdpa(q, k, v, spec, attn_mask=mask)

    return Sdpa(f"sdpa:{kernel} mask", call, padded=padded)


def hf_window() -> Sdpa:
    """The mask that transformers builds for `sliding_window=W`, W being the kernel's inclusive left window."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
        mask = None
        if spec.window[0] is not None:
            allowed = sliding_window_causal_mask_function(spec.window[0])
            at_Q1, at_1L = torch.arange(kv_len - q.shape[2], kv_len)[:, None], torch.arange(kv_len)[None]
            mask = allowed(0, 0, at_Q1, at_1L)
        else:
            mask = positions_mask(q.shape[2], kv_len, spec, q.device)
        return _sdpa(q, k, v, spec, attn_mask=mask)

    return Sdpa("transformers sliding_window", call)


def unrestricted() -> Sdpa:
    """Taken for the flash kernel, but PyTorch chooses: math, where head dims differ."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
        return _sdpa(q, k, v, spec, attn_mask=positions_mask(q.shape[2], kv_len, spec, q.device))

    return Sdpa("torch_sdpa:flash", call)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    gqa = spec.heads_q != spec.heads_kv
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=spec.scale, enable_gqa=gqa
    )


def sliced_flex_mask() -> None:
    """FlexAttention with a BlockMask that was sliced for one decode step: the mask must not become a no-op.

    Raises RuntimeError where PyTorch refuses it.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q >= k

    q, k, v = torch.randn(3, 1, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    whole = create_block_mask(causal, None, None, 256, 256, device="cpu")
    flex_attention(q[:, :, 200:201], k, v, block_mask=whole[:, :, 1], scale=1 / math.sqrt(16))
