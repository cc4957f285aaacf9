"""Prefect's own server for the length of one command: deaf to Ctrl-C, and found again if it is orphaned.

Without PREFECT_API_URL, Prefect runs a flow against a server of its own, a child process. A terminal sends
Ctrl-C to every process of the command; a server that died of it would leave Prefect asking for it, a timeout
an event, while the command has to end. And kill -9 at the command leaves the child behind: who owns it is
noted, so that the next release, or `flows down`, ends it.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from data.paths import state_dir
from tasks.files import write_atomically
from tasks.processes import is_alive, start_ticks


class _Owned(BaseModel):
    """A server and the command that it belongs to, each by pid and start ticks."""

    pid: int
    started: int
    owner: int
    owner_started: int


def start() -> None:
    """Start a server for this command, unless PREFECT_API_URL names one."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return
    stop_orphans()

    def run() -> None:
        # Signal masks are inherited from the thread that starts it; this command stays open to Ctrl-C. Prefect
        # ends its server by SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        server = SubprocessASGIServer()
        server.start()
        if server.server_process is not None:
            _note(server.server_process.pid)

    starting = threading.Thread(target=run, name="prefect-server", daemon=True)
    starting.start()
    starting.join()


def stop_orphans() -> list[int]:
    """End every noted server whose command is gone; returns their pids."""
    ended = []
    for file in _folder().glob("[!.]*.json"):
        try:
            server = _Owned.model_validate_json(file.read_text())
        except (OSError, ValidationError):
            file.unlink(missing_ok=True)
            continue
        if is_alive(server.owner, server.owner_started):
            continue
        if is_alive(server.pid, server.started):
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)  # it holds nothing that is to be saved
            ended.append(server.pid)
        file.unlink(missing_ok=True)
    return ended


def _note(pid: int) -> None:
    me = os.getpid()
    owned = _Owned(pid=pid, started=start_ticks(pid) or 0, owner=me, owner_started=start_ticks(me) or 0)
    write_atomically(_folder() / f"{pid}.json", owned.model_dump_json() + "\n")


def _folder() -> Path:
    return state_dir() / "prefect" / "servers"
