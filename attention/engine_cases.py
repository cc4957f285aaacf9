"""The cases that an engine launches for a model: prefill chunks, decodes in captured sizes, verify batches.

    cases_of(Path("models/llama-3.1-70b"), tp=8, speculative_k=3, capture_sizes=(1, 8, 64), chunk=2048)

What an engine runs is not what a request asks for. Heads are those of one rank; a decode batch is padded to
the next captured size, with members without keys; a prompt comes in chunks, and a chunk shares its step with the
decodes that are running; a speculative step verifies k drafted tokens and the one before (q = k + 1). Each
distinct kind of layer (with a window or not) is launched on its own.

MLA runs as two problems: prefill in the expanded form (DeepSeek: 192/128 a head), decode absorbed, over the
latent key that all heads share (576/512, one KV head; softmax scale of the expanded form). An engine never mixes
the two in one launch; a chunk attends to its cached context without a mask and merges by LSE.
Source: vllm/v1/attention/backends/mla/common.py, vllm/v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attention.cases import AttentionCase
from attention.errors import UserError
from attention.model_config import LayerKind, layer_kinds
from attention.validated import problem


def cases_of(
    model: Path,
    *,
    tp: int = 1,
    speculative_k: int = 0,
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8),
    chunk: int = 2048,
    kv_lens: tuple[int, ...] = (1024,),
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    layout: str = "paged_nhd",
    page_size: int | None = 16,
) -> list[AttentionCase]:
    """The distinct cases of one rank, for each kind of layer of the model folder.

    capture_sizes: members of captured decode graphs; () for an engine without graphs, which decodes one by one.
    chunk: tokens of a step. kv_lens: keys of a decode, and cached keys before a chunk.
    Raises UserError for heads that do not divide over the ranks, a chunk that holds no token, no `kv_lens`, and
    whatever else makes no AttentionCase.
    """
    if tp < 1 or chunk < 1 or speculative_k < 0 or any(size < 1 for size in capture_sizes):
        raise UserError(
            f"tp={tp}, chunk={chunk}, speculative_k={speculative_k}, capture_sizes={capture_sizes}: "
            "tp, chunk and each capture size are at least 1, speculative_k at least 0"
        )
    if short := [kv_len for kv_len in kv_lens if kv_len <= speculative_k]:
        raise UserError(f"kv_lens {short}: a verify batch of {speculative_k + 1} tokens needs at least as many keys")
    if not kv_lens:
        raise UserError("kv_lens is empty: name at least one number of keys")
    common = {"dtype": dtype, "kv_dtype": kv_dtype, "layout": layout, "page_size": page_size}
    sizes = tuple(sorted(set(capture_sizes)))
    found: dict[AttentionCase, None] = {}
    for kind in dict.fromkeys(layer_kinds(model)):
        mine = of_rank(kind, tp)
        if mine.latent is None:
            cases = _dense(mine, common, speculative_k, sizes, chunk, kv_lens)
        else:
            cases = _mla(mine, common, speculative_k, sizes, chunk, kv_lens)
        try:
            found |= dict.fromkeys(cases)
        except ValidationError as error:
            raise UserError(f"cases of {model}: {problem(error)}") from error
    return list(found)


def of_rank(kind: LayerKind, tp: int) -> LayerKind:
    """The layer as one of `tp` ranks has it: KV heads are replicated when there are fewer of them than ranks.

    MLA's expanded form has as many KV heads as query heads; its latent is whole on every rank.
    Source: QKVParallelLinear, vllm/model_executor/layers/linear.py.
    """
    if kind.heads_q % tp:
        raise UserError(f"tp={tp}: {kind.heads_q} query heads do not divide over {tp} ranks")
    if kind.heads_kv % tp and tp % kind.heads_kv:
        raise UserError(f"tp={tp}: {kind.heads_kv} KV heads neither divide over {tp} ranks nor replicate evenly")
    return replace(kind, heads_q=kind.heads_q // tp, heads_kv=max(1, kind.heads_kv // tp))


def _dense(
    kind: LayerKind,
    common: dict[str, Any],
    speculative_k: int,
    sizes: tuple[int, ...],
    chunk: int,
    kv_lens: tuple[int, ...],
) -> Iterator[AttentionCase]:
    shape = {**common, **_heads(kind)}
    yield AttentionCase(phase="prefill", batch=f"q{chunk}", **shape)
    for kv_len in kv_lens:
        yield AttentionCase(phase="extend", batch=f"q{chunk}s{kv_len + chunk}", **shape)
        yield from _decodes(shape, speculative_k, sizes, kv_len)
        # Decodes come first in a step's token budget; the chunk gets the rest.
        q_len = speculative_k + 1
        num_decodes = min(max(sizes, default=1), (chunk - 1) // q_len)
        if num_decodes:
            rest = chunk - num_decodes * q_len
            batch = f"q{rest}s{kv_len + rest}_{num_decodes}q{q_len}s{kv_len}"
            yield AttentionCase(phase="extend", batch=batch, **shape)


def _mla(
    kind: LayerKind,
    common: dict[str, Any],
    speculative_k: int,
    sizes: tuple[int, ...],
    chunk: int,
    kv_lens: tuple[int, ...],
) -> Iterator[AttentionCase]:
    rank, rope = kind.latent or (0, 0)
    # Expanded keys are made for the step; quantised or paged they are only in the cache.
    expanded = {**common, **_heads(kind), "kv_dtype": "auto", "layout": "ragged", "page_size": None}
    absorbed = {**common, **_heads(replace(kind, heads_kv=1, head_dim_qk=rank + rope, head_dim_vo=rank))}
    yield AttentionCase(phase="prefill", batch=f"q{chunk}", **expanded)
    for kv_len in kv_lens:
        yield AttentionCase(phase="extend", batch=f"q{chunk}s{kv_len}", **{**expanded, "causal": False})
        yield from _decodes(absorbed, speculative_k, sizes, kv_len)


def _heads(kind: LayerKind) -> dict[str, Any]:
    names = ("heads_q", "heads_kv", "head_dim_qk", "head_dim_vo", "window", "softcap", "alibi", "sinks")
    return {name: getattr(kind, name) for name in names}


def _decodes(shape: dict[str, Any], speculative_k: int, sizes: tuple[int, ...], kv_len: int) -> Iterator[AttentionCase]:
    """Decodes and verify batches: each captured size full, and with the most padding that it can have."""
    for q_len in (1, speculative_k + 1) if speculative_k else (1,):
        phase = "decode" if q_len == 1 else "extend"
        if not sizes:
            yield AttentionCase(phase=phase, batch=f"q{q_len}s{kv_len}", **shape)
        for below, size in zip((0, *sizes), sizes, strict=False):
            full = f"{size}q{q_len}s{kv_len}"
            yield AttentionCase(phase=phase, batch=full, execution="cuda_graph", **shape)
            if padding := size - below - 1:
                # The graph launches every member; those that pad it have no keys.
                padded = f"{below + 1}q{q_len}s{kv_len}_{padding}q{q_len}s0"
                yield AttentionCase(phase=phase, batch=padded, execution="cuda_graph", **shape)
