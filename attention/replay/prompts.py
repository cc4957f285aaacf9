"""The model layer end to end: recorded and compared for a release's jobs, and by hand for a file of prompts.

python -m attention replay --prompts prompts.jsonl --out A      # in one environment
python -m attention replay --prompts prompts.jsonl --out B      # in another, with other library versions
python -m attention compare A B [--floor F] [--device cuda]     # anywhere
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attention.errors import UserError, is_dir, shown
from attention.fingerprint import Fingerprint, node
from attention.flags import check_count
from attention.job import CompareJob, Evidence, ModelPlan, Prompt, ReplayJob, Setup
from attention.model import Runner
from attention.replay import compare, floor, model, summary
from attention.replay.environment import fields_of
from attention.replay.states import MODES, Manifest, States
from attention.schemas import write_columns

EXIT = {"pass": 0, "fail": 1, "error": 3}


def environment(setup: Setup, found: Fingerprint) -> Manifest:
    """Who records, as a recording says it; its prompts follow."""
    identity = found.identity
    head = compare.Head.read(setup.model).digest
    return Manifest(**fields_of(found), model=setup.model, model_id=identity.model_id, head=head, dtype=identity.dtype)


def record_side(
    runner: Runner, job: ReplayJob, found: Fingerprint, out: Path, progress_of: Callable[[str], Any]
) -> dict[str, str | None]:
    """One side of a release, and its second recording where the plan wants a floor; what `compare_sides` needs."""
    told = environment(job.setup, found)
    texts = [model.tokens_of(runner, prompt, job.model.max_tokens) for prompt in job.model.prompts]
    side = model.record_texts(runner, job.model, texts, told, out / "states", progress_of("model replay"))
    second: Path | None = None
    known: Path | None = None
    if job.model.floors is not None:
        progress = progress_of("floor of the model replay")
        second, known = floor.record(runner, job.setup, job.model, texts, told, out / "floor", progress)
    return {"states": str(side), "floor": str(second) if second else None, "known_floor": str(known) if known else None}


def compare_sides(job: CompareJob) -> dict[str, Any]:
    """Both sides, and the champion with its floor, into `model_replay`."""
    torch.set_num_threads(os.cpu_count() or 1)  # nothing else runs now, and no kernel under test is here
    a, b = States(job.champion), States(job.candidate)
    head = compare.Head.read(job.setup.model, job.setup.device)
    found = compared(a, b, head, job.top_k)
    _write(job.evidence, b.manifest, found)
    if job.known_floor is not None:
        reused = job.floor is None
        columns = floor.read(job.known_floor) if job.floor is None else _floor(a, States(job.floor), head, job)
        if columns is None:
            raise UserError(f"floor {job.known_floor}: cannot be read any more; replay again")
        evidence = job.evidence.model_copy(update={"side": "champion"})
        _write(evidence, a.manifest, columns)
        return {"positions": len(found["kl"]), "floor": "known" if reused else "measured"}
    return {"positions": len(found["kl"]), "floor": None}


def _floor(a: States, second: States, head: compare.Head, job: CompareJob) -> dict[str, Any]:
    columns = compared(a, second, head, job.top_k)
    if job.known_floor is not None:
        floor.keep(job.known_floor, columns)
    return columns


def compared(a: States, b: States, head: compare.Head, top_k: int = compare.TOP_K) -> dict[str, Any]:
    """Columns of `model_replay`: b beside a, position by position, and who was to run each of b's and who did."""
    columns = compare.as_rows(a, compare.columns(a, b, head, top_k))
    told = b.manifest
    modes: list[str] = columns["mode"]
    return {
        **columns,
        "dtype_class": told.dtype,
        "backend": [told.resolved[mode] for mode in modes],
        "confirmed_backend": [told.confirmed[mode] for mode in modes],
    }


def _write(evidence: Evidence, told: Manifest, columns: dict[str, Any]) -> None:
    common = {
        "fingerprint_id": told.fingerprint_id,
        "node": node(),
        "gpu": evidence.gpu,
        "model": told.model_id,
        "side": evidence.side,
        "time": datetime.now(UTC),
    }
    write_columns(evidence.lake, "model_replay", {**common, **columns}, release_id=evidence.release_id)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a JSON Lines file: requests as OpenAI's batch files have them, or a golden set. UserError names
    file, line and key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"prompts {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"prompts {path}: not text in UTF-8") from error
    prompts = tuple(_prompt(line, f"prompts {path}, line {i}") for i, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise UserError(f"prompts {path}: no prompt in it")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON") from error
    body = found.get("body", found) if isinstance(found, dict) else None
    if not isinstance(body, dict):
        raise UserError(f"{where}: holds {shown(found)}, where an object belongs")
    messages = body.get("messages") or ([{"role": "user", "content": body["prompt"]}] if "prompt" in body else None)
    name = found.get("prompt_id", found.get("custom_id"))
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: no prompt_id or custom_id")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: neither messages nor a prompt")
    return Prompt(
        prompt_id=name,
        category=str(found.get("category", "und")),
        language=str(found.get("language", "und")),
        messages=tuple(messages),
        tools=tuple(body["tools"]) if isinstance(body.get("tools"), list) else None,
    )


def record_prompts(args: argparse.Namespace, setup: Setup, progress: Any) -> int:
    """Record a file of prompts on the policy's backends."""
    from attention import startup

    if args.out is None:
        raise UserError("replay --prompts needs --out DIR")
    check_count("--max-tokens", args.max_tokens)
    check_count("--decode-tokens", args.decode_tokens)
    plan = ModelPlan(prompts=read_prompts(args.prompts), max_tokens=args.max_tokens, decode_tokens=args.decode_tokens)
    dispatcher = startup.decide(setup, [])
    found = startup.identify(setup, dispatcher)
    runner = startup.load(setup, dispatcher)
    told = States(model.record(runner, plan, environment(setup, found), args.out, progress)).manifest
    num = sum(prompt.num_tokens for prompt in told.prompts)
    if args.json:
        document = {"fingerprint_id": found.id, "prompts": len(told.prompts), "tokens": num}
        print(json.dumps({**document, "confirmed": told.confirmed}, indent=1))
    else:
        ran = ", ".join(f"{mode} on {backend}" for mode, backend in told.confirmed.items())
        print(f"{args.out}: {len(told.prompts)} prompts, {num} tokens; {ran}")
    return 0


def compare_prompts(args: argparse.Namespace) -> int:
    """Judge recording B of prompts beside recording A. Exit 1: a limit is passed; 3: nothing to judge."""
    if len({folder.resolve() for folder in args.recordings}) == 1:
        raise UserError(f"compare {args.recordings[0]}: A and B are one folder; name two recordings")
    a, b = (States(folder) for folder in args.recordings)
    if args.floor and args.floor.resolve() in {folder.resolve() for folder in args.recordings}:
        raise UserError(f"--floor {args.floor}: it is A or B itself; record a second sound execution of A")
    second = States(args.floor) if args.floor else None
    if second:
        _check_floor(a, second)
    compare.check_pair(a, b)
    limits = summary.load_limits(args.limits, b.manifest.dtype)
    head = compare.Head.read(args.model or _model_of(a), args.device)
    figures = compare.describe(compare.columns(a, b, head, progress=_told("compare")))
    floors = compare.describe(compare.columns(a, second, head, progress=_told("floor"))) if second else None
    reasons = summary.reasons(figures, floors, limits)
    reasons += _stood_in(b)
    unknown = [f"A, {reason}: nothing to hold B against" for reason in _stood_in(a)]
    unknown += [f"{mode}: no position" for mode in MODES if mode not in figures]
    verdict = "fail" if reasons else "error" if unknown else "pass"
    reasons += unknown
    if args.json:
        sides = {name: one.manifest.model_dump(mode="json", exclude={"prompts"}) for name, one in (("a", a), ("b", b))}
        document = {"verdict": verdict, "reasons": reasons, **sides, "figures": figures, "floor": floors}
        print(json.dumps(summary.finite(document), indent=1))
        return EXIT[verdict]
    for name, one in (("A", a), ("B", b)):
        told = one.manifest
        print(f"{name} {one.folder}: torch {told.torch}, {told.gpu}, fingerprint {told.fingerprint_id[:16]}")
    print("\n".join([*summary.lines(figures, floors), *reasons]))
    print(f"{verdict}: {sum(int(f['positions']) for f in figures.values())} positions")
    return EXIT[verdict]


def _stood_in(side: States) -> list[str]:
    """By mode, who ran in place of whom."""
    told = side.manifest
    return [
        f"{mode}: {told.confirmed[mode]} ran in place of {told.resolved[mode]}"
        for mode in MODES
        if side.num_rows(mode) and told.confirmed[mode] != told.resolved[mode]
    ]


def _check_floor(a: States, second: States) -> None:
    """UserError for a floor that is no sound second execution of A: of B's environment it would allow B's faults."""
    fields = ("torch", "python", "gpu", "distributions", "dtype")
    other = [name for name in fields if getattr(second.manifest, name) != getattr(a.manifest, name)]
    if other:
        raise UserError(f"--floor {second.folder}: another {', '.join(other)} than A's; record it where A was recorded")
    if told := _stood_in(second):
        raise UserError(f"--floor {second.folder}: {told[0]}; record it again")


def _model_of(a: States) -> Path:
    """The folder whose lm_head belongs to A, as it was named when A was recorded, perhaps elsewhere."""
    folder = a.manifest.model
    if not is_dir(folder):
        raise UserError(f"model {folder}: recording {a.folder} names it, and it is not here; name it with --model")
    return folder


def _told(what: str) -> Callable[[int, int], None]:
    shown_tenths = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown_tenths
        if done * 10 // total > shown_tenths:
            shown_tenths = done * 10 // total
            print(f"{what}: {done} of {total} positions", file=sys.stderr, flush=True)

    return tell
