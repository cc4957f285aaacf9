"""The supervisor: keeps Envoy, the watchdog and the champion running, and the champion reachable.

One small process a cell, detached from whoever started it. What dies is started again with a growing
pause; what already runs, say after the supervisor itself was killed, is adopted and never started
twice. Which instance is the champion stands in the release record alone: after a promotion or a
rollback the supervisor simply finds another name there.

    python -m tasks.supervisor GPU FAMILY --port N     # started by `flows up`
"""

from __future__ import annotations

import argparse
import http.client
import signal
import sys
import threading
import time

from attention.errors import UserError
from data.paths import cell_dir
from tasks.processes import (
    ask_health,
    find_process,
    free_port,
    is_alive,
    start_instance,
    start_process,
    stop_process,
    stop_processes,
)
from tasks.record import Deployed, Instance, Record, RecordStore
from tasks.router import NAME as ENVOY
from tasks.router import EnvoyRouter, RouterError

POLL_S = 0.2
MAX_PAUSE_S = 10.0
PROVEN_S = 30.0  # a process that lived this long starts again without a pause
SUPERVISOR, WATCHDOG = "supervisor", "watchdog"


class _OvertakenError(RuntimeError):
    """The record names another champion by now."""


class _Pause:
    """Growing pause between restarts: 0, 0.5, 1, 2, 4, 8, 10, 10, ... seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._started = 0.0

    def over(self) -> bool:
        if time.monotonic() - self._started > PROVEN_S:
            self._failures = 0
        pause = min(MAX_PAUSE_S, 0.25 * 2**self._failures) if self._failures else 0.0
        return time.monotonic() - self._started >= pause

    def note_start(self) -> None:
        self._failures += 1
        self._started = time.monotonic()


class Supervisor:
    """Keeps the processes of one cell; `run` returns when `stop` is set."""

    def __init__(self, gpu: str, family: str, port: int) -> None:
        self.gpu, self.family, self.port = gpu, family, port
        self.cell = cell_dir(gpu, family)
        self.store = RecordStore(self.cell / "record.json")
        self.router = EnvoyRouter(self.cell)
        self.stop = threading.Event()
        self._pauses = {name: _Pause() for name in (ENVOY, WATCHDOG, "champion")}
        self._to_route: Instance | None = None  # started here, not yet behind Envoy

    def run(self) -> None:
        """Look after everything five times a second; stop it all at the end."""
        while not self.stop.wait(POLL_S):
            for keep in (self._keep_envoy, self._keep_watchdog, self._keep_champion):
                try:
                    keep()
                except (UserError, RouterError, OSError) as error:
                    _say(f"{keep.__name__.removeprefix('_keep_')}: {error}")
        self._stop_all()

    def _keep_envoy(self) -> None:
        if self.router.process() is not None or not self._pauses[ENVOY].over():
            return
        self._pauses[ENVOY].note_start()
        try:
            record = self.store.load()
            generation, lease_live = record.generation, record.lease_live()
        except UserError:
            generation, lease_live = 0, False
        _say(f"starting Envoy on port {self.port}")
        self.router.start(self.port, generation=generation, keep_traffic=lease_live)

    def _keep_watchdog(self) -> None:
        found = find_process(self.cell, WATCHDOG)
        if (found is not None and found.alive()) or not self._pauses[WATCHDOG].over():
            return
        self._pauses[WATCHDOG].note_start()
        _say("starting the watchdog")
        command = [sys.executable, "-m", "flows.watch", self.gpu, self.family]
        start_process(self.cell, WATCHDOG, "watchdog", command, None)

    def _keep_champion(self) -> None:
        record = self.store.load()
        if record.champion is None:
            return
        instance = record.champion.instance
        if instance is not None and is_alive(instance.pid, instance.started):
            self._route(record, instance)
        elif self._pauses["champion"].over():
            self._pauses["champion"].note_start()
            self._start_champion(record.champion)

    def _start_champion(self, deployed: Deployed) -> None:
        old = deployed.instance
        name = old.name if old is not None else f"champion-{deployed.release_id}"
        _say(f"starting {name}")
        new = start_instance(self.cell, name, "champion", deployed.command, free_port())

        def take_over(record: Record) -> None:
            champion = record.champion
            if champion is None or champion.release_id != deployed.release_id or champion.instance != old:
                raise _OvertakenError
            champion.instance = new

        try:
            self.store.update(take_over, over_lease=True)
            self._to_route = new
        except _OvertakenError:
            stop_process(self.cell, name)

    def _route(self, record: Record, instance: Instance) -> None:
        """Put the champion behind Envoy once it is ready.

        While a lease lives its release moves endpoints itself, so only what was started here is
        routed; otherwise the record decides, also where a release died between two steps.
        """
        told = self.router.told_endpoint("champion")
        ours = told is None or instance == self._to_route or not record.lease_live()
        if told == instance.port or not ours or self.router.process() is None:
            return
        answer = ask_health(instance.port)
        if answer is not None and answer[0] == http.client.OK:
            self.router.set_endpoint("champion", instance.port, generation=record.generation)
            self._to_route = None
            _say(f"{instance.name} serves on port {instance.port}")

    def _stop_all(self) -> None:
        names = [ENVOY, WATCHDOG]
        try:
            champion = self.store.load().champion
            if champion is not None and champion.instance is not None:
                names.append(champion.instance.name)
        except UserError as error:
            _say(str(error))
        found = [process for name in names if (process := find_process(self.cell, name)) is not None]
        stop_processes(self.cell, found)
        _say("stopped")


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} supervisor: {message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gpu")
    parser.add_argument("family")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    supervisor = Supervisor(args.gpu, args.family, args.port)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop.set())
    signal.signal(signal.SIGINT, lambda *_: supervisor.stop.set())
    supervisor.run()


if __name__ == "__main__":
    main()
