"""The floor of the model layer: how far two sound executions of the champion are apart today.

Any two approved ways to compute the same attention round differently, so a candidate is held against a multiple of
that distance and not against zero. The second way is the next validated backend of the champion's own policy; where
the policy has one backend only, the same backend with other batches: prompts in pieces, decodes in small groups.

The figures of a floor belong to what was run: environment, model, tokens and both ways. They are kept under the hash
of these, so that a champion pays for its floor once. Neither tokens nor states are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attention.dispatch import Dispatcher
from attention.job import ModelPlan, Setup
from attention.model import Runner
from attention.model_config import model_revision
from attention.private import private_folder
from attention.replaced import replaced
from attention.replay import compare, model
from attention.replay.model import Batching, batching
from attention.replay.states import Manifest

PIECE, MEMBERS = 256, 16  # of the second way where no second backend is approved
KEPT = 16  # floors that a folder holds


@dataclass(frozen=True)
class Second:
    """The other sound way to run the champion."""

    dispatcher: Dispatcher
    how: Batching


def second(runner: Runner) -> Second:
    """The next validated backend that serves prefill and decode, else other batches on the same backend."""
    first, usual = runner.dispatcher, batching(runner.device)
    chains = [first.resolutions[phase].chain for phase in ("prefill", "decode")]
    others = [name for name in chains[0][1:] if name in chains[1] and name != first.resolved["decode"]]
    if not others:
        return Second(first, Batching(usual.tokens, usual.keys, PIECE, MEMBERS))
    policy = first.policy.model_copy(update={"preferred": tuple(others), "fallback": (), "overrides": ()})
    other = Dispatcher(policy, first.specs, device=first.device, page_size=first.page_size)
    return Second(other, usual)


def record(
    runner: Runner,
    setup: Setup,
    plan: ModelPlan,
    texts: Sequence[Sequence[int]],
    environment: Manifest,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path | None, Path]:
    """The second recording, in `out`, or None where its figures are known; and the file of these figures."""
    if plan.floors is None:
        raise ValueError("a floor needs the folder that keeps it")
    way = second(runner)
    known = plan.floors / f"{_key(runner, setup, plan, texts, environment, way)}.parquet"
    if read(known) is not None:
        return None, known
    usual, runner.dispatcher = runner.dispatcher, way.dispatcher
    try:
        return model.record_texts(runner, plan, texts, environment, out, progress, how=way.how), known
    finally:
        runner.dispatcher = usual


def _key(
    runner: Runner, setup: Setup, plan: ModelPlan, texts: Sequence[Sequence[int]], environment: Manifest, way: Second
) -> str:
    sources = (Path(str(module.__file__)).read_bytes() for module in (compare, model))
    content = {
        "sources": hashlib.sha256(b"".join(sources)).hexdigest(),
        "environment": environment.fingerprint_id,
        "model": model_revision(setup.model),
        "backends": [runner.dispatcher.resolved, way.dispatcher.resolved],
        "batches": [asdict(batching(runner.device)), asdict(way.how)],
        "prompts": [(p.prompt_id, p.category, p.language) for p in plan.prompts],
        "tokens": [list(ids) for ids in texts],
        "decode_tokens": plan.decode_tokens,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def keep(known: Path, columns: dict[str, Any]) -> None:
    """Keep a floor's columns for the next release. The oldest make room."""
    private_folder(known.parent)
    with replaced(known) as fresh:
        pq.write_table(pa.table({name: _whole(value, columns) for name, value in columns.items()}), fresh)
    by_age = sorted(known.parent.glob("*.parquet"), key=lambda path: path.stat().st_mtime)
    for old in by_age[:-KEPT]:
        old.unlink(missing_ok=True)


def _whole(value: Any, columns: dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else [value] * len(columns["kl"])


def read(known: Path) -> dict[str, list[Any]] | None:
    """A floor's columns; None where there is no file or it cannot be read."""
    try:
        found: dict[str, list[Any]] = pq.read_table(known).to_pydict()
    except (OSError, pa.ArrowException):
        return None
    return found
