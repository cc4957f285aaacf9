"""Weighted selection: the truth is recovered, noise is no gain, and its intervals cover."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from attention.cases import AttentionCase
from data.paths import repo_dir
from gates.selection import ALL, Measured, Regret, Service, layout_of, select

Cell = tuple[str, int, int, float]  # family, kv_len, decode batch, calls
Truth = Mapping[Cell, Mapping[str, float]]  # seconds of one call by backend

PREFILL_AND_DECODE: Truth = {
    ("prefill", 1024, 1, 20.0): {"a": 1.0e-3, "b": 1.2e-3, "c": 1.3e-3},
    ("prefill", 4096, 1, 5.0): {"a": 9.0e-3, "b": 8.0e-3, "c": 9.5e-3},
    ("decode", 1024, 1, 900.0): {"a": 2.0e-5, "b": 2.1e-5, "c": 1.8e-5},
    ("decode", 1024, 8, 800.0): {"a": 4.0e-5, "b": 3.0e-5, "c": 3.6e-5},
}
TWO_BUCKETS: Truth = {
    ("decode", 1024, 1, 100.0): {"a": 1.0e-3, "b": 1.1e-3},
    ("decode", 2048, 1, 100.0): {"a": 1.1e-3, "b": 1.0e-3},
}
EQUAL: Truth = {
    (family, kv_len, 1, 100.0): dict.fromkeys("abcd", 1e-6 * kv_len)
    for family in ("prefill", "decode")
    for kv_len in (512, 1024, 2048)
}


def measured(
    truth: Truth, seed: int = 0, *, num_rounds: int = 8, noise: float = 0.01, drift: float = 0.05, weight: float = 0.5
) -> list[Measured]:
    """What a machine that drifts from round to round would say, the same for all backends of a case."""
    generator = np.random.default_rng(seed)
    rows = []
    for (family, kv_len, batch, calls), seconds in truth.items():
        drifts = generator.normal(0, drift, num_rounds)
        for backend, true in seconds.items():
            rounds = true * np.exp(drifts + generator.normal(0, noise, num_rounds))
            name = f"{family}-{batch}-{kv_len}"
            bucket = f"{family}/kv<={kv_len}"
            rows.append(Measured(backend, family, name, bucket, "paged", weight, calls, tuple(map(float, rounds))))
    return rows


def only(rows: Sequence[Measured]) -> Service:
    [service] = select(rows, "chat").services
    return service


def regret(service: Service, family: str = ALL) -> Regret:
    return next(one for one in service.regrets if one.family == family)


def test_the_best_backend_of_each_bucket_is_found_and_what_it_costs() -> None:
    service = only(measured(PREFILL_AND_DECODE, noise=0, drift=0))
    assert [(c.shape_bucket, c.kv_len, c.backend) for c in service.choices] == [
        ("prefill/kv<=1024", 1024, "a"),
        ("prefill/kv<=4096", 4096, "b"),
        ("decode/kv<=1024", 1024, "b"),  # c is best at batch 1, b over both batches by their calls
    ]
    assert [c.seconds for c in service.choices] == pytest.approx([0.020, 0.040, 900 * 2.1e-5 + 800 * 3.0e-5])


def test_scores_are_seconds_per_family_and_over_all_best_first() -> None:
    service = only(measured(PREFILL_AND_DECODE, noise=0, drift=0))
    found = {(s.family, s.backend): s.seconds for s in service.scores}
    assert found["prefill", "a"] == pytest.approx(0.020 + 0.045)
    assert found["decode", "b"] == pytest.approx(900 * 2.1e-5 + 800 * 3.0e-5)
    assert found[ALL, "b"] == pytest.approx(0.024 + 0.040 + 900 * 2.1e-5 + 800 * 3.0e-5)
    assert service.preferred == ("b", "a", "c")
    assert [regret(service, family).single for family in ("prefill", "decode", ALL)] == ["b", "b", "b"]


def test_the_gain_over_the_best_single_backend_is_the_true_one() -> None:
    service = only(measured(PREFILL_AND_DECODE, noise=0, drift=0.1))
    best_single, selection = 0.024 + 0.040 + 0.0429, 0.020 + 0.040 + 0.0429
    assert regret(service).gain.value == pytest.approx(1 - selection / best_single, abs=2e-3)
    assert regret(service, "decode").gain.value == 0


def test_a_gain_is_told_in_one_plain_sentence_with_its_interval() -> None:
    found = select(measured(TWO_BUCKETS, noise=0.002), "chat")
    gain = regret(found.services[0]).gain
    assert gain.low < 1 - 1 / 1.05 < gain.high
    assert found.sentence.startswith("over chat the selection beats the best single backend ")
    assert found.sentence.endswith(f" by {100 * gain.value:.1f} % ({100 * gain.low:.1f} to {100 * gain.high:.1f} %)")
    assert "over chat, decode alone, the selection beats" in regret(found.services[0], "decode").sentence


def test_one_backend_that_is_best_everywhere_is_said_to_be() -> None:
    truth = {cell: {"a": 1e-3, "b": 1.5e-3} for cell in TWO_BUCKETS}
    service = only(measured(truth))
    assert "beats" not in service.sentence
    assert "best single backend a" in service.sentence
    assert (regret(service).gain.low, regret(service).gain.high) == (0, 0)
    assert [choice.gain for choice in service.choices] == [None, None]


@pytest.mark.parametrize("num_rounds", [6, 8])
def test_equal_backends_are_no_gain(num_rounds: int) -> None:
    services = [only(measured(EQUAL, seed, num_rounds=num_rounds)) for seed in range(60)]
    gains = [regret(service).gain for service in services]
    assert sum(gain.low > 0 for gain in gains) <= 3  # at 2.5 % each, more than 3 of 60 would be rare
    assert np.mean([gain.value for gain in gains]) == pytest.approx(0, abs=7e-4)
    # Whoever chooses and judges by the same rounds sees this much.
    best = [next(s.seconds for s in service.scores if s.family == ALL) for service in services]
    assert np.mean([1 - service.seconds / (single or 0) for service, single in zip(services, best, strict=True)]) > 1e-3


@pytest.mark.parametrize("num_rounds", [6, 8])
def test_the_interval_covers_the_true_gain_and_finds_it(num_rounds: int) -> None:
    gains = [regret(only(measured(TWO_BUCKETS, seed, num_rounds=num_rounds))).gain for seed in range(100)]
    covered = sum(gain.low <= 1 - 1 / 1.05 <= gain.high for gain in gains) / len(gains)
    assert covered >= 0.92
    assert all(gain.low > 0 for gain in gains)
    assert np.median([gain.high - gain.low for gain in gains]) < 0.03


@pytest.mark.parametrize("stalled", range(8))
def test_neither_a_stalled_round_nor_the_drift_of_the_machine_moves_a_ratio(stalled: int) -> None:
    rows = measured({("decode", 1024, 1, 100.0): {"a": 1.0e-3, "b": 1.1e-3}}, noise=0, drift=0.3)
    slow = tuple(s * (3 if r == stalled else 1) for r, s in enumerate(rows[0].rounds))
    first, second = only([replace(rows[0], rounds=slow), rows[1]]).scores[:2]
    assert (first.backend, second.backend) == ("a", "b")
    assert (second.seconds or 0) / (first.seconds or 1) == pytest.approx(1.1)


def test_too_few_rounds_are_never_a_gain() -> None:
    service = only(measured(TWO_BUCKETS, noise=0, num_rounds=5))
    assert math.isnan(regret(service).gain.value)
    assert (regret(service).gain.low, regret(service).gain.high) == (-math.inf, math.inf)
    assert "cannot be compared" in service.sentence


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_round_that_is_no_time_leaves_the_backend_without_that_cell(bad: float) -> None:
    rows = measured(TWO_BUCKETS, noise=0)
    rows[0] = replace(rows[0], rounds=(bad, *rows[0].rounds[1:]))  # a at 1024, where it is best
    service = only(rows)
    assert [choice.backend for choice in service.choices] == ["b", "b"]
    [score] = [s for s in service.scores if s.backend == "a" and s.family == ALL]
    assert (score.seconds, score.lacks, score.worst) == (None, ("decode-1-1024",), None)
    assert service.preferred == ("b",)


def test_a_backend_without_a_cell_has_no_score_and_may_still_be_chosen_elsewhere() -> None:
    rows = [row for row in measured(PREFILL_AND_DECODE, noise=0) if (row.backend, row.family) != ("c", "prefill")]
    rows = [replace(row, rounds=tuple(0.5 * s for s in row.rounds)) if row.backend == "c" else row for row in rows]
    service = only(rows)
    assert [choice.backend for choice in service.choices] == ["a", "b", "c"]
    assert "c" not in service.preferred
    [score] = [s for s in service.scores if (s.backend, s.family) == ("c", "decode")]
    assert score.seconds is not None


def test_fewer_rounds_than_the_others_are_a_cell_that_is_lacking() -> None:
    rows = measured(TWO_BUCKETS, noise=0)
    rows[0] = replace(rows[0], rounds=rows[0].rounds[:4])
    assert only(rows).preferred == ("b",)


def test_when_no_backend_has_every_cell_nothing_is_claimed() -> None:
    rows = [row for row in measured(TWO_BUCKETS, noise=0) if (row.backend == "a") == row.case_id.endswith("1024")]
    service = only(rows)
    assert service.preferred == ()
    assert [choice.backend for choice in service.choices] == ["a", "b"]
    assert regret(service).single is None
    assert "no single backend has every cell" in service.sentence


def test_a_bucket_that_no_backend_has_whole_is_left_undecided() -> None:
    rows = [row for row in measured(PREFILL_AND_DECODE) if row.family == "decode" and row.backend != "c"]
    rows = [row for row in rows if (row.backend == "a") == row.case_id.startswith("decode-1-")]
    service = only(rows)
    assert (service.choices, service.undecided, service.worst) == ((), ("decode/kv<=1024",), None)


def test_the_worst_cell_shows_what_a_choice_over_batches_costs_one_of_them() -> None:
    service = only(measured(PREFILL_AND_DECODE, noise=0))
    assert service.worst is not None
    assert (service.worst.case_id, service.worst.backend) == ("decode-1-1024", "b")
    assert service.worst.ratio == pytest.approx(2.1 / 1.8)
    [single] = [s for s in service.scores if (s.backend, s.family) == ("a", ALL)]
    assert single.worst is not None
    assert (single.worst.case_id, single.worst.ratio) == ("decode-8-1024", pytest.approx(4 / 3))


def test_cells_of_little_weight_are_no_worst_cell() -> None:
    assert only(measured(PREFILL_AND_DECODE, weight=0.01)).worst is None


def test_backends_compete_inside_one_layout() -> None:
    rows = measured(TWO_BUCKETS, noise=0, drift=0)
    rows += [replace(row, layout="ragged", rounds=tuple(0.1 * s for s in row.rounds)) for row in rows]
    selection = select(rows, "chat")
    assert [service.layout for service in selection.services] == ["ragged", "paged"]  # the fastest first
    assert all(
        service.seconds == pytest.approx(f * 0.2) for service, f in zip(selection.services, (0.1, 1), strict=True)
    )


def test_a_service_that_captures_graphs_runs_eagerly_what_was_not_captured() -> None:
    eager = measured(PREFILL_AND_DECODE, noise=0, drift=0)
    captured = [
        replace(row, case_id=row.case_id + "-graph", execution="cuda_graph", rounds=tuple(0.5 * s for s in row.rounds))
        for row in eager
        if row.family == "decode" and row.backend != "b"
    ]
    graph, plain = select(eager + captured, "chat").services
    assert (graph.execution, plain.execution) == ("cuda_graph", "eager")
    assert graph.families == plain.families == ("prefill", "decode")
    assert graph.seconds == pytest.approx(0.020 + 0.040 + 0.5 * (900 * 1.8e-5 + 800 * 3.6e-5))
    assert "b" not in graph.preferred


def test_the_service_with_the_most_families_speaks_for_the_selection() -> None:
    rows = measured(PREFILL_AND_DECODE)
    quick = [replace(row, layout="ragged") for row in rows if row.family == "prefill"]
    selection = select([*quick, *rows], "chat")
    assert [service.layout for service in selection.services] == ["paged", "ragged"]
    assert selection.sentence == selection.services[0].sentence


def test_nothing_measured_is_said_to_be_nothing() -> None:
    assert select([], "chat").sentence == "over chat nothing was measured"


def test_a_choice_tells_its_evidence() -> None:
    told = [choice.evidence for choice in only(measured(TWO_BUCKETS, noise=0.002, drift=0)).choices]
    assert all(
        text.startswith(f"decode/kv<={n}, 50.0 % of decode: 0.") for text, n in zip(told, (1024, 2048), strict=True)
    )
    assert sum("saves" in text for text in told) == 1  # the other is the best single backend


def test_the_same_measurements_give_the_same_selection() -> None:
    rows = measured(EQUAL)
    assert select(rows, "chat") == select(rows, "chat")


def test_a_layout_names_all_that_a_service_has_one_of() -> None:
    case = AttentionCase(
        phase="decode", batch="q1s1k", heads_q=32, heads_kv=8, head_dim_qk=128, head_dim_vo=128, dtype="bfloat16"
    )
    assert layout_of(case) == "paged_nhd/16 bfloat16 kv=auto h32/8 d128/128"
    assert layout_of(case.model_copy(update={"execution": "cuda_graph"})) == layout_of(case)
    for change in ({"page_size": 32}, {"dtype": "float16"}, {"kv_dtype": "float8_e4m3fn"}, {"heads_kv": 4}):
        assert layout_of(case.model_copy(update=change)) != layout_of(case)


def test_it_runs_where_the_control_plane_is_not_installed() -> None:
    code = "import sys, gates.selection; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_dir(), capture_output=True, text=True, timeout=120, check=True
    )
    absent = {"duckdb", "great_expectations", "prefect", "mlflow", "pandas", "torch"}
    assert not set(done.stdout.split()) & absent
