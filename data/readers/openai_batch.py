"""OpenAI batch input: one request a line, `custom_id`, `method`, `url`, `body`.

Source of the form: OpenAI's Batch API guide, and vLLM's `run_batch`, which reads the same. Ours has four
columns beside it (`t_s`, `session_id`, `category`, `language`); a line with one of them must have all. A line
with none has no time of arrival: all are taken to arrive at once, which scaling spreads evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, json_lines

_OURS = {"t_s", "session_id", "category", "language"}


def recognises(row: Mapping[str, Any]) -> bool:
    return "body" in row and ("custom_id" in row or "url" in row)


def read(lines: Iterable[Line]) -> Iterator[Found]:
    for found in json_lines(lines):
        if isinstance(found, Rejected):
            yield found
            continue
        number, row = found
        ours = bool(_OURS & row.keys())
        yield Recorded(number, row if ours else {"t_s": 0.0, **row}, complete=ours)
