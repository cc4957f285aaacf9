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
    texts = {prompt.prompt_id: tokens_of(runner, prompt, plan.max_tokens) for prompt in plan.prompts}
    pairs = list(texts.items())
    for at in range(0, len(pairs), BATCH):
        batch = pairs[at : at + BATCH]
        tables = [tuple(runner.pool.alloc(-(-len(ids) // runner.page_size))) for _, ids in batch]
        try:
            for (prompt_id, ids), table in zip(batch, tables, strict=True):
                tensors[f"{prompt_id}/tokens"] = torch.tensor(ids, dtype=torch.int32)
                scored = runner.forward([Chunk(tuple(ids), 0, table)], rows="all")
                tensors[f"{prompt_id}/prefill"] = scored.float().clone()
            decoded = _decode(runner, [ids for _, ids in batch], tables, plan.decode_tokens)
        finally:
            for table in tables:
                runner.pool.free(table)
        for (prompt_id, _), states in zip(batch, decoded, strict=True):
            scored = tensors[f"{prompt_id}/prefill"]
            tensors[f"{prompt_id}/decode"] = torch.stack(states) if states else scored[:0]
        progress(at + len(batch), len(pairs))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "hidden.safetensors"
    save_file(tensors, path)
    return path


def _decode(
    runner: Runner, texts: list[list[int]], tables: list[tuple[int, ...]], forced: int
) -> list[list[torch.Tensor]]:
    """Hidden states [hidden] of the last n = min(forced, length - 1) tokens of each text, all texts in one
    batch, as a server decodes them. The cache holds every token already; each step writes its own anew."""
    starts = [len(ids) - min(forced, len(ids) - 1) for ids in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(forced):
        alive = [i for i, ids in enumerate(texts) if starts[i] + step < len(ids)]
        places = {i: starts[i] + step for i in alive}
        chunks = [Chunk((texts[i][places[i]],), places[i], tables[i]) for i in alive]
        if not chunks:
            break
        for i, hidden in zip(alive, runner.forward(chunks), strict=True):
            rows[i].append(hidden.float())
    return rows
