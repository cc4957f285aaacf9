"""Contenders that take turns on one machine: A B B A, with the machine's ceilings between them.

    with Crew(contenders, folder) as crew:
        run = survey(crew, case, blocks=6, min_s=0.01)
        found = compare(crew, [Pair(case)], "champion", "candidate", effort)

A contender is a resident worker in its own environment. One that crashes, hangs or loses its device gets an outcome
instead of seconds for that case, and a fresh process for the next. Free of Prefect, DuckDB and torch, so that it runs
wherever a GPU is.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal

from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob, BenchSample
from attention.roofline import Ceilings
from data.environment import Environment
from gates.paired_ratio import Estimate, Judged, Side, estimate, judge
from tasks.environment import Job, MeasureError, Worker, WorkerSilentError

Metric = Literal["kernel_s", "ttft_s", "tpot_s"]

ASK_TIMEOUT_S = 180.0  # of one command; a first call may compile
_DEVICE_LOST = ("illegal_access", "crashed", "timed_out")
_CEILING_S = 0.002  # a ceiling's block is its least number of calls
_CEILING_BLOCKS = 6  # of one build: more would say the same
SURVEY_REPLICAS, PAIR_REPLICAS = 2, 16


@dataclass(frozen=True)
class Contender:
    """Who takes turns: a worker's job and environment, and the backend where it is not the policy's choice."""

    name: str
    job: BenchJob
    environment: Environment
    backend: str | None = None
    slowdown: float = 0.0  # a drill's


class Crew:
    """The workers of contenders, by name; those that died come back at the next question."""

    def __init__(self, contenders: Sequence[Contender], folder: Path, *, timeout_s: float = ASK_TIMEOUT_S) -> None:
        self.contenders = {one.name: one for one in contenders}
        self._folder = folder
        self._timeout_s = timeout_s
        self._workers: dict[str, Worker] = {name: self._start(name) for name in self.contenders}
        self._ready: set[str] = set()

    def _start(self, name: str) -> Worker:
        one = self.contenders[name]
        return Worker(Job(f"bench-{name.replace(':', '-')}", one.job, one.environment), self._folder)

    def wait_ready(self) -> None:
        """Wait for all to load, side by side. Raises MeasureError for one that cannot."""
        for name in self._workers:
            self.worker(name)

    def worker(self, name: str) -> Worker:
        """A worker that answers: started anew where the last one was lost. Raises MeasureError where it cannot load."""
        if name not in self._workers:
            self._workers[name] = self._start(name)
        if name not in self._ready:
            self._workers[name].wait_ready()
            self._ready.add(name)
        return self._workers[name]

    def ask(self, name: str, command: BenchCommand) -> BenchSample:
        """One turn of a contender, on its own backend unless the command names one. A lost worker is an answer with
        its outcome."""
        one = self.contenders[name]
        own = {"backend": command.backend or one.backend, "slowdown": one.slowdown}
        command = command.model_copy(update=own if command.metric == "kernel_s" else {})
        try:
            answer = BenchSample.model_validate(self.worker(name).ask(command, self._timeout_s))
        except WorkerSilentError as error:
            answer = BenchSample(outcome="timed_out", error=str(error))
        except MeasureError as error:
            answer = BenchSample(outcome="crashed", error=str(error))
        if answer.outcome in _DEVICE_LOST:
            self._lose(name)
        return answer

    def _lose(self, name: str) -> None:
        self._ready.discard(name)
        self._workers.pop(name).close()

    def renew(self, names: Sequence[str]) -> None:
        """Fresh processes for these: what differs between equal ones for their lifetime is another draw then. They load
        side by side. Raises MeasureError where one cannot."""
        for name in names:
            if name in self._workers:
                self._lose(name)
        for name in names:
            self._workers[name] = self._start(name)
        for name in names:
            self.worker(name)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Run:
    """What one build of one case showed: in `turns[name]` the seconds of each turn, two a block; in `lost[name]` why
    there are none."""

    command: BenchCommand
    turns: dict[str, list[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(list))
    first: dict[str, BenchSample] = field(default_factory=dict)
    last: dict[str, BenchSample] = field(default_factory=dict)
    lost: dict[str, BenchSample] = field(default_factory=dict)
    ceilings: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    num_blocks: int = 0

    def seconds(self, name: str) -> list[float]:
        """All raw samples of a contender; outliers stay, they are the tail."""
        return [second for turn in self.turns[name] for second in turn]

    def block_medians(self, name: str) -> list[float]:
        """Median seconds of a contender in each block."""
        turns = self.turns[name]
        return [median((*turns[i], *turns[i + 1])) for i in range(0, len(turns) - 1, 2)]

    def side(self, name: str) -> Side:
        return Side(tuple(self.turns[name]), self.first[name].num_replicas)

    def machine(self) -> Ceilings | None:
        """The machine's ceilings beside this case: medians over blocks; None where they were not measured."""
        rates = {kind: median(work / seconds for seconds, work in rows) for kind, rows in self.ceilings.items() if rows}
        if len(rates) < 2:
            return None
        return Ceilings(flops_per_s=rates["matmul"], bytes_per_s=rates["read"])


def merged(runs: Sequence[Run]) -> Run:
    """All builds of a case as one: their turns one after the other, the first build's first answers; a contender that
    was lost in one of them is lost."""
    whole = Run(runs[0].command, first=dict(runs[0].first))
    for run in runs:
        whole.num_blocks += run.num_blocks
        whole.last |= run.last
        whole.lost |= run.lost
        for name, turns in run.turns.items():
            whole.turns[name] += turns
        for kind, rows in run.ceilings.items():
            whole.ceilings[kind] += rows
    for name in whole.lost:
        whole.first.pop(name, None)
        whole.turns.pop(name, None)
    return whole


def survey(crew: Crew, case: AttentionCase, *, blocks: int, min_s: float, names: Sequence[str] | None = None) -> Run:
    """All contenders on one case, in turns, `blocks` times."""
    command = BenchCommand(metric="kernel_s", case=case, min_s=min_s, replicas=SURVEY_REPLICAS)
    return _run(crew, command, names or list(crew.contenders), blocks, least=1)


@dataclass(frozen=True)
class Effort:
    """How long to measure, and which difference is none: blocks of one build, in how many processes every cell is
    built, the most blocks of all builds of a cell, the margin of SAME, and when the time is over (`time.monotonic`)."""

    blocks: int
    max_blocks: int
    processes: int
    margin: float
    min_s: float
    deadline: float = math.inf


@dataclass(frozen=True)
class Pair:
    """One case for two contenders to be compared on; `backend` where it is neither's own choice."""

    case: AttentionCase
    metric: Metric = "kernel_s"
    backend: str | None = None


@dataclass
class Compared:
    """What came of a pair; nothing is judged where one of the two was lost."""

    pair: Pair
    runs: list[Run] = field(default_factory=list)
    judged: Judged | None = None
    seconds: float = 0.0  # that measuring took

    @property
    def run(self) -> Run:
        return merged(self.runs)

    @property
    def is_lost(self) -> bool:
        return any(run.lost for run in self.runs)

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)

    def estimate(self, champion: str, candidate: str) -> Estimate:
        return estimate([(run.side(champion), run.side(candidate)) for run in self.runs])


def compare(
    crew: Crew,
    pairs: Sequence[Pair],
    champion: str,
    candidate: str,
    effort: Effort,
    *,
    heard: Callable[[Compared], None] = lambda one: None,
) -> list[Compared]:
    """Two contenders on several cases, judged together. Every pair is built in as many processes as the effort says;
    one that is ambiguous then is built again in fresh ones, until none is, none may be, or the time is over. `heard`
    after every build of a pair."""
    found = [Compared(pair) for pair in pairs]
    left = found
    num_processes = 0
    while True:
        if num_processes:
            try:
                crew.renew([champion, candidate])
            except MeasureError:
                return found  # judged by what is there; who asks a worker next will hear why
        for one in left:
            if num_processes and time.monotonic() >= effort.deadline:
                break
            began = time.monotonic()
            command = BenchCommand(
                metric=one.pair.metric,
                case=one.pair.case,
                min_s=effort.min_s,
                backend=one.pair.backend,
                replicas=PAIR_REPLICAS,
            )
            one.runs.append(_run(crew, command, [champion, candidate], effort.blocks, least=2))
            one.seconds += time.monotonic() - began
            heard(one)
        whole = [one for one in found if not one.is_lost]
        estimates = [one.estimate(champion, candidate) for one in whole]
        groups = [(one.pair.backend, one.pair.case.phase) for one in whole]
        for one, told in zip(whole, judge(estimates, effort.margin, groups), strict=True):
            one.judged = told
        more = [one for one in whole if one.num_blocks + effort.blocks <= effort.max_blocks]
        num_processes += 1
        if num_processes >= effort.processes:
            more = [one for one in more if one.judged is not None and one.judged.verdict == "AMBG"]
        left = more
        if not left or time.monotonic() >= effort.deadline:
            return found


def noise_floor(crew: Crew, pairs: Sequence[Pair], one: str, twin: str, effort: Effort) -> float:
    """Today's floor of this machine: how far from 1 the ratio of two equal contenders came, at most, over some pairs.

    A distance (0.007: 0.7 %). What differs between equal processes for their lifetime is in no interval. 0.0 where
    nothing could be measured: those pairs will tell it.
    """
    once = replace(effort, processes=1, max_blocks=effort.blocks)
    found = compare(crew, pairs, one, twin, once)
    ratios = [each.judged.interval.value for each in found if each.judged is not None]
    return max((max(ratio, 1 / ratio) - 1 for ratio in ratios), default=0.0)


def _run(crew: Crew, command: BenchCommand, names: Sequence[str], blocks: int, *, least: int) -> Run:
    """One build: the first turn of each makes it ready and warms it up, and is not counted. It ends when fewer than
    `least` are left."""
    run = Run(command)
    for name in names:
        answer = crew.ask(name, command)
        if answer.outcome == "measured":
            run.first[name] = answer
        else:
            run.lost[name] = answer
    for _ in range(blocks):
        if len(run.first) < least:
            break
        _block(crew, run)
    return run


def _block(crew: Crew, run: Run) -> None:
    """A B B A, the next block B A A B, since what follows the ceilings is not as the rest; then the ceilings. Who is
    lost on the way is out of this case, with the seconds that it gave."""
    names = list(run.first)
    if run.num_blocks % 2:
        names.reverse()
    turns: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for name in (*names, *reversed(names)):
        if name in run.lost:
            continue
        answer = crew.ask(name, run.command)
        if answer.outcome == "measured":
            turns[name].append(answer.seconds)
            run.last[name] = answer
        else:
            run.lost[name] = answer
    for name, taken in turns.items():
        if name not in run.lost:
            run.turns[name] += taken
    for name in run.lost:
        run.first.pop(name, None)
        run.turns.pop(name, None)
    run.num_blocks += 1
    if run.command.metric == "kernel_s" and run.first and run.num_blocks <= _CEILING_BLOCKS:
        _ceilings(crew, run)


def _ceilings(crew: Crew, run: Run) -> None:
    """By the contender whose turn it is: all share the device, and none should always go last."""
    names = list(run.first)
    name = names[run.num_blocks % len(names)]
    for kind in ("matmul", "read"):
        command = BenchCommand.model_validate({"metric": f"{kind}_s", "case": run.command.case, "min_s": _CEILING_S})
        answer = crew.ask(name, command)
        if answer.outcome == "measured" and answer.work:
            run.ceilings[kind].append((median(answer.seconds), answer.work))
