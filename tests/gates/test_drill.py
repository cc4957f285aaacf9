"""The drill's gate: what trips, what counts as a fault, and that nothing missing is a pass."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pandas as pd
import pytest

from attention.drill.rows import Figures, Row
from attention.errors import UserError
from gates import drill as gate
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import load_limits
from gates.verdict import Verdict

GOOD = Figures(num_masks=0, r_rms=0.7, r_max=1.1, r_row=1.0, lse=1e-6, num_changed=0)
NONE = Figures(num_masks=0, r_rms=0, r_max=0, r_row=0, lse=0, num_changed=None)
LIMITS = load_limits("replay", "full").of_class("bfloat16")
CHECKS = ("finite", "r_rms", "r_max", "r_row", "lse", "repeat")


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "role": "fault",
        "subject": "scale_5",
        "feature": "plain",
        "dtype": "bfloat16",
        "phase": "decode",
        "batch": "q1s63",
        "layout": "ragged",
        "inputs": "normal",
        "seed": 1,
        "figures": GOOD,
        "published": {"fa2": False},
        "effect": NONE,
    }
    return Row(**{**fields, **changes})


BROKEN = [
    ("finite", {"num_masks": 1}),
    ("r_rms", {"r_rms": 1.6}),
    ("r_max", {"r_max": 2.1}),
    ("r_row", {"r_row": 2.1}),
    ("lse", {"lse": 2e-3}),
    ("repeat", {"num_changed": 1}),
]


def test_the_checks_are_those_of_the_replay_gates_suites_and_repeat() -> None:
    assert gate.checks() == CHECKS
    assert gate.checks("lse") == CHECKS[:4] + CHECKS[5:]
    with pytest.raises(UserError, match="--without r_rsm: no such check; did you mean r_rms"):
        gate.checks("r_rsm")


@pytest.mark.parametrize(("check", "change"), BROKEN)
def test_each_check_trips_on_its_figure_alone(check: str, change: dict[str, float]) -> None:
    assert gate.tripped([GOOD], LIMITS, CHECKS) == ()
    assert gate.tripped([GOOD, replace(GOOD, **change)], LIMITS, CHECKS) == (check,)
    left = tuple(name for name in CHECKS if name != check)
    assert gate.tripped([replace(GOOD, **change)], LIMITS, left) == ()


def test_what_was_not_measured_trips_and_an_lse_that_a_backend_never_gives_does_not() -> None:
    assert gate.tripped([replace(GOOD, r_rms=math.nan)], LIMITS, CHECKS) == ("r_rms",)
    assert gate.tripped([replace(GOOD, lse=math.nan)], LIMITS, CHECKS) == ("lse",)
    assert gate.tripped([replace(GOOD, num_changed=None)], LIMITS, CHECKS) == ("repeat",)
    assert gate.tripped([], LIMITS, CHECKS) == ("finite", "r_rms", "r_max", "r_row", "repeat")
    assert gate.tripped([replace(GOOD, lse=None)], LIMITS, CHECKS) == ()


@pytest.mark.parametrize("change", [{}, *(change for _, change in BROKEN), {"r_max": math.nan}, {"r_row": 2.0}])
def test_the_short_way_and_great_expectations_say_the_same(change: dict[str, float]) -> None:
    figures = replace(GOOD, **change)
    frame = pd.DataFrame([{**asdict(figures), "bias_z": 0.0}])
    failed = []
    for name in gate.SUITES:
        suite = load_suite(name)
        notes = {check: Note("1 row", 1) for check in suite.checks}
        failed += [c.check for c in evaluate(suite, frame, LIMITS, notes) if c.verdict is not Verdict.PASS]
    assert tuple(failed) == gate.tripped([figures], LIMITS, CHECKS)


def test_a_run_is_judged_by_its_worst_inputs() -> None:
    found = gate.runs(
        [
            row(inputs="normal"),
            row(inputs="needle", figures=replace(GOOD, r_row=9.0, num_changed=None), effect=replace(NONE, r_row=9.0)),
            row(inputs="normal", seed=2),
        ]
    )
    assert [(run.tripped, run.no_op) for run in found] == [(("r_row",), False), ((), True)]
    assert gate.singles(found, ("ours", "fa2")) == (1, {"ours": 1, "fa2": 0})
    assert gate.singles(found, ("ours",), "normal") == (0, {"ours": 0})


@pytest.mark.parametrize(
    "change",
    [
        {"effect": replace(NONE, r_rms=1.01)},
        {"effect": replace(NONE, r_max=1.01)},
        {"effect": replace(NONE, r_row=1.01)},
        {"effect": replace(NONE, r_row=math.nan)},
        {"effect": replace(NONE, num_masks=1)},
        {"effect": replace(NONE, num_changed=1)},
        {"lse_effect": 1.01},
        {"lse_effect": math.nan},
    ],
)
def test_a_fault_that_changes_the_oracle_in_any_way_is_no_no_op(change: dict[str, Any]) -> None:
    assert gate.is_no_op([row(), row()], 1.0)
    assert not gate.is_no_op([row(), row(**change)], 1.0)


def judged(
    *, faults: list[Row] | None = None, benign: list[Row] | None = None, without: str | None = None
) -> list[str]:
    """Problems of a drill of one kind and 300 sound runs, each with changes."""
    caught = row(figures=replace(GOOD, r_rms=9.0), effect=replace(NONE, r_rms=9.0))
    faults = [replace(caught, seed=seed) for seed in range(20)] + (faults or [])
    sound = [row(role="benign", subject="block 64", seed=seed, effect=None) for seed in range(300)]
    found = gate.runs([*faults, *(sound if benign is None else benign)], without)
    return gate.problems([gate.kind_result("scale_5", "r_rms", found, ("fa2",))], gate.benign_result(found, ("fa2",)))


def test_all_caught_and_nothing_sound_is_no_problem() -> None:
    assert judged() == []


def test_a_fault_that_its_own_check_does_not_catch_escapes_also_when_another_does() -> None:
    (problem,) = judged(faults=[row(figures=replace(GOOD, r_row=9.0), effect=replace(NONE, r_row=9.0), seed=99)])
    assert problem.startswith("scale_5: 1 of 21 escaped r_rms")
    assert problem.endswith("seed 99: tripped r_row")


def test_without_its_check_every_run_of_a_kind_escapes() -> None:
    assert judged(without="r_rms")[0].startswith("scale_5: 20 of 20 escaped r_rms")
    assert judged(without="r_max") == []


def test_a_suite_that_lost_its_expectation_lets_its_kinds_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(one for one in gate.expectations() if one.meta.check != "r_rms")
    monkeypatch.setattr(gate, "expectations", lambda: left)
    assert judged()[0].startswith("scale_5: 20 of 20 escaped r_rms")


def test_a_false_alarm_fails_the_drill_and_is_named() -> None:
    sound = [row(role="benign", subject="block 64", seed=seed, effect=None) for seed in range(300)]
    sound[7] = replace(sound[7], figures=replace(GOOD, r_max=2.5))
    (problem,) = judged(benign=sound)
    assert problem.startswith("1 of 300 sound runs raised an alarm; block 64")
    assert problem.endswith("seed 7: r_max")


def test_too_little_evidence_fails_the_drill() -> None:
    assert judged(benign=[]) == ["0 sound runs; at least 300"]
    no_ops = [row(seed=seed) for seed in range(100, 103)]
    assert judged(faults=no_ops[:2]) == []
    assert judged(faults=no_ops) == ["13.0% of the faults are no-ops; at most 10%"]
    nothing = gate.problems([gate.kind_result("gone", "r_rms", [], ())], gate.BenignResult(300, {}, 0, {}, ()))
    assert nothing[0] == "gone: no run changed the oracle, so nothing was shown"
