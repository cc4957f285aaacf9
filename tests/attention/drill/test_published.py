"""The published rules, each on an output that it accepts and on one that it does not."""

from __future__ import annotations

import pytest
import torch

from attention.drill.kinds import FEATURES
from attention.drill.plan import Draw
from attention.drill.published import RULES, eager, exceeded
from attention.replay.figures import compare
from attention.replay.problems import Problem, make
from tests.attention.drill.plans import SMALL


def problem_of(feature: str = "plain", dtype: str = "bfloat16", batch: str = "q20s144_q5s90") -> Problem:
    draw = Draw(dtype, "extend", batch, "paged_nhd", seed=6)  # type: ignore[arg-type]
    return make(draw.case(feature, SMALL), "normal", draw.seed)


def rejects(problem: Problem, out: torch.Tensor) -> set[str]:
    return {rule for rule, no in exceeded(out, eager(problem), problem).items() if no}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_eager_attention_is_right_to_its_dtype_and_passes_the_rules_that_are_made_of_it(
    feature: str, dtype: str
) -> None:
    problem = problem_of(feature, dtype)
    out = eager(problem)
    assert out.dtype == problem.spec.dtype
    assert compare(out, None, problem.truth, problem.spec.dtype).rel_l2 < (1e-5 if dtype == "float32" else 2e-2)
    assert not rejects(problem, out) & {"fa2", "fa3", "flex"}


def test_every_rule_rejects_zeros_and_nan() -> None:
    problem = problem_of()
    out = eager(problem)
    for broken in (torch.zeros_like(out), out * torch.nan):
        assert rejects(problem, broken) == set(RULES)


def test_a_rounded_truth_passes_every_rule() -> None:
    problem = problem_of()
    assert rejects(problem, problem.truth.out_QHD.to(torch.bfloat16)) == set()


def test_a_mean_misses_one_element_and_the_others_do_not() -> None:
    problem = problem_of()
    out = problem.truth.out_QHD.to(torch.bfloat16)
    out[3, 2, 1] += 0.25
    assert rejects(problem, out) == set(RULES) - {"flex"}


def test_a_tolerance_for_elements_of_size_one_misses_what_is_small() -> None:
    """At 4k keys outputs are about 0.015, so an absolute 1e-2 is two thirds of one."""
    problem = problem_of(batch="q1s4k_q1s4k")
    out = (problem.truth.out_QHD * 1.1).to(torch.bfloat16)
    assert {"fa2", "flex"} <= rejects(problem, out)
    assert not {"allclose_1e-2", "flashinfer_bench"} & rejects(problem, out)
