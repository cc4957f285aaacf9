"""The supervisor: keeps Envoy, the watchdog and the champion running, the champion reachable, previous warm.

One small process a cell, detached from whoever started it. What dies, or hangs, is started again with a
growing pause; what already runs, say after the supervisor itself was killed, is adopted and never started
twice. Which instance is the champion stands in the release record alone: after a promotion or a
rollback the supervisor simply finds another name there.

    python -m tasks.supervisor GPU FAMILY --port N     # started by `flows up`
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from attention.errors import UserError
from data.paths import cell_dir
from tasks.heartbeat import last_beat
from tasks.processes import (
    answers,
    ask_health,
    find_process,
    free_port,
    is_alive,
    living_instance,
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

# A champion answers /health from its event loop while another thread computes, in milliseconds also under
# load; seconds of silence are a machine that swaps, and a restart would only add to that. So: several questions
# in a row, each given 2 s, over 10 s. Any answer counts, also a 503: that process runs, and says what it lacks.
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 2.0
HUNG_S = 10.0
HUNG_ASKS = 4
# The watchdog touches its file before each look, i.e. twice a second; one look may wait for locks and for Envoy,
# and write an event, which takes a few seconds at worst.
SILENT_S = 15.0


class _OvertakenError(RuntimeError):
    """The record wants something else by now."""


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


class _Silence:
    """Tells a process that hangs: for `limit_s`, and that many looks in a row, it gave no new sign of life.

    Looks are counted because this process may itself have been stopped meanwhile.
    """

    def __init__(self, limit_s: float, min_looks: int) -> None:
        self._limit_s, self._min_looks = limit_s, min_looks
        self._sign: object = None
        self._since, self._looks = 0.0, 0

    def too_long(self, sign: object) -> bool:
        now = time.monotonic()
        if sign != self._sign:
            self._sign, self._since, self._looks = sign, now, 0
        self._looks += 1
        return self._looks > self._min_looks and now - self._since > self._limit_s


class Supervisor:
    """Keeps the processes of one cell; `run` returns when `stop` is set."""

    def __init__(self, gpu: str, family: str, port: int) -> None:
        self.gpu, self.family, self.port = gpu, family, port
        self.cell = cell_dir(gpu, family)
        self.store = RecordStore(self.cell / "record.json")
        self.router = EnvoyRouter(self.cell)
        self.stop = threading.Event()
        self._pauses = {name: _Pause() for name in (ENVOY, WATCHDOG, "champion", "previous")}
        self._started: dict[str, Instance] = {}  # by name, what this process started
        self._to_route: Instance | None = None  # started here, not yet behind Envoy
        self._silences = {WATCHDOG: _Silence(SILENT_S, HUNG_ASKS), "champion": _Silence(HUNG_S, HUNG_ASKS)}
        self._proven: Instance | None = None  # champion that was ready once: before that, silence is loading
        self._answers = 0
        self._ask_at = 0.0

    def run(self) -> None:
        """Look after everything five times a second; stop it all at the end."""
        while not self.stop.wait(POLL_S):
            for keep in (self._keep_envoy, self._keep_watchdog, self._keep_champion, self._keep_previous):
                try:
                    keep()
                except (UserError, RouterError, OSError) as error:
                    _say(f"{keep.__name__.removeprefix('_keep_')}: {error}")
                except Exception:  # a defect in one of them must not end the others
                    _say(f"{keep.__name__.removeprefix('_keep_')}: {traceback.format_exc()}")
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
        if found is not None and found.alive():
            if not self._silences[WATCHDOG].too_long((found.pid, last_beat(self.cell))):
                return
            _say(f"the watchdog gave no sign of life for {SILENT_S:g} s: killing it")
            stop_process(self.cell, WATCHDOG, grace_s=0)
        if not self._pauses[WATCHDOG].over():
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
        if instance is not None and is_alive(instance.pid, instance.started) and not self._hangs(instance):
            self._route(record, instance)
        elif self._pauses["champion"].over():
            self._pauses["champion"].note_start()
            self._start_champion(record.champion)

    def _hangs(self, instance: Instance) -> bool:
        """Whether a champion that was ready once fell silent; it is killed then."""
        if self.router.told_endpoint("champion") == instance.port:
            self._proven = instance
        if instance != self._proven or time.monotonic() < self._ask_at:
            return False
        if ask_health(instance.port, HEALTH_TIMEOUT_S) is not None:
            self._answers += 1
        self._ask_at = time.monotonic() + HEALTH_EVERY_S
        if not self._silences["champion"].too_long((instance.pid, self._answers)):
            return False
        _say(f"{instance.name} has not answered /health for {HUNG_S:g} s: killing it")
        stop_process(self.cell, instance.name, grace_s=0)
        return True

    def _start_champion(self, deployed: Deployed) -> None:
        old = deployed.instance
        name = old.name if old is not None else f"champion-{deployed.release_id}"

        def take_over(record: Record, new: Instance) -> None:
            champion = record.champion
            if champion is None or champion.release_id != deployed.release_id or champion.instance != old:
                raise _OvertakenError
            champion.instance = new

        self._to_route = self._start(name, deployed, take_over) or self._to_route

    def _keep_previous(self) -> None:
        """A rollback to a warm instance takes less than a second, to one that must start a minute.

        It comes after the champion, and not while a release measures on this machine.
        """
        record = self.store.load()
        champion, previous = record.champion, record.previous
        if previous is None or champion is None or champion.instance is None:
            return
        if record.lease_live() or record.previous_taken_out():
            return
        old = previous.instance
        if old is not None and is_alive(old.pid, old.started):
            return
        if self.router.told_endpoint("champion") != champion.instance.port or not self._pauses["previous"].over():
            return
        self._pauses["previous"].note_start()
        name = old.name if old is not None else f"previous-{previous.release_id}"

        def keep(record: Record, new: Instance) -> None:
            found = record.previous
            if record.lease_live() or found is None or (found.release_id, found.instance) != (previous.release_id, old):
                raise _OvertakenError
            found.instance = new

        self._start(name, previous, keep)

    def _start(self, name: str, deployed: Deployed, enter: Callable[[Record, Instance], None]) -> Instance | None:
        """Start an instance, or adopt the one of that name that runs, and enter it in the record.

        None if the record does not want it any more. If it cannot be written now, the instance stays: it may be
        the only one that can serve, and the next look adopts it.
        """
        new = living_instance(self.cell, name)
        if new is None:
            _say(f"starting {name}")
            new = start_instance(self.cell, name, "champion", deployed.command, free_port())
            self._started[name] = new
        else:
            _say(f"{name} runs already (pid {new.pid}): adopting it")
        try:
            self.store.update(lambda record: enter(record, new), over_lease=True)
            return new
        except _OvertakenError:
            # By a rollback, which may itself have started this one or have taken it.
            if self._started.get(name) == new and not self._is_named(new):
                stop_process(self.cell, name)
            return None

    def _is_named(self, instance: Instance) -> bool:
        record = self.store.load()
        return any(d is not None and d.instance == instance for d in (record.champion, record.previous))

    def _route(self, record: Record, instance: Instance) -> None:
        """Put the champion behind Envoy once it is ready.

        While a lease lives its release moves endpoints itself, so only what was started here is
        routed; otherwise the record decides, also where a release died between two steps.
        """
        told = self.router.told_endpoint("champion")
        ours = told is None or instance == self._to_route or not record.lease_live()
        if told == instance.port or not ours or self.router.process() is None:
            return
        if answers(instance.port):
            self.router.set_endpoint("champion", instance.port, generation=record.generation)
            self._to_route = None
            _say(f"{instance.name} serves on port {instance.port}")

    def _stop_all(self) -> None:
        names = [ENVOY, WATCHDOG, *self._started]
        try:
            record = self.store.load()
            kept = [d.instance for d in (record.champion, record.previous) if d is not None]
            names += [instance.name for instance in kept if instance is not None]
        except UserError as error:
            _say(str(error))
        found = [process for name in dict.fromkeys(names) if (process := find_process(self.cell, name)) is not None]
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
