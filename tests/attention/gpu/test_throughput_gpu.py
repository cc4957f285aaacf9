"""Throughput of the tensor replay on this GPU: 1,360 cases of 32 query and 8 KV heads, up to 8,192 keys, twice.

python -m pytest -q -s -m gpu tests/attention/gpu/test_throughput_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention.bench_tensor_replay import measure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_500_cases_a_minute_keep_the_gpu_busy_and_a_second_run_needs_no_oracle(tmp_path: Path) -> None:
    found = measure("cuda", ("triton:paged", "triton:paged"), 10, 8192, tmp_path)
    print(f"\n{found}")
    first, second = found["first"], found["second"]
    assert (second["computed"], second["oracle_share"]) == (0, 0)
    assert min(first["cases_per_minute"], second["cases_per_minute"]) >= 500
    assert first["oracle_share"] <= 0.25
    assert min(first["utilisation"], second["utilisation"]) >= 0.8
