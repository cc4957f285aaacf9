"""The model layer of the replay gate: its limits, its floor and its buckets, each broken in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from data.lake import Lake
from data.plan import Plan
from gates.replay_model import buckets, divergences, model_checks
from gates.thresholds import load_limits
from gates.verdict import GateReport, Verdict

Mend = Callable[[dict[str, Any]], dict[str, Any] | None]
FLIP = {"next_token_equal": False, "flip_margin": 0.1}
BOTH = ("prefill", "decode")


def model(evidence: Any, plan: Plan) -> GateReport:
    with Lake(evidence.lake) as tables:
        found = model_checks(tables, evidence.release, plan, load_limits("replay", plan.name))
    return GateReport(stage="replay", checks=tuple(found))


def side_only(side: str, change: dict[str, Any], **where: Any) -> Mend:
    """Change one side's rows that match."""

    def mend(row: dict[str, Any]) -> dict[str, Any]:
        matches = row["side"] == side and all(row[k] == v for k, v in where.items())
        return row | change if matches else row

    return mend


def candidate_only(change: dict[str, Any], **where: Any) -> Mend:
    return side_only("candidate", change, **where)


def limit(plan: Plan, name: str) -> float:
    return load_limits("replay", plan.name).value(name)


def test_sound_evidence_passes_and_says_what_it_could_have_seen(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model()
    found = judged(model(evidence, plan))
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["model.decode.flip_rate"].detectable == "flip rate 1.5 % (0 of 192, 95 %)"
    least = limit(plan, "kl_mean_floor_least") * limit(plan, "kl_mean_floor_ratio")
    assert found.checks["model.prefill.kl_mean_times"].detectable == f"mean KL {least:.2g}"


def test_prefill_and_decode_are_judged_apart(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(candidate_only({"kl": 0.01}, mode="decode"))
    failed = judged(model(evidence, plan)).named(Verdict.FAIL)
    assert "model.decode.kl_mean" in failed
    assert all(name.startswith("model.decode.") for name in failed)


def test_the_tail_of_the_divergence_fails_where_its_mean_passes(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(candidate_only({"kl": 0.3}, mode="prefill", prompt_id="p1", position=7))
    assert judged(model(evidence, plan)).named(Verdict.FAIL) == {"model.prefill.kl_p999", "model.prefill.kl_p999_times"}


def test_flips_of_ties_pass_and_a_flip_against_a_clear_margin_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(candidate_only(FLIP, prompt_id="p1", position=7))
    assert model(evidence, plan).verdict is Verdict.PASS
    evidence.model(candidate_only(FLIP | {"flip_margin": 2.5}, prompt_id="p2", position=7))
    found = judged(model(evidence, plan))
    assert found.named(Verdict.FAIL) == {
        f"model.{mode}.flip_margin{times}" for mode in BOTH for times in ("", "_times")
    }


def test_too_many_flips_fail(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(candidate_only(FLIP, mode="prefill", prompt_id="p1"))
    failed = judged(model(evidence, plan)).named(Verdict.FAIL)
    assert failed >= {"model.prefill.flip_rate", "model.prefill.flip_rate_times"}
    assert all("flip_rate" in name for name in failed)


def test_a_worse_likelihood_on_every_prompt_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(lambda row: row | {"nll_candidate": row["nll_champion"] + 0.05 + 0.001 * (row["position"] % 2)})
    found = judged(model(evidence, plan))
    assert found.named(Verdict.FAIL) == {"model.prefill.nll_difference", "model.decode.nll_difference"}


def test_the_last_position_of_a_prompt_needs_no_likelihood_and_any_other_does(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    lost = {"nll_champion": None, "nll_candidate": None}
    last = {"prefill": 59, "decode": 15}
    evidence.model(lambda row: row | lost if row["position"] == last[row["mode"]] else row)
    assert model(evidence, plan).verdict is Verdict.PASS
    evidence.model(candidate_only(lost, prompt_id="p3"))
    found = judged(model(evidence, plan))
    assert found.named(Verdict.ERROR) >= {"model.prefill.nll_difference", "model.decode.nll_difference"}


@pytest.mark.parametrize(
    ("change", "check"),
    [({"kl": None}, "kl_mean"), ({"kl": math.nan}, "kl_mean"), ({"next_token_equal": None}, "flip_rate")],
)
def test_a_position_without_its_figure_is_an_error(
    evidence: Any, plan: Plan, judged: Any, change: dict[str, Any], check: str
) -> None:
    evidence.model(candidate_only(change, mode="prefill", prompt_id="p1", position=7))
    found = judged(model(evidence, plan))
    assert found.verdict is Verdict.ERROR
    wanted = {f"model.prefill.{check}", f"model.prefill.{check}_times", f"model.prefill.bucket.{check}_times"}
    assert wanted <= found.named(Verdict.ERROR)


def test_a_mode_without_enough_positions_is_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(lambda row: row if row["mode"] == "prefill" else None)
    found = judged(model(evidence, plan))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert all(name.startswith("model.decode.") for name in found.named(Verdict.INCONCLUSIVE))


# The floor.


def test_without_a_floor_nothing_is_shown(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(lambda row: row if row["side"] == "candidate" else None)
    found = judged(model(evidence, plan))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert {"model.prefill.kl_mean_times", "model.decode.flip_margin_times"} <= found.named(Verdict.INCONCLUSIVE)


def test_a_candidate_beyond_twice_the_floor_fails_though_it_is_within_every_fixed_limit(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    kl, floor = {"candidate": 2.1e-6, "champion": 1e-6}, limit(plan, "kl_mean_floor_least.float32")
    assert floor < kl["champion"]
    assert kl["candidate"] < limit(plan, "kl_mean")
    evidence.model(lambda row: row | {"dtype_class": "float32", "kl": kl[row["side"]]})
    failed = judged(model(evidence, plan)).named(Verdict.FAIL)
    wanted = {f"model.{mode}.{part}kl_mean_times" for mode in BOTH for part in ("", "bucket.")}
    assert failed == wanted


def test_a_noisy_floor_makes_room_but_never_beyond_the_fixed_limits(evidence: Any, plan: Plan, judged: Any) -> None:
    """Today's floor is nine times as large as any that was seen: what was too much yesterday is so today."""
    kl = 1.2 * limit(plan, "kl_mean")
    evidence.model(lambda row: row | {"kl": kl})
    failed = judged(model(evidence, plan)).named(Verdict.FAIL)
    assert failed == {f"model.{mode}.{part}kl_mean" for mode in BOTH for part in ("", "bucket.")}


def test_a_floor_of_nothing_does_not_fail_a_sound_kernel(evidence: Any, plan: Plan) -> None:
    """Two runs of one backend agree to the last bit; another sound backend cannot be held to that."""
    sound = {"bfloat16": 9.4e-4, "float32": 2e-11}
    for dtype, kl in sound.items():
        evidence.model(
            lambda row, dtype=dtype, kl=kl: (
                row | {"dtype_class": dtype, "kl": kl if row["side"] == "candidate" else 0.0}
            )
        )
        assert model(evidence, plan).verdict is Verdict.PASS, dtype
        evidence.lake = evidence.lake.with_name(f"after-{dtype}")


def test_float32_has_a_floor_of_its_own(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(lambda row: row | {"dtype_class": "float32", "kl": 1e-6 if row["side"] == "candidate" else 1e-11})
    failed = judged(model(evidence, plan)).named(Verdict.FAIL)
    assert {"model.prefill.kl_mean_times", "model.decode.kl_mean_times"} <= failed


def test_a_floor_of_other_positions_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(lambda row: None if row["side"] == "champion" and row["prompt_id"] == "p3" else row)
    found = judged(model(evidence, plan))
    assert found.named(Verdict.ERROR) == {"model.prefill.floor_positions", "model.decode.floor_positions"}
    assert found.checks["model.prefill.floor_positions"].observed == 60


def test_a_floor_with_a_nan_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(side_only("champion", {"kl": math.nan}, mode="prefill", prompt_id="p1", position=7))
    found = judged(model(evidence, plan))
    assert {"model.prefill.kl_mean_times", "model.prefill.kl_p999_times"} <= found.named(Verdict.ERROR)
    assert found.checks["model.prefill.kl_mean"].verdict is Verdict.PASS, "the candidate's own figure is there"


# Buckets.


def test_a_fault_of_one_language_fails_where_the_mean_over_all_hides_it(evidence: Any, plan: Plan, judged: Any) -> None:
    def mend(row: dict[str, Any]) -> dict[str, Any]:
        polish = row | {"language": "pl" if row["prompt_id"] in ("p10", "p11") else "en"}
        wrong = row["side"] == "candidate" and polish["language"] == "pl" and row["mode"] == "prefill"
        return polish | {"kl": 1.1 * limit(plan, "kl_mean")} if wrong else polish

    evidence.model(mend)
    found = judged(model(evidence, plan))
    assert found.named(Verdict.FAIL) == {"model.prefill.bucket.kl_mean", "model.prefill.bucket.kl_mean_times"}
    assert "worst: language pl" in found.checks["model.prefill.bucket.kl_mean"].message


def test_a_bucket_with_too_few_positions_is_named_as_not_judged(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model(candidate_only({"kl": 5e-3}, language="pl", mode="prefill"))
    check = judged(model(evidence, plan)).checks["model.prefill.bucket.kl_mean"]
    assert check.verdict is Verdict.PASS
    assert check.detectable.endswith("; not judged: language pl (60)")


def test_buckets_are_of_language_length_and_position(evidence: Any, plan: Plan) -> None:
    evidence.model(
        lambda row: (
            row
            | {"num_tokens": 100 if row["prompt_id"] in ("p1", "p2", "p3") else 60, "position": 2 * row["position"]}
            | (FLIP if row["prompt_id"] == "p2" and row["position"] in (3, 9) else {})
        )
    )
    with Lake(evidence.lake) as tables:
        found = {b.bucket: b for b in buckets(tables, evidence.release, load_limits("replay", "demo")) if
                 b.mode == "prefill"}  # fmt: skip
        diverged = divergences(tables, evidence.release)
    assert list(found) == [
        "all",
        "language en",
        "language pl",
        "length to 256",
        "length to 64",
        "position below 256",
        "position below 64",
    ]
    assert found["length to 256"].positions == 180
    assert found["position below 64"].positions == 12 * 32
    assert (found["all"].flips, found["all"].flip_margin, found["language pl"].flips) == (2, 0.1, 0)
    assert found["all"].floor_kl_mean == pytest.approx(1e-6)
    assert (found["language pl"].judged, found["language en"].judged) == (False, True)
    first = diverged[0]
    assert (first.mode, first.prompts, first.diverged, first.median_tokens) == ("prefill", 12, 1, 6)
    assert first.median_margin == pytest.approx(0.1)
