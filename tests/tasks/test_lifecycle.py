"""The record of a release from its beginning to each of its ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from attention.errors import UserError
from data.candidate import Loaded, load_candidate
from data.paths import cell_dir, lake_dir
from gates.verdict import Check, GateReport, Verdict
from tasks import lifecycle
from tasks.context import Context, StageOutcome
from tasks.lifecycle import AFTER, OFFLINE, RESUMABLE, STAGES, ReleaseResult
from tasks.record import Attempt, Deployed, LeaseLostError, Record, RecordStore, Shares, State
from tasks.router import RouterError
from tests.commands import candidate_file


@pytest.fixture(scope="module")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_candidate(candidate_file(tmp_path_factory.mktemp("candidate")))


@pytest.fixture
def loaded(candidate: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """The candidate, in a home of the test's own."""
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    return candidate


@pytest.fixture
def store(loaded: Loaded) -> RecordStore:
    return RecordStore(cell_dir("cpu", "smollm2") / "record.json")


@pytest.fixture
def context(loaded: Loaded, store: RecordStore) -> Iterator[Context]:
    with store.hold("flash-1") as lease:
        yield make_context(loaded, lease, "flash-1")


def make_context(loaded: Loaded, lease: Any, release_id: str, *, resumed: bool = False) -> Context:
    return Context(release_id, loaded.cells[0], loaded, loaded, lease, lambda line: None, resumed)


def incumbent() -> Deployed:
    return lifecycle.incumbent("cpu", "smollm2")


def outcome(stage: str, verdict: Verdict = Verdict.PASS) -> StageOutcome:
    check = Check(check="one", verdict=verdict, observed=0.0, detectable="1 in 40", num_evidence=40, message="too far")
    return StageOutcome(GateReport(stage=stage, checks=(check,)), {"cases": 3})


class FakeRouter:
    """Notes what it was told; `broken` confirms nothing."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.reverted: list[int] = []

    def revert(self, generation: int) -> None:
        if self.broken:
            raise RouterError("Envoy does not answer")
        self.reverted.append(generation)


# ------------------------------------------------------------------------------ who serves


def test_the_declared_incumbent_is_what_serves_before_the_first_release(loaded: Loaded) -> None:
    found = incumbent()
    assert (found.release_id, found.candidate) == ("incumbent-torch-math-cpu", "torch-math-cpu")
    flags = dict(zip(found.command, found.command[1:], strict=False))
    assert (flags["--side"], flags["--lake"]) == ("champion", str(lake_dir()))
    assert all(Path(flags[name]).is_absolute() for name in ("--model", "--policy"))
    assert "--fault" not in found.command


def test_a_gpu_that_declares_nobody_says_what_to_add(loaded: Loaded) -> None:
    with pytest.raises(UserError, match=r"no champion serves tpu .*champions.yaml"):
        lifecycle.incumbent("tpu", "smollm2")
    with pytest.raises(UserError, match=r"has no wave for cpu qwen3"):
        lifecycle.incumbent("cpu", "qwen3")


def test_a_named_champion_is_taken_once_and_then_the_record_decides(loaded: Loaded) -> None:
    empty = Record(gpu="cpu", family="smollm2")
    deployed, _ = lifecycle.champion_of(empty, loaded.cells[0], "torch-flash-cpu")
    assert deployed.candidate == "torch-flash-cpu"
    serving = Record(gpu="cpu", family="smollm2", champion=incumbent())
    assert lifecycle.champion_of(serving, loaded.cells[0], "torch-math-cpu")[0] == serving.champion
    with pytest.raises(UserError, match=r"torch-math-cpu serves cpu smollm2"):
        lifecycle.champion_of(serving, loaded.cells[0], "torch-flash-cpu")


# ------------------------------------------------------------------------------ whether to begin


def attempt(loaded: Loaded, state: State, identity: str | None = None) -> Attempt:
    return Attempt(
        release_id="flash-0",
        candidate="flash",
        identity=identity or loaded.identity,
        state=state,
        failed_gate="canary",
        reason="slow",
        time=1.0,
    )


@pytest.mark.parametrize(("state", "refused"), [("rejected", True), ("rolled_back", True), ("superseded", False)])
def test_what_was_refused_stays_refused_until_it_changes_or_somebody_insists(
    loaded: Loaded, state: State, refused: bool
) -> None:
    record = Record(gpu="cpu", family="smollm2", attempts=[attempt(loaded, state)])
    why = lifecycle.refusal(record, loaded, retry=False)
    assert (why is not None) == refused
    assert why is None or why.release_id == "flash-0"
    said = lifecycle.settled_cell(record, loaded, loaded.cells[0], retry=False)
    assert (said is not None) == refused
    assert said is None or (said.state == state and "flash-0 (slow)" in said.reason and "--retry" in said.reason)
    assert lifecycle.refusal(record, loaded, retry=True) is None
    other = Record(gpu="cpu", family="smollm2", attempts=[attempt(loaded, state, identity="other")])
    assert lifecycle.refusal(other, loaded, retry=False) is None


def test_a_drill_may_be_repeated_and_is_never_a_champion(tmp_path: Path, loaded: Loaded) -> None:
    drill = load_candidate(candidate_file(tmp_path / "drill", fault="wrong_scale"))
    record = Record(gpu="cpu", family="smollm2", attempts=[attempt(drill, "rejected")])
    assert lifecycle.refusal(record, drill, retry=False) is None
    record.champion = incumbent().model_copy(update={"identity": drill.identity})
    assert not lifecycle.is_champion(record, drill, drill.cells[0])


@pytest.fixture
def other_model(loaded: Loaded, tmp_path: Path) -> Record:
    """A cell that this very candidate serves, with another model."""
    champion = incumbent().model_copy(update={"identity": loaded.identity, "model_path": str(tmp_path / "other")})
    identity = loaded.identity
    return Record(gpu="cpu", family="smollm2", champion=champion, release_id="r", identity=identity, state="probed")


def test_another_model_in_the_cell_is_neither_champion_nor_resumed(loaded: Loaded, other_model: Record) -> None:
    cell = loaded.cells[0]
    assert not lifecycle.is_champion(other_model, loaded, cell)
    assert not lifecycle.resumable(other_model, loaded, cell)
    with pytest.raises(UserError, match=r"other on cpu smollm2, not .*135m-instruct: set another `family`"):
        lifecycle.champion_of(other_model, cell, None)


def test_a_drill_is_no_incumbent(loaded: Loaded) -> None:
    drill = "data/candidates/drill/wrong_scale.yaml"
    with pytest.raises(UserError, match=r"wrong_scale.yaml: a drill is never champion"):
        lifecycle.incumbent("cpu", "smollm2", drill)
    with pytest.raises(UserError, match=r"a drill is never champion"):
        lifecycle.champion_of(Record(gpu="cpu", family="smollm2"), loaded.cells[0], drill)


def test_a_champion_that_is_the_candidate_is_settled_and_nothing_changed(loaded: Loaded, store: RecordStore) -> None:
    assert lifecycle.settled(loaded, retry=False) is None

    def promoted(record: Record) -> None:
        record.champion = incumbent().model_copy(update={"identity": loaded.identity, "release_id": "flash-0"})

    store.update(promoted)
    [result] = lifecycle.settled(loaded, retry=False) or []
    assert (result.state, result.changed, result.release_id, result.exit_code) == ("promoted", False, "flash-0", 0)


def test_a_refused_candidate_is_settled_with_exit_1(loaded: Loaded, store: RecordStore) -> None:
    store.update(lambda record: record.attempts.append(attempt(loaded, "rolled_back")))
    [result] = lifecycle.settled(loaded, retry=False) or []
    assert (result.state, result.changed, result.exit_code) == ("rolled_back", False, 1)
    assert lifecycle.settled(loaded, retry=True) is None


@pytest.mark.parametrize(
    ("state", "code"),
    [("promoted", 0), ("baselined", 0), ("rejected", 1), ("rolled_back", 1), ("held", 3)],
)
def test_a_state_has_its_exit_code(state: str, code: int) -> None:
    result = ReleaseResult(release_id="r", candidate="c", gpu="cpu", family="f", state=state, reason="")
    assert result.exit_code == code


# ------------------------------------------------------------------------------ from stage to stage


def test_a_release_begins_registered_against_the_champion(context: Context, loaded: Loaded) -> None:
    record = lifecycle.begin(context, incumbent())
    assert (record.state, record.release_id, record.identity) == ("registered", "flash-1", loaded.identity)
    assert record.champion is not None and record.champion.candidate == "torch-math-cpu"
    assert (record.stages, record.tags) == ([], [])


def test_every_passed_stage_moves_the_state_on_and_is_noted_once(context: Context) -> None:
    lifecycle.begin(context, incumbent())
    for stage in STAGES:
        assert lifecycle.passed(context, stage, outcome(stage), 1.23456).state == AFTER[stage]
    record = lifecycle.passed(context, "canary", outcome("canary"), 2.0)
    assert sorted(stage.stage for stage in record.stages) == sorted(STAGES)
    assert record.stages[-1].stage == "canary" and record.stages[-1].detail == {"cases": 3}


@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL])
def test_a_stage_that_did_not_pass_is_noted_and_moves_nothing(context: Context, verdict: Verdict) -> None:
    lifecycle.begin(context, incumbent())
    record = lifecycle.passed(context, "fingerprint", outcome("fingerprint", verdict), 1.0)
    assert (record.state, record.stages[0].verdict) == ("registered", verdict.value)


@pytest.mark.parametrize("reached", STAGES)
def test_a_resumed_release_keeps_its_offline_stages_and_repeats_the_live_ones(
    loaded: Loaded, store: RecordStore, reached: str
) -> None:
    with store.hold("flash-1") as lease:
        first = make_context(loaded, lease, "flash-1")
        lifecycle.begin(first, incumbent())
        for stage in STAGES[: STAGES.index(reached) + 1]:
            lifecycle.passed(first, stage, outcome(stage), 1.0)
    assert lifecycle.resumable(store.load(), loaded, loaded.cells[0])
    with store.hold("flash-1") as lease:
        record = lifecycle.begin(make_context(loaded, lease, "flash-1", resumed=True), incumbent())
    kept = [stage for stage in OFFLINE if STAGES.index(stage) <= STAGES.index(reached)]
    assert [stage.stage for stage in record.stages] == kept
    assert record.state == AFTER[kept[-1]]


def test_an_offline_stage_that_did_not_pass_is_repeated(loaded: Loaded, store: RecordStore) -> None:
    with store.hold("flash-1") as lease:
        first = make_context(loaded, lease, "flash-1")
        lifecycle.begin(first, incumbent())
        lifecycle.passed(first, "fingerprint", outcome("fingerprint"), 1.0)
        lifecycle.passed(first, "probe", outcome("probe", Verdict.ERROR), 1.0)
        record = lifecycle.begin(make_context(loaded, lease, "flash-1", resumed=True), incumbent())
    assert [stage.stage for stage in record.stages] == ["fingerprint"]
    assert record.state == "fingerprinted"


@pytest.mark.parametrize("state", ["promoted", "rolled_back", "rejected", "superseded", "rolling_back"])
def test_what_ended_is_not_resumed(loaded: Loaded, state: State) -> None:
    record = Record(gpu="cpu", family="smollm2", release_id="r", identity=loaded.identity, state=state)
    assert state not in RESUMABLE and not lifecycle.resumable(record, loaded, loaded.cells[0])


def test_another_candidate_is_not_resumed_and_supersedes(loaded: Loaded, store: RecordStore, tmp_path: Path) -> None:
    with store.hold("flash-1") as lease:
        lifecycle.begin(make_context(loaded, lease, "flash-1"), incumbent())
    other = load_candidate(candidate_file(tmp_path, "other", plan="demo"))
    assert not lifecycle.resumable(store.load(), other, other.cells[0])
    with store.hold("other-1") as lease:
        record = lifecycle.begin(make_context(other, lease, "other-1"), incumbent())
    assert record.release_id == "other-1"
    assert [(one.release_id, one.state) for one in record.attempts] == [("flash-1", "superseded")]


# ------------------------------------------------------------------------------ how it ends


def test_an_end_is_an_attempt_and_an_event(context: Context) -> None:
    lifecycle.begin(context, incumbent())
    record = lifecycle.end(context, "rejected", "replay", "a scale is off")
    [one] = record.attempts
    assert (record.state, one.state, one.failed_gate, one.reason) == (
        "rejected",
        "rejected",
        "replay",
        "a scale is off",
    )
    [event] = pq.read_table(next(lake_dir().glob("events/release_id=flash-1/*.parquet")), partitioning=None).to_pylist()
    assert (event["kind"], event["subject"], event["severity"]) == ("release_rejected", "replay", "critical")


def test_held_is_no_end(context: Context) -> None:
    lifecycle.begin(context, incumbent())
    assert lifecycle.end(context, "held", "replay", "too little evidence").attempts == []


def test_withdrawing_asks_the_router_before_the_record(context: Context) -> None:
    lifecycle.begin(context, incumbent())

    def expose(record: Record) -> None:
        record.shares, record.mirror, record.state = Shares(champion=60, control=20, candidate=20), 1.0, "canary"

    exposed = context.update(expose)
    with pytest.raises(RouterError):
        lifecycle.withdraw(context, FakeRouter(broken=True), "slow")  # type: ignore[arg-type]
    assert context.store.load().exposed(), "the record may not say what the router did not confirm"
    router = FakeRouter()
    record = lifecycle.withdraw(context, router, "slow")  # type: ignore[arg-type]
    assert router.reverted == [exposed.generation]
    assert (record.shares, record.mirror, record.state) == (Shares(), 0.0, "rolling_back")


def test_a_revert_that_cannot_be_confirmed_is_told_and_not_raised() -> None:
    assert lifecycle.try_revert(FakeRouter(), 3) is None  # type: ignore[arg-type]
    assert "does not answer" in str(lifecycle.try_revert(FakeRouter(broken=True), 3))  # type: ignore[arg-type]


def test_a_release_that_was_fenced_out_writes_no_more(context: Context, store: RecordStore) -> None:
    lifecycle.begin(context, incumbent())
    store.update(Record.fence, over_lease=True)
    with pytest.raises(LeaseLostError):
        lifecycle.passed(context, "fingerprint", outcome("fingerprint"), 1.0)
    assert store.load().stages == []


# ------------------------------------------------------------------------------ the final table


def test_the_table_shows_of_each_kind_the_weakest_effect() -> None:
    said = lifecycle.detectable(
        [
            "error rate 7.2 % (0 of 40)",
            "1 request of 40",
            "error rate 6.9 % (0 of 42)",
            "TTFT P50 +20 %; not judged: language pl (60)",
            "recorded: 1 row",
        ]
    )
    assert said == "error rate 7.2 % (0 of 40); TTFT P50 +20 %"
    assert lifecycle.detectable(["1 case of 12", "1 case of 96"]) == "1 case of 12"


def test_an_overruled_release_moves_no_traffic_any_more(context: Context, store: RecordStore) -> None:
    """A rollback took its lease: what is routed by now may be the next release's."""
    store.update(Record.fence, over_lease=True)
    store.acquire("flash-2")
    router = FakeRouter()
    with pytest.raises(LeaseLostError):
        lifecycle.withdraw(context, router, "slow")  # type: ignore[arg-type]
    assert router.reverted == []
