"""JSON Lines that people write: a bad line is counted with its number and why, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from attention.errors import UserError

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class Rejected:
    """A line that was left out: its 1-based number and why."""

    line: int
    reason: str


def read_jsonl(path: Path, model: type[T], key: Callable[[T], str], what: str) -> tuple[list[T], list[Rejected]]:
    """Items of the file in its order, and the lines left out; an item whose `key` was used before is one.

    Raises UserError, which opens with `what`, when the file cannot be read or holds no usable line.
    """
    items: dict[str, T] = {}
    rejected: list[Rejected] = []
    for number, line in _lines(path, what):
        try:
            item = model.model_validate_json(line)
        except ValidationError as error:
            rejected.append(Rejected(number, first_error(error)))
            continue
        if key(item) in items:
            rejected.append(Rejected(number, f"{key(item)!r} was used by an earlier line"))
            continue
        items[key(item)] = item
    if not items:
        why = f"; line {rejected[0].line}: {rejected[0].reason}" if rejected else ", it is empty"
        raise UserError(f"{what} {path}: no usable line{why}")
    return list(items.values()), rejected


def _lines(path: Path, what: str) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, with their 1-based numbers."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}; name a JSON Lines file") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def first_error(error: ValidationError) -> str:
    """`body.max_tokens: Field required`: the first thing that is wrong, on one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    return f"{where}: {message}" if where else message
