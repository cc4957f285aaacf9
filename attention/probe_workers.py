"""The processes that run probes: one worker a backend at a time, replaced when it dies, hangs or loses its device.

A crash, a hang or an illegal access is a row with its reason, and a new worker goes on with the next probe. Within a
budget of seconds the backends take turns. What a worker reads and says stands in attention/probe.py.

    python -m attention.probe_workers     # a worker: a WorkerTask on stdin, rows on stdout
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Event, Lock

import torch
from pydantic import BaseModel

from attention.cases import AttentionCase
from attention.isolate import Child
from attention.lifetime import die_with_parent
from attention.matrix import declared_reasons
from attention.probe import Probe, ProbeResult, result_row, run_probe
from attention.reasons import IN_ANOTHER_PROCESS, Code, Reason

# Exit status of a worker that asks for a fresh one: its device is lost (an illegal access), or what its libraries
# remember of earlier probes is in the way of this one. EX_TEMPFAIL.
_RESTART = 75


class WorkerTask(BaseModel):
    """What a probe worker reads from stdin."""

    backend: str
    device: str
    scale_factor: float
    probes: tuple[Probe, ...]
    try_declared: bool = False
    crash: bool = False  # a drill's: the process dies at its first probe


#: Backend, name and case of a probe.
Key = tuple[str, str, AttentionCase]

# Seconds that a unit of probes keeps its worker at least while others wait: most of a turn is the import.
_SHORTEST_TURN_S = 20.0
# A probe that is under way at the end of a turn may take this much longer, in turns.
_GRACE = 0.5


def probe_all(
    backends: tuple[str, ...],
    probes: list[Probe],
    *,
    device: str,
    scale_factor: float = 1.0,
    timeout_s: float = 120.0,
    jobs: int = 2,
    try_declared: bool = False,
    by_head_dim: bool = False,
    crash: str | None = None,
    budget_s: float | None = None,
    known: Collection[Key] = frozenset(),
    is_pending: Callable[[str, AttentionCase], bool] = lambda backend, case: False,
    heard: Callable[[list[ProbeResult]], None] = lambda rows: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ProbeResult]:
    """All probes of all backends but the `known` ones, in worker processes; rows for whatever a worker lost.

    What a declared rule refuses gets its static row without a process. A probe that gives no row for `timeout_s` is
    lost. `jobs` workers run at a time: a worker's cost is mostly its import, and the machine may serve others.
    `by_head_dim` gives each head dim of a backend its own worker, so that kernels compile side by side. `heard` gets
    the rows of a probe at its end.

    With `budget_s` the backends take turns, so that a slow one cannot starve the rest; those whose kernels would
    compile first (`is_pending`) come last in each round. At its end all workers are killed; the rest is `unknown`.
    Whatever ends this function early (Ctrl-C, an error of `heard`) kills the workers too.
    """
    deadline = None if budget_s is None else time.monotonic() + budget_s
    stopped = Event()

    def is_over() -> bool:
        return stopped.is_set() or (deadline is not None and time.monotonic() >= deadline)

    found: list[ProbeResult] = []
    wanted = [(b, p) for b in backends for p in probes if (b, p.name, p.case) not in known]
    total, left = len(wanted), set(wanted)

    lock = Lock()

    def hear(rows: list[ProbeResult]) -> None:
        with lock:
            found.extend(rows)
            heard(rows)

    allowed = []
    for backend, probe in wanted:
        if try_declared or not declared_reasons(backend, probe.case, device=device):
            allowed.append((backend, probe))
        else:
            hear([next(run_probe(backend, probe, device))])
            left.remove((backend, probe))
    progress(total - len(left), total)
    queue = _units(allowed, by_head_dim, is_pending)
    turn_s = None if budget_s is None else max(_SHORTEST_TURN_S, budget_s * jobs / max(1, len(queue)))
    running: dict[Future[list[Probe]], _Unit] = {}
    spent = dict.fromkeys(backends, 0.0)  # seconds

    def one(unit: _Unit) -> list[Probe]:
        task = WorkerTask(
            backend=unit.backend,
            device=device,
            scale_factor=scale_factor,
            probes=unit.probes,
            try_declared=try_declared,
            crash=unit.backend == crash,
        )
        started = time.monotonic()
        turn = None if turn_s is None else Turn(started + turn_s, turn_s * _GRACE, lambda: bool(queue))
        try:
            return _in_worker(task, timeout_s, is_over, turn, hear)
        finally:
            spent[unit.backend] += time.monotonic() - started

    with ThreadPoolExecutor(max_workers=jobs) as pool, ExitStack() as ends:
        ends.callback(stopped.set)  # before the pool waits for its workers, which would probe all that they have
        while (queue and not is_over()) or running:
            while queue and len(running) < jobs and not is_over():
                at_work = Counter(unit.backend for unit in running.values())
                unit = min(
                    queue, key=lambda u: (u.round, u.pending, u.only_checks, at_work[u.backend], spent[u.backend])
                )
                queue.remove(unit)
                running[pool.submit(one, unit)] = unit
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                rest = future.result()
                left -= {(unit.backend, p) for p in set(unit.probes) - set(rest)}
                if rest:
                    queue.append(replace(unit, probes=tuple(rest), round=unit.round + 1))
                progress(total - len(left), total)
    for backend, probe in allowed:
        if (backend, probe) in left:
            declared = [] if try_declared else [result_row(backend, probe, "static", "pass")]
            hear([*declared, _unprobed(backend, probe)])
    order = {(b, p.name, p.case): i for i, (b, p) in enumerate(wanted)}
    return sorted(found, key=lambda row: order[row.backend, row.probe, row.case])


@dataclass(frozen=True)
class _Unit:
    """Probes of one backend that one worker runs; `pending`: their kernels would compile first."""

    backend: str
    probes: tuple[Probe, ...]
    pending: bool
    round: int = 0

    @property
    def only_checks(self) -> bool:
        return all(probe.check is not None for probe in self.probes)


def _units(
    wanted: list[tuple[str, Probe]], by_head_dim: bool, is_pending: Callable[[str, AttentionCase], bool]
) -> list[_Unit]:
    """By backend, and by head dim too; then the plain probes come first, and the head dims of a backend apart."""
    groups: dict[tuple[str, bool, int | None], list[Probe]] = {}
    for backend, probe in wanted:
        head_dim = probe.case.head_dim_qk if by_head_dim else None
        groups.setdefault((backend, by_head_dim and is_pending(backend, probe.case), head_dim), []).append(probe)
    units = []
    for (backend, pending, _), probes in groups.items():
        ordered = sorted(probes, key=lambda p: p.check is not None) if by_head_dim else probes
        units.append(_Unit(backend, tuple(ordered), pending))
    return units


@dataclass(frozen=True)
class Turn:
    """Until when a unit keeps its worker, if others wait then."""

    end: float
    grace_s: float
    others_wait: Callable[[], bool]

    def is_over(self, between_probes: bool) -> bool:
        return time.monotonic() >= self.end + (0.0 if between_probes else self.grace_s) and self.others_wait()


_FRESH = (Code.LAUNCH_FAILED, "a fresh worker goes on")
_STOPPED = (Code.NOT_PROBED, "its turn, or the time for all, was over")
_TICK_S = 0.2


def _in_worker(
    task: WorkerTask,
    timeout_s: float,
    is_over: Callable[[], bool],
    turn: Turn | None,
    hear: Callable[[list[ProbeResult]], None],
) -> list[Probe]:
    """Run a task in fresh workers until every probe has an outcome, or its turn is over: the probes without one.

    A probe that kills a worker is a row.
    """
    left = list(task.probes)
    while left and not is_over():
        ended, begun, why = _worker_run(task.model_copy(update={"probes": tuple(left)}), timeout_s, is_over, turn, hear)
        # A probe is told apart by its case too: a model with two kinds of layers has each twice.
        lost = [p for p in left if (p.name, p.case) not in ended]
        if why == _STOPPED:
            return lost
        if why == _FRESH:
            if len(lost) == len(left):
                raise RuntimeError(f"probe worker of {task.backend} asked for a fresh one before any probe")
        elif why is not None and lost:
            hear([*begun, _lost(task.backend, lost[0], why)])
            lost = lost[1:]
        elif lost:
            raise RuntimeError(f"probe worker of {task.backend} ended well without {lost[0].name}")
        left = lost
    return left


def _ends(result: ProbeResult, try_declared: bool) -> bool:
    """Whether nothing follows this row."""
    if result.level == "static":
        return result.status != "pass" and not try_declared
    return result.level == "execute" or result.status == "fail"


def _worker_run(
    task: WorkerTask,
    timeout_s: float,
    is_over: Callable[[], bool],
    turn: Turn | None,
    hear: Callable[[list[ProbeResult]], None],
) -> tuple[set[tuple[str, AttentionCase]], list[ProbeResult], tuple[Code, str] | None]:
    """What one worker ended, rows of the probe that it was at, and why it ended early: _FRESH when it asks for a
    successor, None when it did not."""
    ended: set[tuple[str, AttentionCase]] = set()
    begun: list[ProbeResult] = []
    with Child([sys.executable, "-m", "attention.probe_workers"], task.model_dump_json()) as child:
        said_at = time.monotonic()
        while True:
            if is_over() or (turn is not None and turn.is_over(bool(ended) and not begun)):
                return ended, begun, _STOPPED
            try:
                line = child.line(_TICK_S)
            except TimeoutError:
                if time.monotonic() - said_at >= timeout_s:
                    return ended, begun, (Code.TIMEOUT, f"no answer within {timeout_s:g} s")
                continue
            said_at = time.monotonic()
            if line is None:
                break
            if not (line.startswith("{") and line.rstrip().endswith("}")):
                continue
            begun.append(ProbeResult.model_validate_json(line))
            if _ends(begun[-1], task.try_declared):
                hear(begun)
                ended.add((begun[-1].probe, begun[-1].case))
                begun = []
        if child.exit_code() == _RESTART:
            return ended, begun, _FRESH
        how = child.death()
        return ended, begun, None if how is None else (Code.LAUNCH_FAILED, f"the probe worker died {how}")


def _lost(backend: str, probe: Probe, why: tuple[Code, str]) -> ProbeResult:
    reason = Reason(code=why[0], dimension="process", observed="died", allowed="alive", source="probe", message=why[1])
    return result_row(backend, probe, "execute", "fail", reasons=(reason,))


def _unprobed(backend: str, probe: Probe) -> ProbeResult:
    reason = Reason(
        code=Code.NOT_PROBED,
        dimension="time",
        observed="budget spent",
        allowed="a run",
        source="probe",
        message="the time was spent before it",
    )
    return result_row(backend, probe, "execute", "unknown", reasons=(reason,))


def _worker() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    task = WorkerTask.model_validate_json(sys.stdin.read())
    if task.crash:
        os.abort()
    for number, probe in enumerate(task.probes):
        for result in run_probe(task.backend, probe, task.device, task.scale_factor, try_declared=task.try_declared):
            if number and any(reason.message.endswith(IN_ANOTHER_PROCESS) for reason in result.reasons):
                os._exit(_RESTART)
            print(result.model_dump_json(), flush=True)
        if _device_is_lost(task.device):
            # Nothing runs on it any more in this process; atexit handlers would hang or crash on it.
            os._exit(_RESTART)


def _device_is_lost(device: str) -> bool:
    """Whether an illegal access has ended this process's CUDA context."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


if __name__ == "__main__":
    _worker()
