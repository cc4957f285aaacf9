"""A model folder's config.json, revision and serving dtype: what can be known without torch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from attention.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is float32 on the CPU, where few processors multiply bfloat16 natively, else bfloat16."""
    if dtype == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: known are auto, {', '.join(DTYPES)}")
    return dtype


def read_config(model_path: Path) -> dict[str, Any]:
    """config.json of a model folder. UserError when it is no transformers causal LM folder."""
    path = model_path / "config.json"
    if not path.is_file():
        raise UserError(f"model {model_path}: no config.json there; name a folder with a transformers causal LM")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}): fetch the model again") from error
    return config


def model_revision(model_path: Path) -> str:
    """Hash of the model's files: name and size of all, content of the small ones and of each shard's ends.

    Milliseconds, however large the model is. UserError when a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(p for p in model_path.iterdir() if p.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\n".encode())
            with path.open("rb") as file:
                if size <= 1 << 24:
                    digest.update(file.read())
                else:
                    digest.update(file.read(1 << 20))
                    file.seek(-(1 << 20), os.SEEK_END)
                    digest.update(file.read())
    except OSError as error:
        raise UserError(f"model {model_path}: {error.filename}: {error.strerror}: fetch the model again") from error
    return digest.hexdigest()[:12]
