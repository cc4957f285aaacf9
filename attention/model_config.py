"""A model folder's config.json, its kinds of attention layers, revision and serving dtype: all without torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attention.cases import Window, window_of_hf
from attention.errors import UserError, shown
from attention.validated import validated

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
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes that are no text, a number of 5000 digits, deep nesting
        raise UserError(f"{path}: not JSON ({str(error)[:200]}): fetch the model again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds {shown(config)}, where an object belongs: fetch the model again")
    return config


_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Config(BaseModel):
    """What is read of config.json, in transformers' words; null is as if the key were not there.

    Lengths are in tokens. 0 stands for none where some models write it: windows, patterns and the ranks of MLA.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    num_attention_heads: _Count
    num_hidden_layers: int = Field(ge=1, le=10_000)
    model_type: str | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None
    num_key_value_heads: _Count | None = None
    sliding_window: int | None = Field(default=None, ge=0, le=1 << 40)
    use_sliding_window: bool | None = None
    max_window_layers: int | None = Field(default=None, ge=0)
    sliding_window_pattern: int | str | None = None
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = Field(default=None, gt=0)
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
    alibi: bool | None = None
    kv_lora_rank: int | None = Field(default=None, ge=0, le=1_000_000)
    qk_rope_head_dim: _Count | None = None
    qk_nope_head_dim: _Count | None = None
    v_head_dim: _Count | None = None
    global_head_dim: _Count | None = None
    attention_k_eq_v: bool | None = None
    num_global_key_value_heads: _Count | None = None
    max_position_embeddings: int | None = Field(default=None, ge=1, le=1 << 40)

    @field_validator("layer_types")
    @classmethod
    def _served(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in ("full_attention", "sliding_attention"):
                raise ValueError(f"{shown(name)} is not served: only full_attention and sliding_attention are")
        return names

    @model_validator(mode="after")
    def _consistent(self) -> _Config:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} of num_hidden_layers {self.num_hidden_layers}")
        pattern = self.sliding_window_pattern
        if self.window and not self.layer_types and (isinstance(pattern, str) or (pattern or 0) < 0):
            raise ValueError(f"sliding_window_pattern {shown(pattern)}: a number n, or else name the layer_types")
        if self.kv_lora_rank:
            for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
                if getattr(self, key) is None:
                    raise ValueError(f"kv_lora_rank (MLA) needs {key}, which is missing")
            return self
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            if self.num_attention_heads % (getattr(self, key) or 1):
                raise ValueError(
                    f"num_attention_heads {self.num_attention_heads} is no multiple of {key} {getattr(self, key)}"
                )
        if self.head_dim is None and (self.hidden_size or 0) < self.num_attention_heads:
            raise ValueError(
                f"without head_dim, hidden_size {self.hidden_size} is too small for "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def window(self) -> int | None:
        """Hugging Face's W of the layers that have a window; None or 0 when none has."""
        used = self.use_sliding_window or "use_sliding_window" not in self.model_fields_set
        return self.sliding_window if used else None


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
    config = _read(model_path)
    windowed, full = _kind(config, sliding=True), _kind(config, sliding=False)
    return [windowed if kind == "sliding_attention" else full for kind in _layer_types(config)]


def max_context(model_path: Path) -> int:
    """Tokens that the model's positions reach; 4096 where config.json does not say. UserError as layer_kinds."""
    return _read(model_path).max_position_embeddings or 4096


def _read(model_path: Path) -> _Config:
    document = read_config(model_path)
    where = model_path / "config.json"
    text = document.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise UserError(f"{where}: text_config: holds {shown(text)}, where an object belongs: fetch the model again")
    document = {**document, **(text or {})}
    for key in ("num_attention_heads", "num_hidden_layers"):
        if key not in document:
            raise UserError(f"model {model_path}: config.json has no '{key}': only decoder-only causal LMs work")
    return validated(_Config, document, where)


def _layer_types(config: _Config) -> list[str]:
    if not config.window:
        return ["full_attention"] * config.num_hidden_layers
    if config.layer_types:
        return config.layer_types
    pattern = int(config.sliding_window_pattern or 0) or _PATTERNS.get(config.model_type or "")
    first = (config.max_window_layers or 0) if config.use_sliding_window else 0
    return [
        "full_attention" if i < first or (pattern and (i + 1) % pattern == 0) else "sliding_attention"
        for i in range(config.num_hidden_layers)
    ]


def _kind(config: _Config, *, sliding: bool) -> LayerKind:
    heads = config.num_attention_heads
    common: dict[str, Any] = {
        "heads_q": heads,
        "window": window_of_hf(config.window) if sliding and config.window else (None, None),
        "softcap": config.attn_logit_softcapping,
        "alibi": bool(config.alibi) or config.model_type == "bloom",
        "sinks": config.model_type == "gpt_oss",
    }
    if config.kv_lora_rank:  # MLA, with the names of DeepSeek's config; _consistent saw to it that they are there
        rope = config.qk_rope_head_dim or 0
        dim = (config.qk_nope_head_dim or 0) + rope
        return LayerKind(
            **common,
            heads_kv=heads,
            head_dim_qk=dim,
            head_dim_vo=config.v_head_dim or 0,
            scale=dim**-0.5,
            latent=(config.kv_lora_rank, rope),
        )
    dim = config.head_dim or (config.hidden_size or 0) // heads
    heads_kv = config.num_key_value_heads or heads
    if not sliding and config.global_head_dim:  # Gemma 4: the layers that see everything are wider
        dim = config.global_head_dim
        if config.attention_k_eq_v:
            heads_kv = config.num_global_key_value_heads or heads_kv
    return LayerKind(
        **common,
        heads_kv=heads_kv,
        head_dim_qk=dim,
        head_dim_vo=dim,
        scale=float(config.query_pre_attn_scalar or dim) ** -0.5,
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
