"""All evidence of the baselines of one machine in one go: the clock's tests, known differences, survey, load.

    python -m tasks.baseline_steps --out RUN --budget-s 1400                                # on a GPU
    python -m tasks.baseline_steps --out RUN --matrix cpu --cells 6 --budget-s 200          # without one
    python -m tasks.baseline_evidence --collect RUN data/evidence/h200/baseline             # anywhere

Steps are `attention.evidence`'s: processes with a share of the time, of which one that fails or hangs is told of in
RUN/steps.json, and the next one runs; `--resume` goes on with those that are not done. The load needs a model folder
(`--model`), whose weights are not read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from attention.errors import UserError, exit_code
from attention.evidence import Step, run_all
from attention.flags import check_count, check_seconds
from attention.job import Setup
from data.baseline_matrix import load_matrix
from data.mix import load_mix
from data.plan import StressPlan
from tasks.files import write_atomically
from tasks.stress import job_of
from tasks.verdict_drill import PASSES

CLOCK_TESTS = "tests/attention/gpu/test_timing_gpu.py"
#: One concurrency, so that the load of a survey lasts as long as its step.
LOAD = StressPlan(max_running=(32,), saturation_requests=128, duration_s=15, slo_ttft_s=1.0, slo_tpot_s=0.05)
_START_S, _END_S = 40.0, 8.0  # what a step needs beside what its budget limits: to start, and to write


def steps(out: Path, *, matrix: str, mix: str, cells: int, model: Path | None, device: str) -> list[Step]:
    """The steps in their order; they write into `out`."""
    python = [sys.executable, "-m"]

    def within(parts: int, *argv: str) -> Callable[[float], list[str]]:
        """A command with a budget, of which it has so many, one after the other."""
        return lambda limit_s: [*python, *argv, "--budget-s", f"{max(1.0, (limit_s - _START_S - _END_S) / parts):.0f}"]

    drill = ["tasks.verdict_drill", "--matrix", matrix, "--mix", mix, "--cells", str(cells)]
    survey = ["flows", "baseline", "--matrix", matrix, "--mix", mix, "--startup", "--out", str(out), "--json"]
    found = [
        Step("verdicts", within(len(PASSES) + 1, *drill, "--out", str(out / "verdicts.json")), 45),
        Step("survey", within(1, *survey), 45, "baseline.json"),
    ]
    if device == "cuda":
        found.insert(0, Step("clock", lambda limit_s: [*python, "pytest", "-q", "-m", "gpu", CLOCK_TESTS], 8))
    if model is not None:
        load = [*python, "attention", "bench", "stress", "--job", str(out / "load.json"), "--out", str(out / "load")]
        found.append(Step("load", lambda limit_s: load, 12))
    return found


def write_load(out: Path, mix: str, model: Path, device: str) -> None:
    """The job of the load. UserError for a folder that is no model's."""
    if not (model / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json there; `make model` gives data/models/smollm2-135m-instruct")
    setup = Setup(model=model, policy=Path("data/policies/document.yaml"), device=device, num_pages=1 << 14)
    job = job_of(LOAD, load_mix(mix).lengths(), LOAD.max_running[0], setup=setup, random_weights=True)
    write_atomically(out / "load.json", job.model_dump_json(indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every step is done; 1 when one is not; 2 for bad flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.baseline_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--matrix", default="hopper", help="name or file of a baseline matrix (default: %(default)s)")
    parser.add_argument("--mix", default="chat", help="traffic mix (default: %(default)s)")
    parser.add_argument("--cells", type=int, default=50, help="cells of each known difference (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="model folder for the load; none without")
    parser.add_argument("--budget-s", type=float, default=1400.0, help="seconds of all steps (default: %(default)g)")
    parser.add_argument("--only", default="", help="steps whose name begins with one of these, comma-separated")
    parser.add_argument("--resume", action="store_true", help="only the steps that are not done in the folder")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    check_count("--cells", options.cells)
    check_seconds("--budget-s", options.budget_s, or_none=True)
    device = "cpu" if load_matrix(options.matrix).covers("cpu") else "cuda"
    load_mix(options.mix)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.model is not None:
        write_load(out, options.mix, options.model, device)
    offered = steps(
        out, matrix=options.matrix, mix=options.mix, cells=options.cells, model=options.model, device=device
    )
    wanted = [step for step in offered if step.name.startswith(tuple(options.only.split(",")))]
    if not wanted:
        raise UserError(f"--only {options.only}: the steps are {', '.join(step.name for step in offered)}")
    found = run_all(wanted, out, options.budget_s, resume=options.resume)
    return 0 if all(one.status == "done" for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
