"""The watchdog: takes traffic back from a release that died, or that nobody can answer for.

It asks twice a second whether anything but the champion gets live requests, or copies of them, while
no living lease stands for it. Then everything goes to the champion (100/0/0, mirror off), confirmed by
the router; the release resumes at its shadow stage with new windows. A record that cannot be read is
answered in the same way. It imports nothing that a broken lake, Prefect or MLflow could take down.

    python -m flows.watch GPU FAMILY     # started by the supervisor
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback

from attention.errors import UserError
from data.paths import cell_dir
from tasks.events import write_event
from tasks.heartbeat import beat
from tasks.record import Record, RecordStore
from tasks.router import EnvoyRouter, RouterError

POLL_S = 0.5
LOCK_S = 0.2  # a stopped process that holds the record's lock delays the revert by no more than this


class _LeaseIsLiveError(RuntimeError):
    """The lease was renewed, or taken, between the look and the lock."""


def watch(gpu: str, family: str, *, stop: threading.Event | None = None) -> None:
    """Watch one cell until `stop` is set; without it, until the process is ended."""
    stop = stop or threading.Event()
    cell = cell_dir(gpu, family)
    watchdog = _Watchdog(RecordStore(cell / "record.json"), EnvoyRouter(cell))
    _say(f"watching {gpu} {family}")
    while not stop.wait(POLL_S):
        beat(cell)
        try:
            watchdog.look()
        except (RouterError, OSError) as error:  # e.g. Envoy is being restarted: the next look tries again
            watchdog.unconfirmed = True
            _say(str(error))
        except Exception:  # a watchdog that ends of a defect protects nobody
            watchdog.unconfirmed = True
            _say(traceback.format_exc())


class _Watchdog:
    def __init__(self, store: RecordStore, router: EnvoyRouter) -> None:
        self.store = store
        self.router = router
        self.unconfirmed = False  # an order was given that Envoy has not confirmed yet
        self._told_unreadable = False

    def look(self) -> None:
        """Look once, act if needed."""
        try:
            record = self.store.load()
        except UserError as error:
            self._answer_unreadable(str(error))
            return
        self._told_unreadable = False
        if record.lease_live():
            self.unconfirmed = False
        elif record.exposed() or self.router.exposed() or self.unconfirmed:
            self._take_back(record)

    def _answer_unreadable(self, why: str) -> None:
        if self.router.exposed() or self.unconfirmed:
            self.router.revert(self.router.held_generation())
            self.unconfirmed = False
        if not self._told_unreadable:
            self._told_unreadable = True
            gpu, _, family = self.store.path.parent.name.partition("--")
            _report(Record(gpu=gpu, family=family), "record_unreadable", why)

    def _take_back(self, found: Record) -> None:
        """Record first, which fences the release out; then the router; then tell of it."""
        record = found
        try:
            record = self.store.update(_resume_at_shadow, over_lease=True, timeout_s=LOCK_S)
            generation = record.generation
        except _LeaseIsLiveError:
            return
        except (UserError, OSError) as error:
            _say(f"the record could not be written, traffic is taken back all the same: {error}")
            generation = self.router.held_generation()
        self.router.revert(generation)
        self.unconfirmed = False
        lease = found.lease
        holder = f"{lease.holder} (pid {lease.pid})" if lease else "nobody"
        _report(found, "lease_expired", f"traffic taken back to the champion: the lease was held by {holder}")


def _resume_at_shadow(record: Record) -> None:
    if record.lease_live():
        raise _LeaseIsLiveError
    record.fence()
    record.reason = "the release stopped renewing its lease; its traffic was taken back"


def _report(record: Record, kind: str, message: str) -> None:
    _say(message)
    detail = {"shares": record.shares.model_dump(), "mirror": record.mirror, "state": record.state}
    problem = write_event(record, kind, "critical", message, side="candidate", detail=detail)
    if problem:
        _say(problem)


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} watchdog: {message}", flush=True)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    watch(sys.argv[1], sys.argv[2], stop=stop)


if __name__ == "__main__":
    main()
