"""`flashinfer:{fa2,fa3,cudnn,xqa,trtllm-gen}`: FlashInfer's attention kernels, one forced a backend.

Written against flashinfer-python 0.6.13 (prefill.py, decode.py, mla/_core.py, cudnn/, xqa.py of its wheel); what it
cannot do is in attention/matrix/flashinfer.yaml.

- fa2 and fa3 run through FlashInfer's wrappers: pages (NHD, HND, and a contiguous cache seen as pages), ragged
  keys, and MLA's absorbed decode (K [.., 576], V its first 512 columns). Tensor cores serve decode too, so every
  ratio of heads is served.
- cudnn, xqa and trtllm-gen are plain functions over block tables.
- FlashInfer's LSE has base 2. `plan(..., lse=True)` costs one small kernel that multiplies it by ln 2 (none for
  MLA, which converts itself); with `lse=False` a run is the library's call alone. There is no LSE from xqa and
  cuDNN's decode, nor with ALiBi, whose bias FlashInfer shifts by a constant a row. That of fa2 is less exact: it sums
  P as rounded to q's dtype (prefill.cuh and mla.cuh, m16k16_rowsum_f16f16f32), which moves it by up to 2^-9 in bf16.
- Everything that compiles does so in `plan`. FlashInfer's scratch memory is shared by all plans of a device, so
  they must run on one stream.

Shape legend as in `base`; W pages a row of a block table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.backends.flashinfer_plan import (
    PlannedFlashInfer,
    features_of,
    flat_mask,
    imported,
    int32,
    pages_of,
    starts_of,
    window_left,
    workspace,
)
from attention.backends.flashinfer_tables import PlannedCudnn, PlannedTrtllm, PlannedXqa
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

KERNELS = ("fa2", "fa3", "cudnn", "xqa", "trtllm-gen")
CKV_DIM, KPE_DIM = 512, 64  # MLA: latent columns of K, which are V, and the rotary ones behind them


class FlashInfer:
    """One forced FlashInfer kernel on one device."""

    def __init__(self, kernel: str, device: str = "cuda") -> None:
        if kernel not in KERNELS:
            raise UserError(f"flashinfer has no kernel {kernel!r}: known are {', '.join(KERNELS)}")
        self.kernel = kernel
        self.device = device
        self.name = f"flashinfer:{kernel}"

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        """As `Backend.plan`. UserError for what no rule can see: no FlashInfer, foreign ALiBi slopes, an LSE that
        would need more than the call in a graph, or a cuDNN graph that FlashInfer would confuse with another."""
        imported(self.name)
        kind: type[PlannedFlashInfer] = {"cudnn": PlannedCudnn, "xqa": PlannedXqa, "trtllm-gen": PlannedTrtllm}.get(
            self.kernel, _PlannedPrefill
        )
        if kind is _PlannedPrefill:
            if is_mla(spec):
                kind = _PlannedMla
            elif batch.layout == "ragged":
                kind = _PlannedRagged
            elif set(batch.q_lens) == {1} and batch.masks is None and spec.sinks is None:
                kind = _PlannedDecode
        device = torch.device(self.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return kind(self.kernel, batch, spec, device, graph, lse)


def is_mla(spec: AttentionSpec) -> bool:
    """MLA's absorbed form: one KV head of 576 columns, whose first 512 are V."""
    return (spec.heads_kv, spec.head_dim_qk, spec.head_dim_vo) == (1, CKV_DIM + KPE_DIM, CKV_DIM)


# fa2 and fa3: FlashInfer's wrappers.


class _PlannedWrapper(PlannedFlashInfer):
    """A wrapper over pages. Its buffers have fixed addresses under a CUDA graph."""

    features = frozenset({"window", "softcap", "ALiBi", "quantised KV"})
    _wrapper: Any

    def _make(self, batch: Batch) -> None:
        if self._kernel == "fa3" and (
            taken := {"ALiBi", "custom mask", "quantised KV"} & features_of(batch, self.spec)
        ):
            raise UserError(f"{self.backend}: fa3 does not take {', '.join(sorted(taken))}")
        self._pages = pages_of(batch, self._rows)
        # Folded into the softmax scale and multiplied into the output, by FlashInfer.
        scales = {"k_scale": self.spec.k_scale, "v_scale": self.spec.v_scale}
        self._run_options = scales if self.spec.kv_dtype is not None else {}
        self._run_args: tuple[Any, ...] = ()
        self._flat = batch.layout == "contiguous"
        self._is_plain = self.spec.kv_dtype is None and self._sinks is None

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pages = (self._as_pages(k_NPGD), self._as_pages(v_NPGD)) if self._flat else (k_NPGD, v_NPGD)
        if not self._lse:
            if self._is_plain:  # the call of every layer: nothing to unpack
                return self._wrapper.run(q_THD, pages), None
            return self._wrapper.run(q_THD, pages, *self._run_args, **self._run_options), None
        out, lse = self._wrapper.run(q_THD, pages, *self._run_args, return_lse=True, **self._run_options)
        return out, self._natural(lse)

    def _schedule_key(self) -> list[int]:
        return [int(number) for number in self._wrapper._plan_info] if self._graph else []

    def _page_buffers(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        members = len(batch.kv_lens)
        return self._buffer(members + 1), self._buffer(len(self._pages.indices)), self._buffer(members)

    def _plan_options(self) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "NONE" if self.spec.alibi_slopes is None else "ALIBI",
            "window_left": window_left(self.spec),
            "logits_soft_cap": self.spec.softcap,
            "sm_scale": self.spec.scale,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self._kv_dtype,
        }


class _PlannedDecode(_PlannedWrapper):
    """One query token a member."""

    def _make(self, batch: Batch) -> None:
        super()._make(batch)
        buffers = {}
        if self._graph:
            names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
            buffers = dict(zip(names, self._page_buffers(batch), strict=True))
        self._wrapper = imported(self.backend).BatchDecodeWithPagedKVCacheWrapper(
            workspace(self._device),
            self._pages.layout,
            use_cuda_graph=self._graph,
            use_tensor_cores=True,
            backend=self._kernel,
            **buffers,
        )

    def _schedule(self, batch: Batch) -> None:
        self._pages = pages = pages_of(batch, self._rows)
        self._wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            self.spec.heads_q,
            self.spec.heads_kv,
            self.spec.head_dim_qk,
            pages.page_size,
            **self._plan_options(),
        )


class _PlannedPrefill(_PlannedWrapper):
    """Any queries over pages; with a custom mask (fa2) or with sinks, also decode."""

    features = _PlannedWrapper.features | {"custom mask", "sinks"}

    def _make(self, batch: Batch) -> None:
        super()._make(batch)
        buffers: dict[str, torch.Tensor] = {}
        if self._graph:
            names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            buffers = dict(zip(names, self._page_buffers(batch), strict=True))
            buffers["qo_indptr_buf"] = self._buffer(len(batch.q_lens) + 1)
            buffers |= _mask_buffers(batch, self._device)
        self._wrapper = imported(self.backend).BatchPrefillWithPagedKVCacheWrapper(
            workspace(self._device),
            self._pages.layout,
            use_cuda_graph=self._graph,
            backend=self._kernel,
            **buffers,
            **(self._sink_module() if self._sinks is not None else {}),
        )

    def _sink_module(self) -> dict[str, Any]:
        """The module of FlashInfer's attention with sinks.

        BatchAttentionWithAttentionSinkWrapper names it without head dims and KV dtype, so that two models in one
        process would share a name; here the name says all. The module takes sinks and scale with every run.
        """
        if taken := features_of(self.batch, self.spec) & {"softcap", "ALiBi", "custom mask"}:
            raise UserError(f"{self.backend}: sinks do not go with {', '.join(sorted(taken))}")
        spec, window = self.spec, window_left(self.spec) >= 0
        variant = imported(self.backend, "flashinfer.jit.attention.variants").attention_sink_decl[self._kernel]
        types = [spec.dtype, self._kv_dtype, spec.dtype, torch.int32, spec.head_dim_qk, spec.head_dim_vo]
        words = "_".join(str(t).removeprefix("torch.") for t in types)
        self._run_args = (self._sinks, spec.scale * spec.k_scale)
        self._run_options = {"v_scale": spec.v_scale} if spec.kv_dtype is not None else {}
        return {
            "jit_args": [
                f"batch_prefill_attention_sink_{words}_swa_{window}_{self._kernel}",
                *types,
                ["sink"],
                ["float"],
                ["sm_scale"],
                ["double"],
                "AttentionSink",
                variant,
            ],
            "jit_kwargs": {"use_sliding_window": window},
        }

    def _schedule(self, batch: Batch) -> None:
        self._pages = pages = pages_of(batch, self._rows)
        qo_indptr, places = int32(starts_of(batch.q_lens)), (pages.indptr, pages.indices, pages.last_page_len)
        options = self._plan_options() | {"causal": self._causal, "head_dim_vo": self.spec.head_dim_vo}
        if batch.masks is not None:
            # FlashInfer packs the mask on the GPU and reads the lengths where the mask is.
            qo_indptr, places = qo_indptr.to(self._device), pages.to(self._device)
            options |= {
                "custom_mask": flat_mask(batch, self.spec, self._device),
                "causal": False,
                "window_left": -1,
            }
        self._wrapper.plan(
            qo_indptr,
            *places,
            self.spec.heads_q,
            self.spec.heads_kv,
            self.spec.head_dim_qk,
            pages.page_size,
            **options,
        )


class _PlannedRagged(_PlannedWrapper):
    """Keys packed one member after the other, also with unequal head dims (MLA's prefill: 192 and 128)."""

    # The ragged wrapper applies k_scale and v_scale to NVFP4 only.
    features = frozenset({"window", "softcap", "ALiBi", "custom mask"})

    def _make(self, batch: Batch) -> None:
        super()._make(batch)
        buffers: dict[str, torch.Tensor] = {}
        if self._graph:
            members = len(batch.q_lens)
            buffers = {name: self._buffer(members + 1) for name in ("qo_indptr_buf", "kv_indptr_buf")}
            buffers |= _mask_buffers(batch, self._device)
        self._wrapper = imported(self.backend).BatchPrefillWithRaggedKVCacheWrapper(
            workspace(self._device), "NHD", use_cuda_graph=self._graph, backend=self._kernel, **buffers
        )

    def _schedule(self, batch: Batch) -> None:
        where = torch.device("cpu") if batch.masks is None else self._device
        options = self._plan_options() | {"causal": self._causal, "head_dim_vo": self.spec.head_dim_vo}
        if batch.masks is not None:
            options |= {
                "custom_mask": flat_mask(batch, self.spec, self._device),
                "causal": False,
                "window_left": -1,
            }
        self._wrapper.plan(
            int32(starts_of(batch.q_lens)).to(where),
            int32(starts_of(batch.kv_lens)).to(where),
            self.spec.heads_q,
            self.spec.heads_kv,
            self.spec.head_dim_qk,
            **options,
        )

    def run(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._lse:
            return self._wrapper.run(q_THD, k_SGD, v_SGD), None
        out, lse = self._wrapper.run(q_THD, k_SGD, v_SGD, return_lse=True)
        return out, self._natural(lse)


class _PlannedMla(_PlannedWrapper):
    """MLA's absorbed form: V is the first 512 columns of K, so that `run` wants v as that view of k."""

    features = frozenset()
    lse_scale = None

    def _make(self, batch: Batch) -> None:
        super()._make(batch)
        members = len(batch.q_lens)
        buffers = {}
        if self._graph:
            buffers = {
                "qo_indptr": self._buffer(members + 1),
                "kv_indptr": self._buffer(members + 1),
                "kv_indices": self._buffer(len(self._pages.indices)),
                "kv_len_arr": self._buffer(members),
            }
        self._wrapper = imported(self.backend, "flashinfer.mla").BatchMLAPagedAttentionWrapper(
            workspace(self._device), use_cuda_graph=self._graph, backend=self._kernel, **buffers
        )

    def _schedule(self, batch: Batch) -> None:
        self._pages = pages = pages_of(batch, self._rows)
        self._wrapper.plan(
            int32(starts_of(batch.q_lens)),
            pages.indptr,
            pages.indices,
            int32(batch.kv_lens),
            self.spec.heads_q,
            CKV_DIM,
            KPE_DIM,
            pages.page_size,
            self._causal,
            self.spec.scale,
            self.spec.dtype,
            self._kv_dtype,
        )

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if v_NPGD.data_ptr() != k_NPGD.data_ptr():
            raise ValueError(f"{self.backend}: in MLA's absorbed form v must be k[..., :{CKV_DIM}] itself, not a copy")
        # Parts of q and of the cache as views: the kernel takes the strides of pages and tokens.
        k_NPD = k_NPGD if self.batch.layout == "ragged" else self._as_pages(k_NPGD).squeeze(self._head_axis())
        parts = (q_THD[..., :CKV_DIM], q_THD[..., CKV_DIM:], k_NPD[..., :CKV_DIM], k_NPD[..., CKV_DIM:])
        if not self._lse:
            return self._wrapper.run(*parts), None
        out, lse = self._wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)
        return out, self._natural(lse)

    def _head_axis(self) -> int:
        return 1 if self._pages.layout == "HND" else 2


def _mask_buffers(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for the packed mask of the longest batch, eight keys a byte, and where members begin in it."""
    if batch.masks is None:
        return {}
    size = sum(-(-q * kv // 8) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True))
    return {
        "custom_mask_buf": torch.zeros(max(1, size), dtype=torch.uint8, device=device),
        "mask_indptr_buf": torch.zeros(len(batch.q_lens) + 1, dtype=torch.int32, device=device),
    }


def library_call(planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """What a user would write for a planned batch over pages: `run` of the planned wrapper. For `bench dispatch`.

    UserError for other layouts and for features that take more than q and the pages.
    """
    if not isinstance(planned, (_PlannedDecode, _PlannedPrefill)) or not planned.batch.paged:
        raise UserError(f"{planned.backend}: the plain call is for pages and without MLA")
    if planned.spec.sinks is not None or planned.spec.kv_dtype is not None:
        raise UserError(f"{planned.backend}: the plain call has neither sinks nor quantised KV")
    wrapper, pages = planned._wrapper, (k, v)
    return lambda: wrapper.run(q_THD, pages)
