"""Readers of recorded traffic: which format a file has, by its content, and its requests one at a time.

    name = format_of(path)
    for found in read(path, name):  # Recorded or Rejected

A reader is a pure function from lines to requests; none holds more than the line it reads (vLLM's also the
prompts that wait for their parameters), so that a log may be larger than memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from attention.errors import UserError
from data.jsonl import lines
from data.readers import csv_trace, langfuse, litellm, mooncake, openai_batch, otel, vllm_log
from data.readers.record import Found, Line, Recorded

__all__ = ["BATCH", "FORMATS", "Found", "Recorded", "format_of", "read"]

BATCH = "openai-batch"
_LOOKED_AT = 2000  # lines: an engine writes its set-up before its first request
_CHUNK = 1 << 20  # characters read at a time from a file that is one JSON array
_LONGEST = 64 << 20  # characters of an item: what is longer is broken
_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class _Format:
    read: Callable[[Iterable[Line]], Iterator[Found]]
    of_object: Callable[[Mapping[str, Any]], bool] | None = None  # whether a line, a JSON object, is of this format
    of_line: Callable[[bytes], bool] | None = None  # the same of a line of text


FORMATS: Mapping[str, _Format] = {
    BATCH: _Format(openai_batch.read, of_object=openai_batch.recognises),
    "otel": _Format(otel.read, of_object=otel.recognises),
    "litellm": _Format(litellm.read, of_object=litellm.recognises),
    "langfuse": _Format(langfuse.read, of_object=langfuse.recognises),
    "vllm": _Format(vllm_log.read, of_line=vllm_log.recognises),
    "azure": _Format(partial(csv_trace.read, csv_trace.AZURE), of_line=partial(csv_trace.recognises, csv_trace.AZURE)),
    "burstgpt": _Format(
        partial(csv_trace.read, csv_trace.BURSTGPT), of_line=partial(csv_trace.recognises, csv_trace.BURSTGPT)
    ),
    "mooncake": _Format(mooncake.read, of_object=mooncake.recognises),
}


def format_of(path: Path) -> str:
    """Name of the file's format, by the first line that is of one. Raises UserError when none is.

    A file of JSON objects that no reader knows is taken for our own form, whose errors name line and field.
    """
    objects = False
    for _, line in islice(_lines(path), _LOOKED_AT):
        row = _object(line)
        for name, known in FORMATS.items():
            if row is not None and known.of_object is not None and known.of_object(row):
                return name
            if row is None and known.of_line is not None and known.of_line(line):
                return name
        objects |= line.lstrip()[:1] == b"{"
    if objects:
        return BATCH
    raise UserError(
        f"traffic {path}: no line is of a known format ({', '.join(FORMATS)}); name one as `traffic.format` of the "
        f"candidate, or convert the file"
    )


def read(path: Path, name: str) -> Iterator[Found]:
    """Requests and rejected lines of a file, in its order."""
    return FORMATS[name].read(_lines(path))


def _object(line: bytes) -> dict[str, Any] | None:
    if line.lstrip()[:1] != b"{":
        return None
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _lines(path: Path) -> Iterator[Line]:
    """Lines of the file, or the items of the JSON array that it is, each with its 1-based number."""
    found = lines(path, "traffic")
    first = next(found, None)
    if first is None:
        raise UserError(f"traffic {path}: no usable line, it is empty")
    if _ARRAY.match(first[1]):
        found.close()
        yield from _items(path)
    else:
        yield first
        yield from found


def _items(path: Path) -> Iterator[Line]:
    """Items of a JSON array as lines of JSON; what follows an item that is broken cannot be found and is one line."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        buffer, number = file.read(_CHUNK).lstrip().removeprefix("["), 0
        start = 0
        while True:
            between = _BETWEEN.match(buffer, start)
            start = between.end() if between else start
            if buffer.startswith("]", start):
                return
            try:
                item, start = decoder.raw_decode(buffer, start)
            except ValueError:
                more = file.read(max(_CHUNK, len(buffer) - start)) if len(buffer) - start < _LONGEST else ""
                if not more:
                    yield number + 1, buffer[start : start + _CHUNK].encode()
                    return
                buffer, start = buffer[start:] + more, 0
                continue
            number += 1
            yield number, json.dumps(item).encode()
