"""What changed between two nested documents, one line a leaf: `torch: 2.12.0 -> 2.13.0`."""

from __future__ import annotations

import json
from typing import Any


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """One line for every leaf that differs; a key that only one side has is `absent` on the other."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            lines += difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return lines
    return [] if old == new else [f"{path}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    return "absent" if value is None else value if isinstance(value, str) else json.dumps(value)
