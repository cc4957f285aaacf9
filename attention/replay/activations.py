"""Activations of the served model as inputs of the tensor layer: q, K and V of one layer of each kind on one text.

Random numbers have neither the outlier channels nor the sinks of a trained model. The text is the release's own
prompts in a seeded order, so a file of activations is as private as they are: it lies in the folder that the job
names, and goes neither to MLflow nor into a report.

Both sides of a release name one file. Who comes first writes it, and both read what is there: equal inputs, also
where two versions of a library round the layers below differently.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attention.backends.base import AttentionSpec
from attention.errors import UserError
from attention.job import Prompt
from attention.model import Chunk, Runner
from attention.private import private_folder
from attention.replay.inputs import Captured
from attention.replay.model import tokens_of

LAYER = 4  # sinks and outlier channels form in the first layers; the layers above it need not run

Activations = dict[AttentionSpec, Captured]


def capture(
    runner: Runner,
    specs: Sequence[AttentionSpec],
    prompts: Sequence[Prompt],
    seed: int,
    num_tokens: int,
    path: Path,
) -> Activations:
    """The activations in `path`, which is written first where it is missing, by the spec of their layer.

    `specs` are those of the model's layers: the dispatcher's hold a drill's fault.
    """
    if not path.is_file():
        tensors = {}
        for layer in layers_of(specs).values():
            one = _capture(runner, _text(runner, prompts, seed, num_tokens), layer)
            tensors.update({f"{layer}/q": one.q_THD, f"{layer}/k": one.k_TGD, f"{layer}/v": one.v_TGD})
        _write_once(tensors, path)
    return read(path, specs)


def read(path: Path, specs: Sequence[AttentionSpec]) -> Activations:
    """UserError for a file that does not hold every kind of layer."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                spec: Captured(*(file.get_tensor(f"{layer}/{name}") for name in "qkv"))
                for spec, layer in layers_of(specs).items()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(f"activations {path}: {error}; remove the file, and the next replay captures them") from error


def layers_of(specs: Sequence[AttentionSpec]) -> dict[AttentionSpec, int]:
    """The layer that stands for each kind: the first from `LAYER` on, else its last."""
    found: dict[AttentionSpec, int] = {}
    for spec in dict.fromkeys(specs):
        layers = [i for i, one in enumerate(specs) if one == spec]
        found[spec] = next((i for i in layers if i >= LAYER), layers[-1])
    return found


def _text(runner: Runner, prompts: Sequence[Prompt], seed: int, num_tokens: int) -> tuple[int, ...]:
    """Tokens of the prompts in a seeded order, no more than the context and the pages hold."""
    room = min(num_tokens, runner.max_context, runner.pool.num_free * runner.page_size)
    order = random.Random(seed).sample(list(prompts), len(prompts))  # noqa: S311
    ids: list[int] = []
    for prompt in order:
        if len(ids) >= room:
            break
        ids += tokens_of(runner, prompt, room - len(ids))
    if not ids:
        raise UserError("inputs `activations` need prompts: the job's model plan has none")
    return tuple(ids)


class _Seen(Exception):
    """The layer has been reached; the layers above it need not run."""


def _capture(runner: Runner, ids: tuple[int, ...], layer: int) -> Captured:
    kept: list[torch.Tensor] = []

    def tap(at: int, *tensors: torch.Tensor) -> None:
        if at == layer:
            kept.extend(t.float().cpu().contiguous() for t in tensors)
            raise _Seen

    pages = runner.pool.alloc(-(-len(ids) // runner.page_size))
    runner.tap = tap
    try:
        with suppress(_Seen):
            runner.forward([Chunk(ids, 0, tuple(pages))])
    finally:
        runner.tap = None
        runner.pool.free(pages)
    return Captured(*kept)


def _write_once(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Whole or not at all, and never over what another process wrote meanwhile."""
    private_folder(path.parent)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    save_file(tensors, temporary)
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
