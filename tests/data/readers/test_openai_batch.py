from __future__ import annotations

from data.jsonl import Rejected
from data.readers.openai_batch import read
from data.readers.record import Recorded
from tests.data.readers.logs import lines

PLAIN = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}


def test_a_plain_line_is_completed_and_one_of_ours_is_taken_as_it_is() -> None:
    plain, ours = read(lines(PLAIN, PLAIN | {"category": "chat"}))
    assert plain == Recorded(1, {"t_s": 0.0, **PLAIN}, complete=False)
    assert ours == Recorded(2, PLAIN | {"category": "chat"}, complete=True)


def test_a_broken_line_is_rejected_with_its_number() -> None:
    [found] = read([(7, b'{"custom_id": ')])
    assert isinstance(found, Rejected)
    assert (found.line, "Invalid JSON" in found.reason) == (7, True)
