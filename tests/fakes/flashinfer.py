"""A stand-in for FlashInfer on the CPU, with the signatures and the semantics of flashinfer-python 0.6.13.

Its calls take the parameters of the real ones (names, order, defaults; a foreign keyword is a TypeError), check what
those check, and compute in float64 from exactly what they were given: indptr, page indices, last page lengths. As
in the library, a mask replaces causal and window, the LSE has base 2 with -5e4 for rows without keys, ALiBi slopes
are derived, and no KV scale is applied to ragged keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.flashinfer_numerics import attention, gather, kv_lens_of

VERSION = "0.6.13"

Call = tuple[str, dict[str, Any]]


class _Wrapper:
    """What the paged and ragged wrappers share."""

    def __init__(self, calls: list[Call], **kept: Any) -> None:
        self.calls, self.kept = calls, kept
        self._plan_info: list[int] = []

    def members(self) -> list[tuple[slice, int, torch.Tensor]]:
        """Rows of q, number of keys and pages of every member, from what plan was given."""
        plan, found = self.plan_, []
        for i in range(len(plan["kv_lens"])):
            rows = slice(int(plan["qo_indptr"][i]), int(plan["qo_indptr"][i + 1]))
            pages = plan["indices"][int(plan["indptr"][i]) : int(plan["indptr"][i + 1])]
            found.append((rows, int(plan["kv_lens"][i]), pages))
        return found

    def attend(
        self, q: torch.Tensor, keys: Callable[[int], tuple[torch.Tensor, torch.Tensor]], **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses, bit = [], [], 0
        for i, (rows, kv_len, _) in enumerate(self.members()):
            mask, q_len = self.plan_.get("custom_mask"), rows.stop - rows.start
            if mask is not None:
                options["mask_QL"] = mask[bit : bit + q_len * kv_len].view(q_len, kv_len)
                bit += q_len * kv_len
            k, v = keys(i)
            out, lse = attention(
                q[rows],
                k,
                v,
                causal=self.plan_["causal"],
                window_left=self.plan_["window_left"],
                softcap=self.plan_["logits_soft_cap"] or 0.0,
                alibi=self.plan_["pos_encoding_mode"] == "ALIBI",
                **options,
            )
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        if q.dtype != self.plan_["q_data_type"] or k.dtype != (self.plan_["kv_data_type"] or q.dtype):
            raise ValueError("the dtype does not match the one of plan")

    def check_graph(self, **new: torch.Tensor) -> None:
        """Under a CUDA graph everything goes into the buffers of the constructor."""
        if not self.kept["use_cuda_graph"]:
            return
        for name, values in new.items():
            buffer = self.kept[name]
            if len(values) > len(buffer):
                raise ValueError(f"{name} is too small")
            buffer[: len(values)].copy_(values)


def paged_run(
    wrapper: _Wrapper, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scale: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache, v_cache = cache
    if k_cache.stride() != v_cache.stride():
        raise RuntimeError("k/v strides differs")
    wrapper.check(q, k_cache)
    layout, members = wrapper.kept["kv_layout"], wrapper.members()

    def keys(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, kv_len, pages = members[i]
        k, v = (gather(c, layout, pages, kv_len) for c in cache)
        return k.float(), v.float()

    return wrapper.attend(q, keys, scale=scale, **options)


def make(calls: list[Call], cudnn_available: bool = True) -> dict[str, ModuleType]:
    """The modules by name; every constructor, plan and run is noted in `calls`."""

    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
            paged_kv_indptr_buffer: torch.Tensor | None = None,
            paged_kv_indices_buffer: torch.Tensor | None = None,
            paged_kv_last_page_len_buffer: torch.Tensor | None = None,
            backend: str = "auto",
            jit_args: list[Any] | None = None,
        ) -> None:
            given = {k: v for k, v in locals().items() if k not in ("self", "calls", "__class__")}
            super().__init__(calls, **given)
            calls.append(("decode.init", given))

        def plan(
            self,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            pos_encoding_mode: str = "NONE",
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
            o_data_type: Any = None,
            data_type: Any = None,
            sm_scale: float | None = None,
        ) -> None:
            given = {k: v for k, v in locals().items() if k != "self"}
            calls.append(("decode.plan", given))
            self.check_graph(
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
            kv_lens = kv_lens_of(indptr, last_page_len, page_size)
            qo_indptr = torch.arange(len(kv_lens) + 1)
            self.plan_ = {**given, "kv_lens": kv_lens, "qo_indptr": qo_indptr, "causal": False}

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
            *args: Any,
            q_scale: float | None = None,
            k_scale: float | None = None,
            v_scale: float | None = None,
            out: torch.Tensor | None = None,
            lse: torch.Tensor | None = None,
            return_lse: bool = False,
        ) -> Any:
            calls.append(("decode.run", {k: v for k, v in locals().items() if k != "self"}))
            found = paged_run(self, q, paged_kv_cache, self.plan_["sm_scale"] * (k_scale or 1.0))
            result = found[0] * (v_scale or 1.0)
            return (result, found[1]) if return_lse else result

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            qo_indptr_buf: torch.Tensor | None = None,
            paged_kv_indptr_buf: torch.Tensor | None = None,
            paged_kv_indices_buf: torch.Tensor | None = None,
            paged_kv_last_page_len_buf: torch.Tensor | None = None,
            custom_mask_buf: torch.Tensor | None = None,
            mask_indptr_buf: torch.Tensor | None = None,
            backend: str = "auto",
            jit_args: list[Any] | None = None,
            jit_kwargs: dict[str, Any] | None = None,
        ) -> None:
            given = {k: v for k, v in locals().items() if k not in ("self", "calls", "__class__")}
            super().__init__(calls, **given)
            calls.append(("prefill.init", given))

        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: int | None = None,
            custom_mask: torch.Tensor | None = None,
            packed_custom_mask: torch.Tensor | None = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
        ) -> None:
            given = {k: v for k, v in locals().items() if k != "self"}
            calls.append(("prefill.plan", given))
            self.check_graph(
                qo_indptr_buf=qo_indptr,
                paged_kv_indptr_buf=paged_kv_indptr,
                paged_kv_indices_buf=paged_kv_indices,
                paged_kv_last_page_len_buf=paged_kv_last_page_len,
            )
            kv_lens = kv_lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
            self.plan_ = {**given, "kv_lens": kv_lens, "indptr": paged_kv_indptr, "indices": paged_kv_indices}

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
            *args: Any,
            q_scale: float | None = None,
            k_scale: float | None = None,
            v_scale: float | None = None,
            out: torch.Tensor | None = None,
            lse: torch.Tensor | None = None,
            return_lse: bool = False,
        ) -> Any:
            calls.append(("prefill.run", {k: v for k, v in locals().items() if k != "self"}))
            if q.shape[0] != int(self.plan_["qo_indptr"][-1]):
                raise ValueError("q does not match qo_indptr[-1]")
            if self.kept["jit_args"] is None:
                found = paged_run(self, q, paged_kv_cache, self.plan_["sm_scale"] * (k_scale or 1.0))
            else:  # a module of one's own takes its tensors and scalars with every run
                sink, scale = args
                found = paged_run(self, q, paged_kv_cache, scale, sinks=sink)
            result = found[0] * (v_scale or 1.0)
            return (result, found[1]) if return_lse else result

    class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            qo_indptr_buf: torch.Tensor | None = None,
            kv_indptr_buf: torch.Tensor | None = None,
            custom_mask_buf: torch.Tensor | None = None,
            mask_indptr_buf: torch.Tensor | None = None,
            backend: str = "auto",
        ) -> None:
            given = {k: v for k, v in locals().items() if k not in ("self", "calls", "__class__")}
            super().__init__(calls, **given)
            calls.append(("ragged.init", given))

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            head_dim_vo: int | None = None,
            custom_mask: torch.Tensor | None = None,
            packed_custom_mask: torch.Tensor | None = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            sm_scale: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
            q_data_type: Any = "float16",
            kv_data_type: Any = None,
        ) -> None:
            given = {k: v for k, v in locals().items() if k != "self"}
            calls.append(("ragged.plan", given))
            self.check_graph(qo_indptr_buf=qo_indptr, kv_indptr_buf=kv_indptr)
            kv_lens = kv_indptr[1:] - kv_indptr[:-1]
            self.plan_ = {**given, "kv_lens": kv_lens, "indptr": kv_indptr, "indices": torch.arange(kv_indptr[-1])}

        def run(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *args: Any,
            return_lse: bool = False,
        ) -> Any:
            calls.append(("ragged.run", {k: v for k, v in locals().items() if k != "self"}))
            self.check(q, k)
            members = self.members()
            found = self.attend(q, lambda i: (k[members[i][2]], v[members[i][2]]), scale=self.plan_["sm_scale"])
            return found if return_lse else found[0]

    class BatchMLAPagedAttentionWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            use_cuda_graph: bool = False,
            qo_indptr: torch.Tensor | None = None,
            kv_indptr: torch.Tensor | None = None,
            kv_indices: torch.Tensor | None = None,
            kv_len_arr: torch.Tensor | None = None,
            backend: str = "auto",
        ) -> None:
            given = {k: v for k, v in locals().items() if k not in ("self", "calls", "__class__")}
            super().__init__(calls, **given)
            calls.append(("mla.init", given))

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            kv_indices: torch.Tensor,
            kv_len_arr: torch.Tensor,
            num_heads: int,
            head_dim_ckv: int,
            head_dim_kpe: int,
            page_size: int,
            causal: bool,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            use_profiler: bool = False,
        ) -> None:
            given = {k: v for k, v in locals().items() if k != "self"}
            calls.append(("mla.plan", given))
            self.check_graph(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
            more = {"kv_lens": kv_len_arr, "indptr": kv_indptr, "indices": kv_indices, "window_left": -1}
            self.plan_ = {**given, **more, "logits_soft_cap": None, "pos_encoding_mode": "NONE"}

        def run(
            self,
            q_nope: torch.Tensor,
            q_pe: torch.Tensor,
            ckv_cache: torch.Tensor,
            kpe_cache: torch.Tensor,
            out: torch.Tensor | None = None,
            lse: torch.Tensor | None = None,
            return_lse: bool = False,
            profiler_buffer: torch.Tensor | None = None,
            kv_len: torch.Tensor | None = None,
            page_table: torch.Tensor | None = None,
            return_lse_base_on_e: bool = False,
        ) -> Any:
            calls.append(("mla.run", {k: v for k, v in locals().items() if k != "self"}))
            members = self.members()

            def keys(i: int) -> tuple[torch.Tensor, torch.Tensor]:
                _, length, pages = members[i]
                ckv, kpe = (gather(c[:, :, None], "NHD", pages, length) for c in (ckv_cache, kpe_cache))
                return torch.cat([ckv, kpe], -1), ckv

            result, lse_2 = self.attend(torch.cat([q_nope, q_pe], -1), keys, scale=self.plan_["sm_scale"])
            return (result, lse_2 * (math.log(2) if return_lse_base_on_e else 1)) if return_lse else result

    def tables_run(
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        q_lens: list[int],
        kv_layout: str,
        k_scale: float,
        v_scale: float,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses, row = [], [], 0
        for i, q_len in enumerate(q_lens):
            kv_len = int(seq_lens.flatten()[i])
            k, v = (gather(c, kv_layout, block_tables[i], kv_len).float() for c in kv_cache)
            out, lse = attention(query[row : row + q_len], k, v, scale=k_scale, **options)
            outs.append(out * v_scale)
            lses.append(lse)
            row += q_len
        return torch.cat(outs).to(query.dtype), torch.cat(lses)

    def xqa_batch_decode_with_kv_cache(
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        enable_pdl: bool | None = None,
        q_len_per_req: int = 1,
    ) -> torch.Tensor:
        calls.append(("xqa.run", dict(locals())))
        assert seq_lens.dtype == torch.uint32
        assert block_tables.dtype == torch.int32
        assert isinstance(bmm1_scale, float), "a float that is no float would be read as a tensor"
        return tables_run(
            query,
            kv_cache,
            block_tables,
            seq_lens,
            [1] * len(query),
            kv_layout,
            bmm1_scale,
            bmm2_scale,
            window_left=window_left,
            sinks=sinks,
        )[0]

    def get_xqa_module(
        input_dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        page_size: int,
        head_dim: int,
        head_group_ratio: int,
        use_sliding_window: bool,
        output_dtype: torch.dtype,
        q_seq_len: int,
    ) -> None:
        calls.append(("xqa.module", dict(locals())))

    def trtllm_batch_decode_with_kv_cache(
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        kv_layout: str = "HND",
        backend: str = "auto",
        return_lse: bool = False,
    ) -> Any:
        calls.append(("trtllm.decode", dict(locals())))
        q_lens, places = [1] * len(query), (block_tables, seq_lens)
        found = tables_run(
            query, kv_cache, *places, q_lens, kv_layout, bmm1_scale, bmm2_scale, window_left=window_left, sinks=sinks
        )
        return found if return_lse else found[0]

    def trtllm_batch_context_with_kv_cache(
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        batch_size: int,
        cum_seq_lens_q: torch.Tensor,
        cum_seq_lens_kv: torch.Tensor,
        window_left: int = -1,
        kv_layout: str = "HND",
        sinks: torch.Tensor | None = None,
        causal: bool = True,
        return_lse: bool = False,
    ) -> Any:
        calls.append(("trtllm.context", dict(locals())))
        q_lens, options = cum_seq_lens_q.diff().tolist(), {"window_left": window_left, "sinks": sinks, "causal": causal}
        assert torch.equal(cum_seq_lens_kv.diff(), seq_lens)
        found = tables_run(
            query, kv_cache, block_tables, seq_lens, q_lens, kv_layout, bmm1_scale, bmm2_scale, **options
        )
        return found if return_lse else found[0]

    def cudnn_batch_decode_with_kv_cache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        workspace_buffer: torch.Tensor,
        *,
        max_sequence_kv: int,
        actual_seq_lens_kv: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        is_cuda_graph_compatible: bool = False,
    ) -> torch.Tensor:
        calls.append(("cudnn.decode", dict(locals())))
        assert q.dtype == torch.bfloat16
        assert block_tables is not None
        assert actual_seq_lens_kv is not None
        places = (block_tables, actual_seq_lens_kv)
        return tables_run(q, (k_cache, v_cache), *places, [1] * len(q), "HND", scale, 1.0)[0]

    def cudnn_batch_prefill_with_kv_cache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        workspace_buffer: torch.Tensor,
        *,
        max_token_per_sequence: int,
        max_sequence_kv: int,
        actual_seq_lens_q: torch.Tensor,
        actual_seq_lens_kv: torch.Tensor,
        block_tables: torch.Tensor | None = None,
        causal: bool,
        return_lse: bool,
        batch_offsets_q: torch.Tensor | None = None,
        batch_offsets_o: torch.Tensor | None = None,
        batch_offsets_k: torch.Tensor | None = None,
        batch_offsets_v: torch.Tensor | None = None,
        is_cuda_graph_compatible: bool = False,
    ) -> Any:
        calls.append(("cudnn.prefill", dict(locals())))
        assert batch_offsets_q is not None
        q_lens = actual_seq_lens_q.flatten().tolist()
        per_token = q.shape[1] * q.shape[2]
        assert [n * per_token for n in q_lens] == batch_offsets_q.diff().tolist(), "offsets count elements"
        assert max(q_lens) <= max_token_per_sequence
        assert int(actual_seq_lens_kv.max()) <= max_sequence_kv
        cache = (k_cache, v_cache)
        if block_tables is None:  # packed keys are pages of one token
            assert batch_offsets_k is not None
            first = (batch_offsets_k[:-1] // (k_cache.shape[1] * k_cache.shape[2])).tolist()
            block_tables = torch.tensor([[s + j for j in range(max_sequence_kv)] for s in first])
            block_tables = block_tables.clamp(max=len(k_cache) - 1)
            cache = (k_cache[:, :, None], v_cache[:, :, None])
        out, lse_2 = tables_run(q, cache, block_tables, actual_seq_lens_kv, q_lens, "HND", scale, 1.0, causal=causal)
        if not return_lse:
            return out, None
        padded = torch.full((len(q_lens), max_token_per_sequence, q.shape[1]), math.nan)
        for row, part in zip(padded, lse_2.split(q_lens), strict=True):
            row[: len(part)] = part * math.log(2)  # cuDNN's has base e
        return out, padded

    class JitSpec:
        def __init__(self, name: str, sources: list[Path]) -> None:
            self.name, self.sources = name, sources
            self.extra_cflags, self.extra_cuda_cflags = ["-O3"], ["-arch=sm_90a"]
            self.is_compiled = False

        def get_library_path(self) -> Path:
            return Path("/cache") / f"{self.name}.so"

        def build_and_load(self) -> str:
            self.is_compiled = True
            return self.name

    specs: dict[str, JitSpec] = {}
    return {
        "flashinfer": _module(
            "flashinfer",
            BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
            BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
        ),
        "flashinfer.mla": _module("flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper),
        "flashinfer.decode": _module(
            "flashinfer.decode",
            xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache,
            trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache,
            get_trtllm_gen_fmha_module=lambda: None,
        ),
        "flashinfer.prefill": _module(
            "flashinfer.prefill",
            trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache,
            get_trtllm_gen_fmha_module=lambda: None,
        ),
        "flashinfer.xqa": _module("flashinfer.xqa", get_xqa_module=get_xqa_module),
        "flashinfer.cudnn": _module(
            "flashinfer.cudnn",
            cudnn_batch_decode_with_kv_cache=cudnn_batch_decode_with_kv_cache,
            cudnn_batch_prefill_with_kv_cache=cudnn_batch_prefill_with_kv_cache,
        ),
        "flashinfer.cudnn.prefill": _module("flashinfer.cudnn.prefill", CUDNN_AVAILABLE=cudnn_available),
        "flashinfer.jit.attention.variants": _module(
            "flashinfer.jit.attention.variants", attention_sink_decl={"fa2": "fa2 sink", "fa3": "fa3 sink"}
        ),
        "flashinfer.jit.core": _module(
            "flashinfer.jit.core",
            JitSpec=JitSpec,
            jit_spec_registry=SimpleNamespace(get_all_specs=lambda: dict(specs), specs=specs),
        ),
    }


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def install(monkeypatch: pytest.MonkeyPatch, *, cudnn_available: bool = True) -> list[Call]:
    """Put the stand-in where `import flashinfer` finds it; the list that its calls are noted in."""
    calls: list[Call] = []
    for name, module in make(calls, cudnn_available).items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls
