"""What `bench_kernels` measures: shapes, one problem a shape, contenders by name, and the worker that runs them.

A contender is the name of a backend, `read:triton` or `read:torch`, or `triton:paged` and the words of its tiles. All
have the same numbers, in the layout that each reads without a copy. Run as a module this is the worker of
`attention.isolate`: it checks contenders against the fp64 oracle, or times them in turn.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import Batch, Planned
from attention.backends.oracle import attend
from attention.cases import AttentionCase
from attention.checks.common import MAX_RATIO
from attention.errors import UserError
from attention.isolate import Channel, short, worker
from attention.replay.figures import compare
from attention.replay.problems import spec_of
from attention.replay.truths import joined

Call = Callable[[], Any]

READS = ("read:triton", "read:torch")
#: Of these rows at each end and in the middle of a prompt the output is checked.
_CHECKED_ROWS = 128
_FLUSH_BYTES = 256 << 20
_SLEEP_CYCLES = 1_000_000  # about 0.6 ms: longer than the host takes to queue a call


@dataclass(frozen=True)
class Shape:
    """A case, and the work that a second is divided into."""

    name: str
    case: AttentionCase

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
        width = (self.case.head_dim_qk + self.case.head_dim_vo) * spec_of(self.case).dtype.itemsize
        return kv_tokens * self.case.heads_kv * width / seconds / 1e12


def shapes(small: bool = False) -> dict[str, Shape]:
    """By name. `small`: what the interpreter does in seconds."""
    sizes: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim_qk": 128, "head_dim_vo": 128}
    batches = {"decode": "64q1s4k", "prefill": "q8k"}
    if small:
        sizes = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16}
        batches = {"decode": "3q1s128", "prefill": "q64"}
    found = {}
    for phase, page in (("decode", 16), ("decode", 64), ("prefill", 16), ("prefill", 64), ("prefill", None)):
        fields = {"phase": phase, "batch": batches[phase], "dtype": "bfloat16", "page_size": page, **sizes}
        case = AttentionCase(**fields, layout="paged_nhd" if page else "ragged")
        name = f"{phase}-{f'page{page}' if page else 'ragged'}"
        found[name] = Shape(name, case)
    return found


# The problem: dense numbers once, and views or pages of them.


class Problem:
    """Random q, K and V of a shape (members of equal lengths), and the truth of the rows that are checked."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device, self.spec = shape, device, spec_of(shape.case)
        case, generator = shape.case, torch.Generator(device).manual_seed(0)
        self.members, self.q_len, self.kv_len = len(case.members), case.members[0].q_len, case.members[0].kv_len

        def normal(*lead: int) -> torch.Tensor:
            return torch.randn(*lead, case.head_dim_qk, generator=generator, device=device).to(self.spec.dtype)

        self.q_THD = normal(self.members * self.q_len, case.heads_q)
        self.k_BLGD, self.v_BLGD = (normal(self.members, self.kv_len, case.heads_kv) for _ in "kv")
        self._laid_out: dict[str, tuple[Batch, torch.Tensor, torch.Tensor]] = {}

    def laid_out(self, layout: str) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Batch, K and V: `paged_nhd` with the shape's pages in random order, or `ragged` or `contiguous` views."""
        if layout not in self._laid_out:
            self._laid_out[layout] = self._lay_out(layout)
        return self._laid_out[layout]

    def _lay_out(self, layout: str) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        lens = (self.q_len,) * self.members, (self.kv_len,) * self.members
        heads, dim = self.k_BLGD.shape[2:]
        if layout == "contiguous":
            return Batch(*lens, (), None, layout="contiguous"), self.k_BLGD, self.v_BLGD
        if layout == "ragged":
            k, v = (x.view(-1, heads, dim) for x in (self.k_BLGD, self.v_BLGD))
            return Batch(*lens, (), None, layout="ragged"), k, v
        page = self.shape.case.page_size or 16
        order = torch.randperm(self.members * self.kv_len // page, generator=torch.Generator().manual_seed(0))
        places = order.argsort().view(self.members, -1).tolist()
        here = order.to(self.device)
        k, v = (x.view(-1, page, heads, dim)[here] for x in (self.k_BLGD, self.v_BLGD))
        return Batch(*lens, tuple(map(tuple, places)), page), k, v

    def r_rms(self, out_THD: torch.Tensor) -> float:
        """Error of the checked rows in units of the dtype's own; infinite where they are not finite."""
        rows, truth = self._truth
        ratio = compare(out_THD[rows], None, truth, self.spec.dtype).r_rms
        return ratio if math.isfinite(ratio) else math.inf

    @cached_property
    def _truth(self) -> tuple[torch.Tensor, Any]:
        spans = []
        for member in range(self.members):
            some = min(_CHECKED_ROWS, self.q_len)
            for start in sorted({0, (self.q_len - some) // 2, self.q_len - some}):
                spans.append((member, start, start + some))
        truths, rows = [], []
        for member, start, end in spans:
            seen = self.kv_len - self.q_len + end
            here = slice(member * self.q_len + start, member * self.q_len + end)
            truths.append(attend(self.q_THD[here], self.k_BLGD[member, :seen], self.v_BLGD[member, :seen], self.spec))
            rows.append(torch.arange(here.start, here.stop, device=self.device))
        return torch.cat(rows), joined(truths)


# Contenders: named by a backend, `read:...`, or `triton:paged` and its tiles.


def call_of(name: str, problem: Problem) -> Call:
    """The call of a contender; for attention it returns the output first. UserError for what cannot run here."""
    if name in READS:
        _, k, v = problem.laid_out(problem.shape.case.layout)
        return _read_triton(k, v) if name == "read:triton" else _read_torch(k, v)
    shape = problem.shape
    layout = shape.case.layout if reads_pages(name) else _dense(shape.is_decode)
    batch, k, v = problem.laid_out(layout)
    planned = _planned(name, problem, batch)
    if planned.forced_copies:
        raise UserError(f"{name}: {', '.join(planned.forced_copies)}")
    return lambda: planned.run(problem.q_THD, k, v)


def reads_pages(name: str) -> bool:
    """FA2 reads pages of 256 only, FA4 and SDPA none or not these: they get the same numbers without pages."""
    return name.startswith(("triton:", "flashinfer:", *READS))


def _dense(is_decode: bool) -> str:
    return "contiguous" if is_decode else "ragged"


def layout_of(name: str, shape: str) -> str:
    """The layout in which a contender had the numbers of a shape, both by name: `page16`, `ragged`, `contiguous`."""
    phase, _, pages = shape.partition("-")
    return pages if reads_pages(name) else _dense(phase == "decode")


def _planned(name: str, problem: Problem, batch: Batch) -> Planned:
    from attention.backends.triton_paged import TritonPaged

    backend, _, words = name.partition(" ")
    if words:
        tiles = tiles_of(words)
        return TritonPaged(problem.device, prefill=tiles, decode=tiles).plan(batch, problem.spec)
    made = create(backend, problem.device)
    case = problem.shape.case.model_copy(update={"layout": batch.layout, "page_size": batch.page_size})
    if reasons := made.check(case):
        raise UserError("; ".join(map(str, reasons)))
    return made.plan(batch, problem.spec, lse=False)


def tiles_of(words: str) -> Any:
    """Tiles from their words: block_m block_n num_warps num_stages [num_splits [max_registers]], `-` for None."""
    from attention.backends.triton_paged import Tiles

    return Tiles(*(None if word == "-" else int(word) for word in words.split()))  # type: ignore[arg-type]


def name_of(tiles: Any) -> str:
    """The contender of tiles: the inverse of `tiles_of`."""
    return "triton:paged " + " ".join("-" if value is None else str(value) for value in asdict(tiles).values())


def _read_triton(k: torch.Tensor, v: torch.Tensor) -> Call:
    """A kernel that reads all of K and V and keeps only a sum a program."""
    from attention.backends.triton_kernels import read_sum

    parts = [x.view(torch.int32).view(-1) for x in (k, v)]
    block = math.gcd(8192, parts[0].numel())
    sums = torch.empty(parts[0].numel() // block, dtype=torch.int32, device=k.device)

    def call() -> None:
        for words in parts:
            read_sum[(words.numel() // block,)](words, sums, BLOCK=block, num_warps=8)

    return call


def _read_torch(k: torch.Tensor, v: torch.Tensor) -> Call:
    return lambda: (k.view(torch.float32).sum(), v.view(torch.float32).sum())


# The worker: checks, or times. On the wire a contender is `SHAPE|NAME`.


def wired(shape: Shape, name: str) -> str:
    return f"{shape.name}|{name}"


def _worker() -> None:
    with worker() as (task, channel):
        known, device = shapes(task["small"]), task["device"]
        by_shape: dict[str, list[str]] = {}
        for key in task["names"]:
            shape, _, name = key.partition("|")
            by_shape.setdefault(shape, []).append(name)
        with torch.inference_mode():
            for shape, names in by_shape.items():
                problem = Problem(known[shape], device)
                if task["what"] == "check":
                    _check(problem, names, channel)
                else:
                    _time(problem, names, task["blocks"], channel)
        if _device_is_lost(device):
            os._exit(1)


def _check(problem: Problem, names: Sequence[str], channel: Channel) -> None:
    for name in names:
        key = wired(problem.shape, name)
        channel.at(key)
        try:
            channel.done(key, **_checked(name, problem))
        except Exception as error:  # too much shared memory, a package that is missing, a wrong output
            if _device_is_lost(problem.device):
                print(short(error), file=sys.stderr, flush=True)
                os._exit(1)  # the parent blames this name; exit handlers would hang on a lost device
            channel.done(key, error=short(error))


def _checked(name: str, problem: Problem) -> dict[str, Any]:
    call = call_of(name, problem)
    result = call()
    _settle(problem.device)
    if name in READS:
        return {}
    ratio, limit = problem.r_rms(result[0]), MAX_RATIO[problem.shape.case.dtype]
    if not ratio <= limit:
        raise ArithmeticError(f"error of {ratio:.3g} times the dtype's own against the oracle, allowed {limit:g}")
    confirmed = None if " " in name else confirm.watch(call, device=problem.device)[1]
    return {"r_rms": round(ratio, 3), "confirmed": confirmed}


def _time(problem: Problem, names: Sequence[str], blocks: int, channel: Channel) -> None:
    """All contenders of a shape in turn, `blocks` times. An error ends the worker: the next starts without that one.

    A call holds its plan, buffers and inputs, and lives until the last round.
    """
    calls: dict[str, Call] = {}
    for name in names:
        channel.at(wired(problem.shape, name))
        calls[name] = call_of(name, problem)
        calls[name]()
        _settle(problem.device)
    clock = _cuda_clock(problem.device) if problem.device.startswith("cuda") else _cpu_clock
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name in calls if block % 2 else reversed(calls):
            if block == 0:  # warm-up
                channel.at(wired(problem.shape, name))
                clock(calls[name])
            else:
                seen[name].append(clock(calls[name]))
    for name, seconds in seen.items():
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        channel.done(wired(problem.shape, name), seconds=median, low_s=low, high_s=high, blocks=len(seconds))


def _cuda_clock(device: str) -> Callable[[Call], float]:
    """Seconds of one call on the GPU, with a cold L2 and without the host's time."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def clock(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return clock


def _cpu_clock(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _device_is_lost(device: str) -> bool:
    try:
        _settle(device)
    except Exception:
        return True
    return False


if __name__ == "__main__":
    _worker()
