"""How fast the tensor layer of the replay is, and where its time goes; twice, so that the second run has no oracle.

    python -m attention.bench_tensor_replay --device cuda --out tensor_replay.json
    python -m attention.bench_tensor_replay --device cpu --seeds 1 --max-kv-len 300

One layer of 32 query and 8 KV heads of 128 in bfloat16, every shape of the replay up to --max-kv-len, four kinds of
inputs. Before the two runs that count, one seed compiles and warms up. `busy_share` is the lower bound of
attention/replay/throughput.py; `utilisation` is what the driver says: the share of time in which a kernel ran (NVML,
sampled ten times a second; null without it).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import AttentionSpec
from attention.cases import Phase
from attention.errors import UserError, exit_code
from attention.flags import check_count
from attention.job import Setup, TensorPlan
from attention.replaced import replaced
from attention.replay import tensor
from attention.replay.throughput import Meter
from attention.replay.truths import Truths, compute

SPEC = AttentionSpec(32, 8, 128, 128, torch.bfloat16, 128**-0.5)
INPUTS = ("normal", "needle", "large_logit", "sink")
_PERIOD_S = 0.1


def measure(device: str, backend: str, seeds: int, max_kv_len: int, folder: Path) -> dict[str, Any]:
    """Figures of both runs; truths are kept in `folder`. UserError where a case raised."""
    runs = []
    for plan in ((seeds + 1,), *2 * (tuple(range(seeds)),)):
        wanted = TensorPlan(seeds=plan, max_kv_len=max_kv_len, inputs=INPUTS)
        runs.append(_replayed(device, backend, wanted, folder))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"device": name, "torch": torch.__version__, "backend": backend, "first": runs[1], "second": runs[2]}


def _replayed(device: str, backend: str, plan: TensorPlan, folder: Path) -> dict[str, Any]:
    setup = Setup(model=Path("unused"), policy=Path("unused"), device=device)
    resolved: dict[Phase, str] = dict.fromkeys(("prefill", "decode", "extend"), backend)
    with _utilisation(device) as samples:
        meter = Meter(device)
        truths = Truths(folder, meter.oracle(compute))
        sources = tensor.Sources(oracle=truths, meter=meter)
        rows = list(tensor.rows(setup, plan, [SPEC], ("bfloat16",), resolved, 1.0, sources=sources))
        found = meter.summary(len(rows)).row()
    if errors := [row["error"] for row in rows if "error" in row]:
        raise UserError(f"{backend}: {len(errors)} of {len(rows)} cases raised: {errors[0]}")
    utilisation = sum(samples) / len(samples) / 100 if samples else None
    return {**found, "utilisation": utilisation, "computed": truths.num_computed, "read": truths.num_read}


@contextmanager
def _utilisation(device: str) -> Iterator[list[int]]:
    """Percents that NVML gives meanwhile; none without a GPU or without nvidia-ml-py."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_PERIOD_S):
            try:
                samples.append(torch.cuda.utilization())
            except Exception:  # no NVML: the figure is null
                return

    thread = threading.Thread(target=sample, daemon=True)
    if device.startswith("cuda"):
        thread.start()
    try:
        yield samples
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def main(argv: list[str] | None = None) -> int:
    """0 measured; 2 for bad flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--backend", help="default: triton:paged, on the CPU torch_sdpa:flash")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--max-kv-len", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="JSON file; default: stdout")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.backends import chosen
    from attention.matrix import check_device

    check_device(options.device)
    check_count("--seeds", options.seeds)
    check_count("--max-kv-len", options.max_kv_len)
    default = "triton:paged" if options.device.startswith("cuda") else "torch_sdpa:flash"
    backend, *more = chosen(options.backend or default)
    if more:
        raise UserError(f"--backend {options.backend}: name one")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.device, backend, options.seeds, options.max_kv_len, Path(folder))
    text = json.dumps(found, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
        return 0
    with replaced(options.out) as fresh:
        fresh.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
