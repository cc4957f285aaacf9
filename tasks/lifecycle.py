"""The life of one release in its record: begin or resume, pass from stage to stage, end.

The states and their order: README.md, "States and exit codes". Everything here changes the record, and
where traffic is held, the router before it.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from attention.errors import UserError, shown
from attention.yaml_file import read_yaml
from data.candidate import Cell, Loaded, load_candidate
from data.environment import load_environment
from data.paths import candidates_dir, cell_dir, lake_dir, repo_dir
from tasks.context import Context, StageOutcome, setup_of
from tasks.instances import command
from tasks.record import Approval, Attempt, Deployed, Record, RecordStore, Shares, StageRecord, State
from tasks.router import Router, RouterError

#: State after a stage was passed.
AFTER: dict[str, State] = {
    "fingerprint": "fingerprinted",
    "probe": "probed",
    "replay": "replayed",
    "baseline": "baselined",
    "shadow": "shadow",
    "canary": "canary",
    "expand": "canary",
}
OFFLINE = ("fingerprint", "probe", "replay", "baseline")
LIVE = ("shadow", "canary", "expand")
STAGES = (*OFFLINE, *LIVE)

#: States in which a release was under way: the same candidate goes on where it was.
RESUMABLE = ("registered", "fingerprinted", "probed", "replayed", "baselined", "shadow", "canary", "held")


class Gate(BaseModel):
    """One line of the final table."""

    stage: str
    verdict: str
    checks: int
    seconds: float
    detectable: str  # of each kind of effect, the weakest of its checks
    reason: str


def detectable(phrases: Iterable[str]) -> str:
    """Smallest effects that a gate could have seen, in short: one phrase a kind, its largest figure.

    A check that could have seen a single event ("1 request of 46") says less than one with a figure, and is left
    out where there is any, and so is what is only recorded. What a phrase adds after a semicolon is for the report.
    """
    weakest: dict[str, tuple[float, str]] = {}
    for phrase in (text.partition("; ")[0] for text in phrases):
        figure = re.search(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?", phrase)
        if figure is None or phrase.startswith("recorded"):
            continue
        kind = phrase[: figure.start()].strip()
        size = abs(float(figure.group()))
        if kind not in weakest or size > weakest[kind][0]:
            weakest[kind] = (size, phrase)
    single = weakest.pop("", None)
    chosen = [phrase for _, phrase in weakest.values()]
    return "; ".join(chosen or ([single[1]] if single else []))


class ReleaseResult(BaseModel):
    """How a release of one cell ended; what `--json` prints."""

    release_id: str | None
    candidate: str
    gpu: str
    family: str
    state: str
    failed_gate: str | None = None
    reason: str
    changed: bool = True  # False: this candidate was champion already
    gates: list[Gate] = []
    champion: str | None = None
    previous: str | None = None
    router_shares: dict[str, int] | None = None
    candidate_requests: dict[str, int] = {}  # router: live requests by Envoy's count; rows: in the lake
    user_requests: dict[str, int] = {}  # sent and lost, as the clients of the live stages saw it
    mlflow_run_id: str | None = None
    report: str | None = None

    @property
    def exit_code(self) -> int:
        """0 promoted (or stopped where asked); 1 refused or rolled back; 3 held or errored."""
        if self.state in ("rejected", "rolled_back"):
            return 1
        return 3 if self.state == "held" else 0


def champion_of(record: Record, cell: Cell, named: str | None) -> tuple[Deployed, Loaded]:
    """Who serves the cell, or the declared incumbent (data/champions.yaml, or `--champion`)."""
    if record.champion is None:
        loaded = load_candidate(_candidate_file(named or _declared(cell.gpu)))
        return _incumbent(loaded, cell), loaded
    serving = record.champion
    if not _same_model(serving, cell):
        raise UserError(
            f"{serving.candidate} serves {serving.model_path} on {cell.gpu} {cell.family}, not {cell.model_path}: "
            "set another `family` in the wave of that model"
        )
    if named is not None and load_candidate(_candidate_file(named)).candidate.name != serving.candidate:
        raise UserError(
            f"--champion {named}: {serving.candidate} serves {cell.gpu} {cell.family}; leave the option out"
        )
    return serving, load_candidate(Path(serving.candidate_file))


def incumbent(gpu: str, family: str, named: str | None = None) -> Deployed:
    """The declared incumbent of a cell that nothing was released to. UserError when none fits."""
    loaded = load_candidate(_candidate_file(named or _declared(gpu)))
    for cell in loaded.cells:
        if (cell.gpu, cell.family) == (gpu, family):
            return _incumbent(loaded, cell)
    raise UserError(f"{loaded.file}: has no wave for {gpu} {family}; release a candidate that names it first")


def _incumbent(loaded: Loaded, cell: Cell) -> Deployed:
    if loaded.candidate.is_drill:
        raise UserError(f"{loaded.file}: a drill is never champion; name a candidate without `fault`")
    release_id = f"incumbent-{loaded.candidate.name}"
    run = command(
        setup_of(loaded, cell),
        load_environment(loaded.candidate.environment),
        release_id=release_id,
        side="champion",
        instance=release_id,
        lake=str(lake_dir()),
        gpu=cell.gpu,
    )
    return Deployed(
        release_id=release_id,
        candidate=loaded.candidate.name,
        candidate_file=str(loaded.file),
        identity=loaded.identity,
        fingerprint_id=None,
        backends={},
        model_path=str(cell.model_path),
        policy=str(loaded.policy_path),
        environment=loaded.candidate.environment,
        command=run,
        instance=None,
        promoted_at=time.time(),
    )


def _declared(gpu: str) -> str:
    path = repo_dir() / "data" / "champions.yaml"
    declared = read_yaml(path) or {}
    if not isinstance(declared, dict) or gpu not in declared:
        raise UserError(f"no champion serves {gpu} and {path} declares none: add `{gpu}: <candidate file>`")
    if not isinstance(declared[gpu], str):
        raise UserError(f"{path}: {gpu}: name one candidate file (got {shown(declared[gpu])})")
    return str(declared[gpu])


def _candidate_file(name: str) -> Path:
    """A candidate by path, or by name in data/candidates."""
    direct = Path(name) if Path(name).is_absolute() else repo_dir() / name
    return direct if direct.suffix == ".yaml" else candidates_dir() / f"{name}.yaml"


def refusal(record: Record, loaded: Loaded, *, retry: bool) -> Attempt | None:
    """The attempt for which this candidate is not tried again: it was rejected or rolled back as it is now."""
    if retry or loaded.candidate.is_drill:
        return None
    for attempt in reversed(record.attempts):
        if attempt.identity == loaded.identity and attempt.state in ("rejected", "rolled_back"):
            return attempt
    return None


def _shown(file: Path) -> str:
    """The path as one would type it here."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def is_champion(record: Record, loaded: Loaded, cell: Cell) -> bool:
    """Whether the cell is served by this candidate with this model: other cells of it are other releases."""
    champion = record.champion
    if champion is None or loaded.candidate.is_drill:
        return False
    return champion.identity == loaded.identity and _same_model(champion, cell)


def _same_model(deployed: Deployed, cell: Cell) -> bool:
    return Path(deployed.model_path).resolve() == cell.model_path.resolve()


def settled(loaded: Loaded, *, retry: bool) -> list[ReleaseResult] | None:
    """What there is to say without releasing: champion already everywhere, or refused. None: go on."""
    results = []
    for cell in loaded.cells:
        record = RecordStore(cell_dir(cell.gpu, cell.family) / "record.json").load()
        result = settled_cell(record, loaded, cell, retry=retry)
        if result is None:
            return None
        results.append(result)
        if result.exit_code:
            break
    return results


def settled_cell(record: Record, loaded: Loaded, cell: Cell, *, retry: bool) -> ReleaseResult | None:
    result = functools.partial(
        ReleaseResult,
        candidate=loaded.candidate.name,
        gpu=cell.gpu,
        family=cell.family,
        changed=False,
        champion=record.champion.candidate if record.champion else None,
        previous=record.previous.candidate if record.previous else None,
    )
    if is_champion(record, loaded, cell) and record.champion is not None:
        reason = f"nothing changed: {loaded.candidate.name} is champion since {record.champion.release_id}"
        return result(release_id=record.champion.release_id, state="promoted", reason=reason)
    refused = refusal(record, loaded, retry=retry)
    if refused is not None:
        reason = (
            f"{loaded.candidate.name} was {refused.state.replace('_', ' ')} as {refused.release_id}"
            f" ({refused.reason}) and has not changed since;"
            f" `python -m flows release {_shown(loaded.file)} --retry` tries it again"
        )
        return result(release_id=None, state=refused.state, reason=reason)
    return None


def resumable(record: Record, loaded: Loaded, cell: Cell) -> bool:
    """Whether the record's release is this candidate, unchanged, and was not ended."""
    if record.champion is not None and not _same_model(record.champion, cell):
        return False
    return record.identity == loaded.identity and record.state in RESUMABLE and record.release_id is not None


def begin(context: Context, champion: Deployed) -> Record:
    """Register the release, or note that it goes on: finished offline stages stay, live ones are repeated."""

    def change(record: Record) -> None:
        if context.resumed:
            record.stages = [s for s in record.stages if s.stage in OFFLINE and s.done]
            record.state = AFTER[record.stages[-1].stage] if record.stages else "registered"
            record.reason = "resumed"
            return
        if record.release_id is not None and record.state in RESUMABLE:
            _end(record, "superseded", None, f"superseded by {context.release_id}")
        record.champion = record.champion or champion
        record.release_id, record.candidate = context.release_id, context.candidate.candidate.name
        record.identity, record.state = context.candidate.identity, "registered"
        record.tags = ["drill"] if context.candidate.candidate.is_drill else []
        record.stages, record.approval, record.held_stage, record.reason = [], None, None, ""

    return context.update(change)


def passed(
    context: Context, stage: str, outcome: StageOutcome, seconds: float, approval: Approval | None = None
) -> Record:
    """Note a finished stage; the state moves on only with a pass, or a person's yes to what it could not decide."""

    def change(record: Record) -> None:
        record.stages = [s for s in record.stages if s.stage != stage]
        record.stages.append(
            StageRecord(
                stage=stage,
                verdict=str(outcome.report.verdict),
                finished_at=time.time(),
                seconds=round(seconds, 3),
                detail=outcome.detail,
                approved_by=approval.by if approval is not None else None,
            )
        )
        if record.stages[-1].done:
            record.state = AFTER[stage]

    return context.update(change)


def end(context: Context, state: State, failed_gate: str | None, reason: str) -> Record:
    """End a release that holds no traffic any more."""
    record = context.update(lambda r: _end(r, state, failed_gate, reason))
    context.event(f"release_{state}", reason, severity="critical", subject=failed_gate or "")
    return record


def _end(record: Record, state: State, failed_gate: str | None, reason: str) -> None:
    record.state, record.reason = state, reason
    record.approval, record.held_stage = None, failed_gate if state == "held" else None
    if state != "held" and record.release_id and record.candidate and record.identity:
        record.attempts.append(
            Attempt(
                release_id=record.release_id,
                candidate=record.candidate,
                identity=record.identity,
                state=state,
                failed_gate=failed_gate,
                reason=reason,
                time=time.time(),
            )
        )


def withdraw(context: Context, router: Router, reason: str) -> Record:
    """Abort order, steps 1 and 2: share 0 confirmed by the router, mirror off; then the record says so.

    Here the router goes first: users come before bookkeeping. Raises LeaseLostError, and then moves nothing:
    who ended the lease has reverted, and the traffic may be that of the next release.
    """
    router.revert(context.held().generation)

    def change(record: Record) -> None:
        record.shares, record.mirror, record.state, record.reason = Shares(), 0.0, "rolling_back", reason

    return context.update(change)


def try_revert(router: Router, generation: int) -> str | None:
    """Share 0 whatever the state of things; why it could not be confirmed, if so."""
    try:
        router.revert(generation)
    except (RouterError, OSError) as error:
        return str(error)
    return None
