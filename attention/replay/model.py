"""Model layer, recording half: final hidden states of teacher-forced prompts.

Each prompt runs twice. It is scored in prefill, many prompts packed into one forward. Then its last tokens are forced
through the KV cache as single-token decodes, since only these run the decode kernels.

Forced tokens are known beforehand, so decodes need not wait for each other: in one forward the keys and values of all
its tokens are written, layer by layer, before any of its queries reads them. A member that decodes position p reads
what the decodes before p wrote, as it would one step later. Batches grow from one member to as many as fit, because
kernels split the keys of few members and not of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attention.errors import UserError
from attention.job import ModelPlan, Prompt
from attention.model import Chunk, Runner
from attention.replay.states import Manifest, Recorded, Sink, Writer

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Batching:
    """How prompts are laid out in forwards. It is part of what a recording may depend on."""

    tokens: int  # prefill tokens of a forward, at most; a longer prompt or piece goes alone
    keys: int  # decodes of a forward times the longest one's keys, at most: backends without pages copy so many
    piece: int | None = None  # tokens of a prompt in one forward; None: the whole prompt at once
    members: int | None = None  # decodes of a forward, at most


def batching(device: str) -> Batching:
    """What keeps a device busy within its memory: a small model's layers run in less time than they take to launch."""
    return Batching(32_768, 1 << 21) if device.startswith("cuda") else Batching(2_048, 1 << 17)


def tokens_of(runner: Runner, prompt: Prompt, limit: int) -> list[int]:
    """The first `limit` tokens of the rendered prompt."""
    ids = runner.tokenizer.apply_chat_template(
        list(prompt.messages), tools=list(prompt.tools) if prompt.tools else None, add_generation_prompt=True
    )["input_ids"]
    return [int(i) for i in ids[:limit]]


def record(
    runner: Runner,
    plan: ModelPlan,
    environment: Manifest,
    out: Path,
    progress: Progress = lambda done, total: None,
    *,
    how: Batching | None = None,
) -> Path:
    """Record the plan's prompts into the folder `out`. UserError for a prompt without tokens or too long to hold."""
    texts = [tokens_of(runner, prompt, plan.max_tokens) for prompt in plan.prompts]
    return record_texts(runner, plan, texts, environment, out, progress, how=how)


def record_texts(
    runner: Runner,
    plan: ModelPlan,
    texts: Sequence[Sequence[int]],
    environment: Manifest,
    out: Path,
    progress: Progress = lambda done, total: None,
    *,
    how: Batching | None = None,
) -> Path:
    """The same for prompts that are tokens already, one text a prompt of the plan."""
    how = how or batching(runner.device)
    prompts = tuple(
        Recorded(
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            language=prompt.language,
            num_tokens=len(ids),
            num_decoded=min(plan.decode_tokens, len(ids) - 1),
        )
        for prompt, ids in zip(plan.prompts, texts, strict=True)
    )
    _check(prompts, runner)
    manifest = environment.model_copy(update={"prompts": prompts, "resolved": dict(runner.dispatcher.resolved)})
    writer = Writer(out, manifest, texts, runner.hidden_size)
    sizes = sizes_of(how)
    done = 0
    for batch in batches(texts, runner, how.tokens):
        ids = [texts[i] for i in batch]
        starts = [prompts[i].num_tokens - prompts[i].num_decoded for i in batch]
        tables = [tuple(runner.pool.alloc(-(-len(one) // runner.page_size))) for one in ids]
        try:
            score(runner, ids, tables, how, writer.sinks["prefill"])
            decode(runner, ids, starts, tables, sizes, how, writer.sinks["decode"])
        finally:
            for table in tables:
                runner.pool.free(table)
        done += len(batch)
        progress(done, len(texts))
    writer.finish({phase: runner.dispatcher.confirmed[phase] for phase in ("prefill", "decode")})
    return out


def _check(prompts: Sequence[Recorded], runner: Runner) -> None:
    ids = [prompt.prompt_id for prompt in prompts]
    if twice := next((one for one in ids if ids.count(one) > 1), None) if len(set(ids)) < len(ids) else None:
        raise UserError(f"prompt {twice} is there twice; give each an id of its own")
    slots = runner.pool.num_free * runner.page_size
    for prompt in prompts:
        if prompt.num_tokens < 1:
            raise UserError(f"prompt {prompt.prompt_id} has no tokens; leave it out")
        if prompt.num_tokens > min(slots, runner.max_context):
            raise UserError(
                f"prompt {prompt.prompt_id} has {prompt.num_tokens} tokens, the context {runner.max_context} and the "
                f"KV cache {slots}; keep fewer of its tokens"
            )


def batches(texts: Sequence[Sequence[int]], runner: Runner, budget: int) -> Iterator[list[int]]:
    """Indices of consecutive prompts that fit into the budget of tokens and into the pages."""
    batch: list[int] = []
    tokens = pages = 0
    for i, ids in enumerate(texts):
        need = -(-len(ids) // runner.page_size)
        if batch and (tokens + len(ids) > budget or pages + need > runner.pool.num_free):
            yield batch
            batch, tokens, pages = [], 0, 0
        batch.append(i)
        tokens, pages = tokens + len(ids), pages + need
    if batch:
        yield batch


def score(
    runner: Runner, texts: Sequence[Sequence[int]], tables: Sequence[tuple[int, ...]], how: Batching, sink: Sink
) -> None:
    """States of every token. Packed prompts are consecutive, so the rows of a forward are those of the file."""
    if how.piece is None:
        sink.append(runner.forward([Chunk(tuple(i), 0, t) for i, t in zip(texts, tables, strict=True)], rows="all"))
        return
    for ids, table in zip(texts, tables, strict=True):
        for at in range(0, len(ids), how.piece):
            sink.append(runner.forward([Chunk(tuple(ids[at : at + how.piece]), at, table)], rows="all"))


def sizes_of(how: Batching) -> Iterator[int]:
    """1, 2, 4, ... members a forward, for as long as they are asked for."""
    size = 1
    while True:
        yield min(size, how.members or size)
        size = min(2 * size, 1 << 16)


def decode(
    runner: Runner,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[tuple[int, ...]],
    sizes: Iterator[int],
    how: Batching,
    sink: Sink,
) -> None:
    """States of the tokens from `starts` on, each as a decode of its own, earlier positions first."""
    firsts = [0]
    for start, ids in zip(starts, texts, strict=True):
        firsts.append(firsts[-1] + len(ids) - start)
    steps = max(len(ids) - start for start, ids in zip(starts, texts, strict=True))
    members = [
        (i, starts[i] + step) for step in range(steps) for i in range(len(texts)) if starts[i] + step < len(texts[i])
    ]
    if not members:
        return
    states_RD = torch.empty(len(members), runner.hidden_size, dtype=runner.dtype, device=runner.device)
    at, most = 0, max(1, how.keys // max(len(ids) for ids in texts))
    while at < len(members):
        part = members[at : at + min(next(sizes), most)]
        hidden = runner.forward([Chunk((texts[i][p],), p, tables[i]) for i, p in part])
        places = torch.tensor([firsts[i] + p - starts[i] for i, p in part])
        states_RD.index_copy_(0, places.to(runner.device, non_blocking=True), hidden)
        at += len(part)
    sink.append(states_RD)
