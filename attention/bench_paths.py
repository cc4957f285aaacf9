"""What the dispatcher and the operator add to a planned run, in host time a layer; part of `bench dispatch`.

Three paths do the same work: the planned backend's own `run`, `Dispatcher.run`, and `torch.ops.attention.governed`.
They take turns in every order. Measured are the layers after a step's first: that one plans, and is confirmed now and
then. The median is of paired differences. The P99 is what the 99th percentile of a call grows by: differences of two
calls would count what disturbs the planned run too.

On the CPU a kernel works on the core that the host's own code needs next, and leaves its caches cold, so the same three
paths are measured bare too: round a planned run that launches nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention import custom_op
from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.cases import AttentionCase
from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.policy import Policy
from attention.reasons import Reason
from attention.replay.problems import Problem

#: Calls between two syncs: well below the about 1,000 launches that a stream's queue holds.
SYNC_EVERY = 16
WARM_UP = 20

Paths = tuple[Callable[[], Any], Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Added:
    """Microseconds that a layer takes longer than the planned run: median, and growth of the P99."""

    direct_us: float
    direct_p99_us: float
    op_us: float
    op_p99_us: float
    bare_direct_us: float
    bare_direct_p99_us: float
    bare_op_us: float
    bare_op_p99_us: float


def added(with_kernel: Paths, bare: Paths, rounds: int, sync: Callable[[], None]) -> Added:
    """Both sets of paths, each side by side."""
    figures = [*_figures(with_kernel, rounds, sync), *_figures(bare, rounds, lambda: None)]
    return Added(*figures)


def _figures(paths: Paths, rounds: int, sync: Callable[[], None]) -> list[float]:
    run_ns, *others = side_by_side(paths, rounds, sync)
    return [figure for ns in others for figure in (median_us(ns, run_ns), _p99_us(ns) - _p99_us(run_ns))]


def paths_of(planned: Planned, dispatcher: Dispatcher, problem: Problem) -> Paths:
    """The planned run, the dispatcher's and the operator's on one problem. The operator's handle lives as long as the
    process."""
    (handle,) = custom_op.handles(dispatcher, 1)
    operator = torch.ops.attention.governed.default
    q_THD, k, v = problem.q_THD, problem.k, problem.v
    return (
        lambda: planned.run(q_THD, k, v),
        lambda: dispatcher.run(0, q_THD, k, v),
        lambda: operator(q_THD, k, v, handle),
    )


def dispatched(
    backend: str, problem: Problem, device: str, wrap: Callable[[Backend], Backend] = lambda backend: backend
) -> Dispatcher:
    """A dispatcher with that problem planned on that backend, its first layer run. UserError when another is chosen."""
    # Who serves no prefill is no policy by itself: others stand in for the phases that are not measured.
    policy = Policy(preferred=(backend,), fallback=("torch_sdpa", "triton:paged"))
    page_size = problem.batch.page_size or 16
    found = Dispatcher(policy, [problem.spec], device=device, page_size=page_size, wrap=wrap)
    found.plan(problem.batch)
    (part,) = found.last_step().phases
    if part.resolved != backend:
        raise UserError(f"the dispatcher chose {part.resolved} for {part.bucket}, not {backend}")
    with torch.inference_mode():
        found.run(0, problem.q_THD, problem.k, problem.v)
    return found


class Bare(Planned):
    """A plan that gives the output of its first run ever after, and launches nothing."""

    def __init__(self, planned: Planned) -> None:
        super().__init__(planned.backend, planned.batch, planned.spec)
        self._planned = planned
        self._found: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._found is None:
            out_THD, lse_TH = self._planned.run(q_THD, k_NPGD, v_NPGD)
            self._found = out_THD.contiguous(), lse_TH
        return self._found


class BareBackend:
    """Plans what launches nothing."""

    def __init__(self, inner: Backend) -> None:
        self.name = inner.name
        self._inner = inner

    def check(self, case: AttentionCase) -> list[Reason]:
        return self._inner.check(case)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return Bare(self._inner.plan(batch, spec, graph=graph, lse=lse))


def side_by_side(paths: Sequence[Callable[[], Any]], rounds: int, sync: Callable[[], None]) -> list[list[int]]:
    """Host nanoseconds of each path in each round; every order of them has its turn."""
    for _ in range(WARM_UP):
        for path in paths:
            path()
    sync()
    taken: list[list[int]] = [[] for _ in paths]
    clock = time.perf_counter_ns
    orders = list(itertools.permutations(range(len(paths))))
    often = SYNC_EVERY // len(paths)
    for i in range(rounds):
        for which in orders[i % len(orders)]:
            path = paths[which]
            started = clock()
            path()
            taken[which].append(clock() - started)
        if i % often == often - 1:
            sync()
    sync()
    return taken


def median_us(these_ns: list[int], those_ns: list[int]) -> float:
    """Median of the paired differences."""
    return statistics.median(a - b for a, b in zip(these_ns, those_ns, strict=True)) / 1e3


def _p99_us(taken_ns: list[int]) -> float:
    return sorted(taken_ns)[int(0.99 * (len(taken_ns) - 1))] / 1e3
