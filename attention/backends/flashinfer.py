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

import hashlib
import importlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch, Planned, positions_mask
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

KERNELS = ("fa2", "fa3", "cudnn", "xqa", "trtllm-gen")
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
LN_2 = math.log(2)
CKV_DIM, KPE_DIM = 512, 64  # MLA: latent columns of K, which are V, and the rotary ones behind them

_workspaces: dict[tuple[torch.device, bool], torch.Tensor] = {}


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
        _library(self.name)
        kind: type[_PlannedFlashInfer] = {"cudnn": _PlannedCudnn, "xqa": _PlannedXqa, "trtllm-gen": _PlannedTrtllm}.get(
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


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes that FlashInfer gives its heads (utils.py get_alibi_slopes); it takes no others."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return tuple(slopes)


def workspace(device: torch.device, *, counters: bool = False) -> torch.Tensor:
    """FlashInfer's scratch memory of a device, uint8 [WORKSPACE_BYTES], made once a process.

    xqa and trtllm-gen keep counters in theirs, which start at zero and which they reset themselves; no other
    kernel may write there, so that they have one of their own (`counters`).
    """
    key = (device, counters)
    if key not in _workspaces:
        _workspaces[key] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[key]


def _library(backend: str, module: str = "flashinfer") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{backend}: {module} cannot be imported ({error}); pip install flashinfer-python") from error


# The keys of a batch, as pages.


@dataclass(frozen=True)
class _Pages:
    """int32, on the CPU: FlashInfer's plan reads lengths there and copies them itself."""

    page_size: int
    layout: str  # NHD or HND
    indptr: torch.Tensor  # [B + 1] into indices
    indices: torch.Tensor
    last_page_len: torch.Tensor  # [B]; 0 for a member without keys

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device), self.last_page_len.to(device)


def _pages_of(batch: Batch, rows: int) -> _Pages:
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
        starts = [i * stride for i in range(len(counts))] if batch.layout == "contiguous" else _indptr(counts)
        ranges = [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, counts, strict=False)]
        indices = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int32)
    last = [kv - max(0, n - 1) * size for kv, n in zip(batch.kv_lens, counts, strict=True)]
    layout = "HND" if batch.layout == "paged_hnd" else "NHD"
    return _Pages(size, layout, _int32(_indptr(counts)), indices, _int32(last))


def _indptr(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Meaning of a spec and a batch in FlashInfer's terms.


def _causal(spec: AttentionSpec) -> bool:
    """Whether keys end at the diagonal. UserError for any other bound on the right."""
    right = spec.window[1]
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if right not in (None, 0):
        raise UserError(f"flashinfer: a window bounded on the right at {right} cannot be asked for, only causal")
    return right == 0


def _window_left(spec: AttentionSpec) -> int:
    return -1 if spec.window[0] is None else spec.window[0]


def _features(batch: Batch, spec: AttentionSpec) -> set[str]:
    used = {
        "window": spec.window[0] is not None,
        "softcap": spec.softcap is not None,
        "ALiBi": spec.alibi_slopes is not None,
        "custom mask": batch.masks is not None,
        "sinks": spec.sinks is not None,
        "quantised KV": spec.kv_dtype is not None,
    }
    return {name for name, on in used.items() if on}


def _flat_mask(batch: Batch, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
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
    causal, rows, start = _causal(spec), [], 0
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


class _PlannedFlashInfer(Planned):
    """What all kernels share: which features a call takes, the LSE, and re-planning."""

    features: frozenset[str] = frozenset()
    returns_lse = True
    lse_scale: float | None = LN_2  # None: natural already
    _pages: _Pages

    def __init__(
        self, kernel: str, batch: Batch, spec: AttentionSpec, device: torch.device, graph: bool, lse: bool
    ) -> None:
        super().__init__(backend=f"flashinfer:{kernel}", batch=batch, spec=spec)
        ignored = sorted(_features(batch, spec) - self.features)
        if ignored:
            raise UserError(f"{self.backend}: no call for this batch takes {', '.join(ignored)}")
        self._kernel, self._device, self._graph = kernel, device, graph
        self._causal = _causal(spec)
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

    def _make(self, batch: Batch) -> None:
        """Once: buffers, wrapper, module."""
        raise NotImplementedError("each kernel plans its own call")

    def _schedule(self, batch: Batch) -> None:
        """For every batch: lengths and pages into the buffers, and FlashInfer's own plan."""
        raise NotImplementedError("each kernel makes its own call")

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


# fa2 and fa3: FlashInfer's wrappers.


class _PlannedWrapper(_PlannedFlashInfer):
    """A wrapper over pages. Its buffers have fixed addresses under a CUDA graph."""

    features = frozenset({"window", "softcap", "ALiBi", "quantised KV"})
    _wrapper: Any

    def _make(self, batch: Batch) -> None:
        if self._kernel == "fa3" and (taken := {"ALiBi", "custom mask", "quantised KV"} & _features(batch, self.spec)):
            raise UserError(f"{self.backend}: fa3 does not take {', '.join(sorted(taken))}")
        self._pages = _pages_of(batch, self._rows)
        # Folded into the softmax scale and multiplied into the output, by FlashInfer.
        scales = {"k_scale": self.spec.k_scale, "v_scale": self.spec.v_scale}
        self._run_options = scales if self.spec.kv_dtype is not None else {}
        self._run_args: tuple[Any, ...] = ()

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pages = (self._as_pages(k_NPGD), self._as_pages(v_NPGD))
        if not self._lse:
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
            "window_left": _window_left(self.spec),
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
        self._wrapper = _library(self.backend).BatchDecodeWithPagedKVCacheWrapper(
            workspace(self._device),
            self._pages.layout,
            use_cuda_graph=self._graph,
            use_tensor_cores=True,
            backend=self._kernel,
            **buffers,
        )

    def _schedule(self, batch: Batch) -> None:
        self._pages = pages = _pages_of(batch, self._rows)
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
        self._wrapper = _library(self.backend).BatchPrefillWithPagedKVCacheWrapper(
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
        if taken := _features(self.batch, self.spec) & {"softcap", "ALiBi", "custom mask"}:
            raise UserError(f"{self.backend}: sinks do not go with {', '.join(sorted(taken))}")
        spec, window = self.spec, _window_left(self.spec) >= 0
        variant = _library(self.backend, "flashinfer.jit.attention.variants").attention_sink_decl[self._kernel]
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
        self._pages = pages = _pages_of(batch, self._rows)
        qo_indptr, places = _int32(_indptr(batch.q_lens)), (pages.indptr, pages.indices, pages.last_page_len)
        options = self._plan_options() | {"causal": self._causal, "head_dim_vo": self.spec.head_dim_vo}
        if batch.masks is not None:
            # FlashInfer packs the mask on the GPU and reads the lengths where the mask is.
            qo_indptr, places = qo_indptr.to(self._device), pages.to(self._device)
            options |= {
                "custom_mask": _flat_mask(batch, self.spec, self._device),
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
        self._wrapper = _library(self.backend).BatchPrefillWithRaggedKVCacheWrapper(
            workspace(self._device), "NHD", use_cuda_graph=self._graph, backend=self._kernel, **buffers
        )

    def _schedule(self, batch: Batch) -> None:
        where = torch.device("cpu") if batch.masks is None else self._device
        options = self._plan_options() | {"causal": self._causal, "head_dim_vo": self.spec.head_dim_vo}
        if batch.masks is not None:
            options |= {
                "custom_mask": _flat_mask(batch, self.spec, self._device),
                "causal": False,
                "window_left": -1,
            }
        self._wrapper.plan(
            _int32(_indptr(batch.q_lens)).to(where),
            _int32(_indptr(batch.kv_lens)).to(where),
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
        self._wrapper = _library(self.backend, "flashinfer.mla").BatchMLAPagedAttentionWrapper(
            workspace(self._device), use_cuda_graph=self._graph, backend=self._kernel, **buffers
        )

    def _schedule(self, batch: Batch) -> None:
        self._pages = pages = _pages_of(batch, self._rows)
        self._wrapper.plan(
            _int32(_indptr(batch.q_lens)),
            pages.indptr,
            pages.indices,
            _int32(batch.kv_lens),
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


# cudnn, xqa and trtllm-gen: functions over block tables.


class _PlannedTables(_PlannedFlashInfer):
    """Block tables, lengths and offsets in buffers of fixed address; `run` is one call."""

    def _make(self, batch: Batch) -> None:
        if batch.layout == "contiguous" or (batch.layout == "ragged" and self._kernel != "cudnn"):
            raise UserError(f"{self.backend}: layout {batch.layout} is not served")
        self._pages = _pages_of(batch, self._rows)
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

    def _load(self) -> None:
        """Import what `run` calls, and compile it."""
        raise NotImplementedError("each block-table kernel makes its own call")

    def _schedule(self, batch: Batch) -> None:
        tables = torch.zeros(self._tables_BW.shape, dtype=torch.int32)
        if batch.paged:
            for row, (table, kv_len) in enumerate(zip(batch.block_tables, batch.kv_lens, strict=True)):
                used = table[: -(-kv_len // self._pages.page_size)]
                tables[row, : len(used)] = _int32(used)
        self._tables_BW.copy_(tables)
        self._q_lens.copy_(_int32(batch.q_lens))
        self._kv_lens.copy_(_int32(batch.kv_lens))
        self._q_indptr.copy_(_int32(_indptr(batch.q_lens)))
        self._kv_indptr.copy_(_int32(_indptr(batch.kv_lens)))


class _PlannedXqa(_PlannedTables):
    """XQA: decode only."""

    features = frozenset({"window", "sinks", "quantised KV"})
    returns_lse = False

    def _load(self) -> None:
        if self._max_q != 1:
            raise UserError(f"{self.backend}: one query token a member, not {self._max_q}")
        spec = self.spec
        self._call = _library(self.backend, "flashinfer.decode").xqa_batch_decode_with_kv_cache
        _library(self.backend, "flashinfer.xqa").get_xqa_module(
            spec.dtype,
            self._kv_dtype,
            self._pages.page_size,
            spec.head_dim_qk,
            spec.heads_q // spec.heads_kv,
            _window_left(spec) >= 0,
            spec.dtype,
            1,
        )
        self._workspace = workspace(self._device, counters=True)
        self._lens_u32 = self._kv_lens.view(torch.uint32)
        quantised = spec.kv_dtype is not None
        self._options = {
            "bmm1_scale": float(spec.scale * (spec.k_scale if quantised else 1.0)),
            "bmm2_scale": float(spec.v_scale if quantised else 1.0),
            "window_left": _window_left(spec),
            "sinks": self._sinks,
            "kv_layout": self._layout,
        }

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
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


class _PlannedTrtllm(_PlannedTables):
    """TensorRT-LLM's generated kernels, for data-centre Blackwell."""

    features = frozenset({"window", "sinks"})

    def _load(self) -> None:
        self._decode = self._max_q == min(self.batch.q_lens) == 1
        if not self._causal and not self._decode and _window_left(self.spec) >= 0:
            raise UserError(f"{self.backend}: a window goes with a causal mask only")
        self._workspace = workspace(self._device, counters=True)
        self._options: dict[str, Any] = {
            "window_left": _window_left(self.spec),
            "sinks": self._sinks,
            "kv_layout": self._layout,
            "return_lse": self._lse,
        }
        if self._decode:
            module = _library(self.backend, "flashinfer.decode")
            self._call = module.trtllm_batch_decode_with_kv_cache
            self._options |= {"backend": "trtllm-gen"}
        else:
            module = _library(self.backend, "flashinfer.prefill")
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


class _PlannedCudnn(_PlannedTables):
    """cuDNN's SDPA graphs. Single tokens in bf16 over pages go to its decode entry, which gives no LSE.

    cuDNN builds a graph for every pair of longest query and longest keys: both are rounded up to a power of two,
    so that a growing sequence does not build one every step.
    """

    lse_scale = None

    def _limits(self, batch: Batch) -> tuple[int, int]:
        return _power_of_two(max(batch.q_lens)), max(_power_of_two(max(batch.kv_lens)), self._pages.page_size)

    def _load(self) -> None:
        spec, batch, members = self.spec, self.batch, len(self.batch.q_lens)
        cudnn = _library(self.backend, "flashinfer.cudnn")
        if not _library(self.backend, "flashinfer.cudnn.prefill").CUDNN_AVAILABLE:
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
        q_indptr, kv_indptr = _int32(_indptr(batch.q_lens)), _int32(_indptr(batch.kv_lens))
        self._offsets["q"].copy_(q_indptr * (spec.heads_q * spec.head_dim_qk))
        self._offsets["o"].copy_(q_indptr * (spec.heads_q * spec.head_dim_vo))
        self._offsets["k"].copy_(kv_indptr * (spec.heads_kv * spec.head_dim_qk))
        self._offsets["v"].copy_(kv_indptr * (spec.heads_kv * spec.head_dim_vo))

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (q_THD.is_contiguous() and k_NPGD.is_contiguous() and v_NPGD.is_contiguous()):
            # FlashInfer finds a built graph again without its strides.
            raise ValueError(f"{self.backend}: q, k and v must be contiguous")
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
                f"{_cudnn_graphs[key]} for {identity}; use another process"
            )


_cudnn_graphs: dict[tuple[Any, ...], tuple[float, str]] = {}


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# What FlashInfer compiles.


@dataclass(frozen=True)
class JitModule:
    """One compiled module: what it is made of, and where it lies once compiled (None before)."""

    name: str
    source_hash: str  # sha256 over the sources' names and bytes
    flags: tuple[str, ...]
    library: Path | None


def jit_modules() -> list[JitModule]:
    """Modules that this process has asked FlashInfer for, by name (flashinfer.jit.core.jit_spec_registry)."""
    registry = _library("flashinfer", "flashinfer.jit.core").jit_spec_registry
    modules = []
    for name, spec in sorted(registry.get_all_specs().items()):
        digest = hashlib.sha256()
        for source in sorted(map(Path, spec.sources)):
            digest.update(source.name.encode())
            digest.update(source.read_bytes() if source.exists() else b"missing")
        flags = tuple(map(str, (*(spec.extra_cflags or ()), *(spec.extra_cuda_cflags or ()))))
        library = Path(spec.get_library_path()) if spec.is_compiled else None
        modules.append(JitModule(name, digest.hexdigest(), flags, library))
    return modules


def warm(backend: str, cases: Sequence[AttentionCase], device: str = "cuda") -> dict[str, float]:
    """Build and load every module that the cases need on a backend: seconds by module, in order.

    A module that this process has loaded already costs nothing and is not named; one that lies compiled on disk
    costs its loading. Cases that the backend does not serve are skipped.
    """
    made = FlashInfer(backend.partition(":")[2], device)
    seconds: dict[str, float] = {}
    with _timed_builds(made.name, seconds):
        for case in cases:
            if not made.check(case):
                made.plan(*_shape_of(case))
    return seconds


@contextmanager
def _timed_builds(backend: str, seconds: dict[str, float]) -> Iterator[None]:
    """FlashInfer builds in JitSpec.build_and_load and reports no times: it is wrapped meanwhile."""
    spec_class = _library(backend, "flashinfer.jit.core").JitSpec
    build = spec_class.build_and_load

    def timed(spec: Any) -> Any:
        started = time.perf_counter()
        module = build(spec)
        seconds[spec.name] = time.perf_counter() - started
        return module

    spec_class.build_and_load = timed
    try:
        yield
    finally:
        spec_class.build_and_load = build


def _shape_of(case: AttentionCase) -> tuple[Batch, AttentionSpec]:
    """A batch and spec of the case's shape, without keys: enough to plan."""
    from attention.replay.problems import spec_of

    q_lens, kv_lens = (tuple(getattr(m, name) for m in case.members) for name in ("q_len", "kv_len"))
    counts = [-(-kv // (case.page_size or 1)) for kv in kv_lens]
    starts = _indptr(counts)
    tables = tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=False))
    masks = tuple(torch.ones(q, kv, dtype=torch.bool) for q, kv in zip(q_lens, kv_lens, strict=True))
    batch = Batch(
        q_lens,
        kv_lens,
        tables if case.page_size is not None else (),
        case.page_size,
        layout=case.layout,
        masks=masks if case.custom_mask else None,
    )
    spec = spec_of(case)
    return batch, replace(spec, alibi_slopes=alibi_slopes(case.heads_q)) if case.alibi else spec
