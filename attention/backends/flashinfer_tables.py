"""`flashinfer:{cudnn,xqa,trtllm-gen}`: plain functions over block tables, each call planned once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from attention.backends.base import Batch
from attention.backends.flashinfer_plan import (
    PlannedFlashInfer,
    imported,
    int32,
    pages_of,
    starts_of,
    window_left,
    workspace,
)
from attention.errors import UserError
from attention.reasons import IN_ANOTHER_PROCESS


class _PlannedTables(PlannedFlashInfer):
    """Block tables, lengths and offsets in buffers of fixed address; `run` is one call."""

    def _make(self, batch: Batch) -> None:
        if batch.layout == "contiguous" or (batch.layout == "ragged" and self._kernel != "cudnn"):
            raise UserError(f"{self.backend}: layout {batch.layout} is not served")
        self._pages = pages_of(batch, self._rows)
        members = len(batch.kv_lens)
        self._max_q, self._max_kv = self._limits(batch)
        self._width = -(-self._max_kv // self._pages.page_size) if batch.paged else 0
        self._tables_BW = self._buffer(members * self._width)[: members * self._width].view(members, self._width)
        self._q_lens, self._kv_lens = self._buffer(members), self._buffer(members)
        self._q_indptr, self._kv_indptr = self._buffer(members + 1), self._buffer(members + 1)
        self._layout = self._pages.layout
        self._load()

    def _limits(self, batch: Batch) -> tuple[int, int]:
        return max(batch.q_lens), max(batch.kv_lens)

    @abstractmethod
    def _load(self) -> None:
        """Import what `run` calls, and compile it."""

    def _schedule(self, batch: Batch) -> None:
        tables = torch.zeros(self._tables_BW.shape, dtype=torch.int32)
        if batch.paged:
            for row, (table, kv_len) in enumerate(zip(batch.block_tables, batch.kv_lens, strict=True)):
                used = table[: -(-kv_len // self._pages.page_size)]
                tables[row, : len(used)] = int32(used)
        self._tables_BW.copy_(tables)
        self._q_lens.copy_(int32(batch.q_lens))
        self._kv_lens.copy_(int32(batch.kv_lens))
        self._q_indptr.copy_(int32(starts_of(batch.q_lens)))
        self._kv_indptr.copy_(int32(starts_of(batch.kv_lens)))


class PlannedXqa(_PlannedTables):
    """XQA: decode only."""

    features = frozenset({"window", "sinks", "quantised KV"})
    returns_lse = False

    def _load(self) -> None:
        if self._max_q != 1:
            raise UserError(f"{self.backend}: one query token a member, not {self._max_q}")
        spec = self.spec
        self._call = imported(self.backend, "flashinfer.decode").xqa_batch_decode_with_kv_cache
        imported(self.backend, "flashinfer.xqa").get_xqa_module(
            spec.dtype,
            self._kv_dtype,
            self._pages.page_size,
            spec.head_dim_qk,
            spec.heads_q // spec.heads_kv,
            window_left(spec) >= 0,
            spec.dtype,
            1,
        )
        self._workspace = workspace(self._device, counters=True)
        self._lens_u32 = self._kv_lens.view(torch.uint32)
        quantised = spec.kv_dtype is not None
        self._options = {
            "bmm1_scale": float(spec.scale * (spec.k_scale if quantised else 1.0)),
            "bmm2_scale": float(spec.v_scale if quantised else 1.0),
            "window_left": window_left(spec),
            "sinks": self._sinks,
            "kv_layout": self._layout,
        }

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_contiguous(self.backend, q_THD, k_NPGD, v_NPGD)  # the kernel takes no strides, and FlashInfer asks not
        out = self._call(
            q_THD,
            (k_NPGD, v_NPGD),
            self._workspace,
            self._tables_BW,
            self._lens_u32,
            self._max_kv,
            **self._options,
        )
        return out, None


class PlannedTrtllm(_PlannedTables):
    """TensorRT-LLM's generated kernels, for data-centre Blackwell."""

    features = frozenset({"window", "sinks"})

    def _load(self) -> None:
        self._decode = self._max_q == min(self.batch.q_lens) == 1
        if not self._causal and not self._decode and window_left(self.spec) >= 0:
            raise UserError(f"{self.backend}: a window goes with a causal mask only")
        self._workspace = workspace(self._device, counters=True)
        self._options: dict[str, Any] = {
            "window_left": window_left(self.spec),
            "sinks": self._sinks,
            "kv_layout": self._layout,
            "return_lse": self._lse,
        }
        if self._decode:
            module = imported(self.backend, "flashinfer.decode")
            self._call = module.trtllm_batch_decode_with_kv_cache
            self._options |= {"backend": "trtllm-gen"}
        else:
            module = imported(self.backend, "flashinfer.prefill")
            self._call = module.trtllm_batch_context_with_kv_cache
            self._options |= {
                "max_q_len": self._max_q,
                "max_kv_len": self._max_kv,
                "batch_size": len(self.batch.q_lens),
                "cum_seq_lens_q": self._q_indptr,
                "cum_seq_lens_kv": self._kv_indptr,
                "causal": self._causal,
            }
        module.get_trtllm_gen_fmha_module()
        if self._decode:
            self._options |= {"max_seq_len": self._max_kv}

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = self._call(
            query=q_THD,
            kv_cache=(k_NPGD, v_NPGD),
            workspace_buffer=self._workspace,
            block_tables=self._tables_BW,
            seq_lens=self._kv_lens,
            bmm1_scale=self.spec.scale,
            bmm2_scale=1.0,
            **self._options,
        )
        return (result[0], self._natural(result[1])) if self._lse else (result, None)


class PlannedCudnn(_PlannedTables):
    """cuDNN's SDPA graphs. Single tokens in bf16 over pages go to its decode entry, which gives no LSE.

    cuDNN builds a graph for every pair of longest query and longest keys: both are rounded up to a power of two,
    so that a growing sequence does not build one every step.
    """

    lse_scale = None

    def _limits(self, batch: Batch) -> tuple[int, int]:
        return _power_of_two(max(batch.q_lens)), max(_power_of_two(max(batch.kv_lens)), self._pages.page_size)

    def _load(self) -> None:
        spec, batch, members = self.spec, self.batch, len(self.batch.q_lens)
        cudnn = imported(self.backend, "flashinfer.cudnn")
        if not imported(self.backend, "flashinfer.cudnn.prefill").CUDNN_AVAILABLE:
            raise UserError(f"{self.backend}: the module cudnn is missing; pip install nvidia-cudnn-frontend")
        self._decode = batch.paged and max(batch.q_lens) == 1 == min(batch.q_lens) and spec.dtype == torch.bfloat16
        self._lse = self._lse and not self._decode
        self._call = cudnn.cudnn_batch_decode_with_kv_cache if self._decode else cudnn.cudnn_batch_prefill_with_kv_cache
        self._workspace = workspace(self._device)
        self._kv_lens_B111 = self._kv_lens.view(members, 1, 1, 1)
        self._q_lens_B111 = self._q_lens.view(members, 1, 1, 1)
        self._options: dict[str, Any] = {
            "max_sequence_kv": self._max_kv,
            "actual_seq_lens_kv": self._kv_lens_B111,
            "block_tables": self._tables_BW if batch.paged else None,
            "is_cuda_graph_compatible": self._graph,
        }
        if not self._decode:
            self._offsets = {name: self._buffer(members + 1) for name in ("q", "k", "v", "o")}
            ragged = ("q", "o") if batch.paged else ("q", "k", "v", "o")
            self._options |= {f"batch_offsets_{name}": self._offsets[name] for name in ragged}
            self._options |= {
                "max_token_per_sequence": self._max_q,
                "actual_seq_lens_q": self._q_lens_B111,
                "causal": self._causal,
                "return_lse": self._lse,
            }
        rows = [i * self._max_q + row for i, q_len in enumerate(batch.q_lens) for row in range(q_len)]
        self._lse_rows = torch.tensor(rows, device=self._device)
        self._claim_graph()

    def _schedule(self, batch: Batch) -> None:
        super()._schedule(batch)
        if self._decode:
            return
        # cuDNN's ragged offsets count elements.
        spec = self.spec
        q_indptr, kv_indptr = int32(starts_of(batch.q_lens)), int32(starts_of(batch.kv_lens))
        self._offsets["q"].copy_(q_indptr * (spec.heads_q * spec.head_dim_qk))
        self._offsets["o"].copy_(q_indptr * (spec.heads_q * spec.head_dim_vo))
        self._offsets["k"].copy_(kv_indptr * (spec.heads_kv * spec.head_dim_qk))
        self._offsets["v"].copy_(kv_indptr * (spec.heads_kv * spec.head_dim_vo))

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_contiguous(self.backend, q_THD, k_NPGD, v_NPGD)  # a built graph is found again without its strides
        if self.batch.layout == "paged_nhd":  # cuDNN reads [N, G, P, D] by strides
            k_NPGD, v_NPGD = k_NPGD.transpose(1, 2), v_NPGD.transpose(1, 2)
        result = self._call(q_THD, k_NPGD, v_NPGD, self.spec.scale, self._workspace, **self._options)
        if self._decode:
            return result, None
        out, lse_BQH = result
        # cuDNN pads the LSE to the longest query.
        return out, lse_BQH.flatten(0, 1)[self._lse_rows] if self._lse else None

    def _claim_graph(self) -> None:
        """FlashInfer finds cuDNN's graphs again by a key without scale and layout (cudnn/prefill.py and decode.py):
        a plan that would get another plan's graph is refused."""
        spec, batch = self.spec, self.batch
        shape = (spec.heads_q, spec.heads_kv, spec.head_dim_qk, spec.head_dim_vo, self._max_q, self._max_kv)
        key: tuple[Any, ...] = (len(batch.q_lens), *shape, self._decode, batch.paged, batch.page_size, self._lse)
        if not self._decode:
            key = (*key, spec.dtype, self._causal)
        identity = (spec.scale, batch.layout)
        if _cudnn_graphs.setdefault(key, identity) != identity:
            raise UserError(
                f"{self.backend}: FlashInfer would reuse a cuDNN graph of this shape with scale and layout "
                f"{_cudnn_graphs[key]} for {identity}; {IN_ANOTHER_PROCESS}"
            )


_cudnn_graphs: dict[tuple[Any, ...], tuple[float, str]] = {}


def _check_contiguous(backend: str, *tensors: torch.Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{backend}: q, k and v must be contiguous")


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
