"""A model folder's config.json, its kinds of attention layers, revision and serving dtype: all without torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.cases import Window, window_of_hf
from attention.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")

#: Every n-th layer sees everything, the others a window, where config.json names no `layer_types` and no
#: `sliding_window_pattern`. Source: transformers, configuration_<model type>.py.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}


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


@dataclass(frozen=True)
class LayerKind:
    """What one layer's attention is, over the whole model (before tensor parallelism).

    With `latent` (MLA) the heads and dims are those of the expanded form that prefill runs; `latent` is the
    width of the compressed key that decode reads instead, (kv_lora_rank, qk_rope_head_dim).
    """

    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_vo: int
    scale: float
    window: Window = (None, None)
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    latent: tuple[int, int] | None = None


def layer_kinds(model_path: Path) -> list[LayerKind]:
    """One LayerKind a layer, from config.json. UserError when it describes no decoder-only causal LM."""
    config = read_config(model_path)
    config = {**config, **config.get("text_config", {})}
    try:
        windowed, full = _kind(config, sliding=True), _kind(config, sliding=False)
        num_layers = int(config["num_hidden_layers"])
    except KeyError as error:
        raise UserError(f"model {model_path}: config.json has no {error}: only decoder-only causal LMs work") from error
    return [windowed if kind == "sliding_attention" else full for kind in _layer_types(config, num_layers)]


def _layer_types(config: dict[str, Any], num_layers: int) -> list[str]:
    if not _window(config):
        return ["full_attention"] * num_layers
    if config.get("layer_types"):
        return list(config["layer_types"])
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    first = int(config.get("max_window_layers", 0)) if config.get("use_sliding_window") else 0
    return [
        "full_attention" if i < first or (pattern and (i + 1) % int(pattern) == 0) else "sliding_attention"
        for i in range(num_layers)
    ]


def _window(config: dict[str, Any]) -> int | None:
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def _kind(config: dict[str, Any], *, sliding: bool) -> LayerKind:
    heads = int(config["num_attention_heads"])
    window = _window(config)
    common: dict[str, Any] = {
        "heads_q": heads,
        "window": window_of_hf(int(window)) if sliding and window else (None, None),
        "softcap": config.get("attn_logit_softcapping"),
        "alibi": bool(config.get("alibi")) or config.get("model_type") == "bloom",
        "sinks": config.get("model_type") == "gpt_oss",
    }
    if config.get("kv_lora_rank"):  # MLA, with the names of DeepSeek's config
        rope = int(config["qk_rope_head_dim"])
        dim = int(config["qk_nope_head_dim"]) + rope
        return LayerKind(
            **common,
            heads_kv=heads,
            head_dim_qk=dim,
            head_dim_vo=int(config["v_head_dim"]),
            scale=dim**-0.5,
            latent=(int(config["kv_lora_rank"]), rope),
        )
    dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    heads_kv = int(config.get("num_key_value_heads") or heads)
    if not sliding and config.get("global_head_dim"):  # Gemma 4: the layers that see everything are wider
        dim = int(config["global_head_dim"])
        if config.get("attention_k_eq_v"):
            heads_kv = int(config.get("num_global_key_value_heads") or heads_kv)
    return LayerKind(
        **common,
        heads_kv=heads_kv,
        head_dim_qk=dim,
        head_dim_vo=dim,
        scale=float(config.get("query_pre_attn_scalar") or dim) ** -0.5,
    )


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
