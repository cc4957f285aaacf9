"""Times `triton:paged` over lists of tiles on this GPU, beside what bounds it: the numbers behind its tables.

    python -m attention.backends.triton_tune --out FILE [--only decode] [--rounds 7]

Decode: 64 sequences of 4096 keys, 32 query and 8 KV heads, D 128, bfloat16; figures are TB/s of K and V, beside a
kernel and `torch.sum` that only read the same bytes. Prefill: 2 causal prompts of 8192 tokens; figures are TFLOP/s.
FlashAttention-2 stands beside both where it can be imported. Every contender is a CUDA graph; they take turns,
round after round, so that all see the same minutes of the GPU. Inputs are far larger than its L2, hence cold.
FILE gets one JSON object a line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import Batch
from attention.backends.triton_paged import _DECODE, _PREFILL, Tiles, TritonPaged, default_tiles
from attention.cases import AttentionCase
from attention.replay.problems import spec_of

Call = Callable[[], Any]

DECODE_TILES = (
    *(Tiles(16, n, w, s) for n, w, s in product((32, 64, 128), (2, 4, 8), (2, 3, 4)) if n * s <= 384),
    *(Tiles(16, 64, 4, 3, num_splits) for num_splits in (1, 2, 3, 4, 8)),
    *(Tiles(16, 128, 4, 2, num_splits) for num_splits in (1, 2, 4)),
)
PREFILL_TILES = (
    *(Tiles(128, 64, w, s) for w, s in product((4, 8), (2, 3, 4))),
    *(Tiles(128, 128, 8, s) for s in (2, 3)),
    *(Tiles(128, 32, w, s) for w, s in product((4, 8), (3, 4))),
    *(Tiles(64, n, 4, s) for n, s in product((64, 128), (2, 3))),
)


@dataclass(frozen=True)
class Row:
    """One contender on one shape; `figure` in `unit`, from the median of the rounds."""

    shape: str
    contender: str
    unit: str
    figure: float | None
    microseconds: float | None
    error: str | None = None


@dataclass(frozen=True)
class Shape:
    """A target: the case, the tiles to try, and the work that a second is divided into."""

    name: str
    case: AttentionCase
    tiles: tuple[Tiles, ...]
    calls: int  # in one graph

    @property
    def is_decode(self) -> bool:
        return self.case.phase == "decode"

    @property
    def unit(self) -> str:
        return "TB/s" if self.is_decode else "TFLOP/s"

    def figure(self, seconds: float) -> float:
        if not self.is_decode:
            return self.case.flops() / seconds / 1e12
        kv_tokens = sum(member.kv_len for member in self.case.members)
        return kv_tokens * self.case.heads_kv * 2 * self.case.head_dim_qk * 2 / seconds / 1e12


def shapes() -> tuple[Shape, ...]:
    fields: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim_qk": 128, "head_dim_vo": 128, "dtype": "bfloat16"}

    def shape(phase: str, page: int | None) -> Shape:
        batch = "64q1s4k" if phase == "decode" else "2q8k"
        layout = "ragged" if page is None else "paged_nhd"
        case = AttentionCase(phase=phase, batch=batch, layout=layout, page_size=page, **fields)
        tiles, calls = (DECODE_TILES, 8) if phase == "decode" else (PREFILL_TILES, 2)
        return Shape(f"{phase}-{'ragged' if page is None else f'page{page}'}", case, tiles, calls)

    return tuple(shape(*of) for of in product(("decode", "prefill"), (16, 64, None)))


def inputs(case: AttentionCase) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, K and V on the GPU; pages in random order."""
    generator = torch.Generator("cuda").manual_seed(0)
    q_lens, kv_lens = (tuple(getattr(m, name) for m in case.members) for name in ("q_len", "kv_len"))
    tokens, tables = sum(kv_lens), []
    if case.page_size is not None:
        order = torch.randperm(tokens // case.page_size, generator=torch.Generator().manual_seed(0)).tolist()
        for kv_len in kv_lens:
            tables.append(tuple(order.pop() for _ in range(kv_len // case.page_size)))
    lead = (tokens,) if case.page_size is None else (tokens // case.page_size, case.page_size)
    heads = {"q": (sum(q_lens), case.heads_q), "k": (*lead, case.heads_kv), "v": (*lead, case.heads_kv)}
    q, k, v = (
        torch.randn(*heads[name], case.head_dim_qk, generator=generator, device="cuda", dtype=torch.bfloat16)
        for name in "qkv"
    )
    return Batch(q_lens, kv_lens, tuple(tables), case.page_size, layout=case.layout), q, k, v


def contenders(shape: Shape) -> Iterator[tuple[str, Callable[[], Call]]]:
    """(name, what makes its call); making one may raise."""
    case, (batch, q, k, v) = shape.case, inputs(shape.case)
    spec = spec_of(case)
    chosen = default_tiles(_DECODE if shape.is_decode else _PREFILL, spec, case.page_size)
    expected = TritonPaged("cuda").plan(batch, spec).run(q, k, v)[0]

    def ours(tiles: Tiles) -> Call:
        planned = TritonPaged("cuda", prefill=tiles, decode=tiles).plan(batch, spec)
        off = float((planned.run(q, k, v)[0].float() - expected.float()).abs().max())
        if not off < 0.05:
            raise ArithmeticError(f"differs from the table's tiles by {off:.3g}")
        return lambda: planned.run(q, k, v)

    for tiles in dict.fromkeys((chosen, *shape.tiles)):
        name = "table: " if tiles is chosen else ""
        yield name + " ".join(str(n) for n in asdict(tiles).values() if n is not None), partial(ours, tiles)
    if shape.is_decode:
        yield "read kernel", lambda: _reads(k, v)
        yield "torch.sum", lambda: lambda: (k.view(torch.float32).sum(), v.view(torch.float32).sum())
    yield "flash_attn 2", lambda: _flash_attention_2(shape, q, k, v)


def _reads(k: torch.Tensor, v: torch.Tensor) -> Call:
    """A kernel that reads all of K and V and keeps only a sum a program."""
    from attention.backends.triton_kernels import read_sum

    block = 8192
    parts = [(x.view(torch.int32).view(-1), x.numel() // 2) for x in (k, v)]
    sums = torch.empty(max(n for _, n in parts) // block, dtype=torch.int32, device="cuda")

    def call() -> None:
        for words, count in parts:
            read_sum[(count // block,)](words, sums, BLOCK=block, num_warps=8)

    return call


def _flash_attention_2(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    flash = importlib.import_module("flash_attn")
    case, members = shape.case, shape.case.members
    k, v = (x.reshape(-1, case.heads_kv, case.head_dim_qk) for x in (k, v))
    if shape.is_decode:
        # The same bytes as one contiguous cache a sequence: its pages have 256 tokens at least.
        caches = [x.view(len(members), -1, case.heads_kv, case.head_dim_qk) for x in (k, v)]
        lens = torch.tensor([m.kv_len for m in members], dtype=torch.int32, device="cuda")
        return lambda: flash.flash_attn_with_kvcache(q[:, None], *caches, cache_seqlens=lens, causal=True)
    longest = max(m.q_len for m in members)
    ends = torch.tensor([0, *(m.q_len for m in members)], device="cuda").cumsum(0).to(torch.int32)
    return lambda: flash.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)


def graph_of(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """`calls` calls in a row as one graph, warmed up."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def tune(shape: Shape, rounds: int) -> list[Row]:
    """All contenders of a shape, best first; one that cannot run is a row with its error."""
    graphs, rows = {}, []
    for name, make in contenders(shape):
        row = Row(shape.name, name, shape.unit, None, None)
        try:
            graphs[name] = graph_of(make(), shape.calls)
        except Exception as error:  # too much shared memory, a package that is missing
            rows.append(replace(row, error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))
    seen: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            seen[name].append(seconds_of(graph) / shape.calls)
    for name, times in seen.items():
        median = statistics.median(times)
        rows.append(Row(shape.name, name, shape.unit, round(shape.figure(median), 3), round(median * 1e6, 1)))
    return sorted(rows, key=lambda row: -(row.figure or 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with options.out.open("w") as out:
        for shape in shapes():
            if options.only not in shape.name:
                continue
            for row in tune(shape, options.rounds):
                print(json.dumps(asdict(row)), file=out, flush=True)
                result = row.error or f"{row.figure:9.3f} {row.unit:8} {row.microseconds:9.1f} us"
                print(f"{row.shape:16} {row.contender:32} {result}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
