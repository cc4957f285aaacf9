"""Named pieces of work in worker processes: one that crashes or hangs costs itself and no other.

The parent starts the command, writes one JSON object to its stdin (the task and the `names` to work on) and reads
JSON lines: `{"at": NAME}` before a name is touched, `{"done": NAME, ...}` with what came of it. A worker that dies,
or that says nothing for `timeout_s`, is blamed on the name that it was at; a new one goes on with the names that
have no outcome yet. A worker may therefore touch a name several times before it says that it is done.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import IO, Any

from attention.lifetime import die_with_parent

NOT_RUN = "not run: the time was spent before it"


@dataclass(frozen=True)
class Outcome:
    """What came of one name: the fields that the worker sent, or why there are none."""

    name: str
    said: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def in_workers(
    command: Sequence[str],
    task: dict[str, Any],
    names: Sequence[str],
    *,
    timeout_s: float,
    deadline: float | None = None,
) -> list[Outcome]:
    """An outcome for every name, in their order. `deadline` is a time of `time.monotonic`."""
    found: dict[str, Outcome] = {}
    while left := [name for name in names if name not in found]:
        if deadline is not None and time.monotonic() >= deadline:
            found |= {name: Outcome(name, error=NOT_RUN) for name in left}
            break
        done, at, why = _one_worker(command, {**task, "names": left}, timeout_s, deadline)
        found |= done
        if why is None:
            found |= {n: Outcome(n, error="the worker ended without a word on it") for n in left if n not in found}
        elif at is not None and at not in found:
            found[at] = Outcome(at, error=why)
        elif not done:  # it died before it began: so would the next
            found |= {name: Outcome(name, error=why) for name in left}
    return [found[name] for name in names]


def _one_worker(
    command: Sequence[str], task: dict[str, Any], timeout_s: float, deadline: float | None
) -> tuple[dict[str, Outcome], str | None, str | None]:
    """Outcomes of one worker, the name that it was at last, and why it ended early (None: it did not)."""
    done: dict[str, Outcome] = {}
    at: str | None = None
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as worker:
            Thread(target=_read, args=(worker.stdout, lines), daemon=True).start()
            with suppress(BrokenPipeError):  # a worker that died already is told by its exit status
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(task))
                worker.stdin.close()
            while True:
                wait_s = timeout_s if deadline is None else max(0.1, min(timeout_s, deadline - time.monotonic()))
                try:
                    line = lines.get(timeout=wait_s)
                except queue.Empty:
                    worker.kill()
                    spent = deadline is not None and time.monotonic() >= deadline
                    return done, at, NOT_RUN if spent else f"no answer within {timeout_s:g} s"
                if line is None:
                    break
                said = _message(line)
                at = said.get("at", at)
                if name := said.pop("done", None):
                    done[name] = Outcome(name, said, said.pop("error", None))
        if worker.returncode == 0:
            return done, at, None
        errors.seek(0)
        tail = (errors.read().strip().splitlines() or ["no message"])[-1][:300]
    code = worker.returncode
    return done, at, f"the worker died ({f'signal {-code}' if code < 0 else f'exit {code}'}): {tail}"


def _message(line: str) -> dict[str, Any]:
    """A line of the protocol; an empty one for whatever else a library prints."""
    with suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict):
            return said
    return {}


def _read(stream: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    for line in stream or ():
        lines.put(line)
    lines.put(None)


# The worker's side.


class Channel:
    """What a worker says to its parent."""

    def __init__(self, sink: IO[str]) -> None:
        self._sink = sink

    def at(self, name: str) -> None:
        self._say({"at": name})

    def done(self, name: str, **said: Any) -> None:
        self._say({"done": name, **said})

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._sink, flush=True)


@contextmanager
def worker() -> Iterator[tuple[dict[str, Any], Channel]]:
    """The task of this worker, and its channel; whatever libraries print goes to stderr meanwhile."""
    die_with_parent()
    sink, sys.stdout = sys.stdout, sys.stderr
    yield json.loads(sys.stdin.read()), Channel(sink)


def short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
