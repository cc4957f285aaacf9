"""All evidence of one machine in one go: fingerprint, compilation, probes, host overhead, kernels, fingerprint again.

    python -m attention.evidence --out data/evidence/h200 --budget-s 480   # needs a GPU
    python -m attention.evidence --table data/evidence/h200                # the backends as a markdown table, anywhere

Every step is a process group of its own with a share of the time that is left; what a step does not use goes to
those after it. A step writes what it has as it goes, so that one that is killed loses the item that it was at. One
that fails, crashes or takes too long is recorded and the next one runs. `steps.json` is written anew after each, and
keeps those of earlier calls.
`--resume` goes on in a folder: it skips what is done, and has the other steps keep what they have (`partial`: the
time was spent before all of it). The folder has at most 8 files and stays under a megabyte.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from attention.errors import UserError, exit_code, nearest
from attention.flags import check_count, check_seconds
from attention.lifetime import end_session
from attention.reasons import Code
from attention.replaced import replaced
from attention.yaml_file import read_json

CELLS = Path("attention/cells/hopper.yaml")
POLICY = Path("data/policies/document.yaml")
#: Whose host overhead is measured.
DISPATCHED = ("torch_sdpa:flash", "torch_sdpa:cudnn", "flash_attn:fa2", "flashinfer:fa2")
#: The fingerprint is of a layer of this shape: Llama 3 8B's. No weights are needed.
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_MARGIN_S = 6.0  # a step is told to end this much before it is ended
_SPENT = 3  # the exit code of a step whose time was spent before all was done

#: Contender -> phase -> rows of kernels.json.
Kernels = dict[str, dict[str, list[dict[str, Any]]]]
Status = Literal["done", "partial", "failed", "timeout", "not run"]


@dataclass(frozen=True)
class Step:
    """One command: its arguments for a number of seconds, its share of the time, and where the JSON that it writes
    to stdout goes."""

    name: str
    argv: Callable[[float], list[str]]
    share: float
    stdout: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a step; `tail` is the end of what it said."""

    name: str
    status: Status
    seconds: float
    limit_s: float
    exit_code: int | None
    command: str
    tail: str


def steps(
    out: Path, *, device: str, cells: Path, backends: str, calls: int | None, small: bool, resume: bool = False
) -> list[Step]:
    """The steps in their order; they write into `out`."""
    python = [sys.executable, "-m"]
    jobs = str(max(1, (os.cpu_count() or 2) - 2))
    identity = ["--model", str(out / "model"), "--policy", str(POLICY), "--device", device, "--json"]
    fingerprint = [*python, "attention", "fingerprint", *identity]
    compiled = out / "compiled.json"

    def within(module: str, *argv: str) -> Callable[[float], list[str]]:
        command = [*python, module, *argv, "--device", device, *(["--resume"] if resume else [])]
        return lambda limit_s: [*command, "--budget-s", f"{max(1.0, limit_s - _MARGIN_S):.0f}"]

    compile_ = ["--cells", str(cells), "--jobs", str(os.cpu_count() or 2), "--out", str(compiled)]
    probe = ["probe", "--cells", str(cells), "--jobs", jobs]
    probe += ["--backends", backends, "--timeout-s", "120", "--out", str(out / "probes.parquet")]

    def probes(limit_s: float) -> list[str]:  # told when it starts: the step before may have written no file
        known = ["--compiled", str(compiled)] if compiled.is_file() else []
        return within("attention", *probe, *known)(limit_s)

    kernels = ["--jobs", "8", *(["--small"] if small else []), "--out", str(out / "kernels.json")]
    dispatch = ["--backends", ",".join(DISPATCHED), "--out", str(out / "dispatch.json")]
    dispatch += [] if calls is None else ["--calls", str(calls)]
    return [
        Step("fingerprint_before", lambda limit_s: fingerprint, 5, "fingerprint_before.json"),
        Step("compile", within("attention.warm", *compile_), 25),
        Step("probes", probes, 30),
        Step("dispatch", within("attention.bench_dispatch", *dispatch), 12),
        Step("kernels", within("attention.bench_kernels", *kernels), 23),
        Step("fingerprint_after", lambda limit_s: fingerprint, 5, "fingerprint_after.json"),
    ]


def run_all(wanted: list[Step], out: Path, budget_s: float, *, resume: bool = False) -> list[Outcome]:
    """Run the steps one after the other, whatever comes of each; with `resume` those that are not done."""
    deadline = time.monotonic() + budget_s
    (out / "model").mkdir(parents=True, exist_ok=True)
    (out / "model" / "config.json").write_text(json.dumps(MODEL, indent=1) + "\n")
    history = _outcomes(out) if resume else []
    found = {one.name: one for one in history}
    left = [step for step in wanted if not _is_done(step.name, found, out)]
    for i, step in enumerate(left):
        left_s = deadline - time.monotonic()
        limit_s = left_s * step.share / sum(one.share for one in left[i:])
        one = found[step.name] = run_step(step, out, limit_s)
        history.append(one)
        write_steps(history, out)
        print(f"{one.name:20} {one.status:8} {one.seconds:6.1f} of {one.limit_s:5.0f} s  {one.tail[-100:]}", flush=True)
    if not left:
        write_steps(history, out)
    squeeze(out)
    return list(found.values())


def _outcomes(out: Path) -> list[Outcome]:
    path = out / "steps.json"
    return [Outcome(**one) for one in read_json(path)] if path.is_file() else []


def _is_done(name: str, found: dict[str, Outcome], out: Path) -> bool:
    """Whether a step needs no other run. What was compiled on another machine is to be compiled on this one."""
    if name not in found or found[name].status != "done":
        return False
    if name != "compile":
        return True
    from attention.warm import earlier_rows

    return bool(earlier_rows(out / "compiled.json"))


def run_step(step: Step, out: Path, limit_s: float) -> Outcome:
    """One step in a session of its own, ended as a whole after `limit_s`."""
    argv = step.argv(limit_s)
    shown = " ".join(["python", *argv[1:]])
    if limit_s < 1:
        return Outcome(step.name, "not run", 0.0, round(limit_s, 1), None, shown, "the time was spent before it")
    started = time.monotonic()
    # Compilers that a probe or a bench starts share the cores with the other workers.
    environment = {"MAX_JOBS": "2", **os.environ}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=errors if step.stdout is None else said,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit_s)
            ends: dict[int, Status] = {0: "done", _SPENT: "partial"}
            status: Status = ends.get(process.returncode, "failed")
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            end_session(process)
        for file in (errors, said):
            file.seek(0)
        tail = " | ".join(line.strip() for line in errors.read().splitlines()[-4:])[-600:]
        if step.stdout is not None and not _keep(said.read(), out / step.stdout) and status == "done":
            status, tail = "failed", f"{tail} | no JSON on stdout"
    seconds = time.monotonic() - started
    return Outcome(step.name, status, round(seconds, 1), round(limit_s, 1), process.returncode, shown, tail)


def _keep(said: str, path: Path) -> bool:
    """Put what a step said into its file; whether it said anything whole."""
    try:
        value = json.loads(said)
    except ValueError:
        return False
    _write(path, value)
    return True


def write_steps(found: list[Outcome], out: Path) -> None:
    _write(out / "steps.json", [asdict(one) for one in found])


def _write(path: Path, document: Any) -> None:
    with replaced(path) as fresh:
        fresh.write_text(json.dumps(document, indent=1) + "\n")


def squeeze(out: Path) -> None:
    """The probes as one Parquet file with zstd, also those of a step that was killed: rows repeat cases and reasons."""
    import pyarrow.parquet as pq

    from attention.drift import finish_log

    path = out / "probes.parquet"
    finish_log(path)
    if path.is_file():
        with replaced(path) as fresh:
            pq.write_table(pq.read_table(path), fresh, compression="zstd", compression_level=15)
    for unfinished in out.glob(".*.new"):  # of steps that were killed
        unfinished.unlink()


# What the folder says.


def backend_table(folder: Path) -> str:
    """The folder as a markdown table, one line a backend. UserError where there is no evidence.

    Cells: right of those that ran, refused by a declared rule (`known_bad` too). Checks: passed of those that applied
    and ran; what a library refuses only when it is called, such as strides, counts as not passed. Kernels: the best
    shape of a phase, with the layout that the backend read, against the plain read or FlashAttention-2.
    """
    from attention.backends import NAMES

    if not (folder / "steps.json").is_file():
        raise UserError(f"evidence {folder}: no steps.json, so no run of python -m attention.evidence wrote it")
    probes, kernels, overheads = _probes(folder), _kernels(folder), _overheads(folder)
    lines = [
        "| backend | cells right | refused | checks passed | decode, TB/s of KV | prefill, TFLOP/s "
        "| host overhead, us | graph nodes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in NAMES if name in {*probes, *kernels, *overheads}):
        cells, checks = probes.get(name, (Counter(), Counter()))
        columns = [
            f"`{name}`",
            _passed(cells),
            "not installed" if cells["missing"] == cells.total() > 0 else str(cells["refused"] or "-"),
            _passed(checks),
            *(_figures(kernels.get(name, {}).get(phase, [])) for phase in ("decode", "prefill")),
            *_overhead(overheads.get(name, [])),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    unreached = sum(cells["unknown"] for cells, _ in probes.values())
    return "\n".join([*lines, "", *_reads(kernels), _footer(folder, unreached)])


def _reads(kernels: Kernels) -> list[str]:
    """The plain reads of the same bytes; decode is held against the first."""
    reads = [(name, phases["decode"]) for name, phases in kernels.items() if name.startswith("read:")]
    shown = ", ".join(f"`{name}` {max(row['figure'] for row in rows):.2f} TB/s" for name, rows in reads)
    return [f"Plain read: {shown}."] if reads else []


def _footer(folder: Path, unreached: int) -> str:
    """Which machine, whether its fingerprint stayed the same, and what of the run is missing."""
    ids, gpu = [], "unknown machine"
    for path in (folder / f"fingerprint_{when}.json" for when in ("before", "after")):
        if path.is_file():
            found = read_json(path)
            ids.append(found["id"])
            gpu = f"{found['identity']['gpu']}, torch {found['identity']['torch']}"
    same = "unknown" if len(ids) < 2 else "the same" if ids[0] == ids[1] else f"then {ids[1]}"
    outcomes = {one.name: one for one in _outcomes(folder)}.values()
    missing = [f"{one.name} ({one.status})" for one in outcomes if one.status != "done"]
    missing += [f"{unreached} cells"] if unreached else []
    words = f"{gpu}; fingerprint {ids[0] if ids else 'unknown'} before, {same} after; {len(outcomes)} steps"
    return f"{words}, not done: {', '.join(missing)}." if missing else f"{words}, all done."


def _probes(folder: Path) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Backend -> outcomes of its cells, and of its checks."""
    from attention.drift import read_rows, unfinished_rows

    path = folder / "probes.parquet"
    rows = unfinished_rows(path) or (read_rows(path) if path.is_file() else [])  # a run that was killed has them all
    outcomes: dict[tuple[str, str, str], str] = {}
    for row in rows:
        if row.level == "construct" and row.status == "pass":
            continue
        status: str = row.status
        if row.level == "static" and row.status != "pass":
            absent = any(one.code == Code.IMPORT_FAILED for one in row.reasons)
            status = "missing" if absent else "refused"
        outcomes[row.backend, row.probe, row.case.case_id] = status
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for (backend, probe, _), status in outcomes.items():
        cells, checks = found.setdefault(backend, (Counter(), Counter()))
        (cells if probe == "cell" else checks)[status] += 1
    return found


def _kernels(folder: Path) -> Kernels:
    """Contender -> phase -> its rows that have a figure."""
    path = folder / "kernels.json"
    found: Kernels = {}
    for row in read_json(path)["rows"] if path.is_file() else ():
        if row.get("figure") is not None:
            found.setdefault(row["contender"], {}).setdefault(row["shape"].split("-")[0], []).append(row)
    return found


def _overheads(folder: Path) -> dict[str, list[dict[str, Any]]]:
    path = folder / "dispatch.json"
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_json(path) if path.is_file() else ():
        if row.get("error") is None:
            found.setdefault(row["backend"], []).append(row)
    return found


def _passed(outcomes: Counter[str]) -> str:
    ran = outcomes["pass"] + outcomes["fail"]
    return f"{outcomes['pass']} of {ran}" if ran else "-"


def _figures(rows: list[dict[str, Any]]) -> str:
    """The best row of each layout that the backend read: its figure, the layout, and the ratio to the baseline."""
    from attention.bench_contenders import layout_of

    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        layout = layout_of(row["contender"], row["shape"])
        best[layout] = max(best.get(layout, row), row, key=lambda one: one["figure"])
    shown = []
    for layout, row in best.items():
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.0%}"
        shown.append(f"{row['figure']:.{2 if row['figure'] < 10 else 0}f} ({layout}{ratio})")
    return "; ".join(shown) or "-"


def _overhead(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The worst overhead, and the nodes of the graphs of both calls."""
    if not rows:
        return "-", "-"
    nodes = {f"{row['run_nodes']} = {row['library_nodes']}" for row in rows if row["nodes_equal"]}
    unequal = {f"{row['run_nodes']} against {row['library_nodes']}" for row in rows if row["nodes_equal"] is False}
    worst = max(row["overhead_us"] for row in rows)
    return f"{worst:+.1f}", ", ".join(sorted(unequal or nodes)) or "-"


def main(argv: list[str] | None = None) -> int:
    """0 when every step is done; 1 when one is not; 2 for bad flags."""
    parser = argparse.ArgumentParser(
        prog="python -m attention.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the evidence")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the markdown table of a folder instead")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all steps (default: %(default)g)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--cells", type=Path, default=CELLS, help="cases and checks to probe (default: %(default)s)")
    parser.add_argument("--backends", default="all", help="to probe, comma-separated")
    parser.add_argument("--calls", type=int, help="pairs of calls for the host overhead, at most")
    parser.add_argument("--small", action="store_true", help="kernels on shapes that Triton's interpreter can do")
    parser.add_argument("--only", default="", help="steps whose name begins with one of these, comma-separated")
    parser.add_argument("--resume", action="store_true", help="skip what is done in the folder, complete the rest")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.backends import chosen
    from attention.matrix import check_device

    if options.table is not None:
        print(backend_table(options.table))
        return 0
    if options.out is None:
        raise UserError("name the folder: --out FOLDER, or --table FOLDER")
    check_seconds("--budget-s", options.budget_s, or_none=True)
    check_count("--calls", options.calls)
    check_device(options.device)
    chosen(options.backends)
    offered = steps(
        options.out,
        device=options.device,
        cells=options.cells,
        backends=options.backends,
        calls=options.calls,
        small=options.small,
        resume=options.resume,
    )
    wanted = [step for step in offered if step.name.startswith(tuple(options.only.split(",")))]
    if not wanted:
        raise UserError(f"--only {options.only}: no step begins so; {nearest(options.only, [s.name for s in offered])}")
    found = run_all(wanted, options.out, options.budget_s, resume=options.resume)
    return 0 if all(one.status == "done" for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
