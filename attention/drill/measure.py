"""Measure a drill where the kernels are; who judges it needs no GPU, and who measures it no gates.

    python -m attention.drill.measure --plan h200 --frozen gates/thresholds.yaml gates/suites --out rows --jobs 16
    python -m flows drill --rows rows

The first needs torch, pyarrow, pydantic and PyYAML alone. Files after `--frozen` are hashed before the seed is drawn;
the second refuses rows that were measured under others, and a folder that lacks any of what was measured. A draw is
written as soon as it is measured: stopped, the same command goes on with those that are left, under the same seed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from functools import partial
from pathlib import Path

from attention.drill.measured import Asked, Folder, device_name, sha256_of
from attention.drill.plan import Draw, DrillPlan, draws, load_plan
from attention.drill.rows import Row
from attention.drill.workers import mapped
from attention.errors import UserError, exit_code
from attention.flags import check_count
from attention.lifetime import end_on_sigterm


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attention.drill.measure", description="Measure a drill's rows.")
    parser.add_argument("--plan", required=True, help="a plan of attention/drill/plans by name, or a file")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the rows; goes on with one")
    parser.add_argument("--frozen", required=True, nargs="+", type=Path, metavar="FILE", help="what will judge them")
    parser.add_argument("--seed", type=int, help="repeat a drill; default: a fresh seed")
    parser.add_argument("--jobs", type=int, default=1, help="draws that are measured at a time, a process each")
    args = parser.parse_args(argv)
    end_on_sigterm()
    return exit_code(lambda: measure(args.plan, args.out, args.frozen, args.seed, args.jobs))


def measure(name: str, out: str, frozen: list[Path], seed: int | None, jobs: int = 1) -> int:
    """Measure what is left of a plan into a folder. Raises UserError for a folder of another plan, limits or seed, and
    for one that another process measures into."""
    if not out.strip():
        raise UserError(f"--out {out!r}: name a folder")
    if seed is not None and seed < 0:
        raise UserError(f"--seed {seed}: use a whole number, 0 or more")
    check_count("--jobs", jobs)
    plan, folder = load_plan(name), Folder(Path(out))
    _check_device(plan)
    limits = sha256_of(frozen)
    with folder.held():
        _measure_left(folder, plan, _begun(folder, plan, limits, seed), jobs)
    return 0


def _measure_left(folder: Folder, plan: DrillPlan, asked: Asked, jobs: int) -> None:
    total, left = sum(1 for _ in draws(asked.plan, asked.seed)), list(folder.left(asked))
    started = time.monotonic()
    _say(started, f"seed {asked.seed}, limits {asked.frozen_sha256[:12]}, {asked.device}, {len(left)} of {total} draws")
    with mapped(min(jobs, len(left)), ordered=False) as spread:
        measured = spread(partial(_rows, plan=plan), left)
        for done, (number, draw, rows) in enumerate(measured, start=total - len(left) + 1):
            folder.add(number, rows)
            errors = [f"{row.subject} on {row.feature}: {row.error}" for row in rows if row.error]
            _say(started, f"{done} of {total} draws, {len(rows)} rows, {len(errors)} errors; {draw}")
            for error in errors[:3]:
                _say(started, f"  {error}")
    folder.finish()


def _rows(numbered: tuple[int, Draw], plan: DrillPlan) -> tuple[int, Draw, list[Row]]:
    from attention.drill.run import rows_of

    number, draw = numbered
    return number, draw, list(rows_of(draw, plan))


def _check_device(plan: DrillPlan) -> None:
    import torch

    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"the plan's device is {plan.device}, and there is no CUDA device here")


def _begun(folder: Folder, plan: DrillPlan, frozen: str, seed: int | None) -> Asked:
    import torch

    known = folder.asked()
    if known is None:
        drawn = secrets.randbits(32) if seed is None else seed
        known = Asked(
            plan=plan, seed=drawn, frozen_sha256=frozen, torch=torch.__version__, device=device_name(plan.device)
        )
        folder.begin(known)
    same = {
        "plan": known.plan == plan,
        "limits": known.frozen_sha256 == frozen,
        "seed": seed in (None, known.seed),
        "device": known.device == device_name(plan.device),
        "torch": known.torch == torch.__version__,
    }
    for what, is_same in same.items():
        if not is_same:
            raise UserError(f"--out {folder.path}: its rows are of another {what}; use a new folder")
    return known


def _say(started: float, line: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
