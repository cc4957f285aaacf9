"""Host overhead: both calls do the same work, in alternating order, and graphs of both are equally large."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention import bench_dispatch, bench_paths
from attention.__main__ import main
from attention.backends import create
from attention.backends.base import Planned
from attention.backends.torch_sdpa import library_call
from attention.bench_dispatch import (
    LEAST_CALLS,
    Overhead,
    cases,
    fitting,
    library_call_of,
    measure,
    measure_all,
    pairs,
    table,
)
from attention.bench_paths import SYNC_EVERY, dispatched, side_by_side
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.isolate import NOT_RUN, Outcome
from attention.replay.problems import Problem, make


def planned_of(case: AttentionCase, kernel: str = "flash") -> tuple[Planned, Problem]:
    problem = make(case, "normal", 3)
    return create(f"torch_sdpa:{kernel}").plan(problem.batch, problem.spec), problem


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("batch", ["q1s70", "q33"])
def test_the_plain_call_gives_what_the_planned_run_gives(kernel: str, batch: str) -> None:
    planned, problem = planned_of(cases((batch,), "float32")[0], kernel)
    out_THD, _ = planned.run(problem.q_THD, problem.k, problem.v)
    plain_BHQD = library_call_of(planned, problem)()
    torch.testing.assert_close(plain_BHQD[0].transpose(0, 1), out_THD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_THD.double(), problem.truth.out_QHD, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": "2q1s64"}, "one member, not for 2"),
        ({"batch": "q5s64", "phase": "extend"}, "no mask beyond is_causal"),
        ({"window": (7, 0)}, "no mask beyond is_causal"),
    ],
)
def test_what_has_no_plain_call_is_refused(changes: dict[str, Any], message: str) -> None:
    case = AttentionCase.model_validate({**cases(("q1s64",), "float32")[0].model_dump(), **changes})
    planned, problem = planned_of(case)
    with pytest.raises(UserError, match=message):
        library_call(planned, problem.q_THD, problem.k, problem.v)


def test_a_backend_module_without_a_plain_call_is_named() -> None:
    _, problem = planned_of(cases(("q1s64",), "float32")[0])
    with pytest.raises(UserError, match=r"attention\.backends\.base has no library_call"):
        library_call_of(Planned("x:y", problem.batch, problem.spec), problem)


def test_pairs_alternate_and_the_queue_is_drained_before_it_fills() -> None:
    events: list[str] = []

    def named(name: str) -> Callable[[], None]:
        return lambda: events.append(name)

    run_ns, library_ns = pairs(named("run"), named("library"), 64, named("sync"))
    assert len(run_ns) == len(library_ns) == 64
    assert all(taken >= 0 for taken in run_ns + library_ns)
    text = " ".join(events)
    timed = text.split("sync ", 1)[1]
    assert timed.startswith("run library library run run library")
    between = [part.split() for part in timed.split("sync") if part.strip()]
    assert max(map(len, between)) == SYNC_EVERY
    assert sum(map(len, between)) == 128


def test_three_paths_go_in_every_order_and_the_queue_is_drained() -> None:
    events: list[str] = []
    paths = [partial(events.append, name) for name in ("run", "direct", "op")]
    taken = side_by_side(paths, 12, lambda: events.append("sync"))
    assert [len(one) for one in taken] == [12, 12, 12]
    timed = events[events.index("sync") + 1 :]
    calls = [name for name in timed if name != "sync"]
    orders = {tuple(calls[i : i + 3]) for i in range(0, 36, 3)}
    assert orders == set(itertools.permutations(("run", "direct", "op")))
    assert max(len(part.split()) for part in " ".join(timed).split("sync")) <= SYNC_EVERY


class Slow:
    """A dispatcher that takes two milliseconds a layer, four at every tenth."""

    def __init__(self, problem: Problem) -> None:
        self.out = torch.zeros_like(problem.q_THD)
        self.calls = 0

    def run(self, layer: int, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(0.004 if self.calls % 10 == 0 else 0.002)
        return self.out


def test_what_dispatcher_and_operator_add_to_the_planned_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dispatch, "dispatched", lambda backend, problem, device, wrap=None: Slow(problem))
    row = measure("torch_sdpa:flash", cases(("q1s64",), "float32")[0], device="cpu", calls=60)
    for median, p99 in (
        (row.direct_us, row.direct_p99_us),
        (row.op_us, row.op_p99_us),
        (row.bare_direct_us, row.bare_direct_p99_us),
        (row.bare_op_us, row.bare_op_p99_us),
    ):
        assert median is not None
        assert p99 is not None
        assert 1_000 < median < 3_500
        assert p99 > median + 1_000
    assert f"{row.direct_us:.2f} ({row.direct_p99_us:.2f})" in table([row])[1]


def test_bare_paths_launch_nothing_and_give_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(cases(("q16",), "float32")[0], "normal", 1)
    planned = create("torch_sdpa:math").plan(problem.batch, problem.spec)
    bare = bench_paths.Bare(planned)
    one = dispatched("torch_sdpa:math", problem, "cpu", bench_paths.BareBackend)
    with torch.inference_mode():
        paths = bench_paths.paths_of(bare, one, problem)
        expected = planned.run(problem.q_THD, problem.k, problem.v)[0]
        outs = [paths[0]()[0], paths[1](), paths[2]()]
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_attention_math", None)
        outs += [paths[0]()[0], paths[1](), paths[2]()]
    for out in outs:
        torch.testing.assert_close(out, expected)


def test_what_is_measured_is_the_dispatcher_on_that_backend() -> None:
    problem = make(cases(("q1s64",), "float32")[0], "normal", 1)
    one = dispatched("torch_sdpa:math", problem, "cpu")
    assert one.last_step().phases[0].confirmed == "torch_sdpa:math"
    with pytest.raises(UserError, match=r"the dispatcher chose torch_sdpa:flash for decode/kv<=64, not torch_sdpa:cud"):
        dispatched("torch_sdpa:cudnn", problem, "cpu")


def test_the_clock_sees_what_the_planned_run_takes_longer() -> None:
    run_ns, library_ns = pairs(lambda: time.sleep(0.002), lambda: None, 30, lambda: None)
    assert sorted(run_ns)[15] - sorted(library_ns)[15] > 1_500_000


def test_medians_of_a_backend_on_the_cpu_have_no_graph() -> None:
    row = measure("torch_sdpa:flash", cases(("q1s64",), "float32")[0], device="cpu", calls=30)
    assert row.calls == 30
    assert row.run_us > 0
    assert row.library_us > 0
    assert (row.run_nodes, row.library_nodes, row.nodes_equal, row.same_graphs) == (None, None, None, None)
    assert None not in (row.direct_us, row.direct_p99_us, row.op_us, row.op_p99_us)


def test_a_backend_that_cannot_run_the_case_says_why() -> None:
    with pytest.raises(UserError, match=r"torch_sdpa:cudnn cannot run decode-q1s64.*no declared rules for cpu"):
        measure("torch_sdpa:cudnn", cases(("q1s64",), "float32")[0], device="cpu", calls=1)


def test_the_table_has_columns_and_the_document_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "dispatch", "--backend", "torch_sdpa:math", "--batch", "q1s32", "--calls", "10"]
    assert main(argv) == 0
    header, row = capsys.readouterr().out.splitlines()
    added = "+ direct us (P99) bare (P99) + operator us (P99) bare (P99)"
    assert " ".join(header.split()) == f"backend case run us library us overhead us {added} graph nodes"
    assert row.startswith("torch_sdpa:math        decode-q1s32-h32/8")
    assert main([*argv, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert set(document) == {*Overhead.__dataclass_fields__, "nodes_equal"}


def test_kernels_of_a_family_that_cannot_run_here_are_passed_over_and_a_named_one_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "dispatch", "--batch", "q1s32", "--calls", "2"]) == 0
    seen = capsys.readouterr()
    assert [line.split()[0] for line in seen.out.splitlines()[1:]] == ["torch_sdpa:flash", "torch_sdpa:math"]
    assert "left out: torch_sdpa:cudnn" in seen.err
    assert main(["bench", "dispatch", "--backend", "torch_sdpa:cudnn", "--calls", "2"]) == 2
    assert main(["bench", "dispatch", "--calls", "0"]) == 2
    assert "--calls 0: use a whole number, at least 1" in capsys.readouterr().err
    assert main(["bench", "dispatch", "--backend", "flex_attention", "--calls", "2"]) == 2
    assert "none of flex_attention runs on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("pair_s", "fit"), [(0.001, 900), (0.0002, LEAST_CALLS), (0.0001, 5_000), (1e-9, 20_000)])
def test_the_pairs_fit_into_the_time(monkeypatch: pytest.MonkeyPatch, pair_s: float, fit: int) -> None:
    """Half of a second is for pairs; 0.9 of it where else they were fewer than 2,000."""
    clock = iter([0.0, pair_s * 2 * bench_paths.WARM_UP])
    monkeypatch.setattr(bench_dispatch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(bench_dispatch, "pairs", lambda *args: None)
    found = fitting(lambda: None, lambda: None, 20_000, lambda: None, 1.0)
    assert abs(found - fit) <= 1 or (fit == LEAST_CALLS and found >= fit)


WORKER = """
import time
from attention.isolate import worker
with worker() as (task, channel):
    for name in task["names"]:
        channel.at(name)
        time.sleep(60 if name == "hangs" else 0)
        channel.done(name, calls=2000)
"""


def test_a_backend_that_hangs_costs_half_the_time_and_the_rows_of_the_others_are_there() -> None:
    heard: list[Outcome] = []
    measure_all(
        ["first", "hangs", "last"],
        device="cpu",
        dtype="float32",
        calls=None,
        deadline=time.monotonic() + 10,
        heard=heard.append,
        command=[sys.executable, "-c", WORKER],
    )
    assert [(one.name, one.error) for one in heard] == [
        ("first", None),
        ("hangs", heard[1].error),
        ("last", None),
    ]
    assert str(heard[1].error).startswith("no answer within")
    late: list[Outcome] = []
    measure_all(["a"], device="cpu", dtype="float32", calls=1, deadline=time.monotonic() - 1, heard=late.append)
    assert late == [Outcome("a", error=NOT_RUN)]


@pytest.mark.parametrize(("nodes", "code"), [((5, 5), 0), ((6, 5), 1)])
def test_graphs_of_unequal_size_fail(monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, int], code: int) -> None:
    one = Overhead("torch_sdpa:flash", "case", 10, 2.0, 1.0, 1.0, *nodes)
    monkeypatch.setattr(bench_dispatch, "measure", lambda *args, **kwargs: one)
    assert main(["bench", "dispatch", "--backend", "torch_sdpa:flash", "--batch", "q1s32"]) == code
    assert table([one])[1].endswith(f"{nodes[0]} against {nodes[1]}")


def test_a_graph_of_other_kernels_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Overhead("torch_sdpa:flash", "case", 10, 2.0, 1.0, 1.0, 5, 5, same_graphs=False)
    monkeypatch.setattr(bench_dispatch, "measure", lambda *args, **kwargs: one)
    assert main(["bench", "dispatch", "--backend", "torch_sdpa:flash", "--batch", "q1s32"]) == 1
    assert table([one])[1].endswith("5 against 5, not those of dispatcher and operator")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "math"])
def test_a_captured_run_has_as_many_nodes_as_the_plain_call(kernel: str) -> None:
    for case in cases(("q1s512", "q64"), "bfloat16"):
        row = measure(f"torch_sdpa:{kernel}", case, device="cuda", calls=200)
        assert row.nodes_equal, row
        assert row.same_graphs, row
