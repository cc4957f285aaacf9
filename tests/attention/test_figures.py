"""Figures: ratios to the dtype's own error that read the same at every shape, and never hide a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase
from attention.replay.figures import compare, half_ulp, row_name
from attention.replay.problems import spec_of


def truth_of(dtype: str = "bfloat16", kv_len: int = 128) -> Truth:
    case = AttentionCase(
        phase="decode", batch=f"q1s{kv_len}", heads_q=4, heads_kv=4, head_dim_qk=32, head_dim_vo=32, dtype=dtype
    )
    spec = spec_of(case)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, 4, 32, generator=generator).to(spec.dtype) for n in (1, kv_len, kv_len))
    return attend(q, k, v, spec)


def test_an_output_that_rounds_as_its_class_must_reads_about_one() -> None:
    for kv_len in (16, 128, 2048):
        truth = truth_of(kv_len=kv_len)
        figures = compare(truth.rounded_QHD.bfloat16(), truth.lse_QH.float(), truth, torch.bfloat16)
        assert figures.finite_mask_equal
        assert 0.3 < figures.r_rms <= 1.0
        assert figures.r_row <= 1.0
        assert figures.r_max <= 1.0
        assert figures.lse_max_abs is not None
        assert figures.lse_max_abs < 1e-5


def test_the_exact_output_has_no_error() -> None:
    truth = truth_of()
    figures = compare(truth.out_QHD, None, truth, torch.bfloat16)
    assert figures.max_abs == figures.mean_abs == figures.rel_l2 == figures.r_rms == 0
    assert figures.cosine == pytest.approx(1.0)
    assert figures.lse_max_abs is None


def test_a_single_nan_takes_every_figure_with_it_and_names_its_row() -> None:
    truth = truth_of()
    out = truth.out_QHD.clone()
    out[0, 2, 5] = math.nan
    figures = compare(out, truth.lse_QH.float(), truth, torch.bfloat16)
    assert not figures.finite_mask_equal
    assert figures.worst_row_index == 2
    assert (figures.num_finite_differ, figures.first_finite_differ) == (
        1,
        f"member 0 token 0 head 2 dim 5: nan, exact {float(truth.out_QHD[0, 2, 5]):.6g}",
    )
    figured = {name: value for name, value in figures.row().items() if isinstance(value, float)}
    assert len(figured) == 12
    assert all(math.isnan(value) for value in figured.values()), "the median error too, which one NaN does not move"
    assert figures.lse_max_abs is None


def test_one_wrong_row_shows_in_the_row_ratio() -> None:
    truth = truth_of()
    out = truth.rounded_QHD.clone()
    out[0, 3] = truth.out_QHD[0, 3] * 1.1
    figures = compare(out, None, truth, torch.bfloat16)
    assert figures.worst_row_index == 3
    assert figures.r_row > 10


def test_rounding_toward_zero_shows_as_a_bias() -> None:
    truth = truth_of()
    shrunk = truth.out_QHD.abs() * 0.99  # all positive truth, all errors of one sign
    positive = Truth(truth.out_QHD.abs(), truth.lse_QH, truth.rounded_QHD.abs())
    assert compare(shrunk, None, positive, torch.bfloat16).bias_z < -6


def without_keys() -> Truth:
    """A truth whose head 1 sees no key."""
    truth = truth_of()
    empty = Truth(truth.out_QHD.clone(), truth.lse_QH.clone(), truth.rounded_QHD.clone())
    empty.out_QHD[0, 1] = empty.rounded_QHD[0, 1] = 0
    empty.lse_QH[0, 1] = -math.inf
    return empty


def test_an_empty_row_costs_nothing_when_it_is_zero_and_its_lse_minus_infinity() -> None:
    empty = without_keys()
    figures = compare(empty.rounded_QHD, empty.lse_QH.float(), empty, torch.bfloat16)
    assert figures.r_row <= 1.0
    assert figures.lse_max_abs is not None
    assert figures.lse_max_abs < 1e-5


@pytest.mark.parametrize("wrong", [7.0, 0.0, -5e4, math.inf, math.nan])
def test_any_other_lse_of_an_empty_row_is_no_small_error(wrong: float) -> None:
    empty = without_keys()
    lse = empty.lse_QH.float().clone()
    lse[0, 1] = wrong
    found = compare(empty.rounded_QHD, lse, empty, torch.bfloat16).lse_max_abs
    assert found is not None
    assert not math.isfinite(found)


def test_an_infinite_lse_where_the_oracle_is_finite_is_no_small_error() -> None:
    truth = truth_of()
    lse = truth.lse_QH.float().clone()
    lse[0, 0] = math.inf
    assert compare(truth.out_QHD, lse, truth, torch.bfloat16).lse_max_abs == math.inf
    lse[0, 0] = math.nan
    found = compare(truth.out_QHD, lse, truth, torch.bfloat16).lse_max_abs
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_an_ulp_is_half_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 3.0, 0.0078125, 100.0], dtype=dtype)
    above = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    distance = above.double() - values.double()
    assert torch.equal(half_ulp(values.double(), dtype), distance / 2)


def test_a_finite_number_where_the_truth_has_none_is_named_too() -> None:
    truth = truth_of()
    hollow = Truth(truth.out_QHD.clone(), truth.lse_QH, truth.rounded_QHD)
    hollow.out_QHD[0, 1, 3:] = math.inf
    figures = compare(truth.out_QHD, None, hollow, torch.bfloat16)
    assert (figures.finite_mask_equal, figures.num_finite_differ, figures.worst_row_index) == (False, 29, 1)
    assert figures.first_finite_differ is not None
    assert figures.first_finite_differ.startswith("member 0 token 0 head 1 dim 3: ")
    assert figures.first_finite_differ.endswith("exact inf")


def test_ulp_quantiles_count_in_the_spacing_of_the_output_at_the_exact_value() -> None:
    truth = truth_of()
    rounded = compare(truth.out_QHD.bfloat16(), None, truth, torch.bfloat16)
    assert 0 < rounded.ulp_p50 < rounded.ulp_p99 <= rounded.ulp_max <= 0.5, "round to nearest is half an ulp at most"
    # One ulp above the nearest value: between 0.5 and 1.5 everywhere. One value of 128 far off: behind the p99.
    above = torch.nextafter(truth.out_QHD.bfloat16(), torch.tensor(math.inf, dtype=torch.bfloat16)).double()
    above[0, 0, :1] += 1000 * 2 * half_ulp(truth.out_QHD, torch.bfloat16)[0, 0, :1]
    figures = compare(above, None, truth, torch.bfloat16)
    assert 0.5 <= figures.ulp_p50 <= figures.ulp_p99 <= 1.5
    assert figures.ulp_max == pytest.approx(1000, abs=2)


def test_the_worst_row_is_named_by_member_token_and_head() -> None:
    assert row_name(0, 4, (2, 3)) == "member 0 token 0 head 0"
    assert row_name(2 * 4 + 1, 4, (2, 3)) == "member 1 token 0 head 1"
    assert row_name(9, 2, (1, 0, 5)) == "member 2 token 3 head 1", "a member without a query has no row"
    with pytest.raises(ValueError, match="behind the last of 5 tokens"):
        row_name(20, 4, (2, 3))
    truth = truth_of()
    stacked = Truth(*(torch.cat([t] * 5) for t in (truth.out_QHD, truth.lse_QH, truth.rounded_QHD)))
    out = stacked.rounded_QHD.clone()
    out[3, 2] *= 1.1
    assert compare(out, None, stacked, torch.bfloat16, (2, 3)).worst_row_at == "member 1 token 1 head 2"
