"""Documents that people write, as their models: whatever is wrong with one is a UserError of one line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from attention.errors import UserError, nearest, shown
from attention.yaml_file import line_of

_Kind = TypeVar("_Kind", bound=BaseModel)


def validated(kind: type[_Kind], document: Any, where: object, known: Iterable[str] = ()) -> _Kind:
    """The document as its model. UserError: `where` (the file), the key and the problem, as `problem` says it, and the
    line where the file is YAML."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        is_yaml = isinstance(where, Path) and where.suffix in (".yaml", ".yml")
        line = line_of(where, _first(error)["loc"]) if isinstance(where, Path) and is_yaml else None
        raise UserError(f"{where}: {problem(error, known)}" + (f" (line {line})" if line else "")) from error


def _first(error: ValidationError) -> Any:
    """An unknown key goes first: a mistyped key is also a missing one."""
    found = error.errors(include_url=False)
    return next((e for e in found if e["type"] == "extra_forbidden"), found[0])


def problem(error: ValidationError, known: Iterable[str] = ()) -> str:
    """First finding of a validation as `key: problem`, with near names among `known` for an unknown key."""
    first = _first(error)
    key = ".".join(str(part) or "''" for part in first["loc"])
    where = f"{key}: " if key else ""
    if first["type"] == "extra_forbidden":
        names = tuple(known)
        return f"{where}unknown key" + (f"; {nearest(str(first['loc'][-1]), names)}" if names else "")
    if first["type"] == "missing":
        return f"{where}this key is missing"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{where}{text}"  # of keys together, which the text names
    return f"{where}{text} (got {shown(first['input'])})"
