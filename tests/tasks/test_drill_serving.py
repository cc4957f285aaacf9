"""Faults of a serving process, as the drill sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attention.faults import BACKEND_RAISES
from tasks.drill_serving import CHECK, FIRST, SECOND, SOUND_CHECK, WANTED, Seen, judged, observe

RAISED = Seen(
    ((200, SECOND), (503, SECOND)),
    frozenset({"ready", "backend_raised", "backend_failed", "fallback_refused"}),
    {"LAUNCH_FAILED": 1.0},
)


def test_a_fault_is_caught_when_all_that_it_must_show_is_there() -> None:
    assert judged(BACKEND_RAISES, RAISED) == (CHECK,)
    for spoilt in (
        replace(RAISED, answers=((500, SECOND), (503, SECOND))),
        replace(RAISED, answers=((200, FIRST), (503, SECOND))),
        replace(RAISED, answers=((200, SECOND), (200, SECOND))),
        replace(RAISED, events=RAISED.events - {"backend_failed"}),
        replace(RAISED, counted={"NUMERIC_DRIFT": 1.0}),
    ):
        assert judged(BACKEND_RAISES, spoilt) == (), RAISED.missing(WANTED[BACKEND_RAISES])


def test_a_sound_instance_answers_on_its_own_backend_and_counts_nothing() -> None:
    sound = Seen(((200, FIRST), (200, FIRST)), frozenset({"ready"}))
    assert judged(None, sound) == ()
    assert judged(None, replace(sound, answers=((200, FIRST),))) == (SOUND_CHECK,)
    assert judged(None, RAISED) == (SOUND_CHECK,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WANTED, None])
def test_every_fault_shows_what_it_must(kind: str | None, tmp_path: Path) -> None:
    seen = observe("smollm2-135m-instruct", kind, tmp_path)
    assert judged(kind, seen) == ((CHECK,) if kind else ()), seen
