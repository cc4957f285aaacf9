"""The stress run of a release: the champion sets the rates, and a process that is lost is a row."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from attention.errors import UserError
from attention.job import StressJob
from attention.schemas import write_rows
from data.candidate import load_candidate
from data.environment import Environment
from data.lake import Lake
from data.paths import repo_dir
from data.plan import StressPlan
from data.requests import RequestLength
from gates import stress as gate
from gates.thresholds import load_limits
from gates.verdict import Verdict, worst
from tasks import stress
from tasks.context import SIDES, Context, Side

LENGTHS = [RequestLength("a", 100, 16, count=3.0), RequestLength("b", 20, 4, cached_tokens=10)]
PLAN = StressPlan(max_running=(2, 4), saturation_requests=16, duration_s=10, slo_ttft_s=1, slo_tpot_s=0.1)

# Stands for `python -m attention bench stress --job FILE --out DIR`: what it says of its job, all good up to
# the saturation of 20 requests a second.
MEASURES = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[6]).read_text())
assert sys.argv[1:5] == ["-m", "attention", "bench", "stress"]
levels = []
for level in job["levels"]:
    num = round(level * (job["saturation_per_s"] or 20.0) * job["duration_s"])
    levels.append({"level": level, "rate_per_s": num / job["duration_s"], "max_running": job["max_running"],
                   "num_offered": num, "num_good": num if level <= 1 else 0, "num_failed": 0, "num_fallbacks": 0,
                   "num_out_of_memory": 0})
result = {"fingerprint_id": FINGERPRINT, "saturation_per_s": 20.0, "left_out": 0.25, "levels": levels}
(pathlib.Path(sys.argv[8]) / "result.json").write_text(json.dumps(result))
"""


@dataclass(frozen=True)
class Fakes(Context):
    """A release whose environments are scripts, by side."""

    pythons: tuple[Path, ...] = ()
    base: Path = Path()

    def environment(self, side: Side) -> Environment:
        return Environment(name=side, interpreter=str(self.pythons[SIDES.index(side)]))

    @property
    def work(self) -> Path:
        return self.base / "work"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Any:
    def context(champion: str = MEASURES, candidate: str = MEASURES, plan: StressPlan | None = PLAN) -> Context:
        loaded = load_candidate(repo_dir() / "data" / "candidates" / "torch-flash-cpu.yaml")
        baseline = loaded.plan.baseline.model_copy(update={"stress": plan})
        loaded = loaded.model_copy(update={"plan": loaded.plan.model_copy(update={"baseline": baseline})})
        pythons = []
        for side, script in zip(SIDES, (champion, candidate), strict=True):
            path = tmp_path / f"python-{side}"
            path.write_text(f"#!{sys.executable}\n{script.replace('FINGERPRINT', repr(f'fp-{side}'))}")
            path.chmod(0o755)
            pythons.append(path)
        found = Fakes("r1", loaded.cells[0], loaded, loaded, None, said.append, lake=tmp_path / "lake")
        write_rows(found.lake, "fingerprints", [
            {"side": side, "fingerprint_id": f"fp-{side}"} for side in SIDES
        ], release_id="r1")  # fmt: skip
        return replace(found, pythons=tuple(pythons), base=tmp_path)

    return context


def written(context: Context) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset(context.lake / "perf_stress", format="parquet").to_table().to_pylist()
    return found


def judged(context: Context) -> Verdict:
    with Lake(context.lake, release_id="r1") as tables:
        return worst(check.verdict for check in gate.checks(tables, "r1", PLAN, load_limits("stress", "full")))


def jobs(context: Context) -> dict[str, StressJob]:
    """By name, what each process was told."""
    return {
        file.parent.name.rpartition("-")[0]: StressJob.model_validate_json(file.read_text())
        for file in context.work.glob("*/job.json")
    }


def test_the_candidate_meets_the_champions_rates_at_every_concurrency(make: Any, said: list[str]) -> None:
    context = make()
    rows = stress.run(context, LENGTHS)
    assert [(row["side"], row["max_running"], row["level"], row["rate_per_s"]) for row in rows] == [
        (side, running, level, 20 * level) for running in (2, 4) for side in SIDES for level in PLAN.levels
    ]
    assert {(row["side"], row["fingerprint_id"], row["mix"]) for row in rows} == {
        (side, f"fp-{side}", "chat") for side in SIDES
    }
    assert len(written(context)) == 16
    told = jobs(context)
    assert {name: job.saturation_per_s for name, job in told.items()} == {
        "stress-2-champion": None, "stress-2-candidate": 20.0, "stress-4-champion": None, "stress-4-candidate": 20.0,
    }  # fmt: skip
    assert {job.lengths for job in told.values()} == {((100, 16, 3.0), (20, 4, 1.0))}
    assert told["stress-2-champion"].seed == told["stress-2-candidate"].seed
    assert judged(context) is Verdict.PASS
    assert "baseline: stress of champion, 2 running, 20/s: good at 50%: 100 of 100" in said[0]
    assert said[1] == "baseline: 25% of the mix is too long for this instance and was left out"


def test_a_candidate_that_is_lost_is_a_row_a_level_and_an_error(make: Any, said: list[str]) -> None:
    context = make(candidate="import sys; sys.exit('illegal memory access')")
    rows = [row for row in stress.run(context, LENGTHS) if row["side"] == "candidate"]
    assert [(row["level"], row["rate_per_s"], row.get("num_good")) for row in rows] == 2 * [
        (level, 20 * level, None) for level in PLAN.levels
    ]
    assert {row["fingerprint_id"] for row in rows} == {"fp-candidate"}
    assert judged(context) is Verdict.ERROR
    [event] = [line for line in said if "stress-4-candidate" in line]
    assert event.endswith("exit 1: illegal memory access")
    events = ds.dataset(context.lake / "events", format="parquet").to_table().to_pylist()
    assert {(row["kind"], row["subject"]) for row in events} == {("stress_lost", "candidate")}


def test_without_a_champion_there_are_no_rates_for_a_candidate(make: Any) -> None:
    context = make(champion="raise SystemExit(9)")
    rows = stress.run(context, LENGTHS)
    assert {(row["side"], row["rate_per_s"]) for row in rows} == {("champion", None)}
    assert not any("candidate" in name for name in jobs(context))
    assert judged(context) is Verdict.ERROR


def test_a_plan_without_a_stress_run_measures_nothing(make: Any) -> None:
    context = make(plan=None)
    assert stress.run(context, LENGTHS) == []
    assert not (context.lake / "perf_stress").exists()


def test_a_plan_whose_burst_is_too_small_is_refused_before_anything_starts(make: Any) -> None:
    context = make(plan=PLAN.model_copy(update={"max_running": (8,)}))
    with pytest.raises(UserError, match=r"baseline\.stress: saturation_requests: give 32 or more, .* \(got 16\)"):
        stress.run(context, LENGTHS)
    assert not context.work.exists()


def test_a_release_that_goes_on_measures_only_what_is_not_there_yet(make: Any) -> None:
    first = stress.run(make(), LENGTHS)
    again = stress.run(make("raise SystemExit(9)", "raise SystemExit(9)"), LENGTHS)
    assert again == first


def test_the_job_is_the_plan_of_one_side() -> None:
    setup = {"model": "m", "policy": "p"}
    job = stress.job_of(PLAN, LENGTHS, 4, setup=setup, saturation_per_s=2.5)
    assert (job.max_running, job.levels, job.duration_s) == (4, PLAN.levels, 10.0)
    assert json.loads(job.model_dump_json())["verb"] == "bench stress"
