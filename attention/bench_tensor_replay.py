"""How fast the tensor layer of the replay is, and where its time goes; twice, so that the second run has no oracle.

    python -m attention.bench_tensor_replay --out tensor_replay.json                       # needs a GPU
    python -m attention.bench_tensor_replay --device cpu --seeds 1 --max-kv-len 20         # runs anywhere

As in a release both sides run at once, a process each, and share their truths: one begins with the last case, so that
each computes about half. A side is one layer of 32 query and 8 KV heads of 128 in bfloat16, every shape of the replay
up to --max-kv-len, four kinds of inputs. Before the two runs that count, one seed compiles and warms up.

`utilisation` is what the driver says, the share of the wall time in which a kernel ran (NVML, sampled ten times a
second; null without it). `shares` are of a side's wall time, the mean of both sides: spans of its work on the device,
which hold the other side's turns too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import AttentionSpec
from attention.cases import Phase
from attention.errors import UserError, exit_code
from attention.flags import check_count, check_out
from attention.job import Setup, TensorPlan
from attention.lifetime import die_with_parent, end_on_sigterm
from attention.progress import now_and_then
from attention.replaced import put_json
from attention.replay import tensor
from attention.replay.throughput import Meter
from attention.replay.truths import Truths, compute

SPEC = AttentionSpec(32, 8, 128, 128, torch.bfloat16, 128**-0.5)
INPUTS = ("normal", "needle", "large_logit", "sink")
_DEFAULTS = {"cuda": "triton:paged", "cpu": "torch_sdpa:flash"}
_PERIOD_S = 0.1


def measure(device: str, backends: tuple[str, str], seeds: int, max_kv_len: int, folder: Path) -> dict[str, Any]:
    """Figures of both runs; truths are kept in `folder`. UserError where a case raised."""
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_side(device, backend, max_kv_len, folder, backwards))
            for backend, backwards in zip(backends, (False, True), strict=True)
        ]
        _told("warm-up", _both(sides, (seeds,), device))
        first, second = (_told(name, _both(sides, tuple(range(seeds)), device)) for name in ("first run", "second run"))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"device": name, "torch": torch.__version__, "backends": backends, "first": first, "second": second}


def _told(what: str, found: dict[str, Any]) -> dict[str, Any]:
    print(f"{what}: {found['num_cases']} cases of both sides in {found['wall_s']:.1f} s", file=sys.stderr, flush=True)
    return found


def _both(sides: list[Connection], seeds: tuple[int, ...], device: str) -> dict[str, Any]:
    with _utilisation(device) as samples:
        started = time.perf_counter()
        for side in sides:
            side.send(seeds)
        found = [side.recv() for side in sides]
        wall_s = time.perf_counter() - started
    if errors := [one["error"] for one in found if "error" in one]:
        raise UserError(errors[0])
    num = sum(one["num_cases"] for one in found)
    parts = {part for one in found for part in one["shares"]}
    shares = {part: sum(one["shares"].get(part, 0.0) for one in found) / len(found) for part in sorted(parts)}
    return {
        "num_cases": num,
        "wall_s": wall_s,
        "cases_per_minute": 60 * num / wall_s,
        "utilisation": sum(samples) / len(samples) / 100 if samples else None,
        "oracle_share": shares["oracle"],
        "shares": shares,
        "computed": sum(one["computed"] for one in found),
        "read": sum(one["read"] for one in found),
    }


@contextmanager
def _side(device: str, backend: str, max_kv_len: int, folder: Path, backwards: bool) -> Iterator[Connection]:
    """A process that replays the seeds it is sent and answers with figures."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_replay, args=(there, device, backend, max_kv_len, folder, backwards), daemon=True)
    process.start()
    there.close()  # so that a side that dies is an end of file here
    try:
        yield here
    except (EOFError, ConnectionError):
        raise UserError("the process of a side died: killed, out of memory, or a kernel that crashed") from None
    finally:
        process.terminate()
        process.join()


def _replay(parent: Connection, device: str, backend: str, max_kv_len: int, folder: Path, backwards: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both sides too; the parent ends them
    die_with_parent()
    setup = Setup(model=Path("unused"), policy=Path("unused"), device=device)
    resolved: dict[Phase, str] = dict.fromkeys(("prefill", "decode", "extend"), backend)
    while True:
        plan = TensorPlan(seeds=parent.recv(), max_kv_len=max_kv_len, inputs=INPUTS)
        meter = Meter(device)
        truths = Truths(folder, meter.oracle(compute))
        sources = tensor.Sources(oracle=truths, meter=meter, backwards=backwards)
        progress = now_and_then(f"side {'B' if backwards else 'A'}, cases")
        rows = list(tensor.rows(setup, plan, [SPEC], ("bfloat16",), resolved, 1.0, progress, sources))
        errors = [row["error"] for row in rows if "error" in row]
        if errors:
            parent.send({"error": f"{backend}: {len(errors)} of {len(rows)} cases raised: {errors[0]}"})
        else:
            found = meter.summary(len(rows)).row()
            parent.send({**found, "computed": truths.num_computed, "read": truths.num_read})


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
    parser = argparse.ArgumentParser(
        prog="python -m attention.bench_tensor_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--backends", nargs=2, metavar=("A", "B"), help=f"of both sides (default: {_DEFAULTS})")
    parser.add_argument("--seeds", type=int, default=10, help="inputs of each case (default: %(default)s)")
    parser.add_argument("--max-kv-len", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default: stdout")
    options = parser.parse_args(argv)
    end_on_sigterm()
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.backends import chosen
    from attention.matrix import check_device

    check_device(options.device)
    check_count("--seeds", options.seeds)
    check_count("--max-kv-len", options.max_kv_len)
    check_out(options.out)
    default = _DEFAULTS[options.device.split(":")[0]]
    first, second = options.backends or (default, default)
    chosen(f"{first},{second}")  # both exist
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.device, (first, second), options.seeds, options.max_kv_len, Path(folder))
    put_json(found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
