"""`flows up`: Envoy, the champion and the watchdog of one cell, under one supervisor.

Does nothing where all of it already runs; starts only what is missing after a crash. Returns when live
requests are answered.
"""

from __future__ import annotations

import http.client
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from attention.errors import UserError
from data.paths import cell_dir
from flows.down import down
from tasks.files import locked
from tasks.processes import (
    ProcessError,
    ProcessFile,
    ask_health,
    find_process,
    is_alive,
    log_end,
    require_free_port,
    start_process,
)
from tasks.record import Deployed, Instance, Record, RecordStore
from tasks.router import EnvoyRouter, RouterError, default_port
from tasks.supervisor import SUPERVISOR, WATCHDOG


@dataclass(frozen=True)
class Running:
    """A cell that answers live requests."""

    url: str  # of the listener, without a path
    port: int
    champion: Instance
    release_id: str  # of the champion
    supervisor_pid: int


def up(
    gpu: str,
    family: str,
    *,
    champion: Deployed | None = None,
    port: int | None = None,
    timeout_s: float = 180.0,
) -> Running:
    """Start what is not running, wait until the champion serves behind Envoy.

    `champion`: what to serve where the record names none yet; a champion in the record wins. `port`:
    of the listener, default ATTENTION_RELEASE_PORT or 8700; a running Envoy keeps its own. Raises
    UserError (no champion, port in use) and ProcessError (something did not become ready within
    `timeout_s` seconds; what this call started is stopped again).
    """
    cell = cell_dir(gpu, family)
    store, router = RecordStore(cell / "record.json"), EnvoyRouter(cell)
    with locked(cell / "up.lock", timeout_s):
        envoy = router.process()
        port = envoy.port if envoy is not None and envoy.port is not None else port or default_port()
        if envoy is None:
            require_free_port(port)
        record = _with_champion(store, champion)
        supervisor = find_process(cell, SUPERVISOR)
        fresh = supervisor is None or not supervisor.alive()
        if supervisor is None or fresh:
            command = [sys.executable, "-m", "tasks.supervisor", record.gpu, record.family]
            supervisor = start_process(cell, SUPERVISOR, SUPERVISOR, [*command, "--port", str(port)], None)
        try:
            return _wait_serving(store, router, supervisor, timeout_s)
        except ProcessError:
            if fresh:
                down(gpu, family)
            raise


def _with_champion(store: RecordStore, champion: Deployed | None) -> Record:
    record = store.load()
    if record.champion is not None:
        return record
    if champion is None:
        raise UserError(f"{store.path}: names no champion to serve: release one first")

    def name_it(record: Record) -> None:
        record.champion = record.champion or champion

    # Over a lease: the first release of a cell holds it already when it brings its champion up.
    return store.update(name_it, over_lease=True)


def _wait_serving(store: RecordStore, router: EnvoyRouter, supervisor: ProcessFile, timeout_s: float) -> Running:
    started = time.monotonic()
    while True:
        champion = store.load().champion
        if champion is not None and champion.instance is not None:
            instance = champion.instance
            if not is_alive(instance.pid, instance.started):
                _raise_if_it_died_now(instance, supervisor)
            elif _serves(router, instance) and (port := router.port) is not None:
                return Running(
                    url=f"http://127.0.0.1:{port}",
                    port=port,
                    champion=instance,
                    release_id=champion.release_id,
                    supervisor_pid=supervisor.pid,
                )
        if not supervisor.alive():
            raise ProcessError(f"the supervisor died:\n{_tail(supervisor.log)}")
        if time.monotonic() - started > timeout_s:
            missing = f"the champion does not serve after {timeout_s:g} s; {_health(champion)}"
            raise ProcessError(f"{missing}; the supervisor's log:\n{_tail(supervisor.log)}")
        time.sleep(0.1)


def _raise_if_it_died_now(instance: Instance, supervisor: ProcessFile) -> None:
    """A champion that this supervisor started and that is dead will not come up by waiting."""
    if instance.started >= supervisor.started:
        raise ProcessError(f"{instance.name} died while starting:\n{log_end(instance)}")


def _serves(router: EnvoyRouter, instance: Instance) -> bool:
    watchdog = find_process(router.cell, WATCHDOG)
    if watchdog is None or not watchdog.alive():
        return False
    try:
        if router.observe().endpoints["champion"] != instance.port:
            return False
    except RouterError:
        return False
    answer = ask_health(instance.port)
    return answer is not None and answer[0] == http.client.OK


def _health(champion: Deployed | None) -> str:
    if champion is None or champion.instance is None:
        return "the champion was not started"
    answer = ask_health(champion.instance.port)
    return f"the champion's /health says {'nothing' if answer is None else answer}"


def _tail(log: str) -> str:
    return "\n".join(Path(log).read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
