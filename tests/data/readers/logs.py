"""Lines of made logs, shaped as the real ones are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded


def lines(*content: Any) -> list[Line]:
    texts = [one if isinstance(one, bytes | str) else json.dumps(one) for one in content]
    return [(number, text.encode() if isinstance(text, str) else text) for number, text in enumerate(texts, start=1)]


def write(path: Path, *content: Any) -> Path:
    path.write_bytes(b"\n".join(text for _, text in lines(*content)) + b"\n")
    return path


def rows(found: Iterable[Found]) -> list[dict[str, Any]]:
    """The rows of requests; a rejected line fails the test that did not expect it."""
    result = []
    for one in found:
        assert isinstance(one, Recorded), one
        result.append(dict(one.row))
    return result


def reason(found: Iterable[Found]) -> str:
    [one] = found
    assert isinstance(one, Rejected), one
    return one.reason
