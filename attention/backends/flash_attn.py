"""`flash_attn:{fa2,fa3,fa4}`: the three generations of FlashAttention, each through its own package.

    fa2   flash-attn 2.8         extension module flash_attn_2_cuda (csrc/flash_attn/flash_api.cpp)
    fa3   built from hopper/     flash_attn_interface (hopper/flash_attn_interface.py)
    fa4   flash-attn-4 4.0.0b36  flash_attn.cute (flash_attn/cute/interface.py)

All three take packed queries [T, H, D] and read pages, ragged keys and contiguous keys where they lie:
HND pages are a strided view of NHD ones. A plan holds every argument of one library call.
Causal is bottom-right aligned in all three; a window is inclusive on both sides.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.backends.edges import (
    PlannedBlind,
    blind_rows,
    bounds,
    has_nothing_to_read,
    starts,
    table_rows,
)
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

KERNELS = ("fa2", "fa3", "fa4")

#: Fewest queries of a block of fa2's paged kernel (flash_fwd_launch_template.h run_mha_fwd_splitkv_dispatch).
_BLOCK_ROWS = 64

#: Queries a member up to which fa2 is asked to split the keys over more blocks: with so few rows there are
#: too few blocks otherwise, and its LSE [B, H, Q] costs a transposed copy from two rows on.
_MAX_SPLIT_ROWS = 16


class FlashAttention:
    """One generation of FlashAttention on one CUDA device."""

    def __init__(self, kernel: str, device: str = "cuda") -> None:
        if kernel not in KERNELS:
            raise UserError(f"flash_attn has no kernel {kernel!r}: known are {', '.join(KERNELS)}")
        self.kernel = kernel
        self.device = device
        self.name = f"flash_attn:{kernel}"

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        _refuse_what_no_call_takes(self.name, batch, spec)
        if has_nothing_to_read(batch):
            return PlannedBlind(self.name, batch, spec, lse=lse)
        if self.kernel == "fa2":
            uniform = len(set(batch.q_lens)) == 1 and batch.q_lens[0] <= _MAX_SPLIT_ROWS
            planned = _Fa2Split if uniform and batch.layout != "ragged" else _Fa2
            return planned(self.name, batch, spec, self.device, graph, lse)
        if self.kernel == "fa3":
            return _Fa3(self.name, batch, spec, self.device, graph, lse)
        return _Fa4(self.name, batch, spec, self.device, graph, lse)


def _refuse_what_no_call_takes(name: str, batch: Batch, spec: AttentionSpec) -> None:
    """UserError for features that the calls have no argument for: `check` says so, and a plan never drops one."""
    generation = name.split(":")[1]
    asked = {
        "custom masks": batch.masks is not None,
        "quantised KV": spec.kv_dtype is not None,
        "ALiBi": spec.alibi_slopes is not None and generation != "fa2",
        "sinks": spec.sinks is not None and generation != "fa4",
    }
    refused = [feature for feature, on in asked.items() if on]
    if refused:
        raise UserError(f"{name}: no {', '.join(refused)}")


class _PlannedFlash(Planned):
    """Lengths and pages of a batch on the device, as all three generations take them."""

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, device: str, graph: bool, lse: bool) -> None:
        super().__init__(backend=backend, batch=batch, spec=spec)
        self._where = torch.device(device)
        self._graph, self._lse = graph, lse
        self._max_q, self._max_k = max(batch.q_lens), max(batch.kv_lens)
        self._hnd = batch.layout == "paged_hnd"
        self._cu_q = self._int32(starts(batch.q_lens))
        self._kv_lens = self._int32(batch.kv_lens)
        self._cu_k = self._int32(starts(batch.kv_lens))
        self._table: torch.Tensor | None = None
        if batch.page_size is not None:
            self._width = -(-self._max_k // batch.page_size)
            self._table = self._int32(table_rows(batch, self._width))

    def _int32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._where)

    def replan(self, batch: Batch) -> None:
        if not self._graph:
            raise UserError(f"{self.backend}: was not planned for a CUDA graph")
        self._check_fits(batch)
        self._kv_lens.copy_(torch.tensor(batch.kv_lens, dtype=torch.int32))
        if batch.layout == "ragged":
            self._cu_k.copy_(torch.tensor(starts(batch.kv_lens), dtype=torch.int32))
        if self._table is not None:
            self._table.copy_(torch.tensor(table_rows(batch, self._width), dtype=torch.int32))


class _Fa2(_PlannedFlash):
    """`varlen_fwd`: members of any lengths. It splits the keys only for single-token GQA decodes."""

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, device: str, graph: bool, lse: bool) -> None:
        super().__init__(backend, batch, spec, device, graph, lse)
        self._refuse_blind_blocks(batch)
        import flash_attn_2_cuda  # type: ignore[import-not-found, unused-ignore]

        self._library = flash_attn_2_cuda
        # A row without keys has LSE +inf there; a smaller batch in the same graph may bring one.
        self._blind = graph or bool(blind_rows(batch, spec))
        left, right = bounds(spec)
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=self._where)
            # Its causal kernels add slope * key, which leaves the output and moves the LSE; its windowed
            # ones add -slope * distance. A window over all keys is the same mask.
            left = self._max_k - 1 if left is None and right is not None else left
        causal = right == 0 and left is None
        window = (-1 if left is None else left, -1 if right is None or causal else right)
        self._bind(slopes, causal, window, spec.softcap or 0.0)

    def _refuse_blind_blocks(self, batch: Batch) -> None:
        """UserError where a whole block of queries sees no key: over pages, `varlen_fwd` leaves early there and
        writes the LSE at the offset of a padded batch, on other rows or past the end."""
        if not batch.paged:
            return
        _, right = bounds(self.spec)
        for member, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            before = 0 if right is None else q_len - kv_len - right  # rows that end before the first key
            if q_len and (kv_len == 0 or before >= _BLOCK_ROWS):
                raise UserError(
                    f"{self.backend}: varlen over pages loses the LSE of member {member} (q{q_len}s{kv_len})"
                )

    def replan(self, batch: Batch) -> None:
        self._refuse_blind_blocks(batch)
        super().replan(batch)

    def _bind(self, slopes: torch.Tensor | None, causal: bool, window: tuple[int, int], softcap: float) -> None:
        # It takes a batch whose longest query is one token for one where every query is one.
        max_q = 2 if self._max_q == 1 and 0 in self.batch.q_lens else self._max_q
        self._flat = self.batch.layout == "contiguous"
        self._rows = -1  # keys a member of the contiguous cache, known at the first run
        self._used = None if self.batch.layout == "ragged" else self._kv_lens
        self._before: tuple[Any, ...] = (None, self._table, slopes, max_q, self._max_k, 0.0, self.spec.scale, False)
        self._after: tuple[Any, ...] = (causal, *window, softcap, False, None)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._hnd:
            k_NPGD, v_NPGD = k_NPGD.transpose(1, 2), v_NPGD.transpose(1, 2)
        elif self._flat:
            if k_NPGD.shape[1] != self._rows:
                self._rows = k_NPGD.shape[1]
                self._cu_k = self._int32([self._rows * i for i in range(len(self.batch.kv_lens) + 1)])
            k_NPGD, v_NPGD = k_NPGD.view(-1, *k_NPGD.shape[2:]), v_NPGD.view(-1, *v_NPGD.shape[2:])
        out, lse_HT, _, _ = self._library.varlen_fwd(
            q_THD, k_NPGD, v_NPGD, None, self._cu_q, self._cu_k, self._used, *self._before, *self._after
        )
        if not self._lse:
            return out, None
        return out, _no_keys_is_minus_inf(lse_HT).T if self._blind else lse_HT.T

    def library_call(self, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        flash, options = importlib.import_module("flash_attn"), self._options()
        lens = (self._cu_q, self._cu_k, self._max_q, self._max_k)
        return lambda: flash.flash_attn_varlen_func(q_THD, k, v, *lens, **options)

    def _options(self) -> dict[str, Any]:
        """Arguments of both public functions."""
        left, right = bounds(self.spec)
        alone = left is None and right == 0
        return {
            "block_table": self._table,
            "softmax_scale": self.spec.scale,
            "causal": right == 0,
            # Causal alone, as a user writes it: a bound of 0 beside it would keep a KV head's queries from one tile.
            "window_size": (-1 if left is None else left, -1 if right is None or alone else right),
            "softcap": self.spec.softcap or 0.0,
        }


class _Fa2Split(_Fa2):
    """`fwd_kvcache`: as many queries for every member, keys split over blocks as it sees fit."""

    def _refuse_blind_blocks(self, batch: Batch) -> None:
        """None: its LSE is padded."""

    def _bind(self, slopes: torch.Tensor | None, causal: bool, window: tuple[int, int], softcap: float) -> None:
        q_len = self.batch.q_lens[0]
        self._shape = (len(self.batch.q_lens), q_len, self.spec.heads_q, self.spec.head_dim_qk)
        self._single = q_len == 1
        # Nothing is appended or rotated, members are in order and start at their first key.
        self._before = (None, None, self._kv_lens, None, None, None, None, self._table, slopes, None)
        self._after = (self.spec.scale, causal, *window, softcap, True, 0)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._hnd:
            k_NPGD, v_NPGD = k_NPGD.transpose(1, 2), v_NPGD.transpose(1, 2)
        # For one token a member an axis is added and taken away: half of what `view` costs the host.
        q_BQHD = q_THD.unsqueeze(1) if self._single else q_THD.view(self._shape)
        out, lse_BHQ = self._library.fwd_kvcache(q_BQHD, k_NPGD, v_NPGD, *self._before, *self._after)
        out = out.squeeze(1) if self._single else out.view(q_THD.shape)
        if not self._lse:
            return out, None
        lse_TH = lse_BHQ.squeeze(2) if self._single else lse_BHQ.transpose(1, 2).reshape(-1, lse_BHQ.shape[1])
        return out, _no_keys_is_minus_inf(lse_TH) if self._blind else lse_TH

    def library_call(self, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        flash, options = importlib.import_module("flash_attn"), {**self._options(), "cache_seqlens": self._kv_lens}
        if self._single:
            return lambda: flash.flash_attn_with_kvcache(q_THD.unsqueeze(1), k, v, **options)
        return lambda: flash.flash_attn_with_kvcache(q_THD.view(self._shape), k, v, **options)


def _no_keys_is_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    """In place: fa2 writes +inf for a row without keys, and never elsewhere."""
    inf = float("inf")
    return lse.nan_to_num_(nan=float("nan"), posinf=-inf, neginf=-inf)


class _Fa3(_PlannedFlash):
    """`flash_attn_with_kvcache` for pages and contiguous keys, `flash_attn_varlen_func` for ragged ones.

    The latter returns the LSE in newer versions only; without it the plan returns None.
    """

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, device: str, graph: bool, lse: bool) -> None:
        super().__init__(backend, batch, spec, device, graph, lse)
        import flash_attn_interface  # type: ignore[import-not-found, unused-ignore]

        left, right = bounds(spec)
        same: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": right == 0,
            "window_size": (-1 if left is None else left, -1 if right is None else right),
            "softcap": spec.softcap or 0.0,
            "cu_seqlens_q": self._cu_q,
            "max_seqlen_q": self._max_q,
            "num_splits": 0,
        }
        if batch.layout == "ragged":
            same |= {"cu_seqlens_k": self._cu_k, "max_seqlen_k": self._max_k}
            self._call: Callable[..., Any] = partial(flash_attn_interface.flash_attn_varlen_func, **same)
        else:
            same |= {"cache_seqlens": self._kv_lens, "page_table": self._table, "return_softmax_lse": True}
            self._call = partial(flash_attn_interface.flash_attn_with_kvcache, **same)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._hnd:
            k_NPGD, v_NPGD = k_NPGD.transpose(1, 2), v_NPGD.transpose(1, 2)
        found = self._call(q_THD, k_NPGD, v_NPGD)
        out, lse_HT = found[:2] if isinstance(found, tuple) else (found, None)
        return out, lse_HT.T if self._lse and lse_HT is not None else None


class _Fa4(_PlannedFlash):
    """`flash_attn_varlen_func` of flash_attn.cute. Rows without keys and sinks are its own business.

    Where whole tiles are loaded by TMA (contiguous keys, pages as long as a tile), V rows beyond a member's
    keys reach the product: 0 times NaN. Such batches are refused.
    """

    def __init__(self, backend: str, batch: Batch, spec: AttentionSpec, device: str, graph: bool, lse: bool) -> None:
        super().__init__(backend, batch, spec, device, graph, lse)
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

        left, right = bounds(spec)
        contiguous = batch.layout == "contiguous"
        if contiguous and (graph or len(set(batch.kv_lens)) > 1):
            raise UserError(f"{backend}: contiguous keys only where all members have as many, and not in a graph")
        if batch.page_size in _tiles(spec):
            raise UserError(f"{backend}: a page of {batch.page_size} is a tile at head dim {spec.head_dim_qk}")
        sinks = None
        if spec.sinks is not None:
            sinks = torch.tensor(spec.sinks, dtype=torch.float32, device=self._where)
        self._call: Callable[..., Any] = partial(
            flash_attn_varlen_func,
            cu_seqlens_q=self._cu_q,
            cu_seqlens_k=self._cu_k if batch.layout == "ragged" else None,
            seqused_k=self._kv_lens if batch.paged else None,
            page_table=self._table,
            max_seqlen_q=self._max_q,
            max_seqlen_k=self._max_k,
            softmax_scale=spec.scale,
            causal=right == 0,
            window_size=(left, None if right == 0 else right),
            learnable_sink=sinks,
            softcap=spec.softcap or 0.0,
            return_lse=True,
        )
        self._cut = self._max_k if contiguous else None

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._hnd:
            k_NPGD, v_NPGD = k_NPGD.transpose(1, 2), v_NPGD.transpose(1, 2)
        elif self._cut is not None:
            k_NPGD, v_NPGD = k_NPGD[:, : self._cut], v_NPGD[:, : self._cut]
        out, lse_HT = self._call(q_THD, k_NPGD, v_NPGD)
        return out, lse_HT.T if self._lse else None


def _tiles(spec: AttentionSpec) -> tuple[int, ...]:
    """Keys a tile on Hopper by head dim, whatever else decides it (interface.py _tile_size_fwd_sm90)."""
    dim = spec.head_dim_qk
    if dim <= 128:
        return (128, 144) if 64 < dim <= 96 else (128,)
    return (96, 112, 128) if dim <= 192 else (64, 80)


def library_call(planned: Planned, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """What a user would write for a planned batch over NHD pages: the package's public function. For `bench dispatch`.

    UserError for other layouts, for ALiBi, and for a generation whose plan holds that very function.
    """
    if not isinstance(planned, _Fa2):
        raise UserError(f"{planned.backend}: its run is the library's public call already")
    if planned.batch.layout != "paged_nhd" or planned.spec.alibi_slopes is not None:
        raise UserError(f"{planned.backend}: the plain call is for NHD pages without ALiBi")
    return planned.library_call(q_THD, k, v)
