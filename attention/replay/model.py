"""Model layer, recording half: final hidden states of teacher-forced prompts.

Only hidden states are kept (2.3 kB a token of SmolLM2), from which one comparer computes exact
distributions with one lm_head: logits of two environments never meet two different matrix products.
Each prompt runs twice: scored in one prefill, and with its last tokens forced one by one through
the KV cache, since only the latter exercises the decode kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from attention.job import ModelPlan, Prompt
from attention.model import Chunk, Runner

BATCH = 16  # texts that are forced side by side

Progress = Callable[[int, int], None]


def tokens_of(runner: Runner, prompt: Prompt, limit: int) -> list[int]:
    """The first `limit` tokens of the rendered prompt."""
    ids = runner.tokenizer.apply_chat_template(
        list(prompt.messages), tools=list(prompt.tools) if prompt.tools else None, add_generation_prompt=True
    )["input_ids"]
    return [int(i) for i in ids[:limit]]


def record(runner: Runner, plan: ModelPlan, out: Path, progress: Progress = lambda done, total: None) -> Path:
    """Write `hidden.safetensors` into `out`: per prompt `<id>/tokens`, `<id>/prefill`, `<id>/decode`."""
    tensors: dict[str, torch.Tensor] = {}
    done, total = 0, 2 * len(plan.prompts)
    texts = {prompt.prompt_id: tokens_of(runner, prompt, plan.max_tokens) for prompt in plan.prompts}
    for prompt_id, ids in texts.items():
        tensors[f"{prompt_id}/tokens"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{prompt_id}/prefill"] = _prefill(runner, ids)
        done += 1
        progress(done, total)
    pairs = list(texts.items())
    for at in range(0, len(pairs), BATCH):
        batch = pairs[at : at + BATCH]
        decoded = _decode(runner, [ids for _, ids in batch], plan.decode_tokens)
        for (prompt_id, _), hidden in zip(batch, decoded, strict=True):
            tensors[f"{prompt_id}/decode"] = hidden
        done += len(batch)
        progress(done, total)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "hidden.safetensors"
    save_file(tensors, path)
    return path


def _prefill(runner: Runner, ids: list[int]) -> torch.Tensor:
    pages = runner.pool.alloc(-(-len(ids) // runner.page_size))
    try:
        return runner.forward([Chunk(tuple(ids), 0, tuple(pages))], rows="all").float().clone()
    finally:
        runner.pool.free(pages)


def _decode(runner: Runner, texts: list[list[int]], forced: int) -> list[torch.Tensor]:
    """Hidden states [n, hidden] of the last n = min(forced, length - 1) tokens of each text, all texts in one
    batch, as a server decodes them."""
    starts = [len(ids) - min(forced, len(ids) - 1) for ids in texts]
    tables = [tuple(runner.pool.alloc(-(-len(ids) // runner.page_size))) for ids in texts]
    try:
        for ids, start, table in zip(texts, starts, tables, strict=True):
            runner.forward([Chunk(tuple(ids[:start]), 0, table)])
        rows: list[list[torch.Tensor]] = [[] for _ in texts]
        for step in range(forced):
            alive = [i for i, ids in enumerate(texts) if starts[i] + step < len(ids)]
            places = {i: starts[i] + step for i in alive}
            chunks = [Chunk((texts[i][places[i]],), places[i], tables[i]) for i in alive]
            for i, hidden in zip(alive, runner.forward(chunks), strict=True):
                rows[i].append(hidden.float())
        return [torch.stack(states) for states in rows]
    finally:
        for table in tables:
            runner.pool.free(table)
