"""The drill's gate: what trips, what counts as a fault, and that nothing missing is a pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from attention.drill.rows import Figures, Row
from data.lake import Lake
from data.plan import load_plan
from gates import drill as gate
from gates import replay
from gates.thresholds import load_limits
from gates.verdict import Verdict
from tests.gates.conftest import Evidence

GOOD = Figures(num_masks=0, r_rms=0.6, r_max=1.1, r_row=1.0, lse=1e-6, champion_r_rms=0.6)
NONE = Figures(num_masks=0, r_rms=0, r_max=0, r_row=0, lse=0)
LIMITS = load_limits("replay", "full").of_class("bfloat16")
BESIDE = ("tensor.times_champion", "tensor.pooled_times_champion")
CHECKS = ("tensor.finite", "tensor.r_rms", "tensor.r_max", "tensor.r_row", *BESIDE, "tensor.lse")


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "kind": "scale_5",
        "backend": "emulated",
        "variant": "",
        "confirmed": None,
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


def beyond(name: str) -> float:
    """A figure that its limit just does not allow."""
    return 1.01 * LIMITS.value(name)


def many(change: dict[str, float], good: int = 20) -> list[Figures]:
    """Sound figures and one that is not: a worst case shows, a pooled figure hardly moves."""
    return [*[GOOD] * good, replace(GOOD, **change)]


BROKEN = [
    ("tensor.finite", many({"num_masks": 1})),
    ("tensor.r_rms", many({"r_rms": beyond("r_rms"), "champion_r_rms": LIMITS.value("r_rms")})),
    ("tensor.r_max", many({"r_max": beyond("r_max")})),
    ("tensor.r_row", many({"r_row": beyond("r_row")})),
    ("tensor.times_champion", many({"r_rms": beyond("times_champion")})),
    ("tensor.pooled_times_champion", [replace(GOOD, r_rms=beyond("pooled_times_champion") * GOOD.r_rms)] * 3),
    ("tensor.lse", many({"lse": beyond("lse")})),
]


def test_the_checks_are_those_of_the_replay_gates_suites() -> None:
    assert gate.checks() == CHECKS


@pytest.mark.parametrize(("check", "figures"), BROKEN)
def test_each_check_trips_on_its_figure_alone(check: str, figures: list[Figures]) -> None:
    assert gate.tripped([GOOD], LIMITS) == ()
    assert gate.tripped(figures, LIMITS) == (check,)
    assert gate.tripped(figures, LIMITS, without=check) == ()


def test_what_was_not_measured_trips_but_for_an_lse_never_given_and_a_champion_that_ran_none() -> None:
    assert gate.tripped([replace(GOOD, r_rms=math.nan)], LIMITS) == ("tensor.r_rms", *BESIDE)
    assert gate.tripped([replace(GOOD, champion_r_rms=math.nan)], LIMITS) == BESIDE
    assert gate.tripped([replace(GOOD, lse=math.nan)], LIMITS) == ("tensor.lse",)
    assert gate.tripped([], LIMITS) == CHECKS[:4]
    assert gate.tripped([replace(GOOD, lse=None)], LIMITS) == ()
    assert gate.tripped([replace(GOOD, champion_r_rms=None)], LIMITS) == ()


@pytest.mark.parametrize(
    "figures",
    [
        [GOOD],
        [replace(GOOD, r_max=math.nan)],
        [replace(GOOD, r_row=LIMITS.value("r_row"))],
        many({"r_rms": 0.99 * LIMITS.value("times_champion")}),  # beyond it, were the champion's 0.6 not counted as 1
        *(figures for _, figures in BROKEN),
    ],
)
def test_the_short_way_and_the_replay_gate_itself_say_the_same(figures: list[Figures], evidence: Evidence) -> None:
    """The same figures as rows of `tensor_replay`, before the gate of a release."""
    rows = [
        evidence.backend(side)
        | {"case_id": f"case{number}", "inputs": "normal", "seed": 1, "dtype_class": "bfloat16", "bias_z": 0.5}
        | {"finite_mask_equal": not one.num_masks, "lse_max_abs": one.lse, "r_max": one.r_max, "r_row": one.r_row}
        | {"r_rms": one.r_rms if side == "candidate" else one.champion_r_rms}
        for number, one in enumerate(figures)
        for side in ("champion", "candidate")
    ]
    evidence.write("tensor_replay", rows)
    with Lake(evidence.lake, release_id=evidence.release) as tables:
        found = replay.tensor_checks(tables, evidence.release, load_plan("full"), load_limits("replay", "full"))
    failed = {f"tensor.{check.check.split('.')[-1]}" for check in found if check.verdict is not Verdict.PASS}
    assert failed & set(CHECKS) == set(gate.tripped(figures, LIMITS))


def test_a_run_is_judged_by_its_worst_inputs() -> None:
    found = gate.runs(
        [
            row(inputs="normal"),
            row(inputs="needle", figures=replace(GOOD, r_row=beyond("r_row")), effect=replace(NONE, r_row=9.0)),
            row(inputs="normal", seed=2),
        ]
    )
    assert [(run.tripped, run.no_op) for run in found] == [(("tensor.r_row",), False), ((), True)]
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
        {"lse_effect": 1.01},
        {"lse_effect": math.nan},
    ],
)
def test_a_fault_that_changes_the_oracle_in_any_way_is_no_no_op(change: dict[str, Any]) -> None:
    assert gate.is_no_op([row(), row()], 1.0)
    assert not gate.is_no_op([row(), row(**change)], 1.0)


SCALE = gate.Expected("scale_5", "tensor.r_rms")


def judged(
    *, faults: list[Row] | None = None, benign: list[Row] | None = None, without: str | None = None
) -> list[str]:
    """Problems of a drill of one kind and 300 sound runs, each with changes."""
    caught = row(figures=replace(GOOD, r_rms=beyond("r_rms")), effect=replace(NONE, r_rms=9.0))
    faults = [replace(caught, seed=seed) for seed in range(20)] + (faults or [])
    sound = [row(kind=None, variant="block 64", seed=seed, effect=None) for seed in range(300)]
    found = gate.runs([*faults, *(sound if benign is None else benign)], without)
    return gate.problems([gate.kind_result(SCALE, found, ("fa2",))], gate.benign_result(found, ("fa2",)))


def test_all_caught_and_nothing_sound_is_no_problem() -> None:
    assert judged() == []


def test_a_fault_that_its_own_check_does_not_catch_escapes_also_when_another_does() -> None:
    (problem,) = judged(
        faults=[row(figures=replace(GOOD, r_row=beyond("r_row")), effect=replace(NONE, r_row=9.0), seed=99)]
    )
    assert problem.startswith("scale_5: 1 of 21 escaped tensor.r_rms")
    assert problem.endswith("seed 99: tripped tensor.r_row")


def test_without_its_check_every_run_of_a_kind_escapes() -> None:
    assert judged(without="tensor.r_rms")[0].startswith("scale_5: 20 of 20 escaped tensor.r_rms")
    assert judged(without="tensor.r_max") == []


def test_a_suite_that_lost_its_expectation_lets_its_kinds_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(one for one in gate.expectations() if one.meta.check != "r_rms")
    monkeypatch.setattr(gate, "expectations", lambda: left)
    assert judged()[0].startswith("scale_5: 20 of 20 escaped tensor.r_rms")


def test_a_false_alarm_fails_the_drill_and_is_named() -> None:
    sound = [row(kind=None, variant="block 64", seed=seed, effect=None) for seed in range(300)]
    sound[7] = replace(sound[7], figures=replace(GOOD, r_max=beyond("r_max")))
    (problem,) = judged(benign=sound)
    assert problem.startswith("1 of 300 sound runs raised an alarm; emulated, block 64")
    assert problem.endswith("seed 7: tensor.r_max")


def test_too_little_evidence_fails_the_drill() -> None:
    assert judged(benign=[]) == ["0 sound runs; at least 300"]
    no_ops = [row(seed=seed) for seed in range(100, 103)]
    assert judged(faults=no_ops[:2]) == []
    assert judged(faults=no_ops) == ["13.0% of the faults are no-ops; at most 10%"]
    nothing = gate.problems(
        [gate.kind_result(gate.Expected("gone", "tensor.r_rms"), [], ())], gate.BenignResult(300, {}, 0, {}, ())
    )
    assert nothing[0] == "gone: no run changed the oracle, so nothing was shown"


def test_a_call_that_raised_or_ran_another_kernel_is_no_sound_run() -> None:
    sound = {"kind": None, "backend": "flash_attn:fa2", "effect": None}
    (raised,) = gate.runs([row(**sound, figures=None, error="illegal access")])
    assert "tensor.errors" in raised.tripped
    (other,) = gate.runs([row(**sound, confirmed="flash_attn:fa4")])
    assert other.tripped == ("tensor.confirmed",)
    assert gate.runs([row(**sound, confirmed="flash_attn:fa2")])[0].tripped == ()


def test_where_no_published_rule_judges_none_is_counted() -> None:
    run = gate.Run("race", "a release", "one release", False, ("model.kl_p999",), published=None)
    assert gate.kind_result(gate.Expected("race", "model.kl_p999"), [run], ("fa2",)).published == {}
