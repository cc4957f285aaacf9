"""The replay gate: tensor, model and business layer, each broken in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from attention.cases import AttentionCase, Inputs
from data.lake import Lake
from data.plan import Plan
from gates import replay
from gates.replay_tensor import beside, tensor_checks
from gates.thresholds import load_limits
from gates.verdict import Check, GateReport, Verdict

Mend = Callable[[dict[str, Any]], dict[str, Any] | None]


def tensor(evidence: Any, plan: Plan) -> GateReport:
    return layer(evidence, plan, tensor_checks)


def layer(evidence: Any, plan: Plan, checks: Callable[..., list[Check]]) -> GateReport:
    with Lake(evidence.lake) as tables:
        found = checks(tables, evidence.release, plan, load_limits("replay", plan.name))
    return GateReport(stage="replay", checks=tuple(found))


def limit(plan: Plan, name: str) -> float:
    return load_limits("replay", plan.name).value(name)


def candidate_only(change: dict[str, Any], **where: Any) -> Mend:
    """Change the candidate's rows that match."""

    def mend(row: dict[str, Any]) -> dict[str, Any]:
        matches = row["side"] == "candidate" and all(row[k] == v for k, v in where.items())
        return row | change if matches else row

    return mend


def test_a_sound_candidate_passes_all_three_layers(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.tensor()
    evidence.model()
    evidence.golden()
    found = judged(replay.judge(evidence.lake, evidence.release, plan, num_golden=48))
    assert found.verdict is Verdict.PASS, found.report.reason
    r_rms = found.checks["tensor.bfloat16.r_rms"]
    assert r_rms.detectable == f"R_rms +{100 * (r_rms.limit / 0.72 - 1):.0f} %"
    assert found.checks["tensor.bfloat16.champion_r_rms"].observed == pytest.approx(0.72)
    assert found.checks["model.decode.flip_rate"].detectable == "flip rate 1.5 % (0 of 192, 95 %)"
    assert found.checks["business.mcnemar_p"].detectable == "5 prompts lost of 48 (10 %)"


# One query asks all tables: each is broken once, and each kind of foreign row is shown by one of them.
@pytest.mark.parametrize(
    ("table", "foreign"),
    [
        ("tensor", "fp-upgraded"),
        ("model", "fp-upgraded"),
        ("golden", "fp-upgraded"),
        ("model", "fp-champion"),
        ("tensor", None),
    ],
)
def test_a_row_of_another_environment_fails(
    evidence: Any, plan: Plan, judged: Any, table: str, foreign: str | None
) -> None:
    for name in ("fingerprints", "tensor", "model", "golden"):
        getattr(evidence, name)()
    getattr(evidence, table)(candidate_only({"fingerprint_id": foreign}))
    found = judged(replay.judge(evidence.lake, evidence.release, plan, num_golden=48))
    assert found.named(Verdict.FAIL) == {"measured_rows"}


@pytest.mark.parametrize("figure", ["r_rms", "r_max", "r_row"])
def test_one_case_beyond_a_limit_fails_and_is_named(evidence: Any, plan: Plan, judged: Any, figure: str) -> None:
    beyond = 1.01 * limit(plan, figure)
    evidence.tensor(candidate_only({"r_rms": 0.9, figure: beyond}, case_id="case3", seed=1))
    found = judged(tensor(evidence, plan))
    beside = {"tensor.bfloat16.times_champion"} if figure == "r_rms" else set()
    assert found.named(Verdict.FAIL) == {f"tensor.bfloat16.{figure}"} | beside
    assert "case3" in found.report.reason


def test_rounding_that_is_worse_everywhere_fails_where_no_single_case_does(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    worse = {"champion": 1.0, "candidate": 1.01 * limit(plan, "pooled_times_champion")}
    evidence.tensor(lambda row: row | {"r_rms": worse[row["side"]] * row["r_rms"]})
    assert judged(tensor(evidence, plan)).named(Verdict.FAIL) == {"tensor.bfloat16.pooled_times_champion"}


def test_each_dtype_class_is_judged_apart_by_its_own_limit(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor()
    limits = load_limits("replay", plan.name)
    own = limits.of_class("float32").value("r_max")
    assert own > 2 * limits.value("r_max")

    def float32(r_max: float, name: str) -> Mend:
        return lambda row: row | {"dtype_class": "float32", "r_max": r_max, "case_id": row["case_id"] + name}

    evidence.tensor(float32(own / 2, "a"))
    assert tensor(evidence, plan).verdict is Verdict.PASS
    evidence.tensor(float32(own * 2, "b"))
    assert judged(tensor(evidence, plan)).named(Verdict.FAIL) == {"tensor.float32.r_max"}


def test_a_misplaced_nan_in_one_output_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    broken = {"finite_mask_equal": False, "r_rms": math.nan, "r_max": math.nan, "r_row": math.nan}
    evidence.tensor(candidate_only(broken, case_id="case3"))
    found = judged(tensor(evidence, plan))
    assert found.verdict is Verdict.FAIL
    assert found.checks["tensor.bfloat16.finite"].observed == 3


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_ratio_that_was_not_measured_is_an_error(evidence: Any, plan: Plan, judged: Any, value: float | None) -> None:
    evidence.tensor(candidate_only({"r_max": value}, case_id="case3", seed=1))
    assert judged(tensor(evidence, plan)).named(Verdict.ERROR) == {"tensor.bfloat16.r_max"}


def test_a_case_that_crashed_is_an_error_with_its_reason(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(candidate_only({"error": "illegal access", "r_rms": None}, case_id="case3"))
    found = judged(tensor(evidence, plan))
    assert found.named(Verdict.ERROR) == {"tensor.errors"}
    assert "illegal access" in found.report.reason


def test_a_lost_shard_is_an_error_though_enough_cases_are_left(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(lambda row: None if row["side"] == "candidate" and row["case_id"] == "case3" else row)
    found = judged(tensor(evidence, plan))
    assert found.named(Verdict.ERROR) == {"tensor.lost_cases", "tensor.planned_cases"}
    assert found.checks["tensor.cases"].verdict is Verdict.PASS


def test_too_few_cases_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(cases=5)
    assert judged(tensor(evidence, plan)).named(Verdict.INCONCLUSIVE) == {"tensor.cases"}


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (
            lambda row: row["seed"] > 0,
            "candidate has 32 of 48 normal in bfloat16, champion has 32 of 48 normal in bfloat16",
        ),
        (lambda row: row["side"] == "candidate", "champion has 0 of 48 normal in bfloat16"),
        (lambda row: row["side"] == "champion" or row["case_id"] != "case3", "candidate has 45 of 48 normal"),
    ],
)
def test_fewer_cases_than_planned_on_either_side_are_an_error(
    evidence: Any, plan: Plan, judged: Any, kept: Callable[[dict[str, Any]], bool], named: str
) -> None:
    evidence.tensor(lambda row: row if kept(row) else None)
    found = judged(tensor(evidence, plan))
    assert "tensor.planned_cases" in found.named(Verdict.ERROR)
    assert named in found.checks["tensor.planned_cases"].message


def with_inputs(plan: Plan, *inputs: Inputs) -> Plan:
    return plan.model_copy(update={"replay": plan.replay.model_copy(update={"inputs": inputs})})


def test_each_kind_of_inputs_that_the_plan_names_must_be_there(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor()
    evidence.tensor(lambda row: row | {"inputs": "needle"})  # twice as many rows, none of them of a sink
    found = judged(tensor(evidence, with_inputs(plan, "normal", "sink")))
    assert found.named(Verdict.ERROR) == {"tensor.planned_cases"}
    assert "candidate has 0 of 48 sink in bfloat16" in found.checks["tensor.planned_cases"].message


def test_inputs_at_the_edge_of_a_window_are_planned_where_a_case_has_one(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    case = AttentionCase(
        phase="decode", batch="q1s63", heads_q=1, heads_kv=1, head_dim_qk=8, head_dim_vo=8, dtype="bfloat16"
    )
    asking = with_inputs(plan, "normal", "window_edge")
    evidence.tensor(lambda row: row | {"case_json": case.model_dump_json()})
    assert tensor(evidence, asking).verdict is Verdict.PASS, "no case has a window"
    for window, verdict in (((63, 0), Verdict.PASS), ((31, 0), Verdict.ERROR)):
        windowed = case.model_copy(update={"window": window}).model_dump_json()
        evidence.tensor(lambda row, windowed=windowed: row | {"case_json": windowed})
        assert tensor(evidence, asking).verdict is verdict
    named = judged(tensor(evidence, asking)).checks["tensor.planned_cases"].message
    assert "champion has 0 of 6 window_edge in bfloat16" in named


def test_rows_of_a_class_that_is_always_replayed_must_be_there(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(lambda row: row | {"dtype_class": "float32"})
    assert judged(tensor(evidence, plan)).named(Verdict.ERROR) == {"tensor.planned_cases"}


def test_a_case_that_another_backend_ran_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(candidate_only({"confirmed_backend": evidence.math}, seed=1))
    assert judged(tensor(evidence, plan)).named(Verdict.FAIL) == {"tensor.confirmed"}


def test_an_lse_is_judged_where_a_backend_gives_one(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(lambda row: row | {"lse_max_abs": None})
    found = judged(tensor(evidence, plan))
    assert found.verdict is Verdict.PASS
    assert "tensor.lse" not in found.checks


@pytest.mark.parametrize(("value", "verdict"), [(0.05, Verdict.FAIL), (None, Verdict.ERROR)])
def test_an_lse_that_is_off_fails_and_one_that_went_missing_is_an_error(
    evidence: Any, plan: Plan, judged: Any, value: float | None, verdict: Verdict
) -> None:
    evidence.tensor(candidate_only({"lse_max_abs": value}, case_id="case3"))
    assert judged(tensor(evidence, plan)).named(verdict) == {"tensor.lse"}


def by_side(champion: float, candidate: float) -> Mend:
    return lambda row: row | {"r_rms": champion if row["side"] == "champion" else candidate}


def test_the_champions_own_error_gates_the_candidates_beside_it(evidence: Any, plan: Plan, judged: Any) -> None:
    within, beyond = (share * limit(plan, "times_champion") for share in (0.99, 1.01))
    assert beyond < limit(plan, "r_rms")
    evidence.tensor(lambda row: by_side(0.9, within)(row) if row["case_id"] == "case3" else row)
    found = judged(tensor(evidence, plan))
    assert found.checks["tensor.bfloat16.times_champion"].observed == pytest.approx(within)
    assert found.verdict is Verdict.PASS, "below 1 the champion's error is its rounding"
    evidence.tensor(lambda row: by_side(0.9, beyond)(row) if row["case_id"] == "case3" else None)
    found = judged(tensor(evidence, plan))
    assert found.named(Verdict.FAIL) == {"tensor.bfloat16.times_champion"}, "within r_rms and not beside 0.9"
    assert f"{round(beyond, 3)} on torch_sdpa:flash, champion 0.9 on torch_sdpa:math" in found.report.reason


def test_a_champion_that_is_as_far_off_makes_room_for_the_candidate(evidence: Any, plan: Plan) -> None:
    far_off = 0.99 * limit(plan, "r_rms")
    assert far_off > limit(plan, "times_champion")
    evidence.tensor(by_side(far_off, far_off))
    assert tensor(evidence, plan).verdict is Verdict.PASS


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_champion_without_a_figure_is_an_error_beside_the_candidate(
    evidence: Any, plan: Plan, judged: Any, value: float | None
) -> None:
    evidence.tensor(lambda row: row | {"r_rms": value} if row["side"] == "champion" and row["seed"] == 1 else row)
    assert "tensor.bfloat16.times_champion" in judged(tensor(evidence, plan)).named(Verdict.ERROR)


def test_a_champion_of_another_dtype_class_gates_nothing(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.tensor(by_side(0.6, 0.6))
    half = {"dtype_class": "float16", "r_rms": 0.99 * limit(plan, "r_rms")}
    evidence.tensor(
        lambda row: row | half | {"case_id": f"half-{row['case_id']}"} if row["side"] == "candidate" else None
    )
    found = judged(tensor(evidence, plan))
    assert found.checks["tensor.float16.r_rms"].verdict is Verdict.PASS
    assert "tensor.float16.times_champion" not in found.checks
    assert "tensor.bfloat16.times_champion" in found.checks


def test_both_sides_of_a_case_stand_in_one_row_the_worst_first(evidence: Any) -> None:
    evidence.tensor(candidate_only({"r_rms": 1.1, "worst_row_at": "member 0 token 2 head 1"}, case_id="case3", seed=2))
    with Lake(evidence.lake) as tables:
        rows = beside(tables, evidence.release, 100)
        assert len(beside(tables, evidence.release, 4)) == 4
    assert len(rows) == 16, "one a case and kind of inputs"
    first = rows[0]
    assert (first.case_id, first.r_rms, first.champion_r_rms) == ("case3", 1.1, pytest.approx(0.72))
    assert (first.backend, first.champion_backend) == (evidence.flash, evidence.math)


def test_what_quantisation_costs_is_recorded_and_gates_nothing(evidence: Any, plan: Plan) -> None:
    evidence.tensor(candidate_only({f"quantisation_{name}": 1e3 for name in ("r_rms", "r_max", "r_row")}))
    assert tensor(evidence, plan).verdict is Verdict.PASS
    with Lake(evidence.lake) as tables:
        assert beside(tables, evidence.release, 1)[0].quantisation_r_rms == 1e3


def test_nothing_replayed_is_inconclusive(evidence: Any, plan: Plan) -> None:
    assert replay.judge(evidence.lake, evidence.release, plan, num_golden=48).verdict is Verdict.INCONCLUSIVE
