"""The release: one candidate through all phases, on evidence, to champion or back.

    python -m flows release data/candidates/torch-flash-cpu.yaml

fingerprint, probe, replay and baseline are measured where the candidate lives; shadow, canary and
expand hold live traffic. Every stage ends in a gate; a stage is one Prefect task around a pure function,
and nothing here needs a Prefect server. Whatever interrupts a release, traffic goes back to the
champion first.
"""

from __future__ import annotations

import functools
import importlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Failed

from attention.errors import UserError
from data.candidate import Cell, Loaded, candidate_named, load_candidate
from data.paths import cell_dir, lake_dir
from data.requests import TrafficRequest, addressed, scale
from flows.up import up
from gates.verdict import GateReport, Verdict
from tasks import canary, environment, expand, figures, hold, instances, lifecycle, shadow
from tasks import report as report_html
from tasks.context import Context, StageOutcome, new_release_id
from tasks.lifecycle import LIVE, OFFLINE, STAGES, Gate, ReleaseResult
from tasks.offline import run_stage
from tasks.processes import ProcessError, stop_process
from tasks.record import Approval, LeaseLostError, Record, RecordStore, Shares
from tasks.router import EnvoyRouter, RouterError
from tasks.story import Story, tell
from tasks.track import Tracker
from tasks.vigil import Vigil

Say = Callable[[str], None]

# Where progress goes: the terminal of a command; by default printed, so that a worker's run logs it.
_say: ContextVar[Say] = ContextVar("say", default=lambda line: print(line))


@contextmanager
def speaking(say: Say) -> Iterator[None]:
    """Give releases of this context another place to tell their progress."""
    token = _say.set(say)
    try:
        yield
    finally:
        _say.reset(token)


_LIVE: dict[str, Callable[[Context, EnvoyRouter, list[TrafficRequest]], StageOutcome]] = {
    "shadow": shadow.run,
    "canary": canary.run,
    "expand": expand.run,
}


class ReleaseRefusedError(RuntimeError):
    """The release ended without promotion; the flow run is Failed, and `results` say why."""

    def __init__(self, results: Sequence[ReleaseResult]) -> None:
        super().__init__("; ".join(f"{r.candidate} on {r.gpu}: {r.state}: {r.reason}" for r in results if r.exit_code))
        self.results = list(results)


@flow(name="release", flow_run_name="{candidate}", log_prints=True)
def release(
    candidate: str, champion: str | None = None, stop_after: str | None = None, retry: bool = False
) -> list[dict[str, Any]] | State[Any]:
    """Release a candidate through all waves. Raises ReleaseRefusedError when a cell does not promote it, and UserError.

    candidate: its file; for a run of a deployment its name in data/candidates, and so for champion.
    champion: the incumbent of a cell that nothing was released to (default: data/champions.yaml).
    stop_after: end after this stage passed. retry: try a candidate again that was rejected before.
    """
    say = _say.get()
    try:
        if _deployed():
            candidate = str(candidate_named(candidate))
            champion = str(candidate_named(champion)) if champion is not None else None
        results = run_release(candidate, champion=champion, stop_after=stop_after, retry=retry, say=say)
    except UserError as error:
        return _failed(error)
    if any(result.exit_code for result in results):
        return _failed(ReleaseRefusedError(results))
    return [result.model_dump() for result in results]


def _failed(error: Exception) -> State[Any]:
    """Failed for a reason that is known: said in one line, where an exception leaves a traceback in the run's log.

    Who called the flow gets the exception.
    """
    return Failed(message=str(error), data=error)


def _deployed() -> bool:
    """Whether an event, a schedule or an API call started this run: it may pick candidates, not bring them."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def run_release(
    candidate: str, *, champion: str | None, stop_after: str | None, retry: bool, say: Say
) -> list[ReleaseResult]:
    """Wave by wave, cell by cell; the first cell that does not promote ends it."""
    if stop_after is not None and stop_after not in STAGES:
        raise UserError(f"--stop-after {stop_after}: stages are {', '.join(STAGES)}")
    loaded = load_candidate(Path(candidate))
    results: list[ReleaseResult] = []
    for cell in loaded.cells:
        results.append(_release_cell(loaded, cell, champion, stop_after, retry, say))
        if results[-1].exit_code:
            break
    return results


def _release_cell(
    loaded: Loaded, cell: Cell, named_champion: str | None, stop_after: str | None, retry: bool, say: Say
) -> ReleaseResult:
    folder = cell_dir(cell.gpu, cell.family)
    store = RecordStore(folder / "record.json")
    record = store.load()
    decided = lifecycle.settled_cell(record, loaded, cell, retry=retry)
    if decided is not None:
        return decided
    deployed, champion = lifecycle.champion_of(record, cell, named_champion)
    resumed = lifecycle.resumable(record, loaded, cell)
    release_id = record.release_id if resumed and record.release_id else new_release_id(loaded.candidate.name)
    with _terminated_like_interrupted(), store.hold(release_id) as lease:
        serving = store.load().champion
        if (serving and serving.release_id) != (record.champion and record.champion.release_id):
            raise UserError(f"another release of {cell.gpu} {cell.family} ended just now: run the command again")
        context = Context(
            release_id=release_id,
            cell=cell,
            candidate=loaded,
            champion=champion,
            lease=lease,
            say=say,
            resumed=resumed,
        )
        lifecycle.begin(context, deployed)
        return _Release(context, stop_after).run()


class _Release:
    """One release of one cell, while its lease is held."""

    def __init__(self, context: Context, stop_after: str | None) -> None:
        self.context = context
        self.stop_after = stop_after
        self.router = EnvoyRouter(context.folder)
        self.tracker = Tracker(context.cell.gpu, context.cell.family, context.lake, context.release_id)
        self.run_id: str | None = None
        self.failed_gate: str | None = None
        self.overruled: str | None = None  # who took the release's lease: the record is theirs then
        self._router_before = 0  # requests that Envoy sent to a candidate before this release
        # Pictures and MLflow's copies decide nothing, so they are made beside the next stage.
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")

    def run(self) -> ReleaseResult:
        context = self.context
        context.say(
            f"release {context.release_id}: {context.candidate.candidate.name} against "
            f"{context.champion.candidate.name} on {context.cell.gpu}, {context.cell.model}"
            + (" (resumed)" if context.resumed else "")
        )
        started_here = self.router.process() is None
        try:
            self._copies.submit(self._open)
            self._stages()
        except (KeyboardInterrupt, SystemExit):
            self._abandon(started_here)
            raise
        except LeaseLostError as error:
            # A rollback or the watchdog has moved traffic already; the record is theirs now, and the
            # candidate stays warm for whoever looks into it.
            self.overruled = f"stopped: {error}"
            context.say(self.overruled)
            instances.stop(context, self.router, keep_candidate=True)
        except UserError as error:
            self._end("held", f"set-up: {error}")
            raise
        except (RouterError, ProcessError, environment.MeasureError, RuntimeError, OSError) as error:
            self._end("held", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        except BaseException as error:
            self._end("held", f"{type(error).__name__}: {error}")
            raise
        return self._finish()

    def _open(self) -> None:
        """The MLflow run, and Great Expectations, whose import takes seconds that the first gate need not wait for."""
        self.run_id = self.tracker.open_release(self._story())
        importlib.import_module("great_expectations")

    def _serve(self) -> None:
        """Envoy, champion and watchdog run, and everything goes to the champion."""
        running = up(self.context.cell.gpu, self.context.cell.family)
        self.context.check()
        record = self.context.update(lambda r: None)
        self.router.revert(record.generation)
        self._router_before = self.router.observe().requests["candidate"]
        self.context.say(f"traffic: {running.url} is served by {running.release_id}")

    def _stages(self) -> None:
        if self._offline():
            self._live()

    def _offline(self) -> bool:
        """The stages that need no traffic, those of an earlier try left out; False ends the release."""
        done = {s.stage for s in self.context.store.load().stages}
        if self.stop_after not in OFFLINE:
            self._serve()
        for name in OFFLINE:
            if name not in done and not self._stage(name, functools.partial(run_stage, name, self.context)):
                return False
            if name == self.stop_after:
                self._stopped(name)
                return False
        return True

    def _live(self) -> None:
        requests = self._requests()
        self.context.say("shadow: starting candidate and control")
        instances.start(self.context, self.router)
        for name in LIVE:
            if not self._stage(name, functools.partial(_LIVE[name], self.context, self.router, requests)):
                return
            if name == self.stop_after:
                self._withdraw(f"stopped after {name}, as asked")
                self._stopped(name)
                return
        self._promote()

    def _requests(self) -> list[TrafficRequest]:
        from transformers import AutoTokenizer

        traffic = self.context.candidate.traffic()
        if traffic.sample is not None and traffic.sample.sampled < traffic.sample.requests:
            self.context.say(f"traffic: {traffic.sample}")
        for line in traffic.rejected[:3]:
            self.context.say(f"traffic: line {line.line} left out: {line.reason}")
        if len(traffic.rejected) > 3:
            self.context.say(f"traffic: {len(traffic.rejected)} lines left out in all")
        tokenizer = AutoTokenizer.from_pretrained(self.context.cell.model_path)
        return addressed(scale(traffic, self.context.plan.traffic, tokenizer), self.context.cell.model)

    def _stage(self, name: str, run: Callable[[], StageOutcome]) -> bool:
        """Run one stage as a Prefect task, write its evidence, note it; False ends the release."""
        started = time.monotonic()
        self.context.check()
        outcome = stage.with_options(name=name)(run)
        seconds = time.monotonic() - started
        report = outcome.report
        report.write(
            self.context.lake, self.context.release_id, gpu=self.context.cell.gpu, model=self.context.cell.model
        )
        # Users first: a failed gate takes the traffic back before anything is drawn or logged.
        approval = self._approval(name, report)
        if report.verdict is not Verdict.PASS and approval is None and name in LIVE:
            self._withdraw(report.reason)
        lifecycle.passed(self.context, name, outcome, seconds, approval)
        if report.verdict is Verdict.PASS:
            self.context.say(f"{name}: pass, {len(report.checks)} checks, {seconds:.0f} s")
        self._copies.submit(self._log_stage, name, outcome, seconds)
        if report.verdict is Verdict.PASS or approval is not None:
            return True
        self.failed_gate = name
        self._refuse(name, outcome)
        return False

    def _approval(self, name: str, report: GateReport) -> Approval | None:
        """A person's yes to an inconclusive gate. A live one is held for it, traffic as it is, until the deadline; an
        offline one was held when this release ended before."""
        if report.verdict is not Verdict.INCONCLUSIVE:
            return None
        if name in OFFLINE:
            return hold.spend(self.context, name)
        deadline_s = self.context.plan.canary.hold_deadline_s
        if deadline_s == 0:
            return None
        hold.hold(self.context, name, report.reason)
        self.context.say(
            f"{name}: held: {report.reason}; `python -m flows approve {self.context.release_id}`"
            f" within {deadline_s:.0f} s goes on, otherwise it is rolled back"
        )
        found = hold.wait(self.context, self.router, name, deadline_s)
        if isinstance(found, str):
            self.context.say(f"{name}: {found}")
            return None
        return found

    def _refuse(self, name: str, outcome: StageOutcome) -> None:
        reason, verdict = outcome.report.reason, outcome.report.verdict
        if name in LIVE:
            self._roll_back(reason, name)
        elif verdict is Verdict.FAIL:
            self._mark("rejected", name, reason)
        else:
            self._mark("held", name, reason)

    def _roll_back(self, reason: str, gate: str | None = None) -> None:
        """After the withdrawal: the record says so, the control stops, the candidate stays warm to be looked into."""
        self._mark("rolled_back", gate, reason)
        instances.stop(self.context, self.router, keep_candidate=True)

    def _mark(self, state: Any, gate: str | None, reason: str) -> None:
        lifecycle.end(self.context, state, gate, reason)
        self.context.say(f"{state.replace('_', ' ')}: {reason}")

    def _withdraw(self, reason: str) -> None:
        """Share 0, confirmed; mirror off. The candidate stays warm for whoever looks into it."""
        started = time.monotonic()
        lifecycle.withdraw(self.context, self.router, reason)
        self.context.say(f"share 0 confirmed by the router in {time.monotonic() - started:.2f} s")

    def _end(self, state: Any, reason: str) -> None:
        """Something broke: traffic back if any is out, then the record says so."""
        try:
            record = self.context.held()
            exposed = record.exposed()
            problem = lifecycle.try_revert(self.router, record.generation) if exposed else None
            if problem:
                reason = f"{reason}; the router did not confirm share 0 ({problem}), the watchdog goes on trying"
            if exposed:
                self._withdraw_record()
            if record.state == "promoted":
                self.context.say(f"promoted, but afterwards: {reason}")
            else:
                self._mark("rolled_back" if exposed else state, None, reason)
        except LeaseLostError as error:
            self.context.say(f"stopped: {error}")
        instances.stop(self.context, self.router)

    def _withdraw_record(self) -> None:
        def change(record: Record) -> None:
            record.shares, record.mirror = Shares(), 0.0

        self.context.update(change)

    def _abandon(self, started_here: bool) -> None:
        """Ctrl-C or SIGTERM: share 0, then stop what this command started."""
        self.context.say("interrupted: traffic back to the champion")
        environment.kill_running()

        def change(record: Record) -> None:
            record.shares, record.mirror = Shares(), 0.0
            if record.state in ("shadow", "canary", "held"):
                record.state = "baselined"
            record.candidate_instance = record.control_instance = None
            if record.state != "promoted":
                record.reason = "interrupted; the same command resumes it"

        try:
            problem = lifecycle.try_revert(self.router, self.context.held().generation)
            if problem:
                self.context.say(f"the router did not confirm share 0 ({problem}); the watchdog goes on trying")
            self.context.update(change)
        except LeaseLostError as error:
            started_here = False
            self.context.say(f"traffic and record are another's: {error}")
        instances.stop(self.context, self.router)
        if started_here:
            from flows.down import down

            down(self.context.cell.gpu, self.context.cell.family)
        self._copies.shutdown(cancel_futures=True)
        self.tracker.close_release(self.run_id, self._story())

    def _stopped(self, name: str) -> None:
        instances.stop(self.context, self.router)

        def change(record: Record) -> None:
            record.candidate_instance = record.control_instance = None
            record.reason = f"stopped after {name}, as asked; the same command without --stop-after goes on"
            if record.state == "rolling_back":
                record.state = "baselined"

        self.context.update(change)

    def _promote(self) -> None:
        context = self.context
        if context.candidate.candidate.is_drill:
            self._withdraw("a drill is never promoted")
            self._roll_back("a drill passed every gate: the gate that should stop it is blind")
            return
        if context.cell.approval and not self._approved():
            return
        stages = {s.stage: s for s in context.store.load().stages}
        if undone := [name for name in STAGES if name not in stages or not stages[name].done]:
            raise RuntimeError(f"not promoted: no pass of {', '.join(undone)} is on record")
        if (trouble := Vigil(context).trouble()) is not None:
            self._withdraw(trouble)
            self._roll_back(f"not promoted: {trouble}")
            return
        known = {s.stage: s.detail for s in context.store.load().stages}
        old = context.store.load().previous
        expand.hand_over(context, self.router, known["fingerprint"]["candidate"], dict(known["probe"]["resolved"]))
        instances.stop(context, self.router, keep_candidate=True)
        # One previous is kept warm; the one before it has served its turn.
        if old is not None and old.instance is not None:
            stop_process(context.folder, old.instance.name)
        context.say(f"promoted: {context.candidate.candidate.name} serves {context.cell.gpu} {context.cell.family}")

    def _approved(self) -> bool:
        """A wave with `approval: true` waits for a person, traffic on the candidate, until the deadline."""
        context, deadline_s = self.context, self.context.plan.canary.hold_deadline_s
        hold.hold(context, hold.PROMOTION, "every gate passed; the wave waits for approval")
        context.say(f"approval: `python -m flows approve {context.release_id}` within {deadline_s:.0f} s promotes it")
        found = hold.wait(context, self.router, hold.PROMOTION, deadline_s)
        if isinstance(found, str):
            self._withdraw(f"the wave waited for approval: {found}")
            self._roll_back(f"the wave waited for approval: {found}")
            return False
        return True

    def _log_stage(self, name: str, outcome: StageOutcome, seconds: float) -> None:
        """Copies for reviewers: nothing that happens here decides anything."""
        pictures = figures.save(name, self.context.lake, self.context.release_id, self._figures)
        self.tracker.log_stage(self.run_id, outcome.report, pictures, seconds)

    @property
    def _figures(self) -> Path:
        return self.context.work / "figures"

    def _story(self) -> Story:
        policy = self.context.candidate.policy_path.read_text()
        return tell(self.context.store.load(), lake_dir(), self.context.release_id, policy_yaml=policy)

    def _finish(self) -> ReleaseResult:
        """Report, MLflow, and the result; the record decides what it says."""
        self._copies.shutdown()
        story, record = self._story(), self.context.store.load()
        page = report_html.write(story, self._figures)
        self.tracker.close_release(self.run_id, story, page)
        if record.state == "promoted" and record.champion and record.champion.release_id == self.context.release_id:
            self.tracker.promoted(self.run_id, story, record)
        own = record.release_id == self.context.release_id
        taken_back = own and record.state in ("rolling_back", "rolled_back")  # by a person, while it ran
        return ReleaseResult(
            release_id=self.context.release_id,
            candidate=self.context.candidate.candidate.name,
            gpu=self.context.cell.gpu,
            family=self.context.cell.family,
            state=str(record.state) if self.overruled is None else "rolled_back" if taken_back else "held",
            failed_gate=self.failed_gate,
            reason=record.reason if self.overruled is None or taken_back else self.overruled,
            gates=_gates(story, record),
            champion=record.champion.candidate if record.champion else None,
            previous=record.previous.candidate if record.previous else None,
            router_shares=self._shares(),
            candidate_requests=self._candidate_requests(),
            user_requests={n: sum(s.detail.get(n, 0) for s in record.stages) for n in ("sent", "lost")},
            mlflow_run_id=self.run_id,
            report=str(page),
        )

    def _shares(self) -> dict[str, int] | None:
        try:
            return self.router.observe().shares.model_dump()
        except RouterError:
            return None

    def _candidate_requests(self) -> dict[str, int]:
        from data.lake import Lake

        with Lake(self.context.lake, release_id=self.context.release_id) as lake:
            [(rows,)] = lake.rows(
                "select count(*) from requests where release_id = $id and side = 'candidate' and not shadow",
                id=self.context.release_id,
            )
        counted = {"rows": int(rows)}
        with suppress(RouterError):
            counted["router"] = self.router.observe().requests["candidate"] - self._router_before
        return counted


def _gates(story: Story, record: Record) -> list[Gate]:
    seconds = {s.stage: s.seconds for s in record.stages}
    return [
        Gate(
            stage=gate.stage,
            verdict=str(gate.verdict),
            checks=len(gate.checks),
            seconds=seconds.get(gate.stage, 0.0),
            detectable=lifecycle.detectable(c.detectable for c in gate.checks if c.detectable),
            reason=gate.reason,
        )
        for gate in story.gates
    ]


@task(cache_policy=NO_CACHE, persist_result=False)
def stage(run: Callable[[], StageOutcome]) -> StageOutcome:
    """One stage. Never cached: stages change the world."""
    return run()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a release as Ctrl-C does: share 0 first, nothing left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, as on a worker: Prefect handles the signal there
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
