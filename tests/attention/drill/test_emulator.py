"""The pseudo-kernel in float64 is the oracle; in a kernel's dtypes it is sound, and its variants differ in bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from attention.cases import REPLAY_INPUTS, DType, Layout
from attention.drill.emulator import EXACT, Variant, kernel_numbers
from attention.drill.kernel import run
from attention.drill.kinds import FEATURES
from attention.drill.plan import Draw
from attention.replay.figures import compare
from attention.replay.problems import make
from gates.thresholds import load_limits
from tests.attention.drill.plans import SMALL

SHAPE = "q20s90_q1s33"


def draw(dtype: DType = "bfloat16", layout: Layout = "paged_nhd", batch: str = SHAPE) -> Draw:
    return Draw(dtype, "extend", batch, layout, seed=3)


@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd", "ragged", "contiguous"])
@pytest.mark.parametrize("feature", FEATURES)
def test_in_float64_every_variant_is_the_oracle(feature: str, layout: Layout) -> None:
    problem = make(draw(layout=layout).case(feature, SMALL), "large_logit", 3)
    for variant in (Variant(), *SMALL.variants, Variant(block=7, splits=5, reverse=True)):
        found = run(problem, EXACT, seed=3, variant=variant)
        torch.testing.assert_close(found.out_THD, problem.truth.out_QHD, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.lse_TH, problem.truth.lse_QH, rtol=0, atol=1e-12)


def test_in_float64_rows_without_a_key_are_the_oracles_too() -> None:
    problem = make(draw(batch="q5s3_q3s0_q2s40").case("plain", SMALL), "normal", 3)
    for variant in SMALL.variants:
        found = run(problem, EXACT, seed=3, variant=variant)
        torch.testing.assert_close(found.out_THD, problem.truth.out_QHD, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.lse_TH, problem.truth.lse_QH, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_sound_variants_stay_within_the_limits(feature: str, dtype: DType) -> None:
    limits = load_limits("replay", "full").of_class(dtype)
    for inputs in REPLAY_INPUTS:
        problem = make(draw(dtype).case(feature, SMALL), inputs, 3)
        for variant in SMALL.variants:
            found = run(problem, kernel_numbers(problem.spec.dtype), seed=3, variant=variant)
            figures = compare(found.out_THD, found.lse_TH, problem.truth, problem.spec.dtype)
            assert found.out_THD.dtype == problem.spec.dtype
            assert figures.lse_max_abs is not None and figures.lse_max_abs <= limits.value("lse")
            for name in ("r_rms", "r_max", "r_row"):
                assert getattr(figures, name) <= limits.value(name), (inputs, variant, figures)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_variants_round_differently_and_calls_alike(dtype: DType) -> None:
    problem = make(draw(dtype).case("plain", SMALL), "normal", 3)
    numbers = kernel_numbers(problem.spec.dtype)
    outs = [run(problem, numbers, seed=3, variant=variant).out_THD for variant in SMALL.variants]
    assert all(not torch.equal(one, other) for one, other in pairwise(outs))
    again = run(problem, numbers, seed=3, variant=SMALL.variants[-1], call=1).out_THD
    assert torch.equal(outs[-1], again)


def test_a_kernel_rounds_its_weights_and_its_output() -> None:
    """Were P left in float32, the sound runs of a drill would prove little about bfloat16."""
    problem = make(draw().case("plain", SMALL), "normal", 3)

    def r_rms(out: torch.Tensor) -> float:
        return compare(out, None, problem.truth, torch.bfloat16).r_rms

    kernel = r_rms(run(problem, kernel_numbers(torch.bfloat16), seed=3).out_THD)
    output_alone = r_rms(problem.truth.out_QHD.to(torch.bfloat16))
    assert 1.05 * output_alone < kernel < 1.5
