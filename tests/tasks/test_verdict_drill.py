"""The drill of verdicts: known differences, and what may be said of them."""

from __future__ import annotations

from typing import Any

import pytest

from data.baseline_matrix import load_matrix
from tasks import verdict_drill
from tasks.verdict_drill import Verdict, drillable, exit_of, summary


def verdict(drilled: Any, said: str | None, margin: float = 0.01) -> Verdict:
    return Verdict(drilled, "b", "c", "l", "eager", said, 1.0, 0.9, 1.1, margin, 0.01, 0.005, 8, 2.0)


@pytest.mark.parametrize(
    ("drilled", "said", "margin", "wrong"),
    [
        ("equal", "SAME", 0.01, False),
        ("equal", "AMBG", 0.01, False),
        ("equal", "SLOW", 0.01, True),
        ("equal", "FAST", 0.01, True),
        ("2 % slower", "SAME", 0.01, True),
        ("2 % slower", "SAME", 0.03, False),
        ("2 % slower", "SLOW", 0.01, False),
        ("5 % slower", "FAST", 0.3, True),
        ("5 % slower", None, 0.01, False),
    ],
)
def test_a_verdict_is_wrong_when_it_says_what_is_not_so(drilled: Any, said: str, margin: float, wrong: bool) -> None:
    assert verdict(drilled, said, margin).wrong is wrong


def test_the_summary_counts_by_pass() -> None:
    found = summary([verdict("equal", "SAME"), verdict("equal", "SLOW"), verdict("5 % slower", None)])
    expected = {"cells": 2, "SAME": 1, "SLOW": 1, "wrong": 1, "margin": 0.01, "seconds": 4.0, "blocks": 16}
    assert found["equal"] == expected
    assert found["5 % slower"]["lost"] == 1
    assert "2 % slower" not in found


@pytest.mark.parametrize(
    ("equal", "slower", "margin", "code"),
    [
        (["SAME"] * 10, ["SLOW"] * 10, 0.01, 0),
        (["SAME"] * 9 + ["AMBG"], ["SLOW"] * 10, 0.01, 0),
        (["SAME"] * 8 + ["AMBG"] * 2, ["SLOW"] * 10, 0.01, 3),
        (["SAME"] * 10, ["SLOW"] * 9 + ["AMBG"], 0.01, 3),
        (["SAME"] * 10, ["SLOW"] * 10, 0.02, 3),
        (["SAME"] * 10, [*["SLOW"] * 9, None], 0.01, 3),
        ([*["SAME"] * 9, "FAST"], ["SLOW"] * 10, 0.01, 1),
        ([], [], 0.01, 3),
    ],
)
def test_a_machine_that_cannot_tell_is_no_success(
    equal: list[str], slower: list[str | None], margin: float, code: int
) -> None:
    found = [verdict("equal", said, margin) for said in equal]
    assert exit_of([*found, *(verdict("5 % slower", said, margin) for said in slower)]) == code


def test_cells_are_pairs_that_the_rules_let_run_in_one_order() -> None:
    found = drillable(load_matrix("cpu"), "chat", "cpu")
    assert found == drillable(load_matrix("cpu"), "chat", "cpu")
    assert {pair.backend for pair in found[:6]} == {"torch_sdpa:flash", "torch_sdpa:math"}
    assert {pair.case.phase for pair in found} == {"prefill", "decode"}


def test_a_slowdown_is_slow_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(verdict_drill, "PASSES", {"equal": 0.0, "5 % slower": 4.0})
    monkeypatch.setattr(verdict_drill, "MARGIN", 0.1)
    heard: list[Verdict] = []
    verdict_drill.drill(load_matrix("cpu"), "chat", "cpu", 1, work=tmp_path, budget_s=20.0, heard=heard.append)
    assert [one.drilled for one in heard] == ["equal", "5 % slower"]
    assert {(one.backend, one.case_id, one.lost) for one in heard} == {(heard[0].backend, heard[0].case_id, None)}
    assert heard[1].ratio is not None and heard[1].ratio > 1.5
