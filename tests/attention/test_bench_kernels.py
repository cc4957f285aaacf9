"""The kernels' bench: a contender is checked before it is timed, and one that faults is a row."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import bench_contenders, bench_kernels
from attention.backends import triton_tune
from attention.backends.triton_paged import Tiles
from attention.bench_contenders import Problem, call_of, name_of, shapes, tiles_of
from attention.bench_kernels import Row, bench, write
from attention.errors import UserError
from attention.isolate import Channel, Outcome

ROOT = Path(__file__).parents[2]
SMALL = shapes(small=True)


@pytest.mark.parametrize("name", ["decode-page16", "prefill-ragged"])
@pytest.mark.parametrize("kernel", ["torch_sdpa:flash", "torch_sdpa:math"])
def test_a_contender_is_checked_against_the_oracle_in_its_own_layout(name: str, kernel: str) -> None:
    problem = Problem(SMALL[name], "cpu")
    out, _ = call_of(kernel, problem)()
    assert problem.r_rms(out) < 3
    assert problem.r_rms(out * 1.5) > 10
    assert problem.r_rms(out * float("nan")) == float("inf")


def test_pages_in_random_order_hold_the_same_numbers() -> None:
    problem = Problem(SMALL["decode-page16"], "cpu")
    batch, k, _ = problem.laid_out("paged_nhd")
    for member, table in enumerate(batch.block_tables):
        assert torch.equal(k[list(table)].flatten(0, 1), problem.k_BLGD[member])
    assert list(batch.block_tables[0]) != sorted(batch.block_tables[0])


def test_figures_divide_the_bytes_of_keys_and_values_or_the_products() -> None:
    found = shapes()
    assert set(found) == {"decode-page16", "decode-page64", "prefill-page16", "prefill-page64", "prefill-ragged"}
    assert found["decode-page16"].figure(1e-3) == pytest.approx(64 * 4096 * 8 * 2 * 128 * 2 / 1e9)
    assert found["prefill-ragged"].figure(1.0) == pytest.approx(4 * 128 * 32 * 8192 * 8193 / 2 / 1e12)


@pytest.mark.parametrize("tiles", [Tiles(16, 64, 4, 3), Tiles(128, 32, 8, 3, None, 128), Tiles(16, 64, 4, 3, 2)])
def test_tiles_are_named_and_read_back(tiles: Tiles) -> None:
    assert tiles_of(name_of(tiles).partition(" ")[2]) == tiles


def test_every_tile_to_tune_has_a_shape_that_triton_takes() -> None:
    for tiles in (*triton_tune.DECODE_TILES, *triton_tune.PREFILL_TILES):
        for size in (tiles.block_m, tiles.block_n, tiles.num_warps):
            assert size & (size - 1) == 0


def test_ratios_are_to_the_fastest_baseline_and_errors_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"triton:paged": 2.0, "read:triton": 1.0, "read:torch": 1.5}
    asked = []

    def in_workers(command: Any, task: dict[str, Any], names: list[str], **_: Any) -> list[Outcome]:
        asked.append((task["what"], list(names)))
        if task["what"] == "check":
            faulty = {"decode-page16|flash_attn:fa2": "the worker died (signal 11): illegal memory access"}
            return [Outcome(n, error=faulty.get(n)) for n in names]
        return [
            Outcome(n, {"seconds": seconds[n.split("|")[1]], "low_s": 1.0, "high_s": 3.0, "blocks": 5}) for n in names
        ]

    monkeypatch.setattr(bench_kernels, "in_workers", in_workers)
    rows = bench([(SMALL["decode-page16"], [*seconds, "flash_attn:fa2"])], device="cpu", jobs=1)
    assert [(row.contender, row.ratio) for row in rows] == [
        ("read:triton", 1.0),
        ("read:torch", 0.667),
        ("triton:paged", 0.5),
        ("flash_attn:fa2", None),
    ]
    assert rows[0].baseline == "read:triton"
    assert rows[-1].error == "the worker died (signal 11): illegal memory access"
    assert asked[-1] == ("time", [f"decode-page16|{name}" for name in seconds]), "what failed its check is not timed"


def test_what_serves_is_measured_first_and_rows_are_there_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    asked: list[str] = []

    def in_workers(command: Any, task: dict[str, Any], names: list[str], **given: Any) -> list[Outcome]:
        asked.extend(f"{task['what']} {name.split('|')[0]}" for name in names)
        said = {"seconds": 1.0, "low_s": 1.0, "high_s": 1.0, "blocks": 5} if task["what"] == "time" else {}
        found = [Outcome(name, dict(said)) for name in names]
        for one in found:
            given["heard"](one)
        return found

    monkeypatch.setattr(bench_kernels, "in_workers", in_workers)
    work = [(shape, ["triton:paged"]) for shape in SMALL.values()]
    rows = bench(work, device="cpu", jobs=1, heard=lambda rows: seen.append(len(rows)))
    assert asked[:4] == [f"{what} {name}" for what in ("check", "time") for name in bench_kernels.FIRST]
    assert seen[:2] == [1, 2]
    assert len(rows) == len(SMALL)


def test_what_a_call_reads_lives_until_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tuner kept a contender's CUDA graph and dropped its plan: replays read tiles and workspaces that the
    allocator had given to others, and one ended in an illegal memory access."""
    living: list[weakref.ref[torch.Tensor]] = []

    def call_of(name: str, problem: Problem) -> Any:
        workspace = torch.zeros(8)
        living.append(weakref.ref(workspace))
        return lambda: workspace

    def clock(call: Any) -> float:
        assert all(ref() is not None for ref in living)
        call()
        return 1.0

    monkeypatch.setattr(bench_contenders, "call_of", call_of)
    monkeypatch.setattr(bench_contenders, "_cpu_clock", clock)
    sink = io.StringIO()
    bench_contenders._time(Problem(SMALL["decode-page16"], "cpu"), ["a", "b", "c"], 3, Channel(sink))
    done = [json.loads(line).get("done") for line in sink.getvalue().splitlines()][-3:]
    assert done == ["decode-page16|a", "decode-page16|b", "decode-page16|c"]


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_rows_are_written_in_either_format(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    write([Row("decode-page16", "triton:paged", "TB/s", 3.5), Row("x", "y", "TB/s", error="no")], path)
    if ending == "json":
        rows = json.loads(path.read_text())["rows"]
    else:
        import pyarrow.parquet as pq

        rows = pq.read_table(path).to_pylist()
    assert [(row["figure"], row["error"]) for row in rows] == [(3.5, None), (None, "no")]
    assert [row.error for row in bench_kernels.read(path)] == [None, "no"]
    with pytest.raises(UserError, match=r"\.json or \.parquet"):
        write([], tmp_path / "rows.csv")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_our_kernel_and_the_reads_run_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    flags = ["--device", "cpu", "--small", "--only", "decode-page16", "--blocks", "1", "--jobs", "2", "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "attention.bench_kernels", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert {"triton:paged", "read:triton", "read:torch"} <= set(rows)
    assert rows["triton:paged"]["confirmed"] == "triton:paged"
    assert all(row["error"] is None and row["figure"] > 0 for row in rows.values())
