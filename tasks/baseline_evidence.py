"""What a GPU showed of the baselines: collected into a small folder, and told as markdown tables.

python -m tasks.baseline_steps --out RUN --model MODEL                          # on the GPU: all that is measured
python -m tasks.baseline_evidence --collect RUN data/evidence/h200/baseline     # anywhere
python -m tasks.baseline_evidence [--asked] data/evidence/h200/baseline
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.lib import ArrowException

from attention.cases import AttentionCase
from attention.errors import UserError, exit_code, one_line
from attention.yaml_file import read_json

TABLES = ("perf_backends", "perf_ceilings", "perf_startup", "perf_stress")
#: What the issue of a baseline asks of a Hopper GPU: the batch of a family, and the least share of its ceiling.
ASKED = {"prefill": ("q8k", 0.85), "decode": ("64q1s4k", 0.95)}

Row = dict[str, Any]


def collect(run: Path, folder: Path) -> None:
    """One Parquet file a table of a run's lake, without the raw samples, and its two documents without the rows. What
    the run lacks is not there afterwards either. UserError for a folder that is no run of `flows baseline`."""
    document = read_json(run / "baseline.json")
    if not isinstance(document, dict) or "release_id" not in document:
        raise UserError(f"{run / 'baseline.json'}: not what `python -m flows baseline --json` prints")
    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        path = run / "lake" / table / f"release_id={document['release_id']}"
        (folder / f"{table}.parquet").unlink(missing_ok=True)
        if path.is_dir():
            pq.write_table(
                ds.dataset(path, format="parquet").to_table(), folder / f"{table}.parquet", compression="zstd"
            )
    kept = {key: value for key, value in document.items() if key != "cells"}
    (folder / "baseline.json").write_text(json.dumps(kept, indent=1) + "\n")
    for source, name in (("verdicts.json",) * 2, ("steps.json",) * 2, ("load/result.json", "load.json")):
        (folder / name).unlink(missing_ok=True)
        if (run / source).is_file():
            shutil.copyfile(run / source, folder / name)


def rows_of(folder: Path, table: str) -> list[Row]:
    """Rows of a collected table; none where it was not measured. UserError for a file that is no Parquet."""
    path = folder / f"{table}.parquet"
    if not path.is_file():
        return []
    try:
        found: list[Row] = pq.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)[:200]}") from error
    return found


def asked_table(folder: Path) -> str:
    """What is asked of a baseline, and what was seen. UserError for a folder without the documents."""
    rows = rows_of(folder, "perf_backends")
    lines = [_best(rows, family, batch, least) for family, (batch, least) in ASKED.items()]
    lines += _verdicts(read_json(folder / "verdicts.json")["summary"])
    lines.append(f"| weighted selection | {read_json(folder / 'baseline.json')['sentence']} | beats, or says not |")
    return "\n".join(
        [f"| on one {read_json(folder / 'baseline.json')['device']} | seen | asked |", "|---|---|---|", *lines]
    )


def _best(rows: Iterable[Row], family: str, batch: str, least: float) -> str:
    mine = [r for r in rows if _is(r, family, batch) and r["outcome"] == "measured"]
    if not mine:
        return f"| best {family} of {batch} | not measured | {least:.0%} |"
    best = max(mine, key=lambda row: float(row["limit_ratio"]))
    of = "matrix product" if family == "prefill" else "read of the same bytes"
    seen = f"{best['backend']} {_rate(best)}, {best['limit_ratio']:.1%} of the {of}"
    return f"| best {family} of {batch} | {seen} | {least:.0%} |"


def _is(row: Row, family: str, batch: str) -> bool:
    return row["family"] == family and AttentionCase.model_validate_json(row["case_json"]).batch == batch


def _rate(row: Row) -> str:
    """TFLOP/s of what products limit, TB/s of what reading limits."""
    case = AttentionCase.model_validate_json(row["case_json"])
    if row["limited_by"] == "flops":
        return f"{case.flops() / row['p50_s'] / 1e12:.0f} TFLOP/s"
    return f"{case.num_bytes() / row['p50_s'] / 1e12:.2f} TB/s"


def _verdicts(summary: dict[str, Row]) -> list[str]:
    asked = {
        "equal": "no FAST or SLOW, 90 % SAME",
        "5 % slower": "95 % SLOW",
        "2 % slower": "never SAME",
    }
    lines = []
    for drilled, found in summary.items():
        said = ", ".join(f"{found[word]} {word}" for word in ("SAME", "FAST", "SLOW", "AMBG", "lost") if word in found)
        name = "two equal processes" if drilled == "equal" else f"a process that is {drilled}"
        lines.append(
            f"| {name}: {found['cells']} cells in {found['seconds']:.0f} s | {said} (margin {found['margin']:.1%}) "
            f"| {asked[drilled]} |"
        )
    return lines


def backend_table(folder: Path) -> str:
    """A row a backend: its best layout at the asked shapes, its first calls, its outcomes."""
    rows, startup = rows_of(folder, "perf_backends"), rows_of(folder, "perf_startup")
    lines = ["| backend | prefill q8k | decode 64q1s4k | first call, empty caches / warm | cells measured | others |"]
    lines.append("|---|---|---|---|---|---|")
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        good = [row for row in mine if row["outcome"] == "measured"]
        shapes = [_cell(good, family, batch) for family, (batch, _) in ASKED.items()]
        others = sorted({row["outcome"] for row in mine} - {"measured"})
        told = ", ".join(f"{sum(r['outcome'] == one for r in mine)} {one}" for one in others)
        first = _first([row for row in startup if row["backend"] == backend])
        lines.append(f"| {backend} | {' | '.join(shapes)} | {first} | {len(good)} of {len(mine)} | {told} |")
    lines += ["", _ceilings(rows_of(folder, "perf_ceilings"))]
    if (folder / "load.json").is_file():
        lines += ["", *_load(read_json(folder / "load.json"))]
    return "\n".join(lines)


def _load(found: Row) -> list[str]:
    """A row a level of the load, as a share of the saturation."""
    what = f"load of {found['saturation_per_s']:.3g} requests/s"
    lines = [
        f"| {what} | good | refused | TTFT P50 / P99 | TPOT P50 / P99 | KV pages |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["levels"]:
        tails = [f"{1e3 * row[f'{one}_p50_s']:.0f} / {1e3 * row[f'{one}_p99_s']:.0f} ms" for one in ("ttft", "tpot")]
        good = f"{row['num_good']} of {row['num_offered']}"
        lines.append(
            f"| {row['level']:.0%} | {good} | {row['num_refused']} | {' | '.join(tails)} | {row['kv_peak_share']:.0%} |"
        )
    return lines


def _cell(rows: Sequence[Row], family: str, batch: str) -> str:
    mine = [row for row in rows if _is(row, family, batch)]
    if not mine:
        return "-"
    best = min(mine, key=lambda row: float(row["p50_s"]))
    case = AttentionCase.model_validate_json(best["case_json"])
    pages = "" if case.page_size is None else f"/{case.page_size}"
    return f"{_rate(best)}, {best['limit_ratio']:.0%} ({case.layout}{pages}, {case.execution})"


def _first(rows: Sequence[Row]) -> str:
    found = {row["cache"]: row for row in rows}
    said = []
    for cache in ("cold", "warm"):
        row = found.get(cache)
        if row is None:
            said.append("-")
        else:
            said.append(f"{row['first_call_s']:.2g} s" if row["outcome"] == "measured" else str(row["outcome"]))
    return " / ".join(said)


def _ceilings(rows: Sequence[Row]) -> str:
    """Medians and ranges of the machine's ceilings over the whole survey."""
    said = []
    for kind, unit in (("matmul", "TFLOP/s"), ("read", "TB/s")):
        rates = sorted(row["work"] / row["seconds"] / 1e12 for row in rows if row["kind"] == kind)
        if rates:
            said.append(f"{kind} {median(rates):.3g} {unit} ({rates[0]:.3g} to {rates[-1]:.3g}, {len(rates)} rounds)")
    return f"Ceilings, measured between the cells: {'; '.join(said)}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.baseline_evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of the evidence")
    parser.add_argument("--collect", type=Path, metavar="RUN", help="fill the folder from a run first")
    parser.add_argument("--asked", action="store_true", help="the table of what is asked, in place of the backends'")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.collect is not None:
        if not options.collect.is_dir():
            raise UserError(f"--collect {options.collect}: no such folder")
        collect(options.collect, options.folder)
        return 0
    if not (options.folder / "perf_backends.parquet").is_file():
        raise UserError(f"{options.folder}: no perf_backends.parquet; fill it with --collect RUN first")
    try:
        print((asked_table if options.asked else backend_table)(options.folder))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{options.folder}: not what --collect writes ({type(error).__name__}: {error})") from error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
