"""One backend on one case, ready to be timed: random inputs, a plan, a graph where asked, and proof of what runs.

Before anything is timed the output is compared with the fp64 oracle on rows at the end of every kind of member, the
execution layer names the kernels, and on a GPU the cold L2 is proven: calls on one buffer, flushed in between, must not
be faster than calls on buffers that are together larger than any cache. Whatever fails is a MeasurementError with its
outcome.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec, Planned, own_buffers
from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase
from attention.checks.common import MAX_RATIO, dtype_class
from attention.errors import one_line
from attention.outcomes import MeasurementError
from attention.replay.figures import compare
from attention.replay.members import Member
from attention.replay.problems import Problem, build, spec_of
from attention.replay.truths import joined
from attention.timing import Call, Clock, CudaClock, num_copies

#: The oracle checks so many last rows of the first and of the last member.
_CHECKED_ROWS = 32
#: The cold proof: calls a median is of, and the difference below which caches do not matter to a call.
_PROOF_CALLS = 15
_EVENT_S = 1e-6  # twice the events' resolution
#: Of all replicas together, and of all copies of the cold proof. Large inputs have fewer, and their kernels are long.
_MOST_BYTES = 8 << 30
#: On a GPU one turn over all replicas lasts no longer than this: a long kernel has fewer of them.
_TURN_S = 0.015
_MOST_CPU_REPLICAS = 2  # a core's caches and neighbours do not depend on the place


@dataclass(frozen=True)
class Ready:
    """Calls to be timed, and what the first run showed."""

    calls: tuple[Call, ...]  # the same call on replicas
    backend: str
    confirmed: str
    first_call_s: float  # plan and first call, with whatever is compiled for them
    cold_ratio: float | None  # seconds on one buffer / on rotating buffers; None without a GPU
    workspace_bytes: int | None  # most that plan and call held beside inputs and output; None without a GPU
    graph_capture: str | None  # `captured`; None for a case that is not to be captured
    held: Any  # plans and tensors: a graph's replay does not hold what its kernels read


def prepare(backend: str, case: AttentionCase, device: str, clock: Clock, replicas: int = 2) -> Ready:
    """With at most so many `replicas`, each with a plan and buffers of its own: where those lie moves a kernel of 20 us
    by 1 to 3 %, in one process as between two.

    Raises MeasurementError, and what the backend raises.
    """
    made = create(backend, device)
    if reasons := made.check(case):
        raise MeasurementError("refused", "; ".join(map(str, reasons)))
    if case.execution == "compile":
        raise MeasurementError("refused", "execution compile is not measured: calls are eager or in a CUDA graph")
    problem = random_problem(case, device)
    is_graph = case.execution == "cuda_graph"
    before = _allocated(device)
    started = time.perf_counter()
    planned = made.plan(problem.batch, problem.spec, graph=is_graph, lse=False)
    first = planned.run(problem.q_THD, problem.k, problem.v)[0]
    _settle(device)
    first_call_s = time.perf_counter() - started
    workspace = None if before is None else max(0, _peak(device) - before - first.nbytes)
    _check_numbers(first, problem, case)
    del first

    eager = _call(planned, problem)
    confirmed = confirm.watch(eager, device=device)[1]
    calls, held = [eager], [(planned, problem)]
    if is_graph:
        calls[0], in_graph = _captured(eager, problem, case)
        if not confirm.same_kernels(in_graph, confirmed):
            confirmed = in_graph
    if confirmed != backend:
        raise MeasurementError("wrong_kernel", f"{backend} was asked for, and the execution layer names {confirmed}")
    cold_ratio = _proven_cold(planned, problem, clock) if isinstance(clock, CudaClock) else None
    for _ in range(_num_replicas(problem, workspace, calls[0], clock, replicas) - 1):
        other = replace(problem, q_THD=problem.q_THD.clone(), k=problem.k.clone(), v=problem.v.clone())
        with own_buffers():
            plan = made.plan(other.batch, other.spec, graph=is_graph, lse=False)
        call = _call(plan, other)
        call()
        calls.append(_captured(call, other, case)[0] if is_graph else call)
        held.append((plan, other))
    return Ready(
        calls=tuple(calls),
        backend=backend,
        confirmed=confirmed,
        first_call_s=first_call_s,
        cold_ratio=cold_ratio,
        workspace_bytes=workspace,
        graph_capture="captured" if is_graph else None,
        held=held,
    )


def _call(planned: Planned, problem: Problem) -> Call:
    return lambda: planned.run(problem.q_THD, problem.k, problem.v)


def _num_replicas(problem: Problem, workspace: int | None, call: Call, clock: Clock, most: int) -> int:
    """As many as asked for, fewer of what is large or long."""
    if not isinstance(clock, CudaClock):
        return min(most, _MOST_CPU_REPLICAS)
    num_bytes = problem.q_THD.nbytes + problem.k.nbytes + problem.v.nbytes + (workspace or 0)
    seconds = median(clock.block([call], 3))
    return max(1, min(most, _MOST_BYTES // max(1, num_bytes), max(2, int(_TURN_S / seconds))))


def peak_bytes(device: str) -> int:
    """Most memory that this process held: of the GPU, else its resident set."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_problem(case: AttentionCase, device: str) -> Problem:
    """Random inputs of a case, drawn where they are needed, for a gigabyte of keys is no file of numbers. Seeded, so
    that every contender on a device has the same. Its truth is of the last rows of the first and the last member."""
    spec = spec_of(case)
    generator = torch.Generator(device).manual_seed(0)

    def normal(num: int, heads: int, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        wide = torch.float32 if spec.dtype == torch.float32 else torch.bfloat16
        drawn = torch.randn(num, heads, dim, generator=generator, device=device, dtype=wide)
        return drawn.to(dtype or spec.dtype)

    members = []
    for one in case.members:
        mask = torch.rand(one.q_len, one.kv_len, generator=generator, device=device) < 2 / 3
        members.append(
            Member(
                normal(one.q_len, spec.heads_q, spec.head_dim_qk),
                normal(one.kv_len, spec.heads_kv, spec.head_dim_qk, spec.kv_dtype),
                normal(one.kv_len, spec.heads_kv, spec.head_dim_vo, spec.kv_dtype),
                mask if case.custom_mask else None,
            )
        )
    return build(case, spec, members, device=device, oracle=_truth_of_last_rows)


def _checked(q_lens: Sequence[int]) -> list[tuple[int, int]]:
    """(member, rows from its end) that the oracle answers: of the first and the last member."""
    return [(i, min(_CHECKED_ROWS, q_lens[i])) for i in sorted({0, len(q_lens) - 1})]


def _truth_of_last_rows(members: Sequence[Member], spec: AttentionSpec, device: str) -> Truth:
    """Last rows of a member are a problem of their own: the diagonal ends at the last key."""
    found = []
    for index, num in _checked([len(m.q_QHD) for m in members]):
        member = members[index]
        mask = None if member.mask_QL is None else member.mask_QL[-num:]
        found.append(attend(member.q_QHD[-num:], member.k_LGD, member.v_LGD, spec, mask))
    return joined(found)


def _check_numbers(out_THD: torch.Tensor, problem: Problem, case: AttentionCase) -> None:
    ends = torch.tensor(problem.batch.q_lens).cumsum(0).tolist()
    rows = [torch.arange(ends[i] - num, ends[i]) for i, num in _checked(problem.batch.q_lens)]
    ratio = compare(out_THD[torch.cat(rows).to(out_THD.device)], None, problem.truth, problem.spec.dtype).r_rms
    limit = MAX_RATIO[dtype_class(case)]
    if not ratio <= limit:
        raise MeasurementError(
            "wrong_numbers", f"error of {ratio:.3g} times the dtype's own beside the oracle, allowed {limit:g}"
        )


def _captured(call: Call, problem: Problem, case: AttentionCase) -> tuple[Call, str]:
    """The call in a CUDA graph: its replay, whose output is checked anew, and the backend that its nodes name."""
    from attention.bench_dispatch import captured

    held: list[torch.Tensor] = []

    def kept() -> None:
        held[:] = [call()[0]]

    try:
        graph = captured(kept)
        nodes = confirm.graph_nodes(graph)
    except Exception as error:
        raise MeasurementError("capture_failed", f"{type(error).__name__}: {one_line(error)[:200]}") from error
    held[0].fill_(float("nan"))
    graph.replay()
    _check_numbers(held[0], problem, case)
    output = held[0]  # the graph writes it as long as it is replayed

    def replay() -> tuple[torch.Tensor]:
        graph.replay()
        return (output,)

    return replay, nodes.backend


def _proven_cold(planned: Planned, problem: Problem, clock: CudaClock) -> float:
    """Median seconds on one buffer, over those on buffers that no cache can hold; the flush lies between any two calls.

    MeasurementError where the flush leaves more than half of what a warm cache saves, which calls without it show."""
    num_bytes = problem.k.nbytes + problem.v.nbytes
    num = max(2, min(num_copies(num_bytes, clock.l2_bytes), 512, _MOST_BYTES // max(1, num_bytes)))
    copies = [problem, *(replace(problem, k=problem.k.clone(), v=problem.v.clone()) for _ in range(num - 1))]
    calls = [_call(planned, one) for one in copies]
    for call in calls:  # whatever is done once for a new address
        call()
    warm = median(clock.block(calls[:1], _PROOF_CALLS, flush=False))
    flushed = median(clock.block(calls[:1], _PROOF_CALLS))
    rotating = median(clock.block(calls, _PROOF_CALLS))
    if rotating - flushed > max(_EVENT_S, 0.5 * (rotating - warm)):
        raise MeasurementError(
            "warm_cache",
            f"{flushed * 1e6:.1f} us on one buffer after the flush, {warm * 1e6:.1f} us without it, and "
            f"{rotating * 1e6:.1f} us on {num} rotating ones",
        )
    return flushed / rotating


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _allocated(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak(device: str) -> int:
    return int(torch.cuda.max_memory_allocated(device))
