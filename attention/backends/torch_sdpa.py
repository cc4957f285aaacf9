"""`torch_sdpa:{flash,efficient,cudnn,math}`: PyTorch's scaled_dot_product_attention, one kernel forced.

PyTorch chooses among these by itself; here each is a backend of its own, restricted with
`sdpa_kernel`, so that a refusal is an error with a reason and never another kernel. Its kernels
take dense tensors: pages are gathered first, a copy that the layout forces and that the plan records.

Rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (CUDA) and sdp_utils_cpp.cpp (CPU).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.backends.base import AttentionSpec, Batch, Planned, gather_pages, positions_mask
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class TorchSdpa:
    """One forced SDPA kernel on one device."""

    def __init__(self, kernel: str, device: str = "cpu") -> None:
        if kernel not in KERNELS:
            raise UserError(f"torch_sdpa has no kernel {kernel!r}: known are {', '.join(KERNELS)}")
        self.kernel = kernel
        self.device = device
        self.name = f"torch_sdpa:{kernel}"

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False) -> Planned:
        # One call for a batch of single-token decodes needs a mask over their padding, which the fused CUDA
        # kernels refuse.
        masked = self.device == "cpu" or self.kernel == "math"
        if masked and len(batch.q_lens) > 1 and set(batch.q_lens) == {1}:
            return _PlannedDecodes(self.name, batch, spec, self.kernel, self.device)
        return _PlannedSdpa(backend=self.name, batch=batch, spec=spec, kernel=self.kernel, device=self.device)


class _PlannedSdpa(Planned):
    def __init__(self, *, backend: str, batch: Batch, spec: AttentionSpec, kernel: str, device: str) -> None:
        super().__init__(backend=backend, batch=batch, spec=spec, forced_copies=["paged KV gathered to dense"])
        where = torch.device(device)
        self._tables = [torch.tensor(table, dtype=torch.long, device=where) for table in batch.block_tables]
        self._masks = [positions_mask(q, kv, spec, where) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)]
        self._kernel = kernel
        # The CPU flash operator returns the LSE; the public function drops it.
        self._direct = kernel == "flash" and where.type == "cpu"

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out_THD = q_THD.new_empty(q_THD.shape[0], self.spec.heads_q, self.spec.head_dim_vo)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32) if self._direct else None
        with sdpa_kernel([KERNELS[self._kernel]]):
            row = 0
            for i, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, self.batch.kv_lens, strict=True)):
                rows = slice(row, row + q_len)
                row += q_len
                k_LGD = gather_pages(k_NPGD, self._tables[i], kv_len)
                v_LGD = gather_pages(v_NPGD, self._tables[i], kv_len)
                out, lse = self._member(q_THD[rows], k_LGD, v_LGD, self._masks[i], q_len == kv_len)
                out_THD[rows] = out
                if lse_TH is not None and lse is not None:
                    lse_TH[rows] = lse
        return out_THD, lse_TH

    def _member(
        self,
        q_QHD: torch.Tensor,
        k_LGD: torch.Tensor,
        v_LGD: torch.Tensor,
        mask_QL: torch.Tensor | None,
        square: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = q_QHD.transpose(0, 1)[None]
        k, v = k_LGD.transpose(0, 1)[None], v_LGD.transpose(0, 1)[None]
        # `is_causal` is top-left aligned: right only for square problems; others carry the mask.
        causal = square and self.spec.causal and self.spec.window == (None, None) and mask_QL is not None
        mask = None if causal else mask_QL
        if self._direct:
            bias = None if mask is None else _bias(mask, q.dtype)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=self.spec.scale
            )
            if mask is not None:  # the operator gives rows that see no key a finite LSE
                lse = lse.masked_fill(~mask.any(-1), float("-inf"))
            return out[0].transpose(0, 1), lse[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=self.spec.scale,
            enable_gqa=self.spec.heads_q != self.spec.heads_kv,
        )
        return out[0].transpose(0, 1), None


class _PlannedDecodes(Planned):
    """Several single-token decodes in one call, padded to the longest.

    Shape legend beyond base: B members, L padded KV length. Padded slots may hold anything, NaN too, and a
    masked NaN still poisons the sum: they are zeroed in the gathered copy.
    """

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, kernel: str, device: str) -> None:
        copies = ["paged KV gathered to dense", "KV padded to the longest member"]
        super().__init__(backend=backend, batch=batch, spec=spec, forced_copies=copies)
        where, longest = torch.device(device), max(batch.kv_lens)
        page = batch.page_size or 1
        num_pages = -(-longest // page)
        tables = [(*table, *([table[0]] * num_pages))[:num_pages] for table in batch.block_tables]
        self._pages_BN = torch.tensor(tables, dtype=torch.long, device=where)
        lengths_B1 = torch.tensor(batch.kv_lens, device=where)[:, None]
        places_1L = torch.arange(num_pages * page, device=where)[None]
        visible_BL = places_1L < lengths_B1
        self._padding = (~visible_BL).flatten().nonzero()[:, 0]
        if spec.window[0] is not None:
            visible_BL &= places_1L >= lengths_B1 - 1 - spec.window[0]
        self._bias_B11L = _bias(visible_BL, spec.dtype)[:, None, None]
        self._kernel = kernel
        self._direct = kernel == "flash" and where.type == "cpu"

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q_BH1D, k, v = q_THD[:, :, None], self._gather(k_NPGD), self._gather(v_NPGD)
        if self._direct:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_BH1D, k, v, 0.0, False, attn_mask=self._bias_B11L, scale=self.spec.scale
            )
            return out[:, :, 0], lse[:, :, 0]
        with sdpa_kernel([KERNELS[self._kernel]]):
            gqa = self.spec.heads_q != self.spec.heads_kv
            out = F.scaled_dot_product_attention(
                q_BH1D, k, v, attn_mask=self._bias_B11L, scale=self.spec.scale, enable_gqa=gqa
            )
        return out[:, :, 0], None

    def _gather(self, cache_NPGD: torch.Tensor) -> torch.Tensor:
        """[B, G, L, D] of all members."""
        flat = cache_NPGD.index_select(0, self._pages_BN.flatten())
        flat = flat.view(-1, *cache_NPGD.shape[2:]).index_fill_(0, self._padding, 0)
        return flat.view(len(self._pages_BN), -1, *flat.shape[1:]).transpose(1, 2)


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is visible, -inf where not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
