"""`python -m flows` as a user runs it: in a process of its own, with a home and a port of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.paths import repo_dir
from tasks.processes import free_port
from tasks.record import Record, RecordStore
from tasks.router import EnvoyRouter

QUICK = repo_dir() / "tests" / "plans" / "quick.yaml"
SAMPLE = repo_dir() / "data" / "traffic" / "sample.jsonl"
POLL_S = 0.02  # of a condition: small beside the second that a rollback may take
FLASH = repo_dir() / "data" / "policies" / "cpu-flash.yaml"


def candidate_file(folder: Path, name: str = "flash", **changes: Any) -> Path:
    """A sound candidate with the quick plan; `changes` replace keys, None leaves one out."""
    content = {
        "name": name,
        "engine": "torch",
        "environment": "current",
        "policy": str(FLASH),
        "waves": [{"gpu": "cpu", "models": ["smollm2-135m-instruct"]}],
        "plan": str(QUICK),
        "traffic": {"source": str(SAMPLE), "mix": "chat"},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


@dataclass(frozen=True)
class Home:
    """ATTENTION_RELEASE_HOME of some commands, and the cell `cpu smollm2` in it."""

    path: Path
    prefect: Path  # shared, so that Prefect's database is made once a test session
    port: int = field(default_factory=free_port)

    @property
    def cell(self) -> Path:
        return self.path / "state" / "cpu--smollm2"

    @property
    def store(self) -> RecordStore:
        return RecordStore(self.cell / "record.json")

    @property
    def router(self) -> EnvoyRouter:
        return EnvoyRouter(self.cell)

    def record(self) -> Record:
        return self.store.load()

    def own_env(self, **more: str) -> dict[str, str]:
        """What a command of this home has in its environment beside ours; `more` wins."""
        own = {
            "ATTENTION_RELEASE_HOME": str(self.path),
            "ATTENTION_RELEASE_PORT": str(self.port),
            "PREFECT_HOME": str(self.prefect),
        }
        return {**own, **more}

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.own_env(**more)}

    def run(self, *words: str | Path, timeout_s: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
        """`python -m flows ...` to its end."""
        return subprocess.run(
            _command(words), cwd=repo_dir(), env=self.env(**more), capture_output=True, text=True, timeout=timeout_s
        )

    def start(self, *words: str | Path, **more: str) -> Command:
        """`python -m flows ...` in a process group of its own, as a shell starts it."""
        return Command(self, _command(words), self.env(**more))

    def processes(self) -> list[str]:
        """Every living process that has this home in its command line or its environment."""
        needle, found = str(self.path).encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                told = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:  # gone, or of another user
                continue
            # A zombie has neither.
            if any(needle in text for text in told) and int(entry.name) != os.getpid():
                found.append(f"{entry.name} {told[0].replace(bytes(1), b' ').decode(errors='replace')[:600]}")
        return found


class Command:
    """A command that runs while the test looks on; its output goes to files."""

    def __init__(self, home: Home, command: list[str], env: dict[str, str]) -> None:
        self.out, self.err = home.path / "command.out", home.path / "command.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.child = subprocess.Popen(command, cwd=repo_dir(), env=env, stdout=out, stderr=err, process_group=0)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait while the command runs; fails with its output if it ends before, or is too slow."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.child.poll() is None, f"it ended first with {self.child.returncode}:\n{self.said()}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain:\n{self.said()}"
            time.sleep(POLL_S)

    def interrupt(self, *, group: bool) -> None:
        """Ctrl-C: a terminal sends SIGINT to the whole foreground group, other programs to the leader alone."""
        (os.killpg if group else os.kill)(self.child.pid, signal.SIGINT)

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()


def _command(words: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "flows", *map(str, words)]
