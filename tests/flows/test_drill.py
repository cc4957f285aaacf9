"""`python -m flows drill`: its table, its document, its exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from attention.drill import plan
from attention.drill.kinds import KINDS
from attention.drill.published import RULES
from flows import drill as module
from flows.__main__ import main
from gates.drill import BenignResult, KindResult
from tasks.drill import Drill
from tasks.drill_release import expected
from tests.attention.drill.plans import ONE_DRAW, plan_file
from tests.commands import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path, prefect=tmp_path / "prefect")


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def found(*problems: str) -> Drill:
    kind = KindResult(
        "scale_1", "tensor.r_rms", 12, 1, 12 - len(problems), {"tensor.r_rms": 12}, {"fa2": 12, "flex": 3}, problems
    )
    race = KindResult("race", "model.kl_p999", 1, 0, 1, {"model.kl_p999": 1}, {}, ())
    return Drill(
        seed=7,
        plan="small",
        device="x86_64",
        without=None,
        limits_sha256="ab" * 32,
        checks=("tensor.r_rms", "model.kl_p999"),
        rules=("fa2", "flex"),
        num_draws=12,
        kinds=(kind, kind, race),
        no_ops=("scale_1: emulated, bfloat16 decode q1s9 ragged plain seed 1",) * 2,
        singles={"all inputs": (40, {"ours": 39, "fa2": 30, "flex": 20})},
        benign=BenignResult(432, {"block 64": 432}, 0, {"fa2": 8, "flex": 0}, ()),
        problems=problems,
    )


def shown(drill: Drill, width: int = 120) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(module.render(drill))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_table_is_aligned_and_ends_with_the_verdict() -> None:
    lines = shown(found())
    assert lines[:5] == [
        "fault              check         runs  no-op  ours  fa2  flex",
        "scale_1            tensor.r_rms    12      1    12   12     3",
        "scale_1            tensor.r_rms    12      1    12   12     3",
        "all                                24      2    24   24     6",
        "alone, all inputs                  40           39   30    20",
    ]
    assert "race                   1      0     1  model.kl_p999" in lines
    assert "sound kernels  runs  ours  fa2  flex" in lines
    assert "false alarms    432     0    8     0" in lines
    assert "no-op: scale_1 on bfloat16 decode q1s9 (2)" in lines
    assert lines[-2:] == ["limits abababababab, seed 7, 12 draws, x86_64", "pass"]


def in_full() -> Drill:
    """Every kind of every layer, figures of four digits and all rules."""
    kinds = [
        KindResult(kind.name, f"tensor.{kind.check}", 1234, 12, 1234, {}, dict.fromkeys(RULES, 1200), ())
        for kind in KINDS
    ]
    whole = [KindResult(one.kind, one.check, 6, 0, 6, {}, {}, ()) for one in expected(plan.load_plan("full"))]
    rejected = dict.fromkeys(("ours", *RULES), 39000)
    return found().model_copy(
        update={
            "kinds": (*kinds, *whole),
            "rules": RULES,
            "singles": {"all inputs": (40000, rejected), "normal inputs": (4000, rejected)},
            "benign": BenignResult(5764, {}, 0, dict.fromkeys(RULES, 12), ()),
        }
    )


@pytest.mark.parametrize("width", [80, 120, 160])
def test_its_columns_stand_under_their_names_in_a_pipe_of_eighty(width: int) -> None:
    lines = shown(in_full(), width)
    assert max(map(len, lines)) <= width
    head = next(number for number, line in enumerate(lines) if line.startswith("fault  "))
    rows = lines[head + 1 : head + 1 + len(KINDS)]
    assert [line.split()[0] for line in rows] == [kind.name for kind in KINDS], "a line a kind"
    ends = {name: lines[head].index(name) + len(name) for name in ("runs", "no-op", "ours")}
    for line in rows:
        assert [line[: ends[name]].split()[-1] for name in ends] == ["1234", "12", "1234"]
    assert not any(line.startswith(("fault first", "fault of a release gqa")) for line in lines), "no pairs"


def test_in_a_narrow_pipe_the_rules_of_others_have_a_table_of_their_own() -> None:
    lines = shown(in_full(), 80)
    at = lines.index("fault, rejected by        1e-2      1e-3    fa2    fa3   flex       bench")
    assert lines[at - 1] == "                      allclose  allclose                       flashinfer"
    assert lines[at + 1] == "first_key_dropped         1200      1200   1200   1200   1200        1200"
    assert "flashinfer_bench" in "\n".join(shown(in_full(), 160))


def test_kinds_that_go_around_no_backend_are_named() -> None:
    told = shown(found().model_copy(update={"not_carried": ("merge_base2", "padding_leak")}))
    assert "not shown here, as they go around no backend of the plan: merge_base2, padding_leak" in told


def test_a_problem_is_told_before_the_verdict_and_sets_the_exit_code() -> None:
    failed = found("scale_1: 1 of 12 escaped tensor.r_rms")
    assert shown(failed)[-2:] == ["scale_1: 1 of 12 escaped tensor.r_rms", "fail"]
    assert (found().exit_code, failed.exit_code) == (0, 1)


def test_a_check_that_there_is_not_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flows", "drill", "--small", "--without", "tensor.r_rsm"])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --without tensor.r_rsm: no check of this plan; did you mean tensor.r_rms")
    assert said.count("\n") == 1


def test_without_a_check_its_kinds_escape_and_the_command_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan_file(tmp_path / "small.yaml", **ONE_DRAW)
    monkeypatch.setattr(plan, "FOLDER", tmp_path)
    words = ["flows", "drill", "--small", "--seed", "7", "--json"]
    escaped = []
    for more in ([], ["--without", "tensor.lse"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        assert main() == 1, "one draw has too few sound runs"
        said = capsys.readouterr()
        assert "seed 7 (repeat with --seed 7)" in said.err
        escaped.append([p.split(";")[0] for p in json.loads(said.out)["problems"] if "escaped" in p])
    assert escaped[0] == []
    assert escaped[1] == [
        f"{kind}: 1 of 1 escaped tensor.lse" for kind in ("merge_base2", "lse_base2", "sinks_ignored")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "nowhere"], "--rows nowhere: no drill.json there"),
        (["--rows", "nowhere", "--small"], "--rows has a plan and a seed of its own"),
        (["--small", "--without", "model.kl_mean"], "--without model.kl_mean: no check of this plan"),
    ],
)
def test_a_bad_flag_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["flows", "drill", *words])
    assert main() == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_ctrl_c_ends_it_and_its_workers(home: Home) -> None:
    drill = home.start("drill", "--small", "--json")
    drill.wait_for(lambda: "of 12 draws" in drill.err.read_text(), timeout_s=200)
    drill.interrupt(group=True)
    assert drill.child.wait(timeout=30) == 130
    assert drill.out.read_text() == "", "no half document"
    assert "Traceback" not in drill.err.read_text()
    until(lambda: home.processes() == [])


@pytest.mark.timeout(300)
def test_the_small_drill_catches_every_fault_and_nothing_sound_on_fresh_seeds(home: Home) -> None:
    """The command as it is, with seeds that nobody has seen; about half a minute on one core."""
    done = home.run("drill", "--small", "--json", OMP_NUM_THREADS="1")
    document = json.loads(done.stdout)
    assert done.returncode == 0, document["problems"]
    assert document["benign"]["num_runs"] >= 300 and document["benign"]["false_alarms"] == 0
    assert all(one["effective"] and one["caught"] == one["effective"] for one in document["kinds"])
    assert f"repeat with --seed {document['seed']}" in done.stderr
