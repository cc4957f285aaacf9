"""Traces of lengths as CSV: Azure LLM inference and BurstGPT. Columns are found by their names in the header.

Azure (Azure/AzurePublicDataset, 2023 and 2024): `TIMESTAMP` (date and time, UTC, to 100 ns), `ContextTokens`,
`GeneratedTokens`. BurstGPT (HPMLL/BurstGPT): `Timestamp` (seconds), `Request tokens`, `Response tokens` and,
from its version 2 on, `Session ID`; a response of 0 tokens is a request that failed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, lengths_only, seconds


@dataclass(frozen=True)
class Columns:
    """A trace by the names of its columns, in lower case."""

    name: str
    arrival: str
    prompt: str
    output: str
    arrival_s: Callable[[str], float]
    session: str | None = None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


AZURE = Columns("azure", "timestamp", "contexttokens", "generatedtokens", seconds)
BURSTGPT = Columns("burstgpt", "timestamp", "request tokens", "response tokens", _finite, session="session id")


def header_of(line: bytes) -> list[str]:
    """Names of the columns, in lower case."""
    return [name.strip().lower() for name in _fields(line)]


def recognises(columns: Columns, line: bytes) -> bool:
    return {columns.arrival, columns.prompt, columns.output} <= set(header_of(line))


def read(columns: Columns, lines: Iterable[Line]) -> Iterator[Found]:
    header: list[str] | None = None
    for number, line in lines:
        if header is None:
            header = header_of(line)
            missing = {columns.arrival, columns.prompt, columns.output} - set(header)
            if missing:
                yield Rejected(number, f"the header lacks {', '.join(sorted(missing))}")
                return
            continue
        fields = _fields(line)
        if len(fields) != len(header):
            yield Rejected(number, f"{len(fields)} fields, the header has {len(header)}")
            continue
        yield _request(columns, number, dict(zip(header, fields, strict=True)))


def _fields(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r")]), [])


def _request(columns: Columns, number: int, row: dict[str, str]) -> Found:
    try:
        t_s = columns.arrival_s(row[columns.arrival])
        prompt, output = int(row[columns.prompt]), int(row[columns.output])
    except ValueError:
        wanted = f"{columns.arrival}, {columns.prompt} and {columns.output}"
        return Rejected(number, f"{wanted} must be a time and two whole numbers")
    if prompt < 1 or output < 1:
        return Rejected(number, f"{columns.prompt} {prompt} and {columns.output} {output} must be 1 or more")
    session = row.get(columns.session) if columns.session else None
    named = {"session_id": session} if session else {}
    lengths = lengths_only(columns.name, prompt, output)
    return Recorded(number, {"custom_id": f"{columns.name}-{number}", "t_s": t_s, **named, **lengths}, prompt)
