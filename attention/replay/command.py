"""`python -m attention replay --cases` and `python -m attention compare A B`: a cross-version replay by hand."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from functools import cache
from typing import Any

from attention import startup
from attention.cases import DRAWN_INPUTS, REPLAY_INPUTS, AttentionCase, Inputs
from attention.cells import load_cells
from attention.errors import UserError
from attention.job import Setup
from attention.matrix import declared_reasons
from attention.policy import load_policy, resolve
from attention.progress import now_and_then
from attention.replay import judge
from attention.replay.environment import fields_of
from attention.replay.recording import NUM_SEEDS, Manifest, Recording, record
from attention.replay.truths import Truths, compute

EXIT = {"pass": 0, "fail": 1, "error": 3}
NUM_SHOWN = 20


def record_cases(args: argparse.Namespace, setup: Setup, progress: Any) -> int:
    """Record the cases of a file on the policy's backends. Exit 3 where a case gave no output."""
    if args.out is None:
        raise UserError("replay --cases needs --out DIR")
    inputs = REPLAY_INPUTS if args.inputs is None else _inputs(args.inputs)
    if wrong := [seed for seed in args.seeds if not 0 <= seed < NUM_SEEDS]:
        raise UserError(f"--seeds {wrong[0]}: a seed is 0 or more and below 2**63")
    cases = list(dict.fromkeys(probe.case for probe in load_cells(args.cases)))
    policy = load_policy(setup.policy)

    @cache
    def backend_of(case: AttentionCase) -> str:
        chain = resolve(policy, case, lambda name, one: declared_reasons(name, one, device=setup.device)).chain
        return chain[0] if chain else policy.ordered(case.phase, 0)[0][0]  # what was asked for says why it cannot

    found = startup.identify(setup)
    told = Manifest(**fields_of(found), entries=())
    seeds = tuple(dict.fromkeys(args.seeds))
    manifest = record(cases, inputs, seeds, backend_of, told, args.out, device=setup.device, progress=progress)
    errors = [entry for entry in manifest.entries if entry.error]
    if args.json:
        print(json.dumps({"fingerprint_id": found.id, "cases": len(manifest.entries), "errors": len(errors)}, indent=1))
    else:
        backends = Counter(entry.backend for entry in manifest.entries)
        print(f"{args.out}: {len(manifest.entries)} cases on {_counts(backends)}, {len(errors)} errors")
    for entry in errors[:NUM_SHOWN]:
        print(f"{entry.case.case_id} ({entry.inputs}): {entry.error}", file=sys.stderr)
    return 3 if errors or not manifest.entries else 0


def compare_recordings(args: argparse.Namespace) -> int:
    """Judge recording B beside recording A. Exit 1: a case failed; 3: a case gave nothing to judge."""
    if args.floor is not None:
        raise UserError("--floor is for recordings of prompts; these are of cases")
    if len({folder.resolve() for folder in args.recordings}) == 1:
        raise UserError(f"compare {args.recordings[0]}: A and B are one folder; name two recordings")
    a, b = (Recording(folder) for folder in args.recordings)
    oracle = Truths(args.truths) if args.truths else compute
    rows = judge.judge(a, b, judge.load_limits(args.limits), oracle, now_and_then("compare, cases"))
    verdict = judge.worst(rows)
    if args.json:
        sides = {name: one.manifest.model_dump(exclude={"entries"}) for name, one in (("a", a), ("b", b))}
        print(json.dumps({"verdict": verdict, **sides, "rows": [_finite(row.row()) for row in rows]}, indent=1))
        return EXIT[verdict]
    for name, one in (("A", a), ("B", b)):
        manifest = one.manifest
        print(
            f"{name} {one.folder}: torch {manifest.torch}, {manifest.gpu}, fingerprint {manifest.fingerprint_id[:16]}"
        )
    print("\n".join(_lines(rows)))
    print(f"{verdict}: {_counts(Counter(row.verdict for row in rows)) or 'no case'}")
    return EXIT[verdict]


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that could not be measured is null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(rows: list[judge.Judged]) -> list[str]:
    """The worst case of each dtype class, then what did not pass."""
    lines = []
    for dtype in sorted({row.dtype_class for row in rows}):
        mine = [(row, row.a, row.b) for row in rows if row.dtype_class == dtype and row.a and row.b]
        for name in judge.RATIOS if mine else ():
            row, a, b = max(mine, key=lambda one: float(one[2][name]))
            where = f"{row.case_id} ({row.inputs}, seed {row.seed}), {b['worst_row_at']}"
            lines.append(f"{dtype} {name}: B {b[name]:.3g}, A {a[name]:.3g} on {where}")
    bad = [row for row in rows if row.verdict != "pass"]
    lines += [
        f"{row.verdict} {row.case_id} ({row.inputs}, seed {row.seed}): {'; '.join(row.reasons)}"
        for row in bad[:NUM_SHOWN]
    ]
    if len(bad) > NUM_SHOWN:
        lines.append(f"and {len(bad) - NUM_SHOWN} more: --json lists all")
    return lines


def _inputs(text: str) -> tuple[Inputs, ...]:
    names = [part.strip() for part in text.split(",")]
    if unknown := [name for name in names if name not in DRAWN_INPUTS]:
        raise UserError(
            f"--inputs {unknown[0]!r}: one of {', '.join(DRAWN_INPUTS)} (activations need a release's prompts)"
        )
    return tuple(kind for kind in DRAWN_INPUTS if kind in names)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{num} {name}" for name, num in sorted(counter.items()))
