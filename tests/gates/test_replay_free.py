"""Free-running answers: figures that are recorded and never block."""

from __future__ import annotations

from typing import Any

import pytest

from data.lake import Lake
from gates.replay_free import common_prefix, free_checks
from gates.thresholds import load_limits
from gates.verdict import Check, Verdict


def checks(evidence: Any) -> dict[str, Check]:
    with Lake(evidence.lake) as tables:
        found = free_checks(tables, evidence.release, load_limits("replay", "demo"))
    return {check.check.removeprefix("business.free."): check for check in found}


def test_answers_that_part_are_described_and_never_block(evidence: Any) -> None:
    parted = {"candidate": [1, 2, 9, 9, 9, 9], "champion": [1, 2, 3, 4]}
    evidence.golden(lambda row: row | {"output_tokens": parted[row["side"]]})
    found = checks(evidence)
    assert {check.verdict for check in found.values()} == {Verdict.PASS}
    assert (found["divergence_rate"].observed, found["common_prefix"].observed) == (1.0, 0.5)
    assert found["length_change"].observed == 2
    assert found["divergence_rate"].num_evidence == 48


def test_equal_answers_share_all_tokens(evidence: Any) -> None:
    evidence.golden(lambda row: row | {"output_tokens": [1, 2, 3]})
    found = checks(evidence)
    assert (found["divergence_rate"].observed, found["common_prefix"].observed) == (0, 1)


def test_an_answer_with_an_error_is_no_pair_and_without_pairs_there_is_no_figure(evidence: Any) -> None:
    evidence.golden(lambda row: row | {"output_tokens": [1], "error": "timeout" if row["side"] == "champion" else None})
    assert checks(evidence) == {}


@pytest.mark.parametrize(("one", "other", "num"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1)])
def test_the_common_prefix_ends_at_the_first_token_that_differs(one: list[int], other: list[int], num: int) -> None:
    assert common_prefix(one, other) == num
