"""A release on purpose: every check of the replay and the probe gate has a kind that it alone answers for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attention.drill.evidence_kinds import EVIDENCE_KINDS, EvidenceKind
from attention.drill.kinds import KINDS
from attention.drill.plan import load_plan
from data.plan import Plan
from data.plan import load_plan as load_release_plan
from gates import drill as gate
from gates.evaluate import SUITES, load_suite
from tasks import drill as task
from tasks import drill_release
from tasks.drill_release import Release, judged
from tests.gates.conftest import Evidence, Mend, unchanged

PLAN = load_plan("full")

#: Suites of the two gates, and how their checks are named here.
NAMED = {
    "replay_cases": "tensor",
    "replay_tensor": "tensor",
    "replay_beside": "tensor",
    "replay_lse": "tensor",
    "replay_model": "model",
    "replay_floor": "model",
    "replay_buckets": "model.bucket",
    "replay_business": "business",
    "replay_category": "business.category",
    "probe": "probe",
}


def test_every_check_that_can_hold_a_release_has_a_kind() -> None:
    named = {one.check for one in drill_release.expected(PLAN)} | {f"tensor.{kind.check}" for kind in KINDS}
    asked = {
        f"{layer}.{one.meta.check}"
        for suite, layer in NAMED.items()
        for one in load_suite(suite).expectations
        if one.severity != "info"
    }
    assert named == asked | {"measured_rows"}
    others = {path.stem for path in SUITES.glob("replay*.yaml")} - set(NAMED)
    assert all(one.severity == "info" for name in others for one in load_suite(name).expectations)


def test_names_of_kinds_are_one_each() -> None:
    names = [one.kind for one in drill_release.expected(PLAN)] + [kind.name for kind in KINDS]
    assert len(names) == len(set(names))


class Written(Evidence):
    """Keeps rows instead of writing them."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def write(self, table: str, rows: list[dict[str, Any]], mend: Mend = unchanged, *args: Any) -> None:
        self.tables[table] = [row for row in map(mend, rows) if row is not None]


@pytest.fixture(scope="module")
def sound() -> Release:
    evidence = Written()
    for write in (evidence.fingerprints, evidence.tensor, evidence.golden, evidence.probes):
        write()
    evidence.model(lambda row: row | {"dtype_class": "float32", "kl": 1e-12})
    tables = evidence.tables
    return Release(tables, tuple((row["backend"], row["probe"]) for row in tables["probes"]))


@pytest.fixture(scope="module")
def release_plan(sound: Release) -> Plan:
    demo = load_release_plan("demo")
    num_cases = sum(row["side"] == "candidate" for row in sound.tables["tensor_replay"])
    least = {
        "inputs": ("normal",),
        "seeds": 6,
        "min_cases": num_cases,
        "max_kv_len": 1024,
        "golden_prompts": 48,
        "min_golden_passes": 30,
        "min_category_passes": 30,
    }
    positions = sum(row["mode"] == "prefill" and row["side"] == "candidate" for row in sound.tables["model_replay"])
    return demo.model_copy(update={"replay": demo.replay.model_copy(update={**least, "min_positions": positions})})


@pytest.mark.slow  # two whole gates a kind; `flows drill` itself runs them
@pytest.mark.parametrize("kind", EVIDENCE_KINDS, ids=lambda kind: kind.name)
def test_what_a_fault_leaves_in_the_evidence_is_seen_by_its_check(
    kind: EvidenceKind, sound: Release, release_plan: Plan
) -> None:
    before = {table: [dict(row) for row in rows] for table, rows in sound.tables.items()}
    assert kind.check in judged(Release(kind.change(sound.tables), sound.required), release_plan)
    assert before == sound.tables, "a kind leaves the sound release as it is"


def test_a_sound_release_trips_nothing(sound: Release, release_plan: Plan) -> None:
    assert judged(sound, release_plan) == ()


@pytest.fixture(scope="module")
def real() -> Iterator[list[gate.Run]]:
    """Every kind before the gates, with the real model; without any check left out."""
    yield list(drill_release.runs(PLAN, 7, None, print))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_real_model_every_fault_is_caught_and_without_its_check_escapes(real: list[gate.Run]) -> None:
    expected = drill_release.expected(PLAN)
    enough = gate.BenignResult(300, {}, 0, {}, ())
    assert gate.problems([gate.kind_result(one, real, ()) for one in expected], enough) == []
    assert [run.tripped for run in real if run.kind is None] == [()]
    for check in {one.check for one in expected}:
        left = [run if check not in run.tripped else _without(run, check) for run in real]
        results = [gate.kind_result(one, left, ()) for one in expected]
        assert gate.problems(results, enough), f"without {check} the command would pass"


def _without(run: gate.Run, check: str) -> gate.Run:
    tripped = tuple(name for name in run.tripped if name != check)
    return gate.Run(run.kind, run.subject, run.where, run.no_op, tripped, run.published, run.singles)


def test_every_check_may_be_left_out_by_name() -> None:
    for one in task._expected(PLAN):
        task._check_name(one.check, task._expected(PLAN))
