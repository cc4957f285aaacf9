"""`python -m attention`: what runs where the backend lives. Measuring verbs take a job or flags.

    python -m attention probe --model data/models/smollm2-135m-instruct --policy data/policies/cpu-flash.yaml
    python -m attention resolve data/policies/document.yaml --model data/models/smollm2-135m-instruct
    python -m attention probe --backends all --device cuda --cells attention/cells/hopper.yaml --out rows.parquet
    python -m attention matrix [--drift rows.parquet [other.parquet]]
    python -m attention serve --help

Exit: 0 done; 1 a required probe failed (`probe --help`), or `resolve` found no backend; 2 bad input or set-up;
3 the time of `probe --cells --budget-s` was spent before all was probed; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from attention import STARTED
from attention.cases import DRAWN_INPUTS, REPLAY_INPUTS
from attention.errors import UserError, exit_code
from attention.flags import check_count, check_seconds
from attention.job import (
    BenchJob,
    CompareJob,
    Evidence,
    FingerprintJob,
    ProbeJob,
    ReplayJob,
    Setup,
    read_job,
    write_result,
)
from attention.lifetime import die_with_parent
from attention.matrix import check_device
from attention.yaml_file import read_json

DEFAULT_MODEL = Path("data/models/smollm2-135m-instruct")
DEFAULT_POLICY = Path("data/policies/cpu-flash.yaml")
DEFAULT_LIMITS = Path("gates/thresholds.yaml")
MODEL_HELP = "folder of a transformers causal LM"

PROBE_HELP = """Run the capability probes. A probe is required when serving this model needs it; the others say
what else a backend can do, and most backends fail some. Exit 1: a backend that may run here by the declared rules did
not pass a required probe, although another may stand in for it. Exit 0: none did so; whoever the declared rules refuse
(static rows) does not count. Exit 2: no backend of the policy is left. A file of --cells requires nothing: exit 0."""

REPLAY_HELP = """Record the numerical replay of one side: with --job all layers, with --cases a file of cases, with
--prompts a file of prompts, teacher-forced."""

#: By verb, what a person may type as it stands, in the repository's root.
EXAMPLES = {
    "fingerprint": """
  python -m attention fingerprint
  python -m attention fingerprint --diff data/evidence/h200/fingerprint_before.json \\
    data/evidence/h200/fingerprint_after.json""",
    "matrix": """
  python -m attention matrix
  python -m attention matrix --drift data/evidence/h200/probes.parquet""",
    "resolve": """
  python -m attention resolve data/policies/document.yaml""",
    "probe": """
  python -m attention probe --backends torch_sdpa
on a GPU:
  python -m attention probe --backends all --device cuda --cells attention/cells/hopper.yaml --out rows.parquet""",
    "replay": """
  python -m attention replay --cases attention/cells/cpu.yaml --out A
  python -m attention replay --prompts data/golden/golden.jsonl --max-tokens 64 --decode-tokens 8 --out A-prompts""",
    "compare": """
  python -m attention replay --cases attention/cells/cpu.yaml --policy data/policies/cpu-math.yaml --out A
  python -m attention replay --cases attention/cells/cpu.yaml --policy data/policies/cpu-flash.yaml --out B
  python -m attention compare A B""",
    "bench": """
  python -m attention bench dispatch --calls 200
  echo '{"setup": {"model": "data/models/smollm2-135m-instruct", "policy": "data/policies/cpu-flash.yaml"}}' >job.json
  python -m attention bench --job job.json </dev/null
on a GPU:
  python -m attention bench dispatch --backend flash_attn --backend flashinfer --device cuda""",
    "serve": """
  python -m attention serve --model data/models/smollm2-135m-instruct --policy data/policies/cpu-flash.yaml \\
    --port 8080 --release-id mine --side champion --instance mine-1 --lake data/lake""",
}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # files may hold characters that no encoding has
    return exit_code(lambda: int(args.run(args)))


def _parser() -> argparse.ArgumentParser:
    from attention.serve import flags as serve

    parser = argparse.ArgumentParser(
        prog="python -m attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, help_text: str, run: Any, *, job: bool = False, setup: bool = False) -> Any:
        sub = verbs.add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=f"examples:{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        if job:
            sub.add_argument("--job", type=Path, help="job file (JSON, attention/job.py); replaces the other flags")
            sub.add_argument(
                "--out",
                type=Path,
                help="folder for result.json and recordings (probe: or a .json or .parquet file of rows)",
            )
        if setup:
            sub.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: %(default)s)")
            policy = "attention policy (YAML; default: %(default)s)"
            sub.add_argument("--policy", type=Path, default=DEFAULT_POLICY, help=policy)
            sub.add_argument("--device", default="cpu", help="cpu or cuda")
            sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return sub

    fingerprint = verb("fingerprint", "what decides which kernel runs, as an id", _fingerprint, job=True, setup=True)
    fingerprint.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two fingerprint files")
    matrix = verb("matrix", "the declared compatibility matrix", _matrix)
    matrix.add_argument("--json", action="store_true", help="one JSON document on stdout")
    matrix.add_argument(
        "--drift",
        nargs="+",
        type=Path,
        metavar="OBSERVED",
        help="a file of `probe --out` against the rules that it met, or two files against each other",
    )
    resolve = verb("resolve", "the ordered chain of a policy, and why others are left out", _resolve)
    resolve.add_argument("policy", type=Path, help="attention policy (YAML)")
    resolve.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: %(default)s)")
    resolve.add_argument("--device", default="cpu", help="cpu or cuda")
    resolve.add_argument("--json", action="store_true", help="one JSON document on stdout")
    probe = verb("probe", "run the capability probes", _probe, job=True, setup=True)
    probe.description = PROBE_HELP
    probe.add_argument(
        "--backends",
        help="comma-separated backends or families, or `all` (the default, but on a GPU "
        "without --cells, where most compile for minutes: there the policy's)",
    )
    probe.add_argument("--cells", type=Path, help="cases and checks (YAML or JSON) in place of the model's")
    probe.add_argument("--jobs", type=int, help="workers at a time; default 2, on a GPU 4")
    probe.add_argument("--timeout-s", type=float, default=120.0, help="seconds that one probe may take")
    probe.add_argument("--budget-s", type=float, help="seconds for all of --cells; what is left is unknown (exit 3)")
    probe.add_argument(
        "--compiled", type=Path, help="--cells: what attention.warm wrote; what is missing there is last"
    )
    probe.add_argument("--resume", action="store_true", help="--cells: keep the rows of --out, probe what they lack")
    probe.add_argument(
        "--try-declared-failures", action="store_true", help="run also what declared rules refuse (for matrix --drift)"
    )
    replay = verb("replay", "record the numerical replay of one side", _replay, job=True, setup=True)
    replay.description = REPLAY_HELP
    replay.add_argument("--cases", type=Path, help="cases (YAML or JSON, as for probe --cells) to record into --out")
    kinds = f"--cases: comma-separated kinds of {', '.join(DRAWN_INPUTS)} (default: {','.join(REPLAY_INPUTS)})"
    replay.add_argument("--inputs", help=kinds)
    replay.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="--cases: seeds (default: 0 1)")
    replay.add_argument(
        "--prompts", type=Path, help="prompts (JSON Lines: requests or a golden set) to record into --out"
    )
    replay.add_argument("--max-tokens", type=int, default=1024, help="--prompts: tokens kept of each (default: 1024)")
    replay.add_argument("--decode-tokens", type=int, default=128, help="--prompts: of these, forced (default: 128)")
    compare = verb(
        "compare", "judge recording B of `replay` beside A; with --job, the model layer's", _compare, job=True
    )
    compare.add_argument(
        "recordings", nargs="*", type=Path, metavar="A B", help="folders that replay --cases or --prompts wrote"
    )
    compare.add_argument("--limits", type=Path, default=DEFAULT_LIMITS, help="thresholds (default: %(default)s)")
    compare.add_argument("--truths", type=Path, help="folder that keeps the oracle's answers between runs")
    compare.add_argument("--floor", type=Path, metavar="F", help="prompts: a second sound recording of A's side")
    compare.add_argument("--model", type=Path, help="prompts: folder with the lm_head (default: where A was recorded)")
    compare.add_argument("--device", default="cpu", help="prompts: cpu or cuda")
    compare.add_argument("--json", action="store_true", help="one JSON document on stdout")
    bench = verb("bench", "a worker that times what stdin asks for; dispatch: host overhead", _bench, job=True)
    bench.add_argument("what", nargs="?", choices=("dispatch",), help="dispatch: a planned run against the plain call")
    bench.add_argument("--backend", action="append", help="dispatch: backend or family; may be repeated (torch_sdpa)")
    bench.add_argument("--batch", action="append", help="dispatch: batch such as q1s64 (q1s64 and q16)")
    bench.add_argument("--calls", type=int, help="dispatch: pairs of calls (20000 on a GPU, 2000 on the CPU)")
    bench.add_argument("--device", default="cpu", help="dispatch: cpu or cuda")
    bench.add_argument("--dtype", default="auto", help="dispatch: float32 on the CPU, else bfloat16")
    bench.add_argument("--json", action="store_true", help="dispatch: one JSON document on stdout")
    serve.add_arguments(verb("serve", "serve a model behind the OpenAI API", serve.run))
    return parser


def _job(args: argparse.Namespace, kind: type[Any]) -> Any:
    if args.job is not None:
        die_with_parent()
    if args.job is None or (args.out is None and kind is not BenchJob):
        raise UserError(f"{args.verb} needs --job FILE and --out DIR")
    job = read_job(args.job, kind)
    check_device(job.setup.device)
    return job


def _setup(args: argparse.Namespace) -> Setup:
    check_device(args.device)
    return Setup(model=args.model, policy=args.policy, device=args.device)


def _rows(evidence: Evidence, table: str, rows: list[dict[str, Any]], fingerprint_id: str, model: str) -> None:
    from attention.fingerprint import node
    from attention.schemas import write_rows

    common = {
        "fingerprint_id": fingerprint_id,
        "node": node(),
        "gpu": evidence.gpu,
        "model": model,
        "side": evidence.side,
        "time": datetime.now(UTC),
    }
    write_rows(evidence.lake, table, ({**common, **row} for row in rows), release_id=evidence.release_id)


def _progress(what: str) -> Any:
    """A line every tenth of the work on stderr, which callers show or log."""
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if not total:
            return
        if done * 10 // total > shown or done == total:
            shown = done * 10 // total
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return tell


def _fingerprint(args: argparse.Namespace) -> int:
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
    job = _job(args, FingerprintJob) if args.job else FingerprintJob(setup=_setup(args))
    from attention.startup import identify

    found = identify(job.setup)
    if job.evidence:
        row = {
            "identity_json": found.identity.model_dump_json(),
            "attestation_json": json.dumps(found.attestation),
        }
        _rows(job.evidence, "fingerprints", [row], found.id, found.identity.model_id)
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
    """Identity in a fingerprint file, as JSON: one of another version, with other fields, can be compared too."""
    document = read_json(path)
    identity = document.get("identity") if isinstance(document, dict) else None
    if not isinstance(identity, dict):
        raise UserError(f"fingerprint {path}: not one written by `fingerprint --json` (it has no identity)")
    return identity


def _matrix(args: argparse.Namespace) -> int:
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


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines, every column as wide as its widest entry; an empty column is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*kept, strict=True)
    ]


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


def _resolve(args: argparse.Namespace) -> int:
    from attention import text
    from attention.matrix import declared_reasons
    from attention.model import specs_of
    from attention.model_config import resolve_dtype
    from attention.policy import load_policy, resolve
    from attention.probe import probes_of

    check_device(args.device)
    policy = load_policy(args.policy)
    dtype = resolve_dtype("auto", args.device)
    spec = specs_of(args.model, dtype)[0]
    cases = {p.case.phase: p.case for p in probes_of(spec, dtype, 16) if p.required and not p.check}
    found = [
        resolve(policy, case, lambda name, c: declared_reasons(name, c, device=args.device)) for case in cases.values()
    ]
    if args.json:
        print(json.dumps([r.model_dump(mode="json") for r in found], indent=1))
    else:
        print("\n".join(text.chains(found)))
    return 0 if all(r.chain for r in found) else 1


class ProbeSummary(BaseModel):
    fingerprint_id: str
    requested: dict[str, str]
    resolved: dict[str, str]
    fallbacks: list[dict[str, Any]]
    results: list[dict[str, Any]]


def _probe(args: argparse.Namespace) -> int:
    from attention import startup
    from attention.drift import check_place, write_rows
    from attention.probe import unmet

    check_count("--jobs", args.jobs)
    check_seconds("--timeout-s", args.timeout_s)
    check_seconds("--budget-s", args.budget_s, or_none=True)
    if args.cells is not None:
        return _probe_cells(args)
    if args.out and args.out.suffix:
        check_place(args.out)
    job: ProbeJob = (
        _job(args, ProbeJob) if args.job else ProbeJob(setup=_setup(args), level="full", timeout_s=args.timeout_s)
    )
    results = startup.probe(
        job.setup,
        job.timeout_s,
        level=job.level,
        backends=_probed(args, job),
        jobs=args.jobs or _jobs(job.setup.device),
        try_declared=args.try_declared_failures,
    )
    if not args.out and not args.json:
        _show(results)  # before the decision: with no backend left, these rows say why
    dispatcher = startup.decide(job.setup, results)
    found = startup.identify(job.setup, dispatcher)
    summary = ProbeSummary(
        fingerprint_id=found.id,
        requested=dict(dispatcher.requested),
        resolved=dict(dispatcher.resolved),
        fallbacks=[
            {
                "phase": f.phase,
                "from": f.from_backend,
                "to": f.to_backend,
                "reasons": [str(r) for r in f.reasons],
            }
            for f in dispatcher.fallbacks
        ],
        results=[r.model_dump(mode="json") for r in results],
    )
    if job.evidence:
        _rows(job.evidence, "probes", [r.row() for r in results], found.id, found.identity.model_id)
    if args.out and args.out.suffix:
        write_rows(args.out, results)
    elif args.out:
        write_result(args.out, summary)
    failed = unmet(results)
    if args.json:
        print(summary.model_dump_json(indent=1))
    elif not args.out:
        print(f"resolved: {', '.join(f'{phase} {name}' for phase, name in dispatcher.resolved.items())}")
        print(_verdict(failed))
    return 1 if failed else 0


def _probed(args: argparse.Namespace, job: ProbeJob) -> tuple[str, ...] | None:
    """The backends to probe; None for those of the policy."""
    from attention.backends import NAMES, chosen

    if args.backends is not None:
        return chosen(args.backends)
    return None if args.job or job.setup.device != "cpu" else NAMES


def _verdict(failed: list[tuple[str, str]]) -> str:
    """What the exit code of `probe` says."""
    if not failed:
        return "exit 0: every required probe that the declared rules allow here passed"
    return f"exit 1: required and not passed: {', '.join(f'{backend} {probe}' for backend, probe in failed)}"


def _probe_cells(args: argparse.Namespace) -> int:
    """Probe a file of cells: rows, and no decision."""
    from attention.backends import chosen
    from attention.cells import load_cells
    from attention.drift import RowsLog, check_place
    from attention.probe import was_not_reached
    from attention.probe_workers import probe_all
    from attention.warm import pending

    check_device(args.device)
    backends, probes = chosen("all" if args.backends is None else args.backends), load_cells(args.cells)
    is_pending = pending(args.compiled)
    if args.out:
        check_place(args.out)
    earlier = _reached(args.out) if args.resume and args.out else []
    known = {(row.backend, row.probe, row.case) for row in earlier}
    if all((name, probe.name, probe.case) in known for name in backends for probe in probes):
        print(f"{args.out}: has the rows of all these probes already, and stays as it is", file=sys.stderr)
        if args.json:
            print(json.dumps({"results": []}, indent=1))
        return 0
    log = RowsLog(args.out, earlier) if args.out else None
    try:
        results = probe_all(
            backends,
            probes,
            device=args.device,
            timeout_s=args.timeout_s,
            jobs=args.jobs or _jobs(args.device),
            try_declared=args.try_declared_failures,
            by_head_dim=True,
            budget_s=None if args.budget_s is None else args.budget_s - (time.monotonic() - STARTED),
            known=known,
            is_pending=is_pending,
            heard=log.add if log else lambda rows: None,
            progress=_progress("probes"),
        )
    except KeyboardInterrupt:
        if log:
            print(f"stopped; --out {args.out} --resume goes on with what is left", file=sys.stderr)
        raise
    finally:
        if log:
            log.close()
    if log:
        ended = [row for row in results if row.level == "execute" or row.status != "pass"]
        print(f"{args.out}: {_counts(ended)}", file=sys.stderr)
    if args.json:
        print(json.dumps({"results": [r.model_dump(mode="json") for r in results]}, indent=1))
    elif not args.out:
        _show(results)
        print("a file of cells requires nothing")
    return 3 if any(map(was_not_reached, results)) else 0


def _reached(out: Path) -> list[Any]:
    """Rows of an earlier run but those of probes that it did not reach."""
    from attention.drift import finish_log, read_rows
    from attention.probe import was_not_reached

    finish_log(out)
    rows = read_rows(out) if out.is_file() else []
    lacking = {(row.backend, row.probe, row.case) for row in rows if was_not_reached(row)}
    return [row for row in rows if (row.backend, row.probe, row.case) not in lacking]


def _jobs(device: str) -> int:
    return 4 if device.startswith("cuda") else 2


def _show(results: list[Any]) -> None:
    """A line a row under a header, then how many of each status."""
    rows: list[tuple[str, ...]] = [("backend", "probe", "phase", "level", "required", "status", "reasons")]
    for result in results:
        required, reasons = "yes" if result.required else "no", "; ".join(map(str, result.reasons))
        rows.append((result.backend, result.probe, result.case.phase, result.level, required, result.status, reasons))
    print("\n".join(_aligned(rows)))
    print(f"{len(results)} rows: {_counts(results)}")


def _counts(results: list[Any]) -> str:
    """How many rows have which status; what declared rules refuse apart from what ran and failed."""
    ended = Counter("refused" if row.level == "static" and row.status == "fail" else row.status for row in results)
    shown = [f"{ended[status]} {status}" for status in ("pass", "fail")]
    return ", ".join([*shown, *(f"{num} {status}" for status, num in ended.items() if status not in ("pass", "fail"))])


def _replay(args: argparse.Namespace) -> int:
    if sum(file is not None for file in (args.cases, args.prompts, args.job)) != 1:
        raise UserError("replay takes one of --cases FILE, --prompts FILE and --job FILE, and --out DIR")
    if args.cases is not None:
        from attention.replay.command import record_cases

        return record_cases(args, _setup(args), _progress("replay"))
    if args.prompts is not None:
        from attention.replay.prompts import record_prompts

        return record_prompts(args, _setup(args), _progress("replay"))
    from attention import startup
    from attention.model import specs_of
    from attention.replay import business, prompts, tensor
    from attention.replay.throughput import Meter
    from attention.replay.truths import Truths, compute

    job: ReplayJob = _job(args, ReplayJob)
    dispatcher = startup.decide(job.setup, [])
    found = startup.identify(job.setup, dispatcher)
    runner = startup.load(job.setup, dispatcher)
    specs = specs_of(job.setup.model, found.identity.dtype)
    captured = _captured(runner, job, specs, args.out)
    meter = Meter(job.setup.device)
    oracle = meter.oracle(compute)
    truths = Truths(job.tensor.truths, oracle) if job.tensor.truths else None
    sources = tensor.Sources(captured, oracle=truths or oracle, backwards=job.evidence.side == "candidate", meter=meter)
    rows = list(
        tensor.rows(
            job.setup,
            job.tensor,
            specs,
            (found.identity.dtype, "bfloat16"),
            dispatcher.resolved,
            startup.scale_factor(job.setup.fault),
            _progress("tensor replay"),
            sources,
        )
    )
    throughput = meter.summary(len(rows))
    recorded = prompts.record_side(runner, job, found, args.out, _progress)
    answers = business.answer(runner, job.business, _progress("business replay"))
    _rows(job.evidence, "tensor_replay", rows, found.id, found.identity.model_id)
    summary = {
        "fingerprint_id": found.id,
        "cases": len(rows),
        "errors": sum("error" in row for row in rows),
        "throughput": throughput.row(),
        "truths": {"computed": truths.num_computed, "read": truths.num_read} if truths else None,
        **recorded,
        "answers": answers.model_dump()["answers"],
    }
    write_result(args.out, summary)
    return 0


def _captured(runner: Any, job: ReplayJob, specs: list[Any], out: Path) -> Any:
    """Activations of the served model, where the plan asks for them."""
    if "activations" not in job.tensor.inputs:
        return {}
    from attention.replay import activations
    from attention.replay.tensor import longest

    path = job.tensor.activations or out / "activations.safetensors"
    num_tokens = longest(job.tensor.max_kv_len)
    return activations.capture(runner, specs, job.model.prompts, job.tensor.seeds[0], num_tokens, path)


def _compare(args: argparse.Namespace) -> int:
    if (len(args.recordings), args.job is None) not in ((2, True), (0, False)):
        raise UserError("compare takes two recordings, A and B, or --job FILE and --out DIR")
    if args.recordings:
        from attention.replay import states
        from attention.replay.command import compare_recordings

        check_device(args.device)
        kinds = {folder: states.kind_of(folder) for folder in args.recordings}
        if {"cases", "prompts"} <= set(kinds.values()):
            one, other = (f"{folder} is of {kind}" for folder, kind in kinds.items())
            raise UserError(f"compare: {one}, {other}; name two of a kind")
        if "prompts" not in kinds.values():
            return compare_recordings(args)
        from attention.replay.prompts import compare_prompts

        return compare_prompts(args)
    from attention.replay.prompts import compare_sides

    write_result(args.out, compare_sides(_job(args, CompareJob)))
    return 0


def _bench(args: argparse.Namespace) -> int:
    if args.what == "dispatch":
        return _bench_dispatch(args)
    from attention import bench

    bench.main(_job(args, BenchJob))
    return 0


def _bench_dispatch(args: argparse.Namespace) -> int:
    """Exit 1 when a captured graph has another number of nodes than the plain call's."""
    from attention import bench_dispatch
    from attention.backends import expand
    from attention.cases import parse_batch
    from attention.matrix import declared_reasons
    from attention.model_config import resolve_dtype

    check_device(args.device)
    check_count("--calls", args.calls)
    batches, dtype = tuple(args.batch or ("q1s64", "q16")), resolve_dtype(args.dtype, args.device)
    for batch in batches:
        parse_batch(batch)
    rows = []
    for wish in args.backend or ("torch_sdpa",):
        for name in expand(wish):
            for case in bench_dispatch.cases(batches, dtype, bench_dispatch.PAGE_SIZES.get(name, 16)):
                # A family's kernels that cannot run here are passed over; one that was named must run.
                if name != wish and (reasons := declared_reasons(name, case, device=args.device)):
                    print(f"left out: {name} {case.case_id}: {reasons[0]}", file=sys.stderr)
                    continue
                rows.append(bench_dispatch.measure(name, case, device=args.device, calls=args.calls))
    if not rows:
        raise UserError(f"bench dispatch: none of {', '.join(args.backend)} runs on {args.device}; see above")
    print(json.dumps(bench_dispatch.document(rows), indent=1) if args.json else "\n".join(bench_dispatch.table(rows)))
    return 1 if any(row.nodes_equal is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
