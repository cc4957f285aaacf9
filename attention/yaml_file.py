"""Reads the YAML and JSON files that people write: whatever is wrong with one is a UserError that names it."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def line_of(path: Path, keys: Sequence[str | int]) -> int | None:
    """The line, from 1, at which the value under these keys and places is named in a YAML file: of as many of them as
    are there. None for a file that cannot be read, or keys of which none is there."""
    try:
        node: Any = yaml.compose(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    line = None
    for key in keys:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((name, value) for name, value in node.value if name.value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and 0 <= key < len(node.value):
            found = (node.value[key], node.value[key])
        if found is not None:  # else a part that is no key, such as the branch of a union
            line, node = found[0].start_mark.line + 1, found[1]
    return line


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
