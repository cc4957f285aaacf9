"""The drill as a whole on one draw, and the small plan as `make test` runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attention.drill import plan
from attention.drill.kinds import KINDS
from attention.errors import UserError
from gates import drill as gate
from gates.evaluate import load_suite
from tasks import drill as task


@pytest.fixture
def one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small plan of one draw, in which every kind can show."""
    monkeypatch.setattr(
        plan, "SMALL", replace(plan.SMALL, dtypes=("bfloat16",), shapes=plan.SMALL.shapes[2:], layouts=("paged_nhd",))
    )


def but_few(problems: tuple[str, ...]) -> list[str]:
    """Problems other than that one draw has few sound runs."""
    return [problem for problem in problems if "at least 300" not in problem]


def test_every_kind_is_caught_by_its_check_and_without_it_escapes(one_draw: None) -> None:
    found = task.drill(small=True, seed=7)
    assert but_few(found.problems) == []
    assert [one.caught for one in found.kinds] == [1] * len(KINDS)
    assert (found.seed, found.num_draws, found.checks) == (7, 1, gate.checks())
    assert found.exit_code == 1, "one draw has too few sound runs"
    assert found.benign.false_alarms == 0 and found.benign.num_runs > 20


def test_each_check_is_needed(one_draw: None) -> None:
    from attention.drill.run import rows_of

    (draw,) = plan.draws(plan.SMALL, 7)
    rows = list(rows_of(draw, ()))
    for check in gate.checks():
        found = gate.runs(rows, check)
        named = [kind for kind in KINDS if kind.check == check]
        assert named, check
        results = [gate.kind_result(kind.name, kind.check, found, ()) for kind in KINDS]
        escaped = {one.kind for one in results if one.escaped}
        assert escaped == {kind.name for kind in named}


def test_two_checks_are_all_that_sees_their_fault(one_draw: None) -> None:
    from attention.drill.run import rows_of

    (draw,) = plan.draws(plan.SMALL, 7)
    kinds = tuple(kind for kind in KINDS if kind.name in ("lse_base2", "non_determinism"))
    tripped = {run.subject: run.tripped for run in gate.runs(rows_of(draw, (), kinds)) if run.role == "fault"}
    assert tripped == {"lse_base2": ("lse",), "non_determinism": ("repeat",)}


def test_a_seed_repeats_a_drill_and_none_draws_a_fresh_one() -> None:
    assert list(plan.draws(plan.SMALL, 7)) == list(plan.draws(plan.SMALL, 7)) != list(plan.draws(plan.SMALL, 8))
    assert task.fresh_seed() != task.fresh_seed()


def test_limits_that_change_while_it_runs_make_it_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL", replace(plan.SMALL, repeats=0))
    hashes = iter(["before", "after"])
    monkeypatch.setattr(task, "limits_sha256", lambda: next(hashes))
    with pytest.raises(UserError, match="the limits changed while the drill ran"):
        task.drill(small=True)


def test_the_hash_is_that_of_every_file_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = task.limits_sha256()
    changed = tmp_path / "thresholds.yaml"
    changed.write_text(task.THRESHOLDS_FILE.read_text().replace("value: 1.5,", "value: 1.6,", 1))
    monkeypatch.setattr(task, "THRESHOLDS_FILE", changed)
    assert task.limits_sha256() != before
    assert all(load_suite(name) for name in gate.SUITES)


def test_a_plan_has_every_dtype_phase_and_layout() -> None:
    assert (
        {shape[0] for shape in plan.FULL.shapes} == {"prefill", "decode", "extend"} == {s[0] for s in plan.SMALL.shapes}
    )
    assert len(plan.FULL.dtypes) == 3 and len(plan.FULL.layouts) == 4
    for one in (plan.SMALL, plan.FULL):
        draws = list(plan.draws(one, 1))
        assert len({draw.seed for draw in draws}) == len(draws)
        assert len(draws) * len(one.variants) * 7 >= gate.load_limits("drill", gate.PLAN).value("min_benign")


def test_the_document_is_json(one_draw: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL", replace(plan.SMALL, repeats=0))
    document = json.loads(task.drill(small=True, seed=7).model_dump_json())
    assert document["seed"] == 7
    assert {one["kind"] for one in document["kinds"]} == {kind.name for kind in KINDS}
    assert document["problems"][0].endswith("no run changed the oracle, so nothing was shown")
