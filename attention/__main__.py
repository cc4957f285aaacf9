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
import os
import sys
from pathlib import Path
from typing import Any

from attention.cases import DRAWN_INPUTS, REPLAY_INPUTS
from attention.errors import exit_code
from attention.verbs import benches, identity, probes, replays, rules

DEFAULT_MODEL = Path(os.environ.get("ATTENTION_RELEASE_MODELS", "data/models")) / "smollm2-135m-instruct"
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
  echo '{"setup": {"model": "data/models/smollm2-135m-instruct", "policy": "data/policies/cpu-flash.yaml"},
    "lengths": [[64, 16, 1]], "max_running": 2, "saturation_requests": 8, "levels": [0.5, 1.2], "duration_s": 5,
    "slo_ttft_s": 2, "slo_tpot_s": 0.2}' >stress.json
  python -m attention bench stress --job stress.json --out RUN
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

    fingerprint = verb(
        "fingerprint", "what decides which kernel runs, as an id", identity.fingerprint, job=True, setup=True
    )
    fingerprint.add_argument(
        "--diff", nargs=2, type=Path, metavar=("A", "B"), help="two files of --json, or folders of --out"
    )
    matrix = verb("matrix", "the declared compatibility matrix", rules.matrix)
    matrix.add_argument("--json", action="store_true", help="one JSON document on stdout")
    matrix.add_argument(
        "--drift",
        nargs="+",
        type=Path,
        metavar="OBSERVED",
        help="a file of `probe --out` against the rules that it met, or two files against each other",
    )
    resolve = verb("resolve", "the ordered chain of a policy, and why others are left out", rules.resolve_policy)
    resolve.add_argument("policy", type=Path, help="attention policy (YAML)")
    resolve.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: %(default)s)")
    resolve.add_argument("--device", default="cpu", help="cpu or cuda")
    resolve.add_argument("--json", action="store_true", help="one JSON document on stdout")
    probe = verb("probe", "run the capability probes", probes.probe, job=True, setup=True)
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
    replay = verb("replay", "record the numerical replay of one side", replays.replay, job=True, setup=True)
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
        "compare", "judge recording B of `replay` beside A; with --job, the model layer's", replays.compare, job=True
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
    does = "a worker that times what stdin asks for; dispatch: host overhead; stress: load on the served model"
    bench = verb("bench", does, benches.bench, job=True)
    what = "dispatch: a planned run against the plain call; stress: saturation and open-loop load, as --job says"
    bench.add_argument("what", nargs="?", choices=("dispatch", "stress"), help=what)
    bench.add_argument("--backend", action="append", help="dispatch: backend or family; may be repeated (torch_sdpa)")
    bench.add_argument("--batch", action="append", help="dispatch: batch such as q1s64 (q1s64 and q16)")
    bench.add_argument("--calls", type=int, help="dispatch: pairs of calls (20000 on a GPU, 2000 on the CPU)")
    bench.add_argument("--device", default="cpu", help="dispatch: cpu or cuda")
    bench.add_argument("--dtype", default="auto", help="dispatch: float32 on the CPU, else bfloat16")
    bench.add_argument("--json", action="store_true", help="dispatch: one JSON document on stdout")
    serve.add_arguments(verb("serve", "serve a model behind the OpenAI API", serve.run))
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
