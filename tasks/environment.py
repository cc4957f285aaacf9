"""Run a measuring command where the candidate lives.

Everything that measures is `python -m attention <verb> --job job.json --out DIR` in the environment's
interpreter. It may crash or hang: the caller gets `MeasureError` with the end of its log, which a
stage turns into an `error` verdict. A job that was done before (same content, result there) is not
run again: that is how a release that was killed offline resumes at the unfinished shard.
"""

from __future__ import annotations

import hashlib
import json
import select
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from attention.private import private_folder
from data.environment import Environment
from data.paths import repo_dir
from tasks.context import SIDES, Context, Side
from tasks.files import write_atomically

TIMEOUT_S = 1800.0


class MeasureError(RuntimeError):
    """A measuring command failed, died or hung; the message quotes the end of its log."""


class WorkerSilentError(MeasureError):
    """A resident worker hung, and was killed."""


@dataclass(frozen=True)
class Job:
    """One command: verb, job file content, environment, and a readable name for its folder."""

    name: str
    job: BaseModel
    environment: Environment

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()[:16]


# Children of this process, so that an interrupted release leaves none behind.
_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


def measure(job: Job, folder: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run a job in `<folder>/<name>-<digest>` and return its result.json.

    Raises MeasureError when the command exits other than 0 or 1 (1: measured, and something failed),
    writes no result or runs over `timeout_s`.
    """
    out = folder / f"{job.name}-{job.digest}"
    result = out / "result.json"
    if not result.is_file():
        private_folder(out)
        write_atomically(out / "job.json", job.job.model_dump_json(indent=1))
        verb = str(job.job.verb)  # type: ignore[attr-defined]
        command = [job.environment.python, "-m", "attention", *verb.split()]
        code = _run([*command, "--job", str(out / "job.json"), "--out", str(out)], out / "log.txt", timeout_s)
        if code not in (0, 1) or not result.is_file():
            raise MeasureError(f"{job.name}: {_how(code)}: {_tail(out / 'log.txt')}")
    found: dict[str, Any] = json.loads(result.read_text())
    return {**found, "out": str(out)}


def measure_all(jobs: Sequence[Job], folder: Path, *, at_once: int = 2) -> list[dict[str, Any]]:
    """Several jobs side by side, results in their order; the first failure is raised after all ended."""
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures = [pool.submit(measure, job, folder) for job in jobs]
    return [future.result() for future in futures]


def measure_sides(context: Context, job_of: Callable[[Side], BaseModel]) -> dict[Side, dict[str, Any]]:
    """The same verb for both sides, each in its own environment, side by side."""
    jobs = {side: job_of(side) for side in SIDES}
    named = [Job(f"{job.verb}-{side}", job, context.environment(side)) for side, job in jobs.items()]  # type: ignore[attr-defined]
    return dict(zip(SIDES, measure_all(named, context.work), strict=True))


def _run(command: list[str], log: Path, timeout_s: float) -> int:
    with log.open("ab") as sink:
        child = subprocess.Popen(command, cwd=repo_dir(), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        with _lock:
            _running.add(child)
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise MeasureError(f"{' '.join(command[1:4])}: no end after {timeout_s:g} s: {_tail(log)}") from None
        finally:
            with _lock:
                _running.discard(child)


def kill_running() -> None:
    """End what `measure` runs now: for Ctrl-C, when worker threads wait for their children."""
    with _lock:
        for child in _running:
            child.kill()


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][:400] if lines else "it wrote nothing"


class Worker:
    """A resident `bench` worker: commands in, samples out, a line each."""

    def __init__(self, job: Job, folder: Path) -> None:
        out = folder / f"{job.name}-{job.digest}"
        private_folder(out)
        self._name = job.name
        self._log = out / "log.txt"
        write_atomically(out / "job.json", job.job.model_dump_json(indent=1))
        command = [job.environment.python, "-m", "attention", "bench", "--job", str(out / "job.json")]
        with self._log.open("ab") as sink:
            self._child = subprocess.Popen(
                command, cwd=repo_dir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink
            )
        with _lock:
            _running.add(self._child)
        self.resolved: dict[str, str] = {}
        self.fingerprint_id = ""
        self.device_name = "cpu"

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_ready(self) -> Worker:
        """Wait until the worker has loaded; several may load side by side."""
        ready = self._answer(TIMEOUT_S)
        self.resolved, self.fingerprint_id = ready["resolved"], ready["fingerprint_id"]
        self.device_name = ready["device_name"]
        return self

    def ask(self, command: BaseModel, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """One command, its answer. Raises MeasureError when the worker is gone, and WorkerSilentError, with the worker
        killed, when it says nothing for `timeout_s`."""
        if self._child.stdin is None:
            raise MeasureError(f"{self._name}: the worker has no input")
        try:
            self._child.stdin.write(command.model_dump_json().encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise MeasureError(f"{self._name}: the worker died: {_tail(self._log)}") from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        # An answer is one line, so nothing of the next lies in the pipe's buffer.
        if not select.select([self._child.stdout], [], [], timeout_s)[0]:
            self._child.kill()
            raise WorkerSilentError(f"{self._name}: no answer within {timeout_s:g} s: {_tail(self._log)}")
        line = self._child.stdout.readline()
        if not line:
            raise MeasureError(f"{self._name}: {_how(self._child.wait())}: {_tail(self._log)}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self._child.kill()
            raise MeasureError(f"{self._name}: no answer but {line[:200]!r}") from None
        return answer

    def close(self) -> None:
        with _lock:
            _running.discard(self._child)
        if self._child.stdin:
            with suppress(BrokenPipeError):  # it died with a command unread
                self._child.stdin.close()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout:
            self._child.stdout.close()


def serve_command(environment: Environment, flags: dict[str, str | None]) -> list[str]:
    """The command of a serving instance there; flags without a value are left out."""
    command = [environment.python, "-m", "attention", "serve"]
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name}", value]
    return command
