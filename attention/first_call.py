"""The first call of a backend in a fresh process: what a restart costs, and what compiling adds to it.

    python -m attention.first_call --backend torch_sdpa:flash --cases CASES.json [--device cuda]

Prints one JSON document: seconds until the backend is imported, of plan and first call of every case together, and of
the second calls. Whoever starts it decides which caches it finds (`CACHES`): empty folders for a cold start, the same
folders again for a warm one. Exit 1: the backend failed, and the document says how.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from attention import STARTED
from attention.cases import AttentionCase
from attention.errors import UserError, exit_code, one_line
from attention.outcomes import MeasurementError, outcome_of
from attention.yaml_file import read_json

#: Environment variables that place the caches of compiled kernels, and the folder of each under one parent.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cute",
}


def caches_in(folder: Path) -> dict[str, str]:
    """The environment of a process whose caches of compiled kernels all lie in a folder."""
    return {variable: str(folder / name) for variable, name in CACHES.items()}


def measure(backend: str, cases: Sequence[AttentionCase], device: str) -> dict[str, float]:
    """Seconds of the start, and of the first and the second calls of all cases together that the backend takes. Raises
    what it raises, and MeasurementError where it takes none."""
    import torch

    from attention.backends import create
    from attention.contender import random_problem

    made = create(backend, device)
    refused = {case: made.check(case) for case in cases}
    taken_on = [case for case, reasons in refused.items() if not reasons]
    if not taken_on:
        raise MeasurementError("refused", "; ".join(str(reason) for reasons in refused.values() for reason in reasons))

    def settle() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    settle()
    import_s = time.monotonic() - STARTED
    taken = [0.0, 0.0]
    with torch.inference_mode():
        for problem in (random_problem(case, device) for case in taken_on):
            for nth in range(2):
                settle()
                started = time.perf_counter()
                made.plan(problem.batch, problem.spec, lse=False).run(problem.q_THD, problem.k, problem.v)
                settle()
                taken[nth] += time.perf_counter() - started
    return {"import_s": import_s, "first_call_s": taken[0], "second_call_s": taken[1]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attention.first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", required=True, help="for example torch_sdpa:flash")
    parser.add_argument("--cases", type=Path, required=True, help="a list of AttentionCase as JSON")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        cases = TypeAdapter(list[AttentionCase]).validate_python(read_json(options.cases))
    except ValidationError as error:
        raise UserError(f"--cases {options.cases}: {error.errors()[0]['msg']}") from error
    if not cases:
        raise UserError(f"--cases {options.cases}: no case; name one at least")
    try:
        found = measure(options.backend, cases, options.device)
    except UserError:
        raise
    except Exception as error:
        print(json.dumps({"outcome": outcome_of(error), "error": one_line(error)[:500]}))
        return 1
    print(json.dumps({"outcome": "measured", **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
