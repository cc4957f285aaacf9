"""Reads the YAML files that people write: whatever is wrong with one is a UserError that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from attention.errors import UserError


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, by the safe loader. Raises UserError: cannot be read, or not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bytes that are no text, a path with a NUL
        raise UserError(f"{path}: not YAML: {error}") from error
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise UserError(f"{path}: not YAML that can be used: nested too deeply") from error
    except Exception as error:  # `2024-99-99` or `!!int x` raises whatever the constructor of that type does
        raise UserError(f"{path}: not YAML: {str(error)[:400] or type(error).__name__}") from error
