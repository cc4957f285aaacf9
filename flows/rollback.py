"""`flows rollback`: the one command of on-call. Users first, books later.

While a release holds traffic, everything goes back to the champion. Otherwise the champion itself is
what is complained of, and `previous` takes its place: at once if its instance is still warm, after a
start if not. A second call is not the way back: what was rolled back serves again only by `--to`. The
order: share 0 confirmed by the router, mirror off, evidence, mark; what was
rolled back stays warm. The record is written once before the router, which takes
milliseconds and fences out a release under way; if it cannot be written, traffic moves all the same.

Needs neither Prefect nor MLflow nor the lake nor torch; pyarrow is imported after the share is 0.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from attention.errors import UserError, nearest
from data.paths import cell_dir, cells
from tasks.events import write_event
from tasks.processes import (
    ProcessError,
    answers,
    ask_health,
    free_port,
    is_alive,
    living_instance,
    start_instance,
    stop_process,
    wait_ready,
)
from tasks.record import Attempt, Instance, Record, RecordStore, State
from tasks.router import EnvoyRouter

ANSWER_S, PATIENT_S = 0.3, 2.0  # that a warm previous is given to answer /health, first and last
LOCK_S = 0.2  # a stopped process that holds the record's lock delays a rollback by no more than this
START_S = 180.0  # for a previous that is not warm
START_TRIES = 3

FINAL: tuple[State, ...] = ("promoted", "rolled_back", "rejected", "superseded")

Target = Literal["champion", "previous"]  # who gets all traffic after it


@dataclass(frozen=True)
class RolledBack:
    """What a rollback did."""

    release_id: str  # that was rolled back
    serves: str  # release that serves now
    confirmed: bool  # by the router; False where no router runs, so that nothing gets traffic
    share_zero_s: float  # seconds from the call to the confirmation
    generation: int
    notes: list[str]  # what could not be done besides


class _ChangedError(RuntimeError):
    """The record changed between the decision and the lock, e.g. by a promotion: decide again."""


def rollback(gpu: str, family: str, *, to: str | None = None, reason: str) -> RolledBack:
    """Take all traffic from the release under way, or from the champion, and mark it rolled back.

    `to`: release id of the champion (ends a release under way) or of previous; by default whichever
    undoes what users get now, and never what was rolled back before. Raises UserError (unknown cell or
    release, nothing to go back to, a record that is not one: traffic is then already at 100/0/0),
    RouterError (not confirmed: run it again) and ProcessError (previous could not be started). What else
    goes wrong is printed.
    """
    started = time.monotonic()
    cell = cell_dir(gpu, family)
    if not cell.is_dir():
        known = ", ".join(f"{known_gpu} {known_family}" for known_gpu, known_family in cells()) or "none"
        raise UserError(f"no release record for {gpu} {family}: known cells are {known}")
    store, router = RecordStore(cell / "record.json"), EnvoyRouter(cell)
    while True:
        before = _load(store, router)
        target = _target(before, router, to)
        instance = _ready_previous(router, before) if target == "previous" else _living_champion(before)
        try:
            forward = target == "previous" and before.previous_taken_out()
            return _roll_back(_Order(before, target, forward, instance, reason, started), store, router)
        except _ChangedError:
            continue


@dataclass(frozen=True)
class _Order:
    """What was decided, and on which record."""

    before: Record
    target: Target
    forward: bool  # a person names a release that was rolled back before: it is good, and may be taken back again
    instance: Instance | None  # that gets all traffic, alive; None where nothing runs
    reason: str
    started: float


def _roll_back(order: _Order, store: RecordStore, router: EnvoyRouter) -> RolledBack:
    notes: list[str] = []
    begun = True
    try:
        generation = store.update(_begin(order), over_lease=True, timeout_s=LOCK_S).generation
    except OSError as error:
        begun = False
        notes.append(f"the record was not written before traffic moved: {error}")
        generation = max(order.before.generation, router.held_generation())
    confirmed = router.process() is not None
    if confirmed:
        if order.instance is not None:  # also for the champion: a release may have died in its hand-over
            router.set_endpoint("champion", order.instance.port, generation=generation)
        router.revert(generation)
    else:
        notes.append("no router runs, so nothing gets traffic; `python -m flows up` serves what the record names")
    share_zero_s = time.monotonic() - order.started

    def finish(record: Record) -> None:
        if not begun:
            _begin(order)(record)
        _mark(record, "promoted" if order.forward else "rolled_back")

    after = store.update(finish, over_lease=True)
    detail = {"share_zero_s": share_zero_s, "confirmed": confirmed, "target": order.target}
    side: Literal["champion", "candidate"] = "champion" if order.target == "previous" else "candidate"
    kind = "restored" if order.forward else "rolled_back"
    problem = write_event(after, kind, "warning", order.reason, side=side, detail=detail)
    notes += [problem] if problem else []
    for note in notes:
        print(f"rollback: {note}", file=sys.stderr)
    assert after.champion is not None
    gone = after.previous if order.forward else None
    return RolledBack(
        release_id=gone.release_id if gone is not None else after.release_id or "",
        serves=after.champion.release_id,
        confirmed=confirmed,
        share_zero_s=share_zero_s,
        generation=after.generation,
        notes=notes,
    )


def _load(store: RecordStore, router: EnvoyRouter) -> Record:
    """The record; where it is not one, traffic is made safe before that is said."""
    try:
        return store.load()
    except UserError:
        if router.process() is not None:
            router.revert(router.held_generation())
        raise


def _target(record: Record, router: EnvoyRouter, to: str | None) -> Target:
    champion, previous = record.champion, record.previous
    if champion is None:
        raise UserError(f"{record.gpu} {record.family} has no champion: there is nothing to roll back to")
    exposed = record.exposed() or router.exposed()
    half_done = record.state == "rolling_back" and previous is not None and record.release_id == previous.release_id
    under_way = exposed or record.lease_live() or record.state in ("held", "rolling_back")
    spent = record.previous_taken_out()
    if to is None:
        if exposed or half_done or (under_way and (previous is None or spent)):
            return "champion"
        if previous is None:
            raise UserError(
                f"{champion.release_id} serves {record.gpu} {record.family} and there is no previous release "
                "to go back to: release another candidate"
            )
        if spent:
            raise UserError(
                f"{previous.release_id} is already rolled back and {champion.release_id} serves {record.gpu} "
                f"{record.family}: `--to {previous.release_id}` to go forward again"
            )
        return "previous"
    if to == champion.release_id:
        if not under_way:
            raise UserError(f"{to} gets all traffic already: there is nothing to roll back")
        return "champion"
    if previous is not None and to == previous.release_id:
        return "previous"
    known = [champion.release_id] + ([previous.release_id] if previous is not None else [])
    raise UserError(f"cannot roll back to {to}: {nearest(to, known)}")


def _living_champion(record: Record) -> Instance | None:
    instance = record.champion.instance if record.champion is not None else None
    return instance if instance is not None and is_alive(instance.pid, instance.started) else None


def _ready_previous(router: EnvoyRouter, record: Record) -> Instance | None:
    """The instance of previous: the warm one, else a new one. None where no router runs to use it."""
    previous = record.previous
    assert previous is not None
    warm = previous.instance
    if warm is not None and is_alive(warm.pid, warm.started) and answers(warm.port, ANSWER_S):
        return warm
    served = router.process() is not None
    if served and router.exposed():  # what follows takes its time: no candidate keeps traffic meanwhile
        router.revert(router.held_generation())
    name = warm.name if warm is not None else f"previous-{previous.release_id}"
    found = living_instance(router.cell, name)
    if found is not None:
        answer = ask_health(found.port, PATIENT_S)  # a machine under load: cheaper than a start
        if answer is not None and answer[0] == http.client.OK:
            return found
        if answer is None and _listens(found.port):
            stop_process(router.cell, name, grace_s=0)  # it hangs: it serves nobody
    return _start_previous(router, name, previous.command) if served else None


def _listens(port: int) -> bool:
    """Whether connections are taken: one that still loads may not do that yet."""
    try:
        socket.create_connection(("127.0.0.1", port), PATIENT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # no answer: its queue is full
        return True
    return True


def _start_previous(router: EnvoyRouter, name: str, command: list[str]) -> Instance | None:
    """The supervisor may start or stop the same instance in the same moment: whichever lives is taken.

    None if the router is stopped meanwhile, by `down`: then nothing is left running.
    """
    deadline = time.monotonic() + START_S
    for tries_left in reversed(range(START_TRIES)):
        try:
            instance = living_instance(router.cell, name)
            how = "starting it" if instance is None else f"waiting for what was started as pid {instance.pid}"
            print(f"rollback: {name} is not warm: {how}", file=sys.stderr)
            instance = instance or start_instance(router.cell, name, "champion", command, free_port())
            wait_ready(instance, max(0.0, deadline - time.monotonic()))
        except (UserError, ProcessError):
            if router.process() is not None and tries_left and time.monotonic() < deadline:
                continue
            stop_process(router.cell, name)
            if router.process() is not None:
                raise
        if router.process() is not None:
            return instance
        stop_process(router.cell, name)
        return None
    raise AssertionError("the last try returns or raises")


def _begin(order: _Order) -> Callable[[Record], None]:
    """Fence out a release under way and name who serves: all that a later reader must not get wrong."""

    def change(record: Record) -> None:
        if _served(record) != _served(order.before):
            raise _ChangedError
        unfinished = record.release_id if record.state not in FINAL else None
        record.fence()
        if order.target == "previous":
            _swap(record, order.instance, unfinished, order.forward)
        record.state, record.reason = "rolling_back", order.reason

    return change


def _served(record: Record) -> tuple[str | None, str | None]:
    champion, previous = record.champion, record.previous
    return (champion.release_id if champion else None, previous.release_id if previous else None)


def _swap(record: Record, instance: Instance | None, unfinished: str | None, forward: bool) -> None:
    """Champion and previous change places; the record then tells of the release that was the champion, or, going
    forward again, of the one that is."""
    old, new = record.champion, record.previous
    assert old is not None and new is not None
    if unfinished not in (None, old.release_id):
        record.attempts.append(_attempt(record, "superseded", f"{old.release_id}, its champion, was rolled back"))
    record.champion = new.model_copy(update={"instance": instance or new.instance})
    record.previous = old
    if forward:
        record.champion.promoted_at = time.time()
    told = record.champion if forward else old
    record.release_id, record.candidate, record.identity = told.release_id, told.candidate, told.identity


def _mark(record: Record, state: State) -> None:
    record.state = state
    record.attempts.append(_attempt(record, state, record.reason))


def _attempt(record: Record, state: State, reason: str) -> Attempt:
    return Attempt(
        release_id=record.release_id or "",
        candidate=record.candidate or "",
        identity=record.identity or "",
        state=state,
        failed_gate=None,
        reason=reason,
        time=time.time(),
    )
