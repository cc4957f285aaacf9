"""Mooncake trace (FAST'25): JSON Lines of `timestamp` (milliseconds since its start), `input_length` and
`output_length` (tokens), `hash_ids` (one id for each 512 tokens of the prompt, equal where prefixes are equal).

Source of the form: README of FAST25-release in kvcache-ai/Mooncake. Conversations are not named; what they
share is their prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, json_lines, lengths_only

BLOCK_TOKENS = 512


def recognises(row: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "output_length"} <= row.keys()


def read(lines: Iterable[Line]) -> Iterator[Found]:
    for found in json_lines(lines):
        yield found if isinstance(found, Rejected) else _request(*found)


def _request(number: int, row: Mapping[str, Any]) -> Found:
    try:
        arrival_ms, prompt, output = row["timestamp"], row["input_length"], row["output_length"]
        blocks = row.get("hash_ids") or []
        wanted = -(-prompt // BLOCK_TOKENS)
        if not all(type(number) is int for number in (prompt, output, *blocks)):
            raise TypeError
        t_s = arrival_ms / 1000
    except KeyError as error:
        return Rejected(number, f"{error.args[0]}: this key is missing")
    except TypeError:
        return Rejected(number, "timestamp, input_length, output_length and hash_ids must be numbers")
    if prompt < 1 or output < 1:
        return Rejected(number, f"input_length {prompt} and output_length {output} must be 1 or more")
    if blocks and len(blocks) != wanted:
        return Rejected(number, f"hash_ids: {len(blocks)} blocks, {prompt} tokens are {wanted} of {BLOCK_TOKENS}")
    lengths = lengths_only("mooncake", prompt, output, blocks=blocks, block_tokens=BLOCK_TOKENS)
    return Recorded(number, {"custom_id": f"mooncake-{number}", "t_s": t_s, **lengths}, prompt)
