"""JSON Lines that people write: a bad line is counted with its number and why, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator
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
    for number, line in lines(path, what):
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


def lines(path: Path, what: str) -> Generator[tuple[int, bytes], None, None]:
    """Lines that hold something, with their 1-based numbers, one at a time: the file may be larger than memory.

    Raises UserError, which opens with `what`, when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if content.strip():
                    yield number, content.rstrip(b"\n")
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}; name a file that can be read") from error


def first_error(error: ValidationError) -> str:
    """`body.max_tokens: Field required`: the first thing that is wrong, on one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    return f"{where}: {message}" if where else message
