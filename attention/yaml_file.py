"""Reads the YAML and JSON files that people write: whatever is wrong with one is a UserError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from attention.errors import UserError


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader; a key that stands twice in a mapping, of which YAML would keep the last, is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, by the safe loader. Raises UserError: cannot be read, or not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bytes that are no text, a path with a NUL
        raise UserError(f"{path}: not YAML: {error}") from error
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 - a safe loader
    except RecursionError as error:
        raise UserError(f"{path}: not YAML that can be used: nested too deeply") from error
    except Exception as error:  # `2024-99-99` or `!!int x` raises whatever the constructor of that type does
        raise UserError(f"{path}: not YAML: {str(error)[:400] or type(error).__name__}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file, in any of its encodings. Raises UserError: cannot be read, or not JSON."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not JSON that can be used: nested too deeply") from error
    except ValueError as error:  # bytes that are no text, a number of more than 4300 digits, a path with a NUL
        raise UserError(f"{path}: not JSON: {str(error)[:400]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands twice")
    return found
