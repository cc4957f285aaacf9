"""A model folder's config.json and the serving dtype: what can be known without torch."""

from __future__ import annotations

import json
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
