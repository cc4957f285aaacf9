"""What changed between two nested documents, one line a leaf: `torch: 2.12.0 -> 2.13.0`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Absent(Enum):
    """What stands for a key that only the other side has: null is a value."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True)
class Change:
    """A leaf that differs: its dotted path and both values; ABSENT where only the other side has it."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {short(self.old)} -> {short(self.new)}"


def changes(old: Any, new: Any, path: str = "") -> list[Change]:
    """Every leaf that differs, sorted by path."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[Change] = []
        for key in sorted({*old, *new}):
            found += changes(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}".lstrip("."))
        return found
    # As the text that is hashed: Python finds 1 equal to true.
    return [] if _text(old) == _text(new) else [Change(path, old, new)]


def difference(old: Any, new: Any) -> list[str]:
    """One line for every leaf that differs; a key that only one side has is `absent` on the other."""
    return [str(change) for change in changes(old, new)]


def short(value: Any) -> str:
    """A value as a person reads it in a line."""
    return value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    return value.value if isinstance(value, Absent) else json.dumps(value, sort_keys=True)
