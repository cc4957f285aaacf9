"""First calls of fresh processes, with caches that are empty and then are not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from attention.cases import AttentionCase
from attention.first_call import CACHES, caches_in
from tasks.first_calls import cold_and_warm, one_a_phase, told

SHAPE = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16, "dtype": "float32"}
PREFILL, LONGER, DECODE = (
    AttentionCase(phase=phase, batch=batch, **SHAPE)  # type: ignore[arg-type]
    for phase, batch in (("prefill", "q40"), ("prefill", "q80"), ("decode", "2q1s40"))
)


def test_a_cold_and_a_warm_process_call_the_first_case_of_each_phase() -> None:
    captured = DECODE.model_copy(update={"execution": "cuda_graph"})
    cases = one_a_phase([captured, PREFILL, LONGER, DECODE])
    assert cases == [PREFILL, DECODE]
    rows = cold_and_warm("torch_sdpa:flash", cases, "cpu", sys.executable)
    assert [(row["backend"], row["cache"], row["outcome"]) for row in rows] == [
        ("torch_sdpa:flash", "cold", "measured"),
        ("torch_sdpa:flash", "warm", "measured"),
    ]
    assert all(row["import_s"] > row["first_call_s"] > 0 for row in rows)
    assert told(rows).startswith("cold 0.")


def test_a_backend_that_is_refused_or_dies_or_hangs_is_a_row(tmp_path: Path) -> None:
    def process(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    dead = cold_and_warm("any", [PREFILL], "cpu", process("echo bad >&2; kill -9 $$"))
    assert [(row["outcome"], row["error"]) for row in dead] == [("crashed", "signal 9: bad")] * 2
    began = time.monotonic()
    hung = cold_and_warm("any", [PREFILL], "cpu", process("sleep 31.7 & sleep 31.7"), deadline=began + 0.3)
    assert [row["error"] for row in hung] == ["no end after 0.3 s", "the time was over before it"]
    assert told(hung) == "cold timed_out, warm timed_out"
    assert time.monotonic() - began < 10, "a child that holds its output is not waited for"
    assert subprocess.run(["pgrep", "-f", "^sleep 31.7"], check=False).returncode == 1, "nor left behind"


def test_every_cache_lies_in_the_folder(tmp_path: Path) -> None:
    assert set(caches_in(tmp_path)) == set(CACHES)
    assert all(Path(folder).parent == tmp_path for folder in caches_in(tmp_path).values())
