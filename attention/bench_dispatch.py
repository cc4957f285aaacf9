"""Host overhead of governance, a layer: a planned `run` against the call that a user would write, and over that run
the dispatcher (`Dispatcher.run`) and the operator (`torch.ops.attention.governed`), each on its own.

    python -m attention bench dispatch --backend torch_sdpa:flash [--device cuda] [--calls 20000] [--json]
    python -m attention.bench_dispatch --backends torch_sdpa:flash --device cpu --calls 200 --out rows.json
    python -m attention.bench_dispatch --backends torch_sdpa:flash,flash_attn:fa2 --out rows.json   # needs a GPU

The module takes one decode of each backend, in a worker process, and as many pairs as its share of the time allows
(2,000 at least, if they fit; `calls` says how many). A backend that crashes is a row with its error, and the file is
written anew after each.

Both calls do the same work on the same tensors, without the LSE, which serving does not use; what `run` takes longer
on the host is the price of the plan. What the dispatcher and the operator add to that run: attention/bench_paths.py.

Pairs of calls in alternating order (A B, B A, ...), so that both see the same minutes of the same machine; the
figure is the median, since a host is interrupted often and late. On a GPU the calls are asynchronous: a sync every
few calls, outside the clock, keeps the launch queue from filling, or a call would wait for the device.

A CUDA graph replays without the host, so there the overhead must be nothing at all: all are captured and
their nodes counted, and they must be equally many; dispatcher and operator must launch the planned run's kernels.

A backend module takes part by a function `library_call(planned, q, k, v) -> Callable`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attention import STARTED, confirm
from attention.backends import create
from attention.backends.base import Backend, Planned
from attention.bench_paths import WARM_UP, Bare, BareBackend, added, dispatched, median_us, paths_of, side_by_side
from attention.cases import AttentionCase
from attention.errors import UserError, exit_code
from attention.flags import check_count, check_seconds
from attention.isolate import NOT_RUN, Outcome, in_workers, short, worker
from attention.replaced import replaced
from attention.replay.problems import Problem, make
from attention.yaml_file import read_json

#: Default number of pairs. A call on the CPU takes the kernel's time too, so fewer fit into a minute.
DEFAULT_CALLS = {"cuda": 20_000, "cpu": 2_000}
#: Tokens a page, where a backend does not take 16.
PAGE_SIZES = {"flash_attn:fa2": 256}
#: Pairs where the time is short: the median of fewer moves with the host's interruptions.
LEAST_CALLS = 2_000
_COMMAND = (sys.executable, "-m", "attention.bench_dispatch", "--worker")


@dataclass(frozen=True)
class Overhead:
    """Medians over `calls` pairs, in microseconds of host time; nodes are None without a GPU."""

    backend: str
    case_id: str
    calls: int
    run_us: float
    library_us: float
    overhead_us: float  # median of the paired differences
    run_nodes: int | None = None
    library_nodes: int | None = None
    graph_backend: str | None = None  # whose kernels the captured run holds
    # What the dispatcher and the operator add to the planned run; bare: round a run that launches nothing.
    direct_us: float | None = None
    direct_p99_us: float | None = None
    op_us: float | None = None
    op_p99_us: float | None = None
    bare_direct_us: float | None = None
    bare_direct_p99_us: float | None = None
    bare_op_us: float | None = None
    bare_op_p99_us: float | None = None
    same_graphs: bool | None = None  # captured, both launch the planned run's kernels, in as many nodes

    @property
    def nodes_equal(self) -> bool | None:
        return None if self.run_nodes is None else self.run_nodes == self.library_nodes

    @property
    def failed(self) -> bool:
        """A captured graph holds something else than it should."""
        return self.nodes_equal is False or self.same_graphs is False


def library_call_of(planned: Planned, problem: Problem) -> Callable[[], Any]:
    """The plain call of the module that made this plan. UserError when it offers none."""
    module = importlib.import_module(type(planned).__module__)
    offered = getattr(module, "library_call", None)
    if offered is None:
        raise UserError(f"{planned.backend}: {module.__name__} has no library_call to compare with")
    call: Callable[[], Any] = offered(planned, problem.q_THD, problem.k, problem.v)
    return call


def measure(
    backend: str, case: AttentionCase, *, device: str, calls: int | None = None, time_s: float | None = None
) -> Overhead:
    """Host overhead of one backend on one case. UserError when the backend cannot run it or has no plain call.

    With `time_s` as many pairs as fit into what is left of it after preparation, `calls` at most.
    """
    started = time.monotonic()
    found = create(backend, device)
    if reasons := found.check(case):
        raise UserError(f"{backend} cannot run {case.case_id}: {'; '.join(map(str, reasons))}")
    problem = make(case, "normal", 1, device=device)
    planned = found.plan(problem.batch, problem.spec, lse=False)
    library = library_call_of(planned, problem)
    paths = paths_of(planned, dispatched(backend, problem, device), problem)
    bare = paths_of(Bare(planned), dispatched(backend, problem, device, BareBackend), problem)
    run = paths[0]
    is_cuda = device.startswith("cuda")
    num_calls = calls or DEFAULT_CALLS["cuda" if is_cuda else "cpu"]
    with torch.inference_mode():
        sync = torch.cuda.synchronize if is_cuda else lambda: None
        if time_s is not None:
            # Of 5 calls with a kernel, 2 are the pair's.
            num_calls = fitting(run, library, num_calls, sync, 0.4 * (time_s - (time.monotonic() - started)))
        run_ns, library_ns = pairs(run, library, num_calls, sync)
        over = added(paths, bare, num_calls, sync)
        run_nodes, library_nodes, graph_backend = _nodes(found, problem, planned) if is_cuda else (None, None, None)
        same_graphs = _same_graphs(*paths) if is_cuda else None
    return Overhead(
        backend=backend,
        case_id=case.case_id,
        calls=num_calls,
        run_us=statistics.median(run_ns) / 1e3,
        library_us=statistics.median(library_ns) / 1e3,
        overhead_us=median_us(run_ns, library_ns),
        run_nodes=run_nodes,
        library_nodes=library_nodes,
        graph_backend=graph_backend,
        same_graphs=same_graphs,
        **asdict(over),
    )


def _same_graphs(
    run: Callable[[], Any], direct: Callable[[], torch.Tensor], operator: Callable[[], torch.Tensor]
) -> bool:
    """Whether all of them, captured, launch the same kernels in as many nodes.

    The operator promises rows one after the other; where the run's are not (math), a copy belongs to all three.
    """
    paths = (lambda: run()[0].contiguous(), lambda: direct().contiguous(), operator)
    seen = [confirm.graph_nodes(captured(path)) for path in paths]
    return all(one == seen[0] for one in seen)


def _nodes(found: Backend, problem: Problem, planned: Planned) -> tuple[int, int, str]:
    """Nodes of both calls, captured: planned for a graph where the backend can, else as it is. And whose they are."""
    with contextlib.suppress(UserError):
        planned = found.plan(problem.batch, problem.spec, graph=True, lse=False)
    library = library_call_of(planned, problem)
    run_nodes = confirm.graph_nodes(captured(lambda: planned.run(problem.q_THD, problem.k, problem.v)))
    return run_nodes.num_nodes, confirm.graph_nodes(captured(library)).num_nodes, run_nodes.backend


def pairs(
    run: Callable[[], Any], library: Callable[[], Any], calls: int, sync: Callable[[], None]
) -> tuple[list[int], list[int]]:
    """Host nanoseconds of each call of both, paired; who goes first alternates."""
    run_ns, library_ns = side_by_side((run, library), calls, sync)
    return run_ns, library_ns


def fitting(
    run: Callable[[], Any], library: Callable[[], Any], most: int, sync: Callable[[], None], time_s: float
) -> int:
    """How many pairs fit into half of the time, by a few of them; the graphs take some of the rest.

    LEAST_CALLS at least, where they fit at all; else what does.
    """
    pairs(run, library, 1, sync)  # first calls build plans, and would speak for all
    started = time.perf_counter()
    pairs(run, library, WARM_UP, sync)
    pair_s = (time.perf_counter() - started) / (2 * WARM_UP)
    return min(most, max(int(time_s / 2 / pair_s), min(LEAST_CALLS, int(0.9 * time_s / pair_s)), WARM_UP))


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The call in a CUDA graph whose nodes can be read; warmed up first on a side stream, as capture demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return graph


def cases(batches: tuple[str, ...], dtype: str, page_size: int = 16) -> list[AttentionCase]:
    """Small cases of one Llama layer over pages: the smaller the kernel, the plainer the host's time."""
    shape: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim_qk": 128, "head_dim_vo": 128, "dtype": dtype}
    return [
        AttentionCase(
            phase="decode" if batch.startswith("q1s") else "prefill", batch=batch, page_size=page_size, **shape
        )
        for batch in batches
    ]


def decode(backend: str, dtype: str) -> AttentionCase:
    """The case of a backend in `measure_all`: a decode of 8 members; of one for SDPA, which has no call for more."""
    batch = "q1s512" if backend.startswith("torch_sdpa") else "8q1s512"
    (case,) = cases((batch,), dtype, PAGE_SIZES.get(backend, 16))
    return case.model_copy(update={"phase": "decode"})


def measure_all(
    backends: Sequence[str],
    *,
    device: str,
    dtype: str,
    calls: int | None,
    deadline: float | None,
    heard: Callable[[Outcome], None],
    command: Sequence[str] = _COMMAND,
) -> None:
    """One backend after the other in one worker, which pays for its imports once; each may use as much of the time
    that is left as those after it. Silence of half the time is a hang: a new worker goes on with the next."""
    timeout_s = 300.0 if deadline is None else max(1.0, (deadline - time.monotonic()) / 2)
    task = {"device": device, "dtype": dtype, "calls": calls, "deadline": deadline}
    in_workers(command, task, backends, timeout_s=timeout_s, deadline=deadline, heard=heard)


def _worker() -> None:
    with worker() as (task, channel):
        names, deadline = task["names"], task["deadline"]
        for i, name in enumerate(names):
            channel.at(name)
            # The parent's `time.monotonic` is ours too. A second is for the way back.
            time_s = None if deadline is None else (deadline - 1.0 - time.monotonic()) / (len(names) - i)
            try:
                case = decode(name, task["dtype"])
                row = measure(name, case, device=task["device"], calls=task["calls"], time_s=time_s)
                channel.done(name, **document([row])[0])
            except Exception as error:
                channel.done(name, error=short(error))


def table(rows: list[Overhead]) -> list[str]:
    """For a person: one line a backend and case, medians in microseconds; of what is added to the run, the P99 too."""
    more = " ".join(f"{name:>19}" for name in ("+ direct us (P99)", "bare (P99)", "+ operator us (P99)", "bare (P99)"))
    lines = [f"{'backend':22} {'case':44} {'run us':>9} {'library us':>11} {'overhead us':>12} {more}  graph nodes"]
    for row in rows:
        nodes = "-" if row.run_nodes is None else f"{row.run_nodes} against {row.library_nodes}"
        if row.same_graphs is False:
            nodes += ", not those of dispatcher and operator"
        figures = f"{row.run_us:9.2f} {row.library_us:11.2f} {row.overhead_us:12.2f}"
        pairs_of_figures = (
            (row.direct_us, row.direct_p99_us),
            (row.bare_direct_us, row.bare_direct_p99_us),
            (row.op_us, row.op_p99_us),
            (row.bare_op_us, row.bare_op_p99_us),
        )
        more = " ".join(f"{_both(*both):>19}" for both in pairs_of_figures)
        lines.append(f"{row.backend:22} {row.case_id:44} {figures} {more}  {nodes}")
    return lines


def _both(median: float | None, p99: float | None) -> str:
    return "-" if median is None or p99 is None else f"{median:.2f} ({p99:.2f})"


def document(rows: list[Overhead]) -> list[dict[str, Any]]:
    """As JSON for machines."""
    return [{**asdict(row), "nodes_equal": row.nodes_equal} for row in rows]


def main() -> int:
    """0 done; 1 a backend has an error or graphs of unequal size; 3 the time was spent before all."""
    if "--worker" in sys.argv[1:]:
        _worker()
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m attention.bench_dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backends", required=True, help="comma-separated")
    parser.add_argument("--out", type=Path, required=True, help="a .json file of rows")
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--calls", type=int, help="pairs of calls at most (20000 on a GPU, 2000 on the CPU)")
    parser.add_argument("--budget-s", type=float, help="seconds for all")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out, measure the other backends")
    options = parser.parse_args()
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.backends import chosen
    from attention.matrix import check_device
    from attention.model_config import resolve_dtype

    check_count("--calls", options.calls)
    check_seconds("--budget-s", options.budget_s, or_none=True)
    check_device(options.device)
    backends = chosen(options.backends)
    rows: list[dict[str, Any]] = []
    if options.resume and options.out.is_file():
        rows = [row for row in read_json(options.out) if row.get("error") != NOT_RUN]

    def heard(one: Outcome) -> None:
        said = {"backend": one.name, **one.said} if one.error is None else {"backend": one.name, "error": one.error}
        rows.append(said)
        with replaced(options.out) as fresh:
            fresh.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(said), flush=True)

    there = {row["backend"] for row in rows}
    measure_all(
        [name for name in backends if name not in there],
        device=options.device,
        dtype=resolve_dtype("auto", options.device),
        calls=options.calls,
        deadline=None if options.budget_s is None else STARTED + options.budget_s,
        heard=heard,
    )
    errors = [row["error"] for row in rows if row.get("error")]
    if NOT_RUN in errors:
        return 3
    wrong = any(row.get("nodes_equal") is False or row.get("same_graphs") is False for row in rows)
    return 1 if errors or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
