"""`fingerprint`: what a configuration is, and what changed between two."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attention.errors import UserError
from attention.job import FingerprintJob, write_result
from attention.verbs.common import job_of, setup_of, write_evidence
from attention.yaml_file import read_json


def fingerprint(args: argparse.Namespace) -> int:
    from attention import effects

    if args.diff:
        try:
            found_changes = effects.explain(*(_read_identity(path) for path in args.diff))
            documents = [one.document() for one in found_changes]
            text = json.dumps(documents, indent=1) if args.json else "\n".join(effects.lines(found_changes))
        except RecursionError as error:
            raise UserError(f"--diff {' '.join(map(str, args.diff))}: nested too deeply to be compared") from error
        print(text)
        return 0
    job = job_of(args, FingerprintJob) if args.job else FingerprintJob(setup=setup_of(args))
    from attention.startup import identify

    found = identify(job.setup)
    if job.evidence:
        row = {
            "identity_json": found.identity.model_dump_json(),
            "attestation_json": json.dumps(found.attestation),
        }
        write_evidence(job.evidence, "fingerprints", [row], found.id, found.identity.model_id)
    if args.out:
        write_result(args.out, found)
    elif args.json:
        print(found.model_dump_json(indent=1))
    else:
        print(found.id)
        for name, value in found.identity.model_dump(mode="json", exclude={"distributions"}).items():
            print(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
    return 0


def _read_identity(path: Path) -> dict[str, Any]:
    """Identity in a fingerprint file, or in the folder of `--out`, as JSON: one of another version, with
    other fields, can be compared too."""
    document = read_json(path / "result.json" if path.is_dir() else path)
    identity = document.get("identity") if isinstance(document, dict) else None
    if not isinstance(identity, dict):
        raise UserError(f"fingerprint {path}: not one written by `fingerprint --json` (it has no identity)")
    return identity
