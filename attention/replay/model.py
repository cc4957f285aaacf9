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

from attention.job import ModelReplayJob, Prompt
from attention.model import Chunk, Runner

Progress = Callable[[int, int], None]


def tokens_of(runner: Runner, prompt: Prompt, limit: int) -> list[int]:
    """The first `limit` tokens of the rendered prompt."""
    ids = runner.tokenizer.apply_chat_template(
        list(prompt.messages), tools=list(prompt.tools) if prompt.tools else None, add_generation_prompt=True
    )["input_ids"]
    return [int(i) for i in ids[:limit]]


def record(runner: Runner, job: ModelReplayJob, out: Path, progress: Progress = lambda done, total: None) -> Path:
    """Write `hidden.safetensors` into `out`: per prompt `<id>/tokens`, `<id>/prefill`, `<id>/decode`."""
    tensors: dict[str, torch.Tensor] = {}
    for done, prompt in enumerate(job.prompts, start=1):
        ids = tokens_of(runner, prompt, job.max_tokens)
        forced = min(job.decode_tokens, len(ids) - 1)
        tensors[f"{prompt.prompt_id}/tokens"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{prompt.prompt_id}/prefill"] = _prefill(runner, ids)
        tensors[f"{prompt.prompt_id}/decode"] = _decode(runner, ids, forced)
        progress(done, len(job.prompts))
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


def _decode(runner: Runner, ids: list[int], forced: int) -> torch.Tensor:
    pages = runner.pool.alloc(-(-len(ids) // runner.page_size))
    start = len(ids) - forced
    try:
        runner.forward([Chunk(tuple(ids[:start]), 0, tuple(pages))])
        steps = [runner.forward([Chunk((ids[i],), i, tuple(pages))]) for i in range(start, len(ids))]
        return torch.cat(steps).float()
    finally:
        runner.pool.free(pages)
