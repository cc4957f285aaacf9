"""The limit of a case, and figures that no machine reaches."""

from __future__ import annotations

import pytest

from attention.cases import AttentionCase
from attention.roofline import Ceilings, datasheet_of, limit_of, too_fast


def case(phase: str, batch: str) -> AttentionCase:
    return AttentionCase(
        phase=phase, batch=batch, heads_q=32, heads_kv=8, head_dim_qk=128, head_dim_vo=128, dtype="bfloat16"
    )


H200 = Ceilings(flops_per_s=989e12, bytes_per_s=4.8e12)


def test_a_long_prefill_is_limited_by_its_products_and_a_decode_by_its_keys() -> None:
    prefill, decode = limit_of(case("prefill", "q8k"), H200), limit_of(case("decode", "64q1s4k"), H200)
    # Two products of half a square of 8192 pairs, 32 heads of 128; 64 x 4096 keys and values of 8 heads in bfloat16.
    assert prefill.limited_by == "flops"
    assert prefill.seconds == pytest.approx(4 * 32 * 128 * (8192 * 8193 / 2) / 989e12)
    assert decode.limited_by == "bytes"
    assert decode.seconds == pytest.approx((2 * 64 * 4096 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2) / 4.8e12)


def test_a_datasheet_is_found_by_the_devices_name_and_dtype() -> None:
    assert datasheet_of("NVIDIA H200", "bfloat16") == H200
    assert datasheet_of("NVIDIA H200", "float8_e4m3fn") is None
    assert datasheet_of("cpu", "float32") is None


def test_what_is_faster_than_the_machine_was_not_measured() -> None:
    assert too_fast(1.02, 1.0) is None
    assert too_fast(0.96, None) is None
    assert "1.021 of the ceiling" in (too_fast(1.021, 0.9) or "")
    assert "1.001 of the datasheet" in (too_fast(1.0, 1.001) or "")
