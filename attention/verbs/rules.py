"""`matrix` and `resolve`: what the declared rules say, where observations differ, and the chain of a policy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from attention.errors import UserError
from attention.matrix import check_device


def matrix(args: argparse.Namespace) -> int:
    from attention import text
    from attention.backends import NAMES
    from attention.matrix import declared, known_bad

    if args.drift:
        return _drift(args.drift, args.json)
    sheets = declared()
    if args.json:
        cells = {b: {p: d.model_dump(mode="json") for p, d in sheets.get(b, {}).items()} for b in NAMES}
        bad = [entry.model_dump(mode="json") for entry in known_bad()]
        print(json.dumps({**cells, "known_bad": bad}, indent=1))
        return 0
    for backend in NAMES:
        broken = [entry for entry in known_bad() if entry.backend == backend]
        print("\n".join(text.rules(backend, sheets.get(backend, {}), broken)))
    return 0


def _drift(files: list[Path], as_json: bool) -> int:
    from attention import text
    from attention.drift import against_rules, between, only_in, read_rows

    if len(files) > 2:
        raise UserError("--drift takes one observation, or two")
    observed = [read_rows(path) for path in files]
    found = against_rules(observed[0]) if len(files) == 1 else between(*observed)
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=1))
    else:
        print("\n".join(text.drift(found)) or "no drift")
    if len(files) == 2:
        for path, lone in zip(files, (only_in(*observed), only_in(*reversed(observed))), strict=True):
            if lone:
                print(f"only in {path}: {', '.join(lone)}", file=sys.stderr)
    return 0


def resolve_policy(args: argparse.Namespace) -> int:
    from attention import text
    from attention.chains import chains
    from attention.matrix import declared_reasons
    from attention.model import specs_of
    from attention.model_config import max_context, resolve_dtype
    from attention.policy import load_policy

    check_device(args.device)
    found = chains(
        load_policy(args.policy),
        specs_of(args.model, resolve_dtype("auto", args.device)),
        lambda name, case: declared_reasons(name, case, device=args.device),
        max_kv_len=max_context(args.model),
    )
    if args.json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=1))
    else:
        print("\n".join(text.chains(found)))
    return 0 if all(one.chain for one in found) else 1
