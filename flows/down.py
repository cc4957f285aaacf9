"""`flows down`: traffic to the champion, then every process of the cell stopped, orphans included.

It finds processes by their files and by the logs they write to, so it also cleans up after a supervisor
or a release that was killed. Whatever is broken on the way (record, router) is said and does not keep anything running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attention.errors import UserError
from data.paths import cell_dir
from tasks.processes import (
    GRACE_S,
    ProcessFile,
    broken_files,
    list_processes,
    running_processes,
    stop_process,
    stop_processes,
)
from tasks.record import Record, RecordStore
from tasks.router import EnvoyRouter, RouterError
from tasks.supervisor import SUPERVISOR

MAX_ROUNDS = 5


def down(gpu: str, family: str, *, grace_s: float = GRACE_S) -> list[ProcessFile]:
    """Stop everything of one cell; returns what was running.

    A release that is under way loses its lease and stops at its next step. SIGKILL follows SIGTERM
    after `grace_s` seconds.
    """
    cell = cell_dir(gpu, family)
    store, router = RecordStore(cell / "record.json"), EnvoyRouter(cell)
    running = _living(cell)
    generation = _update(store, Record.fence)
    if router.process() is not None:
        try:
            router.revert(router.held_generation() if generation is None else generation)
        except RouterError as error:
            _say(error)
    # The supervisor first: it would start again what is stopped.
    stop_process(cell, SUPERVISOR, grace_s + GRACE_S)
    for path in broken_files(cell):
        _say(UserError(f"{path}: not a process file: removed; what runs under its name is stopped"))
        with suppress(OSError):
            path.unlink()
    # Again until nothing is found: a rollback or a release under way may be starting something.
    for _ in range(MAX_ROUNDS):
        living = _living(cell)
        stop_processes(cell, [*list_processes(cell), *living], grace_s)
        if not living:
            break
    _update(store, _forget_instances)
    router.stop()
    return running


def _living(cell: Path) -> list[ProcessFile]:
    """What runs: by the process files, and what none of them tells of."""
    listed = [process for process in list_processes(cell) if process.alive()]
    pids = {process.pid for process in listed}
    return listed + [process for process in running_processes(cell) if process.pid not in pids]


def _update(store: RecordStore, change: Callable[[Record], None]) -> int | None:
    """Generation after the update; None if there is no record, or it cannot be written."""
    if not store.path.exists():
        return None
    try:
        return store.update(change, over_lease=True, timeout_s=1.0).generation
    except (UserError, OSError) as error:
        _say(error)
        return None


def _forget_instances(record: Record) -> None:
    record.candidate_instance = record.control_instance = None
    for deployed in (record.champion, record.previous):
        if deployed is not None:
            deployed.instance = None


def _say(error: Exception) -> None:
    print(f"down: {error}", file=sys.stderr)
