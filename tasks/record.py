"""The release record: the only truth of state, champion, previous, shares, lease and approval.

One JSON file per cell (GPU model, model family), replaced atomically under a lock with a growing
generation. MLflow, Prefect and the lake hold copies and are never read to decide. The file must be
usable when everything else is broken, so this module needs pydantic alone.

Who may write: the holder of the lease (with its token); anyone while no lease lives; and, over a
living lease, the three that keep users safe or served: rollback, watchdog, supervisor. A rollback
and the watchdog clear the lease, so that the release they overrule fails at its next update
(`LeaseLostError`) instead of writing on.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from attention.errors import UserError
from tasks.files import locked, write_atomically
from tasks.pids import start_ticks

State = Literal[
    "registered", "fingerprinted", "probed", "replayed", "baselined", "shadow", "canary", "promoted",
    "held", "rolling_back", "rolled_back", "rejected", "superseded",
]  # fmt: skip

LEASE_S = 5.0  # the watchdog takes traffic back this long after the last renewal
RENEW_S = 1.0


class LeaseLostError(RuntimeError):
    """The lease was cleared, taken over or ran out: this release may not write or move traffic any more."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Instance(_Model):
    """A serving process that another process can address again."""

    name: str
    port: int
    pid: int
    started: int  # start ticks of /proc/<pid>/stat, so that a reused pid is not taken for it
    log: str


class Deployed(_Model):
    """What serves, or served, with all that is needed to start it again."""

    release_id: str
    candidate: str
    candidate_file: str
    identity: str  # see data/candidate.py
    fingerprint_id: str | None
    backends: dict[str, str]  # phase -> resolved backend
    model_path: str
    policy: str
    environment: str
    command: list[str]  # starts an instance of it; `--port` is added, or replaced, at each start
    instance: Instance | None
    promoted_at: float  # seconds since the epoch


class Shares(_Model):
    """Percent of live requests per role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    champion: int = 100
    control: int = 0
    candidate: int = 0

    @model_validator(mode="after")
    def _sum_is_100(self) -> Self:
        parts = (self.champion, self.control, self.candidate)
        if min(parts) < 0 or sum(parts) != 100:
            raise ValueError(f"shares must be non-negative and sum to 100, not {parts}")
        return self


class Lease(_Model):
    """The right of one release to write and to hold traffic; void unless it is renewed."""

    holder: str
    pid: int
    token: str
    acquired_at: float
    expires_at: float  # seconds since the epoch
    started: int | None = None  # start ticks of that pid; None: an older version wrote it

    def live(self) -> bool:
        """Whether it counts: its holder runs and renewed it in time.

        The clock may be set back: a lease that claims to last longer than any does has run out too. A
        step of the clock of up to `RENEW_S` ends nothing.
        """
        left = self.expires_at - time.time()
        return 0 < left <= LEASE_S + RENEW_S and self.holder_runs()

    def holder_runs(self) -> bool:
        found = start_ticks(self.pid)
        return found is not None and self.started in (None, found)


class Approval(_Model):
    """A person's yes to one held stage of one release."""

    release_id: str
    stage: str
    by: str
    time: float
    note: str = ""


class StageRecord(_Model):
    """One finished stage of the current release."""

    stage: str
    verdict: str
    finished_at: float
    seconds: float
    detail: dict[str, Any] = {}
    approved_by: str | None = None  # who said yes to an inconclusive verdict

    @property
    def done(self) -> bool:
        """Whether the release may go on after it."""
        return self.verdict == "pass" or (self.verdict == "inconclusive" and self.approved_by is not None)


class Attempt(_Model):
    """How a release ended; keeps a rolled-back candidate from being retried unasked."""

    release_id: str
    candidate: str
    identity: str
    state: State
    failed_gate: str | None
    reason: str
    time: float


class Record(_Model):
    """Everything that decides about one cell."""

    version: Literal[1] = 1
    gpu: str
    family: str
    generation: int = 0
    state: State | None = None
    release_id: str | None = None
    candidate: str | None = None
    identity: str | None = None
    tags: list[str] = []
    champion: Deployed | None = None
    previous: Deployed | None = None
    candidate_instance: Instance | None = None
    control_instance: Instance | None = None
    shares: Shares = Shares()
    mirror: float = 0.0  # fraction of live requests that is copied to the candidate
    lease: Lease | None = None
    held_stage: str | None = None  # what an approval given now would be for
    approval: Approval | None = None
    stages: list[StageRecord] = []
    attempts: list[Attempt] = []
    reason: str = ""

    def lease_live(self) -> bool:
        return self.lease is not None and self.lease.live()

    def previous_taken_out(self) -> bool:
        """Whether `previous` became that by a rollback, and not by the promotion of the champion."""
        champion, previous = self.champion, self.previous
        if champion is None or previous is None:
            return False
        return any(
            attempt.release_id == previous.release_id
            and attempt.state == "rolled_back"
            and attempt.time > champion.promoted_at
            for attempt in self.attempts
        )

    def exposed(self) -> bool:
        """Whether live requests reach, or are copied to, anything but the champion."""
        return self.shares.champion != 100 or self.mirror > 0

    def fence(self) -> None:
        """Clear the lease, which stops a release under way at its next update, and all its traffic.

        A release that held traffic resumes at its shadow stage with new windows.
        """
        if self.state in ("shadow", "canary") or (self.state == "held" and self.exposed()):
            self.state = "baselined"
        self.lease = None
        self.shares, self.mirror = Shares(), 0.0


class RecordStore:
    """The record's file. Safe for any number of processes; cheap to construct."""

    def __init__(self, path: Path) -> None:
        """`path`: `<cell_dir(gpu, family)>/record.json`."""
        self.path = path
        self._lock = path.with_suffix(".lock")
        self._seen = 0

    def load(self) -> Record:
        """The record, or an empty one where no file is. Raises UserError for a file that is not one."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            gpu, _, family = self.path.parent.name.partition("--")
            return Record(gpu=gpu, family=family)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: cannot be read ({error}): mend it or move it away") from error
        try:
            record = Record.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "file"
            raise UserError(
                f"{self.path}: not a release record ({where}: {first['msg']}): restore a good copy, or move "
                "it away to begin anew (its champion must then be released again)"
            ) from error
        self._seen = max(self._seen, record.generation)
        return record

    def update(
        self,
        change: Callable[[Record], None],
        *,
        token: str | None = None,
        over_lease: bool = False,
        timeout_s: float = 5.0,
    ) -> Record:
        """Apply `change` to the newest record and write it with the next generation; returns it.

        `token`: of the caller's lease, which the update renews; without one a living lease refuses the
        update. `over_lease`: for rollback, watchdog and supervisor only. `change` may raise to leave
        the file as it is. Raises LeaseLostError, UserError (another release holds the lease, or the
        file went back to an older generation) and TimeoutError (the lock stayed taken).
        """
        with locked(self._lock, timeout_s):
            newest_seen = self._seen
            record = self.load()
            if record.generation < newest_seen:
                raise UserError(
                    f"{self.path}: generation went back from {newest_seen} to {record.generation}: "
                    "an older file was put in its place; run `python -m flows down`, then `up`"
                )
            if not over_lease:
                _check_lease(record, token)
            change(record)
            record.generation += 1
            self._write(record)
            return record

    def acquire(self, holder: str) -> str:
        """Take the lease for `holder` (the release id) and return its token. Bumps the generation.

        Raises UserError while a living process holds it. The lease of a dead process is waited out
        (at most `LEASE_S`), so that the watchdog has taken its traffic back first. Whoever took a
        lease over calls `router.revert` before anything else: the watchdog trusts a living lease.
        """
        lease = self.load().lease
        if lease is not None and not lease.holder_runs():
            time.sleep(min(LEASE_S, max(0.0, lease.expires_at - time.time())))
        token = uuid.uuid4().hex

        def take(record: Record) -> None:
            now = time.time()
            record.lease = Lease(
                holder=holder,
                pid=os.getpid(),
                token=token,
                acquired_at=now,
                expires_at=now + LEASE_S,
                started=start_ticks(os.getpid()),
            )

        self.update(take)
        return token

    def renew(self, token: str) -> None:
        """Prolong the lease by `LEASE_S`; the generation stays. Raises LeaseLostError."""
        with locked(self._lock):
            record = self.load()
            _check_lease(record, token)
            self._write(record)

    def release(self, token: str) -> None:
        """Give the lease back. Nothing happens where it is no longer ours."""
        with locked(self._lock):
            record = self.load()
            if record.lease is not None and record.lease.token == token:
                record.lease = None
                self._write(record)

    @contextmanager
    def hold(self, holder: str) -> Iterator[HeldLease]:
        """Acquire the lease, renew it every `RENEW_S` from a thread, give it back at the end."""
        held = HeldLease(self.path, self.acquire(holder))
        held.start()
        try:
            yield held
        finally:
            held.stop()
            with suppress(UserError, OSError):  # TimeoutError is one: the lease then simply runs out
                self.release(held.token)

    def _write(self, record: Record) -> None:
        validated = Record.model_validate(record.model_dump())
        write_atomically(self.path, validated.model_dump_json(indent=2) + "\n")
        self._seen = validated.generation


class HeldLease:
    """A lease that a thread keeps alive; `lost` is set once somebody else ended it."""

    def __init__(self, path: Path, token: str) -> None:
        self.token = token
        self.lost = threading.Event()
        self._store = RecordStore(path)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def check(self) -> None:
        """Raise LeaseLostError if the lease is gone: called by long waits between two updates."""
        if self.lost.is_set():
            raise LeaseLostError("the lease was ended by a rollback, the watchdog or another release")

    def _renew(self) -> None:
        while not self._done.wait(RENEW_S):
            try:
                self._store.renew(self.token)
            except (LeaseLostError, UserError):
                self.lost.set()
                return
            except OSError:
                continue  # a full disk, a lock that stays taken: the lease runs out if it lasts


def _check_lease(record: Record, token: str | None) -> None:
    """Refuse a writer that has no right to the record; prolong the lease of the one that has."""
    lease = record.lease
    if token is None:
        if lease is not None and lease.live():
            raise UserError(
                f"a release is already running for {record.gpu} {record.family}: {lease.holder} "
                f"(pid {lease.pid}, since {time.time() - lease.acquired_at:.0f} s): wait for it or stop it"
            )
    elif lease is None or lease.token != token:
        now_held = "nobody" if lease is None else f"{lease.holder} (pid {lease.pid})"
        raise LeaseLostError(f"the lease is held by {now_held}: a rollback, the watchdog or another release ended it")
    else:
        # A lease that ran out while nobody minded is still ours: had it mattered, the watchdog
        # would have cleared it.
        record.lease = lease.model_copy(update={"expires_at": time.time() + LEASE_S})
