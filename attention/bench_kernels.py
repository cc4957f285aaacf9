"""Attention kernels against what bounds them: decode beside a plain read of the same bytes, prefill beside FA2.

    python -m attention.bench_kernels --device cuda --out rows.json [--only decode] [--blocks 25]     # needs a GPU
    TRITON_INTERPRET=1 python -m attention.bench_kernels --device cpu --small --out rows.json         # runs anywhere

Decode: 64 sequences of 4096 keys; TB/s of K and V. `read:triton` and `read:torch` only sum the same bytes. Prefill: one
causal prompt of 8192 tokens; TFLOP/s. 32 query and 8 KV heads, D 128, bfloat16. Every contender has the same numbers,
in the layout that it reads without a copy.

Each is first checked against the fp64 oracle, in worker processes side by side, where it also compiles; one that
crashes or is wrong is a row with its error. The sound ones then take turns in one process, in alternating order, each
call with a cold L2 and queued behind a sleep of the GPU, so that no figure holds host time. Figures are medians; the
quartiles stand beside them.

FIRST are checked and timed before the rest, so that a short run has them; the file is written anew with every row.
Exit 3: the time was spent before all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Lock

from attention import STARTED
from attention.bench_contenders import READS, Shape, shapes, wired
from attention.errors import UserError, exit_code
from attention.flags import check_count, check_seconds
from attention.isolate import NOT_RUN, Outcome, in_workers
from attention.matrix import check_device
from attention.replaced import replaced

#: Beside `triton:paged`, where they are installed.
OTHERS = ("flash_attn:fa2", "flash_attn:fa4", "flashinfer:fa2", "torch_sdpa:cudnn")
#: What a figure is divided by: of several the fastest.
BASELINES = {"decode": READS, "prefill": ("flash_attn:fa2",)}
#: Measured before the others: what the project serves with.
FIRST = ("decode-page16", "prefill-page16")
# Of the time that is left, what the checks of a round may take: the sound ones shall still be timed.
_CHECKS = 0.55
_COMMAND = (sys.executable, "-m", "attention.bench_contenders")


@dataclass(frozen=True)
class Row:
    """One contender on one shape: median and quartiles of `blocks` calls, or the error.

    `ratio` is the figure over that of `baseline` in the same run.
    """

    shape: str
    contender: str
    unit: str
    figure: float | None = None
    microseconds: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    blocks: int = 0
    confirmed: str | None = None
    r_rms: float | None = None
    baseline: str | None = None
    ratio: float | None = None
    error: str | None = None


def bench(
    work: Sequence[tuple[Shape, Sequence[str]]],
    *,
    device: str,
    small: bool = False,
    blocks: int = 25,
    jobs: int = 4,
    timeout_s: float = 120.0,
    deadline: float | None = None,
    heard: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """A row for every contender of every shape, best first, those with an error last.

    `jobs` workers check side by side; one worker times, shape after shape; the shapes in FIRST before the others.
    `heard` gets all rows that there are, whenever there is another.
    """
    task = {"device": device, "small": small, "what": "check"}
    of = {wired(shape, name): (shape, name) for shape, names in work for name in names}
    rows: dict[str, Row] = {}
    lock = Lock()

    def ordered() -> list[Row]:
        found: list[Row] = []
        for shape, names in work:
            mine = _with_ratios([rows[key] for name in names if (key := wired(shape, name)) in rows], shape)
            found += sorted(mine, key=lambda row: -(row.figure or 0))
        return found

    def note(checked: Outcome, timed: Outcome | None = None) -> None:
        with lock:
            rows[checked.name] = _row(*of[checked.name], checked, timed)
            heard(ordered())

    def failed(one: Outcome) -> None:
        if one.error is not None:
            note(one)

    def measure(keys: list[str]) -> None:
        stopped = Event()
        until = None if deadline is None else time.monotonic() + _CHECKS * (deadline - time.monotonic())
        # One worker goes through the shapes of a contender: it is imported once.
        parts: dict[str, list[str]] = {}
        for key in keys:
            parts.setdefault(of[key][1], []).append(key)
        some = list(parts.values())
        lanes = [[key for part in some[i::jobs] for key in part] for i in range(min(jobs, len(some)))]

        def check(lane: list[str]) -> list[Outcome]:
            return in_workers(_COMMAND, task, lane, timeout_s=timeout_s, deadline=until, stopped=stopped, heard=failed)

        with ThreadPoolExecutor(max_workers=jobs) as pool, ExitStack() as ends:
            ends.callback(stopped.set)  # before the pool waits: Ctrl-C ends its workers
            checked = {one.name: one for found in pool.map(check, lanes) for one in found}
        sound = [key for key in keys if checked[key].error is None]
        for key in set(keys) - set(sound):
            note(checked[key])
        timing = {**task, "what": "time", "blocks": blocks}
        for one in in_workers(
            _COMMAND,
            timing,
            sound,
            timeout_s=timeout_s,
            deadline=deadline,
            heard=lambda one: note(checked[one.name], one),
        ):
            note(checked[one.name], one)

    first = [key for key, (shape, _) in of.items() if shape.name in FIRST]
    for keys in (first, [key for key in of if key not in first]):
        if keys:
            measure(keys)
    return ordered()


def _row(shape: Shape, name: str, checked: Outcome, timed: Outcome | None) -> Row:
    row = Row(shape.name, name, shape.unit, **checked.said)
    if timed is None or timed.error is not None:
        return replace(row, error=checked.error if timed is None else timed.error)
    said = timed.said
    return replace(
        row,
        figure=float(f"{shape.figure(said['seconds']):.5g}"),
        microseconds=round(said["seconds"] * 1e6, 2),
        low_us=round(said["low_s"] * 1e6, 2),
        high_us=round(said["high_s"] * 1e6, 2),
        blocks=said["blocks"],
    )


def _with_ratios(rows: list[Row], shape: Shape) -> list[Row]:
    bases = [row for row in rows if row.contender in BASELINES[shape.case.phase] and row.figure]
    if not bases:
        return rows
    base = max(bases, key=lambda row: row.figure or 0)
    return [
        row if row.figure is None else replace(row, baseline=base.contender, ratio=round(row.figure / base.figure, 3))
        for row in rows
        if base.figure
    ]


def contenders(shape: Shape, device: str) -> list[str]:
    """What a shape is measured with by default."""
    others = OTHERS if device != "cpu" else ("torch_sdpa:flash", "torch_sdpa:math")
    return ["triton:paged", *(READS if shape.is_decode else ()), *others]


def write(rows: list[Row], path: Path) -> None:
    """Rows as Parquet (`.parquet`) or JSON (`.json`). UserError for another ending."""
    documents = [asdict(row) for row in rows]
    if path.suffix not in (".json", ".parquet"):
        raise UserError(f"--out {path}: write rows to a .json or .parquet file")
    with replaced(path) as fresh:
        if path.suffix == ".json":
            fresh.write_text(json.dumps({"rows": documents}, indent=1) + "\n")
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(documents), fresh)


def read(path: Path) -> list[Row]:
    """The rows that `write` wrote."""
    if path.suffix == ".json":
        return [Row(**row) for row in json.loads(path.read_text())["rows"]]
    import pyarrow.parquet as pq

    return [Row(**row) for row in pq.read_table(path).to_pylist()]


def line(row: Row) -> str:
    """For a person."""
    if row.error is not None:
        return f"{row.shape:16} {row.contender:30} {row.error}"
    ratio = "" if row.ratio is None else f"  {row.ratio:6.1%} of {row.baseline}"
    return f"{row.shape:16} {row.contender:30} {row.figure:10.4g} {row.unit:8} {row.microseconds:9.1f} us{ratio}"


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags that this and `triton_tune` share; `module` is whose."""
    found = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--out", type=Path, required=True, help="a .json or .parquet file of rows")
    found.add_argument("--device", default="cuda", help="cuda, or cpu with --small in Triton's interpreter")
    found.add_argument("--small", action="store_true", help="shapes that the interpreter can do")
    found.add_argument("--only", default="", help="shapes whose name contains this")
    found.add_argument("--blocks", type=int, default=25, help="timed calls a contender")
    found.add_argument("--jobs", type=int, default=4, help="workers that check and compile at a time")
    found.add_argument("--timeout-s", type=float, default=120.0, help="seconds that one contender may take")
    found.add_argument("--budget-s", type=float, help="seconds for everything; what is left has an error")
    found.add_argument("--resume", action="store_true", help="keep the shapes that --out has whole, measure the others")
    return found


def run(options: argparse.Namespace, names_of: Callable[[Shape], list[str]]) -> int:
    """Measure what the flags ask for; 1 when our kernel has an error somewhere, 3 when the time was spent."""
    for flag, num in (("--jobs", options.jobs), ("--blocks", options.blocks)):
        check_count(flag, num)
    check_seconds("--timeout-s", options.timeout_s)
    check_seconds("--budget-s", options.budget_s, or_none=True)
    check_device(options.device)
    earlier = read(options.out) if options.resume and options.out.is_file() else []
    lacking = {row.shape for row in earlier if row.error == NOT_RUN}
    wanted = [shape for shape in shapes(options.small).values() if options.only in shape.name]
    work = [(shape, names_of(shape)) for shape in wanted]
    there = {(row.shape, row.contender) for row in earlier}
    whole = {s.name for s, names in work if s.name not in lacking and all((s.name, name) in there for name in names)}
    kept = [row for row in earlier if row.shape in whole]
    write(kept, options.out)  # a wrong ending shows before the work
    rows = bench(
        [one for one in work if one[0].name not in whole],
        device=options.device,
        small=options.small,
        blocks=options.blocks,
        jobs=options.jobs,
        timeout_s=options.timeout_s,
        deadline=None if options.budget_s is None else STARTED + options.budget_s,
        heard=lambda found: write([*kept, *found], options.out),
    )
    write([*kept, *rows], options.out)
    print("\n".join(map(line, rows)), flush=True)
    if any(row.error == NOT_RUN for row in rows):
        return 3
    return 1 if any(row.error for row in rows if row.contender == "triton:paged") else 0


def main() -> int:
    options = parser("attention.bench_kernels", __doc__).parse_args()
    return exit_code(lambda: run(options, lambda shape: contenders(shape, options.device)))


if __name__ == "__main__":
    raise SystemExit(main())
