"""float8 KV: what rounding K and V costs and what the kernel adds are two figures, and only the kernel's gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.backends.base import AttentionSpec, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.job import Setup, TensorPlan
from attention.replay import tensor
from attention.replay.problems import make, members_of
from attention.replay.quantisation import quantisation_row, unquantised
from attention.schemas import SCHEMAS
from gates.thresholds import load_limits

SPEC = AttentionSpec(4, 2, 32, 32, torch.bfloat16, 32**-0.5)
SETUP = Setup(model=Path("unused"), policy=Path("unused"))
RESOLVED = dict.fromkeys(("prefill", "decode", "extend"), "oracle:fp64")
FP8 = TensorPlan(seeds=(0,), max_kv_len=144, inputs=("normal", "needle", "sink"), kv_dtypes=("float8_e4m3fn",))


def case(kv_dtype: str) -> AttentionCase:
    return AttentionCase(
        phase="decode",
        batch="2q1s200",
        heads_q=4,
        heads_kv=2,
        head_dim_qk=32,
        head_dim_vo=32,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
    )


class ScaleIgnored(OracleBackend):
    """Reads quantised V as it is stored."""

    def plan(self, batch: Any, spec: AttentionSpec, **options: Any) -> Planned:
        return super().plan(batch, replace(spec, v_scale=1.0), **options)


def rows(monkeypatch: pytest.MonkeyPatch, backend: OracleBackend) -> list[dict[str, Any]]:
    monkeypatch.setattr(tensor, "create", lambda name, device: backend)
    return list(tensor.rows(SETUP, FP8, [SPEC], ("bfloat16",), RESOLVED, 1.0))


def test_a_sound_kernel_over_float8_keeps_the_limits_of_its_class_while_quantisation_costs_far_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = load_limits("replay", "demo").of_class("bfloat16")
    found = rows(monkeypatch, OracleBackend())
    assert found
    assert not any("error" in row for row in found)
    assert {row["dtype_class"] for row in found} == {"bfloat16"}
    for row in found:
        assert all(row[name] <= limits.value(name) for name in ("r_rms", "r_max", "r_row"))
        assert row["quantisation_r_rms"] > 2 * limits.value("r_rms") > 0
        assert set(row) <= set(SCHEMAS["tensor_replay"].names)


def test_a_kernel_that_ignores_the_scale_shows_in_its_own_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, wrong = rows(monkeypatch, OracleBackend()), rows(monkeypatch, ScaleIgnored())
    for one, other in zip(sound, wrong, strict=True):
        assert other["r_rms"] > 20 * one["r_rms"]
        assert other["quantisation_r_rms"] == one["quantisation_r_rms"]


def test_both_parts_are_measured_over_the_same_draws() -> None:
    one = case("float8_e4m3fn")
    problem = make(one, "normal", 3)
    plain = members_of(one, unquantised(problem.spec), "normal", 3)
    stored = members_of(one, problem.spec, "normal", 3)
    for exact, rounded in zip(plain, stored, strict=True):
        assert torch.equal(exact.q_QHD, rounded.q_QHD)
        assert exact.k_LGD.dtype == torch.bfloat16
        error = (
            rounded.k_LGD.double() * problem.spec.k_scale - exact.k_LGD.double()
        ).norm() / exact.k_LGD.double().norm()
        assert 0.01 < float(error) < 0.05, "e4m3 has three bits of mantissa: 2.7 % in the mean"


def test_fewer_bits_cost_more_and_kv_of_the_querys_dtype_has_no_such_figure() -> None:
    cost = {
        kv_dtype: quantisation_row(case(kv_dtype), "normal", 3, make(case(kv_dtype), "normal", 3))
        for kv_dtype in ("auto", "float8_e4m3fn", "float8_e5m2")
    }
    assert cost["auto"] == {}
    for name in ("quantisation_r_rms", "quantisation_r_max", "quantisation_r_row"):
        assert 1 < cost["float8_e4m3fn"][name] < cost["float8_e5m2"][name]
