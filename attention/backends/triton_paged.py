"""`triton:paged`: our own forward attention, for every layout and feature that a case can name.

A plan splits the batch in two. Members of few query tokens (decode, verification) are packed with the heads that
share a KV head and their keys are split over as many tiles as fill the GPU; all others are cut into tiles of query
rows, the heaviest first. Lengths, tiles and block tables lie in one int32 buffer: a plan is one copy to the GPU,
and `replan` is the same copy into the same place.

Needs Triton 3.6 or newer. On the CPU the kernels run in Triton's interpreter, which TRITON_INTERPRET=1 turns on
before Triton is first imported; it is slow and there for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Reason

_FEW_TOKENS = 8  # members up to this many query tokens are packed and split
_MAX_SPLITS = 128  # of one member; the combine kernel holds the LSEs of all of them
_NEVER = -1  # the member of an unused tile
# What decides between more splits and fewer, in keys that a tile reads in the same time: starting a tile, and
# the launch of the combine kernel.
_TILE_COST, _COMBINE_COST = 64, 256
_SHARED_MEMORY = 227 * 1024  # bytes a Hopper multiprocessor lends to its blocks


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut: rows and keys a tile, warps, stages of the load pipeline.

    `num_splits` fixes into how many parts the keys of the longest member fall (decode only); None fills the GPU.
    `max_registers` a thread lets more blocks share a multiprocessor, at the price of spills; None leaves it to Triton.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int | None = None
    max_registers: int | None = None


#: (head dim up to, bytes of q's dtype, page class) -> tiles. Class `block`: a page holds whole blocks of keys, or there
#: are no pages; `row`: every key looks its page up.
_PREFILL: dict[tuple[int, int, str], Tiles] = {
    (64, 2, "block"): Tiles(128, 64, 4, 3),
    (64, 2, "row"): Tiles(128, 64, 4, 3),
    (128, 2, "block"): Tiles(64, 64, 4, 3),
    (128, 2, "row"): Tiles(128, 128, 8, 3),
    (256, 2, "block"): Tiles(128, 64, 8, 2),
    (256, 2, "row"): Tiles(128, 64, 8, 2),
    (576, 2, "block"): Tiles(64, 32, 8, 2),
    (576, 2, "row"): Tiles(64, 32, 8, 2),
    (64, 4, "block"): Tiles(32, 32, 4, 2),
    (64, 4, "row"): Tiles(32, 32, 4, 2),
    (128, 4, "block"): Tiles(32, 16, 8, 2),
    (128, 4, "row"): Tiles(32, 16, 8, 2),
    (256, 4, "block"): Tiles(16, 32, 8, 2),
    (256, 4, "row"): Tiles(16, 32, 8, 2),
    (576, 4, "block"): Tiles(16, 16, 8, 1),
    (576, 4, "row"): Tiles(16, 16, 8, 1),
}
#: Here block_m is the most that is used; a plan takes the least that holds its rows.
_DECODE: dict[tuple[int, int, str], Tiles] = {
    (64, 2, "block"): Tiles(64, 64, 4, 4),
    (64, 2, "row"): Tiles(64, 64, 4, 4),
    (128, 2, "block"): Tiles(64, 64, 4, 4),
    (128, 2, "row"): Tiles(64, 32, 4, 3),
    (256, 2, "block"): Tiles(64, 64, 4, 2),
    (256, 2, "row"): Tiles(64, 64, 4, 2),
    (576, 2, "block"): Tiles(64, 32, 8, 2),
    (576, 2, "row"): Tiles(64, 32, 8, 2),
    (64, 4, "block"): Tiles(32, 32, 4, 2),
    (64, 4, "row"): Tiles(32, 32, 4, 2),
    (128, 4, "block"): Tiles(32, 16, 8, 2),
    (128, 4, "row"): Tiles(32, 16, 8, 2),
    (256, 4, "block"): Tiles(16, 32, 8, 2),
    (256, 4, "row"): Tiles(16, 32, 8, 2),
    (576, 4, "block"): Tiles(16, 16, 8, 1),
    (576, 4, "row"): Tiles(16, 16, 8, 1),
}


def default_tiles(table: dict[tuple[int, int, str], Tiles], spec: AttentionSpec, page_size: int | None) -> Tiles:
    """The table's entry for a layer and a page size. UserError beyond the largest head dim."""
    dim = max(spec.head_dim_qk, spec.head_dim_vo)
    by_row = page_size is not None and page_size % 64 != 0
    fitting = [key for key in table if key[0] >= dim and key[1:] == (spec.dtype.itemsize, "row" if by_row else "block")]
    if not fitting:
        raise UserError(f"triton:paged has no tiles for head dim {dim} in {spec.dtype}")
    return table[min(fitting)]


def split_dim(dim: int) -> tuple[int, int]:
    """Two powers of two that cover a head dim with less padding than one: 576 = 512 + 64, 96 = 64 + 32.

    The second is 0 where one power of two does as well.
    """
    whole = _power_of_two(dim)
    first = whole // 2
    rest = _power_of_two(dim - first)
    return (first, rest) if first >= 16 and first + rest < whole else (whole, 0)


def _power_of_two(value: int) -> int:
    """The least power of two that holds it, at least 16: the least side of a matrix product."""
    return max(16, 1 << (value - 1).bit_length())


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def split_keys(
    spans: list[int], *, units: int, slots: int, block_n: int, most_tiles: int | None, wanted: int | None
) -> int:
    """Keys a tile, so that all tiles together end soonest: a multiple of block_n.

    spans: keys that each member sees. units: tiles that each part of a member costs (groups of heads times blocks
    of rows). slots: tiles that the GPU holds at once. most_tiles: no more parts than these over all members (the
    buffers of a captured graph). wanted: that many parts of the longest member, whatever it costs.
    """
    longest = max(max(spans), 1)
    if wanted is not None:
        return _ceil(longest, min(wanted, _MAX_SPLITS) * block_n) * block_n
    num_splits = np.arange(1, min(_MAX_SPLITS, _ceil(longest, block_n)) + 1)
    keys = -(-longest // (num_splits * block_n)) * block_n
    tiles = np.maximum(1, -(-np.array(spans)[None] // keys[:, None])).sum(1)
    cost = -(-tiles * units // slots) * (keys + _TILE_COST) + np.where(num_splits > 1, _COMBINE_COST, 0)
    if most_tiles is not None:
        # One part a member always fits: it is the first, and what argmin falls back to.
        cost = np.where((tiles > most_tiles) & (num_splits > 1), np.iinfo(np.int64).max, cost)
    return int(keys[cost.argmin()])


@lru_cache(maxsize=256)
def _per_head(values: tuple[float, ...] | None, device: str) -> torch.Tensor | None:
    """A number a query head on the device; the same for every plan of a layer."""
    return None if values is None else torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _num_multiprocessors(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.startswith("cuda") else 4


class TritonPaged:
    """The backend on one device. `prefill` and `decode` replace the table's tiles (for tuning).

    Raises UserError on the CPU when Triton's interpreter is off.
    """

    name = "triton:paged"

    def __init__(self, device: str = "cpu", *, prefill: Tiles | None = None, decode: Tiles | None = None) -> None:
        self.device = device
        self._prefill, self._decode = prefill, decode

    def check(self, case: AttentionCase) -> list[Reason]:
        return declared_reasons(self.name, case, device=self.device)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        """Raises UserError on the CPU without the interpreter, and for what no rule of the matrix can say: a KV dtype
        that is neither q's nor a float8, a custom mask in a graph."""
        if self.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(
                "triton:paged runs on the CPU in Triton's interpreter only: start the process with TRITON_INTERPRET=1"
            )
        if spec.kv_dtype not in (None, spec.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
            raise UserError(f"{self.name}: KV of {spec.kv_dtype} under {spec.dtype}; float8 or q's own dtype only")
        if graph and batch.masks is not None:
            raise UserError(f"{self.name}: a captured graph cannot take other masks; plan without a graph")
        prefill = self._prefill or default_tiles(_PREFILL, spec, batch.page_size)
        if batch.masks is not None:
            # The pipeline holds the mask's blocks too, and shared memory (227 KiB on Hopper) is full of keys.
            prefill = replace(prefill, num_stages=min(2, prefill.num_stages))
        decode = self._decode or default_tiles(_DECODE, spec, batch.page_size)
        return _PlannedPaged(batch, spec, self.device, graph=graph, lse=lse, prefill=prefill, decode=decode)


@dataclass
class _Part:
    """The members that one launch serves: its blocks, and where its tiles lie in the plan's buffer."""

    members: list[int]
    pack: int
    tiles: Tiles
    num_tiles: int = 0
    split: bool = False


class _PlannedPaged(Planned):
    def __init__(
        self,
        batch: Batch,
        spec: AttentionSpec,
        device: str,
        *,
        graph: bool,
        lse: bool,
        prefill: Tiles,
        decode: Tiles,
    ) -> None:
        super().__init__(backend=TritonPaged.name, batch=batch, spec=spec)
        self._device, self._graph, self._lse = device, graph, lse
        ratio = spec.heads_q // spec.heads_kv
        few = [i for i, q_len in enumerate(batch.q_lens) if 0 < q_len <= _FEW_TOKENS]
        many = [i for i, q_len in enumerate(batch.q_lens) if q_len > _FEW_TOKENS]
        rows = max((batch.q_lens[i] for i in few), default=1) * ratio
        block_m = min(decode.block_m, _power_of_two(rows))
        # Short chunks fill a tile's rows only with the heads of their group.
        longest = max((batch.q_lens[i] for i in many), default=0)
        pack = ratio if longest < prefill.block_m else 1
        self._many = _Part(many, pack, prefill)
        self._few = _Part(few, ratio, replace(decode, block_m=block_m))
        self._buffer = self._fill(batch, fit=False).to(device, non_blocking=True)
        self._bind()

    # What the kernels read: one int32 buffer.

    def _fill(self, batch: Batch, *, fit: bool) -> torch.Tensor:
        """members [B, 4], tiles [*, 4] of both parts, split tokens [*, 4], block tables [B, width], one after another.

        With `fit` the sizes stay those of the batch that was planned.
        """
        q_lens, kv_lens = np.array(batch.q_lens, np.int32), np.array(batch.kv_lens, np.int32)
        starts = np.cumsum(q_lens) - q_lens
        key_starts = np.arange(len(kv_lens)) if batch.layout == "contiguous" else np.cumsum(kv_lens) - kv_lens
        members = np.stack([starts, q_lens, kv_lens, key_starts], 1)
        many = self._tiles_of_rows(q_lens, kv_lens)
        few, parts = self._tiles_of_keys(batch, starts, fit)
        if not fit:
            self._many.num_tiles, self._few.num_tiles, self._num_tokens = len(many), len(few), len(parts)
            self._few.split = any(num_splits > 1 for *_, num_splits in parts)
            widest = max((len(table) for table in batch.block_tables), default=0)
            self._width = max(1, _ceil(widest, 16)) * 16  # a multiple of 16, so that widths share a compiled kernel
        tables = np.zeros((len(batch.block_tables), self._width), np.int32)
        for row, table in zip(tables, batch.block_tables, strict=True):
            used = table[: self._width]  # a captured batch only shrinks: pages beyond hold no key
            row[: len(used)] = used
        unused = [(_NEVER, 0, 0, 0)] * (self._few.num_tiles - len(few))
        rows = [members, many, np.array([*few, *unused]).reshape(-1, 4), np.array(parts).reshape(-1, 4)]
        host = torch.from_numpy(np.concatenate([part.astype(np.int32).ravel() for part in (*rows, tables)]))
        # From pinned memory the copy waits for no kernel; the allocator keeps the memory until it is done.
        return host if self._device == "cpu" else host.pin_memory()

    def _tiles_of_rows(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
        """Tiles [*, 4] of the members with many tokens: the ones that see most keys first, since the last to start
        should be the shortest."""
        part, found = self._many, []
        for i in part.members:
            rows = int(q_lens[i]) * part.pack
            blocks = np.arange(-(-rows // part.tiles.block_m))
            last = np.minimum((blocks + 1) * part.tiles.block_m, rows) // part.pack
            seen = kv_lens[i] - q_lens[i] + last if self._right() is not None else np.full_like(last, kv_lens[i])
            zero = np.zeros_like(blocks)
            found.append(np.stack([zero + i, blocks, zero, zero + kv_lens[i], -np.minimum(seen, kv_lens[i])], 1))
        tiles = np.concatenate(found) if found else np.zeros((0, 5), np.int32)
        return tiles[np.argsort(tiles[:, 4], kind="stable"), :4]

    def _tiles_of_keys(
        self, batch: Batch, starts: np.ndarray, fit: bool
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
        """Tiles of the members with few tokens, and for each of their tokens where its parts lie."""
        part, spec = self._few, self.spec
        if not part.members:
            return [], []
        block_m, block_n = part.tiles.block_m, part.tiles.block_n
        left, _ = spec.window
        lows = {}
        for i in part.members:
            low = 0 if left is None else max(0, batch.kv_lens[i] - batch.q_lens[i] - left)
            lows[i] = min(low, batch.kv_lens[i]) // block_n * block_n
        blocks = {i: -(-batch.q_lens[i] * part.pack // block_m) for i in part.members}
        most = max(blocks.values())
        keys = split_keys(
            [batch.kv_lens[i] - lows[i] for i in part.members],
            units=most * spec.heads_kv,
            slots=_num_multiprocessors(self._device) * self._tiles_per_multiprocessor(),
            block_n=block_n,
            most_tiles=part.num_tiles // most if fit else None,
            wanted=None if fit else part.tiles.num_splits,
        )
        tiles: list[tuple[int, int, int, int]] = []
        parts: list[tuple[int, int, int, int]] = []
        for i in part.members:
            begins = range(lows[i], max(batch.kv_lens[i], lows[i] + 1), keys)
            parts += [(int(starts[i]) + t, t, len(tiles), len(begins)) for t in range(batch.q_lens[i])]
            for block in range(blocks[i]):
                tiles += [(i, block, begin, min(begin + keys, batch.kv_lens[i])) for begin in begins]
        return tiles, parts

    def _tiles_per_multiprocessor(self) -> int:
        tiles, spec = self._few.tiles, self.spec
        element = (spec.kv_dtype or spec.dtype).itemsize
        # As compiled: below 64 rows (no warp-group products) a pipeline of n stages keeps n - 1 blocks.
        blocks = tiles.num_stages if tiles.block_m >= 64 else max(1, tiles.num_stages - 1)
        shared = blocks * tiles.block_n * (spec.head_dim_qk + spec.head_dim_vo) * element
        return max(1, min(_SHARED_MEMORY // shared, 16 // tiles.num_warps))

    def _right(self) -> int | None:
        right = self.spec.window[1]
        if self.spec.causal:
            return 0 if right is None else min(right, 0)
        return right

    def replan(self, batch: Batch) -> None:
        if not self._graph:
            return super().replan(batch)
        self._check_fits(batch)
        # self.batch stays the longest one: that is what the next batch must fit.
        self._buffer.copy_(self._fill(batch, fit=True), non_blocking=True)
        return None

    # What does not change from layer to layer is bound once.

    def _bind(self) -> None:
        from attention.backends import triton_kernels

        spec, batch = self.spec, self.batch
        num_members, sizes = len(batch.q_lens), (self._many.num_tiles, self._few.num_tiles, self._num_tokens)
        members, many, few, self._parts, tables = self._buffer.split(
            [num_members * 4, *(size * 4 for size in sizes), len(batch.block_tables) * self._width]
        )
        block_d0, block_d1 = split_dim(spec.head_dim_qk)
        # V that is the first columns of K (absorbed MLA) is read once when the first block is just V.
        self._may_share = block_d0 == _power_of_two(spec.head_dim_vo) == spec.head_dim_vo
        self._slopes, self._sinks = (_per_head(v, self._device) for v in (spec.alibi_slopes, spec.sinks))
        masks, mask_starts = _flat_masks(batch, self._device)
        self._part_out = self._part_lse = None
        if self._few.split:
            rows = self._few.num_tiles * spec.heads_kv * self._few.tiles.block_m
            self._part_out = torch.empty(rows, spec.head_dim_vo, dtype=torch.float32, device=self._device)
            self._part_lse = torch.empty(rows, dtype=torch.float32, device=self._device)
        shared: dict[str, Any] = {
            "members": members,
            "tables": tables if batch.paged else None,
            "slopes": self._slopes,
            "sinks": self._sinks,
            "masks": masks,
            "mask_starts": mask_starts,
            "scale": float(spec.scale * spec.k_scale),
            "v_scale": float(spec.v_scale),
            "stride_table": self._width,
            "HEADS": spec.heads_q,
            "RATIO": spec.heads_q // spec.heads_kv,
            "DIM": spec.head_dim_qk,
            "DIM_V": spec.head_dim_vo,
            "BLOCK_D0": block_d0,
            "BLOCK_D1": block_d1,
            "BLOCK_DV": _power_of_two(spec.head_dim_vo),
            "PAGE_SIZE": batch.page_size or 0,
            "LEFT": spec.window[0],
            "RIGHT": self._right(),
            "SOFTCAP": spec.softcap,
        }
        self._launches: list[tuple[Callable[..., Any], dict[str, Any], str]] = []
        for phase, part, tiles in (("prefill", self._many, many), ("decode", self._few, few)):
            if not part.num_tiles:
                continue
            options = {
                **shared,
                "tiles": tiles,
                "part_out": self._part_out if part.split else None,
                "part_lse": self._part_lse if part.split else None,
                "PACK": part.pack,
                "BLOCK_M": part.tiles.block_m,
                "BLOCK_N": part.tiles.block_n,
                "PHASE": phase,
                "num_warps": part.tiles.num_warps,
                "num_stages": part.tiles.num_stages,
            }
            if part.tiles.max_registers is not None:
                options["maxnreg"] = part.tiles.max_registers
            grid = (part.num_tiles * (spec.heads_q // part.pack), 1, 1)
            self._launches.append((triton_kernels.attend[grid], options, f"attention_release_paged_{phase}"))
        if self._few.split:
            options = {
                "part_out": self._part_out,
                "part_lse": self._part_lse,
                "parts": self._parts,
                "sinks": self._sinks,
                "HEADS": spec.heads_q,
                "PACK": self._few.pack,
                "DIM_V": spec.head_dim_vo,
                "BLOCK_M": self._few.tiles.block_m,
                "BLOCK_DV": _power_of_two(spec.head_dim_vo),
                "BLOCK_S": 8,
                "MAX_SPLITS": _MAX_SPLITS,
                "num_warps": 4,
            }
            self._combine = (triton_kernels.combine[(self._num_tokens * spec.heads_q, 1, 1)], options)

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        if not q_THD.stride(-1) == k_NPGD.stride(-1) == v_NPGD.stride(-1) == 1:
            raise UserError(f"{self.backend}: the head dim of q, K and V must have stride 1")
        out_THD = q_THD.new_empty(q_THD.shape[0], self.spec.heads_q, self.spec.head_dim_vo)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        strides = [_strides(cache, self.batch.layout) for cache in (k_NPGD, v_NPGD)]
        (k_page, k_slot, k_head), (v_page, v_slot, v_head) = strides
        shared_v = self._may_share and k_NPGD.data_ptr() == v_NPGD.data_ptr() and strides[0] == strides[1]
        for launch, options, name in self._launches:
            with _named(name, self._device):
                launch(
                    q_THD, k_NPGD, v_NPGD, out_THD, lse_TH,
                    stride_qt=q_THD.stride(0), stride_qh=q_THD.stride(1),
                    stride_kp=k_page, stride_ks=k_slot, stride_kh=k_head,
                    stride_vp=v_page, stride_vs=v_slot, stride_vh=v_head,
                    SHARED_V=shared_v,
                    **options,
                )  # fmt: skip
        if self._few.split:
            launch, options = self._combine
            with _named("attention_release_paged_combine", self._device):
                launch(out_THD, lse_TH, **options)
        return out_THD, lse_TH if self._lse else None


def _strides(cache: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Of a cache in any layout: from page (or member) to page, from key to key, from head to head."""
    if layout == "ragged":
        key, head, _ = cache.stride()
        return key, key, head
    outer, second, third, _ = cache.stride()
    return (outer, third, second) if layout == "paged_hnd" else (outer, second, third)


def _flat_masks(batch: Batch, device: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The members' masks one after another as bytes, and where each begins."""
    if batch.masks is None:
        return None, None
    ends = np.cumsum([mask.numel() for mask in batch.masks], dtype=np.int64)
    starts = torch.from_numpy(np.concatenate([[0], ends[:-1]])).to(device)
    return torch.cat([mask.reshape(-1) for mask in batch.masks]).to(device).view(torch.uint8), starts


def _named(name: str, device: str) -> AbstractContextManager[Any]:
    """On the CPU the interpreter's launch under the compiled kernel's name: no operator would name it."""
    return record_function(name) if device == "cpu" else nullcontext()
