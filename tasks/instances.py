"""The serving instances of a release: candidate and control, started side by side and put behind the router.

Control is a champion instance that gets the candidate's share and nothing more, so that the two
compare under equal load.
"""

from __future__ import annotations

import time
from typing import Literal

from attention.job import Setup
from data.environment import Environment
from tasks.context import Context, Side
from tasks.environment import serve_command
from tasks.envoy_config import Role
from tasks.processes import free_port, list_processes, start_instance, stop_process, wait_ready
from tasks.record import Instance, Record
from tasks.router import Router, RouterError

READY_S = 180.0
DRAIN_S = 30.0


def command(
    setup: Setup, environment: Environment, *, release_id: str, side: str, instance: str, lake: str, gpu: str
) -> list[str]:
    """The command line of one instance, all paths absolute."""
    return serve_command(
        environment,
        {
            "model": str(setup.model.resolve()),
            "policy": str(setup.policy.resolve()),
            "release-id": release_id,
            "side": side,
            "instance": instance,
            "lake": lake,
            "gpu": gpu,
            "threads": str(setup.num_threads),
            "dtype": setup.dtype,
            "fault": setup.fault,
        },
    )


def command_of(context: Context, role: Literal["candidate", "control"]) -> list[str]:
    """The command line of this release's candidate, or of its control: one more champion."""
    side: Side = "candidate" if role == "candidate" else "champion"
    return command(
        context.setup(side),
        context.environment(side),
        release_id=context.release_id,
        side=role,
        instance=f"{role}-{context.release_id}",
        lake=str(context.lake),
        gpu=context.cell.gpu,
    )


def start(context: Context, router: Router) -> tuple[Instance, Instance]:
    """Candidate and control, ready and behind the router with share 0.

    Raises ProcessError when one does not become ready; the message quotes its reasons.
    """
    # A release that lost its lease, by `down` say, starts nothing that nobody would stop again.
    context.update(lambda record: None)
    reap(context)
    candidate, control = _launch(context, "candidate"), _launch(context, "control")

    def note(record: Record) -> None:
        record.candidate_instance, record.control_instance = candidate, control

    context.update(note)
    for instance in (candidate, control):
        wait_ready(instance, READY_S)
        context.check()
    # Under the lease, not merely read: another release's candidate may stand there by now.
    generation = context.update(lambda record: None).generation
    router.set_endpoint("candidate", candidate.port, generation=generation)
    router.set_endpoint("control", control.port, generation=generation)
    return candidate, control


def _launch(context: Context, role: Literal["candidate", "control"]) -> Instance:
    run = command_of(context, role)
    return start_instance(context.folder, f"{role}-{context.release_id}", role, run, free_port())


def stop(context: Context, router: Router, *, keep_candidate: bool = False) -> None:
    """Stop what this release started, once its last live request is answered; `keep_candidate`: all but that.

    Never what serves: a release that is interrupted after its promotion has a candidate that is the champion.
    """
    roles: tuple[Role, ...] = ("control",) if keep_candidate else ("control", "candidate")
    names = {role: f"{role}-{context.release_id}" for role in roles}
    serving = _serving(context)
    mine = tuple(role for role in roles if names[role] not in serving)
    _drain(router, mine)
    for role in mine:
        stop_process(context.folder, names[role])


def _serving(context: Context) -> set[str]:
    """Names of the instances of champion and previous."""
    record = context.store.load()
    return {d.instance.name for d in (record.champion, record.previous) if d is not None and d.instance is not None}


def _drain(router: Router, roles: tuple[Role, ...]) -> None:
    """Wait until the router has no request open at these roles, at most `DRAIN_S`."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        try:
            counts = router.observe().counts
        except RouterError:  # no router, no requests
            return
        if all(counts[role].active == 0 for role in roles):
            return
        time.sleep(0.1)


def reap(context: Context) -> None:
    """Stop candidates and controls that earlier releases left: warm for a look, or orphans of a kill."""
    serving = _serving(context)
    for process in list_processes(context.folder):
        if process.role in ("candidate", "control") and process.name not in serving:
            stop_process(context.folder, process.name)
