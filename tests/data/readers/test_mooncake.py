from __future__ import annotations

from typing import Any

import pytest

from data.readers.mooncake import read
from tests.data.readers.logs import lines, reason, rows


def request(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]} | changes


def test_milliseconds_become_seconds_and_hash_ids_the_blocks_of_the_prompt() -> None:
    [row] = rows(read(lines(request())))
    assert row["t_s"] == 27.482
    assert row["body"]["max_tokens"] == 52
    assert row["shape"] == {"prompt_tokens": 1300, "blocks": [46, 47, 2353], "block_tokens": 512}


def test_every_request_has_an_id_of_its_own() -> None:
    assert len({row["custom_id"] for row in rows(read(lines(request(), request(), request())))}) == 3


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (request(hash_ids=[46, 47]), "2 blocks, 1300 tokens are 3 of 512"),
        (request(output_length=0), "output_length 0 must be 1 or more"),
        (request(input_length="1300"), "must be numbers"),
        (request(input_length=True), "must be numbers"),
        (request(hash_ids=[1, 2, "x"]), "must be numbers"),
        (request(timestamp=None), "must be numbers"),
        ({"timestamp": 1, "input_length": 5}, "output_length: this key is missing"),
        ("[1]", "a JSON object is needed"),
        ('{"timestamp": 1,', "Invalid JSON"),
    ],
)
def test_a_line_that_is_no_request_says_why(line: object, why: str) -> None:
    assert why in reason(read(lines(line)))
