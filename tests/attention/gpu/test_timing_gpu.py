"""What a baseline's measurement promises of a GPU: cold caches, no host time, proven kernels, graphs that replay.

python -m pytest -q -m gpu tests/attention/gpu/test_timing_gpu.py
"""

from __future__ import annotations

from statistics import median

import pytest
import torch

from attention import ceilings
from attention.cases import AttentionCase
from attention.contender import prepare
from attention.roofline import Ceilings, limit_of
from attention.timing import CudaClock, Rotation

pytestmark = pytest.mark.gpu

SHAPE = {"heads_q": 32, "heads_kv": 8, "head_dim_qk": 128, "head_dim_vo": 128, "dtype": "bfloat16"}


def decode(batch: str, execution: str = "eager") -> AttentionCase:
    return AttentionCase(phase="decode", batch=batch, execution=execution, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def clock() -> CudaClock:
    return CudaClock("cuda")


@pytest.mark.parametrize("execution", ["eager", "cuda_graph"])
@pytest.mark.parametrize("batch", ["q1s512", "8q1s2k", "64q1s4k"])
def test_a_call_finds_a_cold_cache_and_stays_below_the_limit(clock: CudaClock, batch: str, execution: str) -> None:
    case = decode(batch, execution)
    with torch.inference_mode():
        ready = prepare("triton:paged", case, "cuda", clock, replicas=8)
        assert ready.confirmed == "triton:paged"
        assert ready.cold_ratio is None or ready.cold_ratio > 0.95
        seconds = median(clock.times(ready.rotation, min_s=0.01))
        read = ceilings.read(case, "cuda", 4 * clock.l2_bytes)
        rate = read.work / median(clock.times(Rotation([read.call]), min_s=0.01))
    ratio = limit_of(case, Ceilings(flops_per_s=1e18, bytes_per_s=rate)).seconds / seconds
    assert ratio < 1.02
    if batch == "64q1s4k":
        assert ratio > 0.85


def test_a_warm_cache_would_show(clock: CudaClock) -> None:
    """The same call on one buffer is faster than on rotating ones: what the proof looks for is there to be found."""
    with torch.inference_mode():
        ready = prepare("triton:paged", decode("8q1s2k"), "cuda", clock, replicas=8)
        cold = median(clock.times(ready.rotation, min_s=0.01))
        warm = median(clock.times(Rotation(list(ready.rotation.calls)[:1]), min_s=0.01))
    assert warm < 0.9 * cold


def test_the_hosts_time_is_not_in_it(clock: CudaClock) -> None:
    """A call that takes the host a millisecond and the device microseconds."""
    one = torch.zeros(1, device="cuda")

    def slow_to_queue() -> None:
        for _ in range(50):
            torch.empty(1)
        one.add_(1)

    assert median(clock.times(Rotation([slow_to_queue]), min_s=0.001)) < 2e-5


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_slowed_call_takes_its_share_longer(clock: CudaClock, share: float) -> None:
    with torch.inference_mode():
        ready = prepare("triton:paged", decode("64q1s4k"), "cuda", clock)
        call = ready.rotation.calls[0]
        slower = clock.slowed(call, share)
        ratio = median(clock.block(Rotation([slower]), 32)) / median(clock.block(Rotation([call]), 32))
    assert ratio == pytest.approx(1 + share, abs=0.01)
