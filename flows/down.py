"""`flows down`: traffic to the champion, then every process of the cell stopped, orphans included.

It finds processes by their files alone, so it also cleans up after a supervisor or a release that was
killed. Whatever is broken on the way (record, router) is said and does not keep anything running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from attention.errors import UserError
from data.paths import cell_dir
from tasks.processes import GRACE_S, ProcessFile, list_processes, stop_process, stop_processes
from tasks.record import Record, RecordStore
from tasks.router import EnvoyRouter, RouterError
from tasks.supervisor import SUPERVISOR


def down(gpu: str, family: str, *, grace_s: float = GRACE_S) -> list[ProcessFile]:
    """Stop everything of one cell; returns what was running.

    A release that is under way loses its lease and stops at its next step. SIGKILL follows SIGTERM
    after `grace_s` seconds.
    """
    cell = cell_dir(gpu, family)
    store, router = RecordStore(cell / "record.json"), EnvoyRouter(cell)
    running = [process for process in list_processes(cell) if process.alive()]
    generation = _update(store, Record.fence)
    if router.process() is not None:
        try:
            router.revert(router.held_generation() if generation is None else generation)
        except RouterError as error:
            _say(error)
    # The supervisor first: it would start again what is stopped.
    stop_process(cell, SUPERVISOR, grace_s + GRACE_S)
    stop_processes(cell, list_processes(cell), grace_s)
    _update(store, _forget_instances)
    router.stop()
    return running


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
