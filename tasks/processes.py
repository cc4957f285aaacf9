"""Processes that outlive the command that started them: started, recognised, waited for, stopped.

Each process stands in a file `<cell>/processes/<name>.json`, so that any other command can find it
again, and is identified by its pid together with its start ticks: a reused pid is never taken for it.
Each runs in a session of its own: a Ctrl-C at a release does not reach the champion, and stopping the
session's group stops what the process itself started.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from attention.errors import UserError
from attention.private import private_folder
from data.paths import repo_dir
from tasks.files import locked, write_atomically
from tasks.pids import start_ticks as start_ticks
from tasks.record import Instance

GRACE_S = 10.0  # between SIGTERM and SIGKILL
POLL_S = 0.02
LOCK_S = 2.0  # a start holds the lock for milliseconds
LOG_LINES = 20  # of a dead process, quoted in the error

# Children of this very process. A dead child stays a zombie until it is polled.
_children: dict[int, subprocess.Popen[bytes]] = {}


class ProcessError(RuntimeError):
    """A process died, or did not become ready in time; the message quotes its log or its reasons."""


class ProcessFile(BaseModel):
    """What is known of a running process."""

    model_config = ConfigDict(extra="forbid")

    name: str
    role: str  # champion | control | candidate | envoy | watchdog | supervisor
    command: list[str]
    pid: int
    started: int  # start ticks, field 22 of /proc/<pid>/stat
    port: int | None
    log: str

    def alive(self) -> bool:
        return is_alive(self.pid, self.started)


def start_process(cell: Path, name: str, role: str, command: list[str], port: int | None) -> ProcessFile:
    """Start `command` in its own session, output appended to `<cell>/logs/<name>.log`.

    It runs in the repository, so paths in `command` are absolute. Raises UserError if a process of
    that name lives or the program cannot be started, OSError if its process file cannot be written:
    then it is killed again, because nobody would find it.
    """
    with _alone(cell):
        return _start(cell, name, role, command, port)


def _start(cell: Path, name: str, role: str, command: list[str], port: int | None) -> ProcessFile:
    found = find_process(cell, name)
    if found is not None and found.alive():
        raise UserError(f"{name} already runs (pid {found.pid}): stop it first with `python -m flows down`")
    log = cell / "logs" / f"{name}.log"
    private_folder(log.parent)
    with log.open("ab") as sink:
        try:
            child = subprocess.Popen(
                command,
                cwd=repo_dir(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{name}: cannot start {command[0]}: {error.strerror}") from error
    _children[child.pid] = child
    process = ProcessFile(
        name=name,
        role=role,
        command=command,
        pid=child.pid,
        started=start_ticks(child.pid) or 0,
        port=port,
        log=str(log),
    )
    try:
        write_atomically(_file(cell, name), process.model_dump_json(indent=2) + "\n")
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        del _children[child.pid]
        raise
    return process


def start_instance(cell: Path, name: str, role: str, command: list[str], port: int) -> Instance:
    """Start a serving process; `--port` in `command` is set to `port`. It is not ready yet: `wait_ready`."""
    process = start_process(cell, name, role, with_port(command, port), port)
    return Instance(name=name, port=port, pid=process.pid, started=process.started, log=process.log)


def with_port(command: list[str], port: int) -> list[str]:
    """`command` with `--port N` replaced, or added at its end."""
    if "--port" not in command:
        return [*command, "--port", str(port)]
    at = command.index("--port")
    return [*command[: at + 1], str(port), *command[at + 2 :]]


def wait_ready(instance: Instance, timeout_s: float) -> dict[str, Any]:
    """Ask `/health` until it answers 200, and return its body.

    Raises ProcessError when the process dies (with the end of its log), says that it cannot start, or is not ready
    after `timeout_s` seconds (with what it answered last, which names the reasons).
    """
    deadline = time.monotonic() + timeout_s
    answer: tuple[int, dict[str, Any]] | None = None
    while True:
        if not is_alive(instance.pid, instance.started):
            raise ProcessError(f"{instance.name} died while starting:\n{log_end(instance)}")
        answer = ask_health(instance.port) or answer
        if answer is not None and answer[0] == http.client.OK:
            return answer[1]
        if answer is not None and answer[1].get("failed"):
            raise ProcessError(f"{instance.name} cannot start: {'; '.join(map(str, answer[1].get('reasons', ())))}")
        if time.monotonic() >= deadline:
            said = "nothing" if answer is None else f"{answer[0]} {json.dumps(answer[1])}"
            raise ProcessError(f"{instance.name} was not ready after {timeout_s:g} s; /health answered {said}")
        time.sleep(0.1)


def ask_health(port: int, timeout_s: float = 2.0) -> tuple[int, dict[str, Any]] | None:
    """Status and JSON body of `/health` on loopback; None if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return response.status, body if isinstance(body, dict) else {"body": body}


def answers(port: int, timeout_s: float = 2.0) -> bool:
    """Whether the instance on that port says in time that it is ready."""
    answer = ask_health(port, timeout_s)
    return answer is not None and answer[0] == http.client.OK


def log_end(instance: Instance) -> str:
    """The last lines of an instance's log."""
    try:
        lines = Path(instance.log).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(lines[-LOG_LINES:]) or "(its log is empty)"


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with that pid and those start ticks runs; a zombie does not."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
    return start_ticks(pid) == started


def find_process(cell: Path, name: str) -> ProcessFile | None:
    """What the process file says; None if there is none. Whether it lives: `alive()`.

    Where the file is broken, the process itself is looked for: it may be the Envoy that serves users.
    """
    try:
        return _read(_file(cell, name))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        return next((process for process in running_processes(cell) if process.name == name), None)


def living_instance(cell: Path, name: str) -> Instance | None:
    """The serving process of that name, whoever started it; None if none runs."""
    process = find_process(cell, name)
    if process is None or process.port is None or not process.alive():
        return None
    return Instance(name=name, port=process.port, pid=process.pid, started=process.started, log=process.log)


def list_processes(cell: Path) -> list[ProcessFile]:
    """Every process file of the cell, of living and dead processes."""
    names = sorted(path.stem for path in (cell / "processes").glob("[!.]*.json"))
    return [process for name in names if (process := find_process(cell, name)) is not None]


def broken_files(cell: Path) -> list[Path]:
    """Process files that are none."""
    broken = []
    for path in sorted((cell / "processes").glob("[!.]*.json")):
        try:
            _read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValidationError):
            broken.append(path)
    return broken


def running_processes(cell: Path) -> list[ProcessFile]:
    """What runs for the cell, whatever the process files say.

    Whoever was started by `start_process` leads a session and writes to a log of the cell.
    """
    logs, found = (cell / "logs").resolve(), []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            log = (entry / "fd" / "1").readlink()
            if log.parent != logs or os.getsid(pid) != pid:
                continue
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:  # gone, or of another user
            continue
        name = log.name.removesuffix(" (deleted)").removesuffix(".log")
        started = start_ticks(pid)
        if started is not None:
            found.append(
                ProcessFile(
                    name=name,
                    role=name,
                    command=command,
                    pid=pid,
                    started=started,
                    port=_port_in(command),
                    log=str(logs / f"{name}.log"),
                )
            )
    return found


def stop_process(cell: Path, name: str, grace_s: float = GRACE_S) -> None:
    """Stop one process by name; nothing happens if it does not run."""
    process = find_process(cell, name)
    if process is not None:
        stop_processes(cell, [process], grace_s)


def stop_processes(cell: Path, processes: Iterable[ProcessFile], grace_s: float = GRACE_S) -> None:
    """SIGTERM to all at once, SIGKILL to what lives after `grace_s`; removes their process files."""
    processes = list(processes)
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
        living = [process for process in processes if process.alive()]
        for process in living:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        deadline = time.monotonic() + wait_s
        while any(process.alive() for process in living) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    with _alone(cell):
        for process in processes:
            newest = find_process(cell, process.name)
            if newest is None or not newest.alive():
                _file(cell, process.name).unlink(missing_ok=True)


def free_port() -> int:
    """A loopback TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require_free_port(port: int) -> None:
    """Raise UserError, naming who listens, if loopback `port` is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            remedy = "set ATTENTION_RELEASE_PORT to one above 1023"
            raise UserError(f"port {port} is reserved for the system: {remedy}") from None
        except OSError:
            remedy = "stop it or set ATTENTION_RELEASE_PORT"
            raise UserError(f"port {port} is in use ({_listener(port)}): {remedy}") from None


def _listener(port: int) -> str:
    """`pid 123 python -m http.server`, as far as this user may see."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # LISTEN
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(entry.readlink()) in inodes for entry in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                return f"pid {process.name} {b' '.join(words).decode(errors='replace').strip()[:80]}"
    return "by a process of another user"


def _port_in(command: list[str]) -> int | None:
    at = command.index("--port") + 1 if "--port" in command else len(command)
    return int(command[at]) if at < len(command) and command[at].isdecimal() else None


@contextmanager
def _alone(cell: Path) -> Iterator[None]:
    """One at a time starts a process or removes a process file, or two starts of a name would leave an orphan.

    A process that was stopped in the middle, or a disk that refuses the lock, keeps nobody from serving users.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # TimeoutError is one
            stack.enter_context(locked(cell / "processes.lock", LOCK_S))
        yield


def _read(path: Path) -> ProcessFile:
    return ProcessFile.model_validate_json(path.read_bytes())


def _file(cell: Path, name: str) -> Path:
    return cell / "processes" / f"{name}.json"
