"""One backend on one case, ready to be timed: random inputs, a plan, a graph where asked, and proof of what runs.

Before anything is timed the output is compared with the fp64 oracle on rows at the end of every kind of member, the
execution layer names the kernels, and on a GPU the cold L2 is proven: calls that rotate over these copies of the
inputs must not be faster than calls that rotate over twice as many. Whatever fails is a MeasurementError with its
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
from attention.timing import Call, Clock, CudaClock, Rotation, num_copies

#: The oracle checks so many last rows of the first and of the last member.
_CHECKED_ROWS = 32
#: The cold proof: calls that a median is of, and differences that say nothing: twice the events' resolution, and the
#: share by which two medians of one kernel were seen to differ.
_PROOF_CALLS = 16
_EVENT_S, _NOISE = 1e-6, 0.03
#: Copies of the inputs are at most so many, and replicas at most so many bytes together.
_MOST_COPIES, _MOST_BYTES = 256, 8 << 30
#: On a GPU one turn over all replicas lasts no longer than this: a long kernel has fewer of them.
_TURN_S = 0.015
_CPU_COPIES = 2


@dataclass(frozen=True)
class Ready:
    """Calls to be timed, and what the first run showed."""

    rotation: Rotation  # the same call on copies of the inputs, each replica with a plan of its own
    backend: str
    confirmed: str
    first_call_s: float  # plan and first call, with whatever is compiled for them
    cold_ratio: float | None  # seconds on these copies / on twice as many; None where no cache could hold even one
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
    if is_graph:
        in_graph = _captured(eager, problem, case)
        confirmed = confirmed if confirm.same_kernels(in_graph, confirmed) else in_graph
    if confirmed != backend:
        raise MeasurementError("wrong_kernel", f"{backend} was asked for, and the execution layer names {confirmed}")
    size = _size(problem, workspace, eager, clock, replicas)
    problems = [problem, *(_copy(problem) for _ in range(size.copies - 1))]
    cold_ratio = _proven_cold(planned, problems, clock) if size.fits_cache and isinstance(clock, CudaClock) else None
    plans = [planned]
    for _ in range(size.replicas - 1):
        with own_buffers():
            plans.append(made.plan(problem.batch, problem.spec, graph=is_graph, lse=False))
    calls = [_call(plans[i % size.replicas], one) for i, one in enumerate(problems)]
    for call in calls[: size.replicas]:  # whatever a plan does once
        call()
    return Ready(
        rotation=Rotation([_replayed(call) for call in calls] if is_graph else calls, size.replicas),
        backend=backend,
        confirmed=confirmed,
        first_call_s=first_call_s,
        cold_ratio=cold_ratio,
        workspace_bytes=workspace,
        graph_capture="captured" if is_graph else None,
        held=(plans, problems),
    )


def _call(planned: Planned, problem: Problem) -> Call:
    return lambda: planned.run(problem.q_THD, problem.k, problem.v)


def _copy(problem: Problem) -> Problem:
    return replace(problem, q_THD=problem.q_THD.clone(), k=problem.k.clone(), v=problem.v.clone())


@dataclass(frozen=True)
class _Size:
    """How many copies of the inputs calls rotate over, and how many plans with buffers of their own."""

    copies: int
    replicas: int
    fits_cache: bool  # one copy alone


def _size(problem: Problem, workspace: int | None, call: Call, clock: Clock, replicas: int) -> _Size:
    """As many copies as no cache holds, a multiple of the replicas; fewer replicas of what is large or long."""
    if not isinstance(clock, CudaClock):
        return _Size(_CPU_COPIES, min(replicas, _CPU_COPIES), fits_cache=False)
    num_bytes = problem.k.nbytes + problem.v.nbytes
    seconds = median(clock.block(Rotation([call]), 3))
    fit = _MOST_BYTES // max(1, num_bytes + problem.q_THD.nbytes + (workspace or 0))
    num = max(1, min(replicas, fit, max(2, int(_TURN_S / seconds))))
    copies = min(_MOST_COPIES, max(num_copies(num_bytes, clock.l2_bytes), num))
    return _Size(-(-copies // num) * num, num, fits_cache=num_bytes < clock.l2_bytes)


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
        mask = None
        if case.custom_mask:
            mask = torch.rand(one.q_len, one.kv_len, generator=generator, device=device) < 2 / 3
        members.append(
            Member(
                normal(one.q_len, spec.heads_q, spec.head_dim_qk),
                normal(one.kv_len, spec.heads_kv, spec.head_dim_qk, spec.kv_dtype),
                normal(one.kv_len, spec.heads_kv, spec.head_dim_vo, spec.kv_dtype),
                mask,
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


def _captured(call: Call, problem: Problem, case: AttentionCase) -> str:
    """The backend that the nodes of a graph of this call name; the output of its replay is checked too."""
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
    return nodes.backend


def _replayed(call: Call) -> Call:
    """The replay of a graph of this call, captured as `torch.cuda.graph` does but without its garbage collection, which
    takes longer than the capture of one kernel."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            output = call()
        finally:
            graph.capture_end()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def _proven_cold(planned: Planned, problems: Sequence[Problem], clock: CudaClock) -> float:
    """Median seconds of calls that rotate over these copies, over those on twice as many. MeasurementError where the
    one is faster: then a cache holds some of them."""
    others = [_copy(one) for one in problems]
    seconds = []
    for copies in (problems, [*problems, *others]):
        calls = [_call(planned, one) for one in copies]
        for call in calls:  # each was last used a whole round before it is timed
            call()
        seconds.append(median(clock.block(Rotation(calls), min(len(calls), _PROOF_CALLS))))
    these, twice = seconds
    if twice - these > max(_EVENT_S, _NOISE * twice):
        raise MeasurementError(
            "warm_cache",
            f"{these * 1e6:.1f} us on {len(problems)} rotating buffers, {twice * 1e6:.1f} us on twice as many",
        )
    return these / twice


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
