"""Named pieces of work in worker processes: one that crashes or hangs costs itself and no other.

The parent starts the command, writes one JSON object to its stdin (the task and the `names` to work on) and reads
JSON lines: `{"at": NAME}` before a name is touched, `{"done": NAME, ...}` with what came of it. A worker that dies,
or that says nothing for `timeout_s`, is blamed on the name that it was at; a new one goes on with the names that
have no outcome yet. A worker may therefore touch a name several times before it says that it is done.

A worker leads a process group, which is killed with it: a compiler that it started would hold its stdout, and so
whoever waits for the end of that.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import IO, Any

from attention.errors import one_line
from attention.lifetime import die_with_parent, end_group

NOT_RUN = "not run: the time was spent before it"
_TICK_S = 0.2  # between two looks at whether the time is over
_EXIT_S = 20.0  # a process that has closed its stdout may hang in its exit handlers


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
    stopped: Event | None = None,
    heard: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """An outcome for every name, in their order; `heard` gets each at once.

    `deadline` is of `time.monotonic`. Then, or once `stopped` is set (a thread has no Ctrl-C of its own), the worker is
    killed and the rest is NOT_RUN.
    """
    found: dict[str, Outcome] = {}

    def is_over() -> bool:
        return (stopped is not None and stopped.is_set()) or (deadline is not None and time.monotonic() >= deadline)

    def note(one: Outcome) -> None:
        found[one.name] = one
        heard(one)

    while left := [name for name in names if name not in found]:
        if is_over():
            for name in left:
                note(Outcome(name, error=NOT_RUN))
            break
        at, why = _one_worker(command, {**task, "names": left}, timeout_s, is_over, note)
        missing = [name for name in left if name not in found]
        if why is None:
            for name in missing:
                note(Outcome(name, error="the worker ended without a word on it"))
        elif at in missing:
            note(Outcome(str(at), error=why))
        elif len(missing) == len(left):  # it died before it began: so would the next
            for name in missing:
                note(Outcome(name, error=why))
    return [found[name] for name in names]


def _one_worker(
    command: Sequence[str],
    task: dict[str, Any],
    timeout_s: float,
    is_over: Callable[[], bool],
    note: Callable[[Outcome], None],
) -> tuple[str | None, str | None]:
    """The name that one worker was at last, and why it ended early (None: it did not)."""
    at: str | None = None
    with Child(command, json.dumps(task)) as child:
        said_at = time.monotonic()
        while True:
            try:
                line = child.line(_TICK_S)
            except TimeoutError:
                if is_over():
                    return at, NOT_RUN
                if time.monotonic() - said_at >= timeout_s:
                    return at, f"no answer within {timeout_s:g} s"
                continue
            said_at = time.monotonic()
            if line is None:
                how = child.death()
                return at, None if how is None else f"the worker died {how}"
            said = _message(line)
            at = said.get("at", at)
            if name := said.pop("done", None):
                note(Outcome(name, said, said.pop("error", None)))


class Child:
    """A process that got its text on stdin, and the lines that it writes. At the end its whole group is killed."""

    def __init__(self, command: Sequence[str], text: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._lines: queue.Queue[str | None] = queue.Queue()
        with tempfile.TemporaryFile("w+") as stdin:  # no pipe: a write to one waits for whoever does not read
            stdin.write(text)
            stdin.seek(0)
            self._process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=self._errors, text=True, process_group=0
            )
        assert self._process.stdout is not None
        Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        end_group(self._process)
        self._errors.close()

    def line(self, timeout_s: float) -> str | None:
        """The next line; None after the last. TimeoutError when none comes in time."""
        try:
            return self._lines.get(timeout=max(0.01, timeout_s))
        except queue.Empty as error:
            raise TimeoutError from error

    def exit_code(self) -> int:
        """Of a process that has said its last line: one that does not end then is killed."""
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return 0

    def death(self) -> str | None:
        """How it ended, with its last words; None: well."""
        code = self.exit_code()
        if code == 0:
            return None
        self._errors.seek(0)
        tail = (self._errors.read().strip().splitlines() or ["no message"])[-1][:300]
        return f"({f'signal {-code}' if code < 0 else f'exit {code}'}): {tail}"


def _message(line: str) -> dict[str, Any]:
    """A line of the protocol; an empty one for whatever else a library prints."""
    with suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict):
            return said
    return {}


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
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
    return f"{type(error).__name__}: {one_line(error)[:240]}"
