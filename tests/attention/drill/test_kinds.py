"""Every kind of fault changes the oracle where it must, and nothing where it cannot."""

from __future__ import annotations

import pytest
import torch

from attention.drill.kernel import SOUND
from attention.drill.kinds import FEATURES, KINDS, Kind
from attention.drill.plan import Draw
from attention.drill.rows import Figures
from attention.drill.run import effect_of
from attention.replay.problems import Problem, make
from gates import drill as gate
from tests.attention.drill.plans import SMALL

#: Kinds that only the LSE shows; the output is right.
ONLY_LSE = {"lse_base2"}


def problem_of(
    feature: str, batch: str = "q20s144_q5s90", layout: str = "paged_nhd", dtype: str = "bfloat16"
) -> Problem:
    draw = Draw(dtype, "extend", batch, layout, seed=5)  # type: ignore[arg-type]
    return make(draw.case(feature, SMALL), "normal", draw.seed)


def worst(effect: Figures) -> float:
    return max(effect.r_rms, effect.r_max, effect.r_row)


def kind(name: str) -> Kind:
    return next(one for one in KINDS if one.name == name)


def effect(name: str, **problem: str) -> tuple[Figures, float]:
    one = kind(name)
    return effect_of(problem_of(one.feature, **problem), one.fault, 5)


@pytest.mark.parametrize("one", KINDS, ids=lambda one: one.name)
def test_a_fault_changes_the_oracle_where_it_must(one: Kind) -> None:
    found, lse = effect(one.name)
    if one.name in ONLY_LSE:
        assert lse > 100 and worst(found) < 1e-6
    elif one.check == "finite" or one.name == "padding_leak":
        assert found.num_masks == 1
    else:
        assert found.num_masks == 0 and worst(found) > 1


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_sound_changes_nothing(feature: str) -> None:
    found, lse = effect_of(problem_of(feature), SOUND, 5)
    assert worst(found) < 1e-6 and lse < 1e-6 and found.num_masks == 0


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("causal_off_by_one", "q1s300_q1s65"),  # a decode has no key after its own
        ("top_left_causal", "q70_q33"),  # both diagonals are one where queries and keys are as many
        ("window_ignored", "q1s20_q1s9"),
        ("bf16_accumulation", "q1s1_q1s1"),  # one key: all that is summed is a bfloat16 value
    ],
)
def test_some_faults_change_nothing_on_some_shapes(name: str, batch: str) -> None:
    found, lse = effect(name, batch=batch)
    assert worst(found) <= 1 and lse <= 1


def test_a_leak_reads_what_the_layout_has_after_the_last_key() -> None:
    for layout in ("paged_nhd", "paged_hnd", "contiguous"):
        assert effect("padding_leak", layout=layout)[0].num_masks == 1, layout
    # The next member's first key is finite.
    ragged = effect("padding_leak", layout="ragged")[0]
    assert ragged.num_masks == 0 and worst(ragged) > 1
    # Full pages: the slot after them is in a page that nobody owns.
    assert effect("padding_leak", batch="q4s32_q4s48")[0].num_masks == 1


def test_a_fault_does_the_same_under_one_seed_and_reads_nothing_that_it_spoils() -> None:
    for one in KINDS:
        problem = problem_of(one.feature)
        before = [t.clone() for t in (problem.q_THD, problem.k, problem.v)]
        assert str(effect_of(problem, one.fault, 5)) == str(effect_of(problem, one.fault, 5)), one.name
        for old, new in zip(before, (problem.q_THD, problem.k, problem.v), strict=True):
            assert torch.equal(old.float().nan_to_num(-99), new.float().nan_to_num(-99)), one.name


def test_there_are_twenty_kinds_and_each_check_has_one_that_names_it() -> None:
    names = [one.name for one in KINDS]
    assert len(names) == len(set(names)) >= 20
    assert {f"tensor.{one.check}" for one in KINDS} == set(gate.checks())
