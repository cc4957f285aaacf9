"""The drill as a whole on one draw, here and from measured rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention.drill import measure
from attention.drill.kinds import KINDS
from attention.drill.plan import draws, load_plan
from attention.drill.rows import read_rows, write_rows
from attention.drill.run import rows_of
from attention.errors import UserError
from gates import drill as gate
from gates.thresholds import load_limits
from tasks import drill as task
from tests.attention.drill.plans import ONE_DRAW, SMALL, plan_file, small_plan

REAL: dict[str, Any] = {**ONE_DRAW, "variants": (), "faulted": ("torch_sdpa:flash", "torch_sdpa:math")}


@pytest.fixture
def one_draw(tmp_path: Path) -> str:
    return str(plan_file(tmp_path / "plan.yaml", **ONE_DRAW))


def but_few(problems: tuple[str, ...]) -> list[str]:
    """Problems other than that one draw has few sound runs."""
    return [problem for problem in problems if "at least 300" not in problem]


def test_every_kind_is_caught_by_its_check(one_draw: str) -> None:
    found = task.drill(one_draw, seed=7)
    assert but_few(found.problems) == []
    assert [one.caught for one in found.kinds] == [1] * len(KINDS)
    assert (found.seed, found.num_draws, set(found.checks)) == (7, 1, set(gate.checks()))
    assert found.exit_code == 1, "one draw has too few sound runs"
    assert found.benign.false_alarms == 0 and found.benign.num_runs > 20
    assert json.loads(found.model_dump_json())["kinds"][0]["kind"] == "first_key_dropped"


def test_without_any_check_its_kinds_escape_and_no_other() -> None:
    plan = small_plan(**{**ONE_DRAW, "variants": (), "backends": ()})
    (draw,) = draws(plan, 7)
    rows = list(rows_of(draw, plan))
    for check in gate.checks():
        found = gate.runs(rows, check)
        results = [gate.kind_result(gate.Expected(kind.name, f"tensor.{kind.check}"), found, ()) for kind in KINDS]
        named = {kind.name for kind in KINDS if f"tensor.{kind.check}" == check}
        assert named and {one.kind for one in results if one.escaped} == named
        assert gate.problems(results, gate.BenignResult(300, {}, 0, {}, ())), "so the command exits 1"


def test_each_expectation_of_the_suites_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken out of a suite's file is missed, not only what is left out by name."""
    plan = small_plan(**{**ONE_DRAW, "variants": (), "backends": ()})
    (draw,) = draws(plan, 7)
    rows, all_of_them = list(rows_of(draw, plan)), gate.expectations()
    for gone in all_of_them:
        monkeypatch.setattr(gate, "expectations", lambda gone=gone: tuple(e for e in all_of_them if e is not gone))
        found = gate.runs(rows)
        results = [gate.kind_result(gate.Expected(kind.name, f"tensor.{kind.check}"), found, ()) for kind in KINDS]
        assert any(one.escaped for one in results), gone.meta.check


def test_the_lse_is_all_that_sees_its_fault() -> None:
    plan = small_plan(**{**ONE_DRAW, "variants": (), "backends": ()})
    (draw,) = draws(plan, 7)
    kinds = tuple(kind for kind in KINDS if kind.name == "lse_base2")
    assert [run.tripped for run in gate.runs(rows_of(draw, plan, kinds))] == [("tensor.lse",)]


def test_a_seed_repeats_a_drill_and_none_draws_a_fresh_one(tmp_path: Path) -> None:
    assert list(draws(SMALL, 7)) == list(draws(SMALL, 7)) != list(draws(SMALL, 8))
    plan = str(plan_file(tmp_path / "plan.yaml", **{**ONE_DRAW, "shapes": [{"phase": "prefill", "batch": "q17"}]}))
    first, second = (task.drill(plan).seed for _ in range(2))
    assert first != second


def test_limits_that_change_while_it_runs_make_it_worthless(one_draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attention.drill import measured

    hashes = iter(["before", "after"])
    monkeypatch.setattr(measured, "sha256_of", lambda paths: next(hashes))
    monkeypatch.setattr(task, "_runs", lambda *args: [])
    with pytest.raises(UserError, match="the limits changed while the drill ran"):
        task.drill(one_draw)


@pytest.mark.parametrize("name", ["small", "full"])
def test_a_plan_has_every_phase_and_enough_sound_runs(name: str) -> None:
    plan = load_plan(name)
    assert {shape.phase for shape in plan.shapes} == {"prefill", "decode", "extend"}
    planned = list(draws(plan, 1))
    assert len({draw.seed for draw in planned}) == len(planned)
    assert len(planned) * len(plan.variants) * 7 >= load_limits("drill", gate.PLAN).value("min_benign")


def measured(tmp_path: Path, *frozen: Path) -> Path:
    """A folder of one draw of real backends on the CPU, by the command that a GPU machine runs."""
    plan, out = plan_file(tmp_path / "plan.yaml", **REAL), tmp_path / "rows"
    words = ["--plan", str(plan), "--out", str(out), "--seed", "7", "--frozen", *map(str, frozen or task.FROZEN)]
    assert measure.main(words) == 0
    return out


@pytest.fixture(scope="module")
def real_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder, for tests that only read or copy it."""
    return measured(tmp_path_factory.mktemp("measured"))


def test_what_was_measured_elsewhere_is_judged_alike(real_rows: Path) -> None:
    found = task.judge_rows(real_rows)
    assert but_few(found.problems) == []
    assert set(found.benign.subjects) == {"torch_sdpa:flash", "torch_sdpa:math"}
    caught = {one.kind: one.caught for one in found.kinds}
    # Arguments and outputs of both; what sits inside a kernel goes around none.
    assert caught["scale_5"] == 2 and caught["window_ignored"] == 2 and caught["stale_output"] == 2
    assert "bf16_accumulation" not in caught
    left_out = task.judge_rows(real_rows, without="tensor.r_max")
    assert any(problem.startswith("element_off: 2 of 2 escaped") for problem in left_out.problems)


def test_rows_that_were_measured_under_other_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured under other limits; measure again with --frozen"):
        task.judge_rows(measured(tmp_path, tmp_path / "plan.yaml"))


def test_a_folder_without_a_drill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no drill\.json there; measure with"):
        task.judge_rows(tmp_path)


def without_a_kind(out: Path) -> None:
    path = out / "draw-0000.parquet"
    write_rows(path, [row for row in read_rows(path) if row.kind != "scale_1"])


def of_another_plan(out: Path) -> None:
    asked = json.loads((out / "drill.json").read_text())
    asked["plan"]["backends"] = asked["plan"]["backends"][:1]
    (out / "drill.json").write_text(json.dumps(asked))


def as_if_never_finished(out: Path) -> None:
    said = json.loads((out / "measured.json").read_text())
    (out / "measured.json").write_text(json.dumps({**said, "complete": False}))


def of_fewer_kinds(out: Path) -> None:
    said = json.loads((out / "measured.json").read_text())
    (out / "measured.json").write_text(json.dumps({**said, "kinds": said["kinds"][:-1]}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda out: (out / "draw-0000.parquet").unlink(),
            r"1 draws are missing, draw-0000\.parquet first; measure",
        ),
        (
            lambda out: (out / "measured.json").unlink(),
            r"no measured\.json, so nobody knows what is missing;",
        ),
        (without_a_kind, r"draw-0000\.parquet: not as it was measured \(\d+ of \d+ rows: scale_1 0 of 6\); delete it"),
        (of_another_plan, r"drill\.json: not the one that was measured; put it back"),
        (as_if_never_finished, r"measured\.json: says that the drill is not complete; measure on"),
        (of_fewer_kinds, r"measured\.json: of other kinds of fault \(wrong_row\); measure into a new folder"),
    ],
)
def test_a_folder_that_lacks_anything_is_refused(
    real_rows: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    out = tmp_path / "rows"
    shutil.copytree(real_rows, out)
    spoil(out)
    with pytest.raises(UserError, match=said):
        task.judge_rows(out)


def test_kinds_that_no_backend_carries_are_told(real_rows: Path) -> None:
    found = task.judge_rows(real_rows)
    assert "bf16_accumulation" in found.not_carried and "scale_5" not in found.not_carried
    assert {one.kind for one in found.kinds} | set(found.not_carried) == {kind.name for kind in KINDS}


def test_a_plan_of_another_device_is_measured_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"measures on cuda: python -m attention\.drill\.measure, then --rows"):
        task.drill("h200")
