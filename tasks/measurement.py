"""Contenders that take turns on one machine: A B B A, with the machine's ceilings between them.

    with Crew(contenders, folder) as crew:
        run = survey(crew, case, blocks=6, min_s=0.01)
        run = compare(crew, case, "champion", "candidate", rule, min_s=0.01)

A contender is a resident worker in its own environment. One that crashes, hangs or loses its device gets an outcome
instead of seconds for that case, and a fresh process for the next. Free of Prefect, DuckDB and torch, so that it runs
wherever a GPU is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal

from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob, BenchSample
from attention.roofline import Ceilings
from data.environment import Environment
from gates.paired_ratio import Verdict, block_log_ratio, paired_ratio, verdict
from gates.statistics import Interval
from tasks.environment import Job, MeasureError, Worker, WorkerSilentError

Metric = Literal["kernel_s", "ttft_s", "tpot_s"]

ASK_TIMEOUT_S = 180.0  # of one command; a first call may compile
_DEVICE_LOST = ("illegal_access", "crashed", "timed_out")
_CEILING_S = 0.002  # a ceiling's block is its least number of calls


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

    def ask(self, name: str, case: AttentionCase, metric: str, min_s: float) -> BenchSample:
        """One turn of a contender. A lost worker is an answer with its outcome."""
        one = self.contenders[name]
        command = BenchCommand(
            metric=metric,
            case=case,
            min_s=min_s,
            backend=one.backend if metric == "kernel_s" else None,
            slowdown=one.slowdown if metric != "matmul_s" and metric != "read_s" else 0.0,
        )
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
    """What one case showed: in `turns[name]` the seconds of each turn, two a block; in `lost[name]` why there are none."""

    case: AttentionCase
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

    def log_ratios(self, champion: str, candidate: str) -> list[float]:
        """One a block, of turns in the order in which they were taken."""
        return [
            block_log_ratio(
                [(name, self.turns[name][i]) for name in (champion, candidate) for i in (2 * block, 2 * block + 1)],
                champion,
                candidate,
            )
            for block in range(self.num_blocks)
        ]

    def machine(self) -> Ceilings | None:
        """The machine's ceilings beside this case: medians over blocks; None where they were not measured."""
        rates = {kind: median(work / seconds for seconds, work in rows) for kind, rows in self.ceilings.items() if rows}
        if len(rates) < 2:
            return None
        return Ceilings(flops_per_s=rates["matmul"], bytes_per_s=rates["read"])


def survey(
    crew: Crew,
    case: AttentionCase,
    *,
    blocks: int,
    min_s: float,
    metric: Metric = "kernel_s",
    names: Sequence[str] | None = None,
) -> Run:
    """All contenders on one case, in turns, `blocks` times."""
    run = _begin(crew, case, metric, min_s, list(names or crew.contenders))
    for _ in range(blocks):
        _block(crew, run, metric, min_s)
    return run


@dataclass(frozen=True)
class Rule:
    """When to stop, and what to say: blocks at which one looks, confidence of an interval, margin of SAME."""

    looks: tuple[int, ...]
    confidence: float
    margin: float


@dataclass(frozen=True)
class Compared:
    """A ratio candidate / champion of a case, and what may be said of it; no interval where one of them was lost."""

    run: Run
    interval: Interval | None
    verdict: Verdict | None


def compare(
    crew: Crew,
    case: AttentionCase,
    champion: str,
    candidate: str,
    rule: Rule,
    *,
    min_s: float,
    metric: Metric = "kernel_s",
    deadline: float | None = None,
) -> Compared:
    """Two contenders on one case, with more blocks while the verdict is AMBG, up to the last look or the deadline
    (of `time.monotonic`)."""
    run = _begin(crew, case, metric, min_s, [champion, candidate])
    interval, said = None, None
    for num in rule.looks:
        while run.num_blocks < num and not run.lost:
            _block(crew, run, metric, min_s)
        if run.lost:
            return Compared(run, None, None)
        interval = paired_ratio(run.log_ratios(champion, candidate), rule.confidence)
        said = verdict(interval, rule.margin)
        if said != "AMBG" or (deadline is not None and time.monotonic() >= deadline):
            break
    return Compared(run, interval, said)


def noise_floor(crew: Crew, cases: Sequence[AttentionCase], one: str, twin: str, rule: Rule, *, min_s: float) -> float:
    """Today's floor of this machine: how far from 1 the ratio of two equal contenders came, at most, over some cases.

    A distance (0.007: 0.7 %). What differs between equal processes, such as where their buffers lie, does not average
    out with more blocks, and so is not in any interval. 0.0 where nothing could be measured: those cases will tell it.
    """
    floor = 0.0
    for case in cases:
        found = compare(crew, case, one, twin, rule, min_s=min_s)
        if found.interval is not None:
            floor = max(floor, found.interval.value - 1, 1 / found.interval.value - 1)
    return floor


def _begin(crew: Crew, case: AttentionCase, metric: Metric, min_s: float, names: list[str]) -> Run:
    """The first turn of each: it builds and warms up, and is not counted."""
    run = Run(case)
    for name in names:
        answer = crew.ask(name, case, metric, min_s)
        if answer.outcome == "measured":
            run.first[name] = answer
        else:
            run.lost[name] = answer
    return run


def _block(crew: Crew, run: Run, metric: Metric, min_s: float) -> None:
    """A B B A, then the ceilings. Who is lost on the way is out of this case, with the seconds that it gave."""
    names = list(run.first)
    turns: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for name in (*names, *reversed(names)):
        if name in run.lost:
            continue
        answer = crew.ask(name, run.case, metric, min_s)
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
    if metric == "kernel_s" and run.first:
        _ceilings(crew, run)


def _ceilings(crew: Crew, run: Run) -> None:
    """By the contender whose turn it is: all share the device, and none should always go last."""
    names = list(run.first)
    name = names[run.num_blocks % len(names)]
    for kind in ("matmul", "read"):
        answer = crew.ask(name, run.case, f"{kind}_s", _CEILING_S)
        if answer.outcome == "measured" and answer.work:
            run.ceilings[kind].append((median(answer.seconds), answer.work))
