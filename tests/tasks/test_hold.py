"""An approval is good for the stage that was held, once, and only if it came after the hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention.errors import UserError
from data.candidate import load_candidate
from data.paths import cell_dir
from flows.approve import approve
from gates.verdict import Verdict
from tasks import hold, lifecycle
from tasks.context import Context
from tasks.record import Approval, Record, RecordStore
from tests.commands import candidate_file
from tests.tasks.test_lifecycle import incumbent, make_context, outcome


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    store = RecordStore(cell_dir("cpu", "smollm2") / "record.json")
    with store.hold("flash-1") as lease:
        found = make_context(load_candidate(candidate_file(tmp_path)), lease, "flash-1")
        lifecycle.begin(found, incumbent())
        yield found


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.vigil.Vigil.trouble", lambda self, played=None: None)


def test_a_yes_is_spent_by_its_use(context: Context) -> None:
    hold.hold(context, "canary", "too little evidence")
    approve("flash-1")
    assert isinstance(hold.spend(context, "canary"), Approval)
    assert hold.spend(context, "canary") is None


def test_a_yes_to_a_baseline_says_nothing_about_the_canary(context: Context) -> None:
    hold.hold(context, "baseline", "noise")
    approve("flash-1")
    assert hold.spend(context, "canary") is None
    assert hold.spend(context, hold.PROMOTION) is None


def test_a_yes_from_before_the_hold_is_void(context: Context) -> None:
    hold.hold(context, "canary", "too little evidence")
    approve("flash-1")
    hold.hold(context, "canary", "again")
    assert hold.wait(context, None, "canary", 0.05) == "nobody approved it before its deadline"


def test_waiting_ends_with_the_yes(context: Context) -> None:
    hold.hold(context, "canary", "too little evidence")
    threading.Timer(0.3, approve, ["flash-1"]).start()
    found = hold.wait(context, None, "canary", 10)
    assert isinstance(found, Approval)
    assert found.stage == "canary"


def test_waiting_ends_with_the_candidate(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.vigil.Vigil.trouble", lambda self, played=None: "the process of x died")
    hold.hold(context, "canary", "too little evidence")
    started = time.monotonic()
    assert hold.wait(context, None, "canary", 60) == "the process of x died"
    assert time.monotonic() - started < 5


def test_an_offline_hold_is_approved_for_the_next_run_of_that_stage(context: Context) -> None:
    inconclusive = outcome("baseline", Verdict.INCONCLUSIVE)
    lifecycle.passed(context, "baseline", inconclusive, 1.0)
    lifecycle.end(context, "held", "baseline", "noise")
    approve("flash-1")
    found = hold.spend(context, "baseline")
    record = lifecycle.passed(context, "baseline", inconclusive, 1.0, found)
    assert record.stages[-1].done
    assert record.state == "baselined"


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.ERROR])
def test_a_failed_stage_is_not_done_whoever_says_yes(context: Context, verdict: Verdict) -> None:
    yes = Approval(release_id="flash-1", stage="canary", by="somebody", time=time.time())
    assert not lifecycle.passed(context, "canary", outcome("canary", verdict), 1.0, yes).stages[-1].done


def test_an_error_cannot_be_approved(context: Context) -> None:
    lifecycle.passed(context, "replay", outcome("replay", Verdict.ERROR), 1.0)
    lifecycle.end(context, "held", "replay", "the worker died")
    with pytest.raises(UserError, match="replay ended in an error: mend it"):
        approve("flash-1")


def test_what_no_gate_holds_cannot_be_approved(context: Context) -> None:
    def held(record: Record) -> None:
        record.state, record.reason = "held", "set-up: no such file"

    context.update(held)
    with pytest.raises(UserError, match="held, but by no gate"):
        approve("flash-1")
