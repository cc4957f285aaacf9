"""Files that are written whole or not at all: what was there stays until the new one takes its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end; after an error it is gone, and `path` as it was.

    Its name is hidden and holds the whole of the other, so that it is nobody else's: `.rows.parquet.new`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        yield fresh
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def put_json(document: Any, path: Path | None) -> None:
    """A document into a file, whole; None is stdout."""
    text = json.dumps(document, indent=1) + "\n"
    if path is None:
        print(text, end="")
        return
    with replaced(path) as fresh:
        fresh.write_text(text)
