"""First calls of fresh processes: with empty caches of compiled kernels, then with what the first process left there.

Each process is one row of perf_startup: a backend that crashes, hangs or does not compile is a row with its outcome.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attention.cases import AttentionCase
from attention.first_call import caches_in
from attention.lifetime import end_session
from data.paths import repo_dir
from tasks.context import Context, Side
from tasks.files import write_atomically

Row = dict[str, Any]
Cache = Literal["cold", "warm"]

TIMEOUT_S = 900.0  # FlashInfer's kernels of sm_90 compile for minutes


def run(context: Context, cases: Sequence[AttentionCase], resolved: Mapping[Side, Mapping[str, str]]) -> None:
    """Cold and warm start of what each side resolves a phase to, on the first case of those phases; rows into the
    lake."""
    for side, by_phase in resolved.items():
        device, python = context.setup(side).device, context.environment(side).python
        for backend in dict.fromkeys(by_phase[case.phase] for case in one_a_phase(cases)):
            own = [case for case in one_a_phase(cases) if by_phase[case.phase] == backend]
            rows = cold_and_warm(backend, own, device, python)
            who = {"side": side, "fingerprint_id": context.fingerprint_id(side)}
            context.write("perf_startup", [{**who, **row} for row in rows])
            context.say(f"baseline: first call of {side}'s {backend}: {told(rows)}")


def one_a_phase(cases: Iterable[AttentionCase]) -> list[AttentionCase]:
    """The first case of each phase, eager: what a service launches first."""
    found: dict[str, AttentionCase] = {}
    for case in cases:
        if case.execution == "eager":
            found.setdefault(case.phase, case)
    return list(found.values())


def cold_and_warm(
    backend: str, cases: Sequence[AttentionCase], device: str, python: str, deadline: float = math.inf
) -> list[Row]:
    """Two processes, one after the other, with caches in a folder that is empty before the first; none without a
    case. Each ends after TIMEOUT_S, and at the deadline (`time.monotonic`)."""
    if not cases:
        return []
    with tempfile.TemporaryDirectory(prefix="first-call-") as folder:
        work = Path(folder)
        write_atomically(work / "cases.json", json.dumps([case.model_dump(mode="json") for case in cases]))
        command = [python, "-m", "attention.first_call", "--backend", backend, "--device", device]
        command += ["--cases", str(work / "cases.json")]
        caches: tuple[Cache, ...] = ("cold", "warm")
        return [{"backend": backend, "cache": cache, **_process(command, work, deadline)} for cache in caches]


def _process(command: Sequence[str], work: Path, deadline: float) -> Row:
    environment = {**os.environ, **caches_in(work)}
    timeout_s = min(TIMEOUT_S, deadline - time.monotonic())
    if timeout_s <= 0:
        return {"outcome": "timed_out", "error": "the time was over before it"}
    # Files, not pipes: a compiler that outlives the process would keep a pipe open.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=repo_dir(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return {"outcome": "timed_out", "error": f"no end after {timeout_s:.1f} s"}
        finally:
            end_session(process)
        for file in (said, errors):
            file.seek(0)
        return _row(process.returncode, said.read(), errors.read())


def _row(returncode: int, said: str, errors: str) -> Row:
    for line in reversed(said.splitlines()):
        if line.startswith('{"outcome"'):
            found: Row = json.loads(line)
            return found
    last = (errors.strip().splitlines() or ["it wrote nothing"])[-1]
    how = f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"
    return {"outcome": "crashed", "error": f"{how}: {last[:400]}"}


def told(rows: Iterable[Row]) -> str:
    """In words: `cold 2.1 s, warm 0.3 s`."""

    def one(row: Row) -> str:
        return f"{row['first_call_s']:.2g} s" if row["outcome"] == "measured" else str(row["outcome"])

    return ", ".join(f"{row['cache']} {one(row)}" for row in rows)
