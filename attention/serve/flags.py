"""The flags of `python -m attention serve`; imports nothing of the extra `serve`, so that the other verbs
and `--help` work without it."""

from __future__ import annotations

import argparse
from pathlib import Path

from attention.faults import FAULTS
from attention.limits import Limits

HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m attention serve`."""
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers causal LM")
    parser.add_argument("--policy", type=Path, required=True, help="attention policy (YAML)")
    parser.add_argument("--port", type=int, default=8080, help=f"port on {HOST} (default: %(default)s)")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="before it is ready, replay a few texts: backends less exact than plain math give way",
    )
    parser.add_argument("--release-id", default="alone", help="release that it serves under (default: %(default)s)")
    parser.add_argument("--side", choices=("champion", "control", "candidate"), default="champion")
    parser.add_argument("--instance", default="serve-1", help="its name in rows and headers (default: %(default)s)")
    parser.add_argument(
        "--lake", type=Path, default=Path("data/lake"), help="evidence lake for its rows (default: %(default)s)"
    )
    parser.add_argument("--gpu", default="cpu", help="GPU model as records name it; cpu without one")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--step-timeout-s",
        type=float,
        default=120.0,
        help="a step that takes longer hangs: the process begins anew without its backend (default: %(default)g)",
    )
    # For a process that begins anew.
    parser.add_argument("--retired", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    limits = parser.add_argument_group("limits, all in the fingerprint")
    limits.add_argument(
        "--max-queue", type=int, default=Limits.max_queue, help="requests that wait; one more is a 429 (%(default)s)"
    )
    limits.add_argument(
        "--max-running", type=int, default=Limits.max_running, help="requests in one step (%(default)s)"
    )
    limits.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=Limits.max_prompt_tokens,
        help="of one prompt (%(default)s); the context and the cache may hold less",
    )
    limits.add_argument(
        "--max-output-tokens", type=int, default=Limits.max_output_tokens, help="of one answer (%(default)s)"
    )
    limits.add_argument(
        "--request-timeout-s",
        type=float,
        default=Limits.request_timeout_s,
        help="from arrival to the last token; then a 504 (%(default)s)",
    )
    limits.add_argument(
        "--max-body-bytes", type=int, default=Limits.max_body_bytes, help="of one request (%(default)s)"
    )
    limits.add_argument(
        "--cuda-graphs", action="store_true", help="replay decode steps from CUDA graphs; on a GPU, not measured yet"
    )
    parser.add_argument(
        "--admin-token-file",
        type=Path,
        help="turns on POST /admin/drain and /admin/resume for who holds the token in this file (mode 0600, one line)",
    )
    parser.add_argument("--fault", help=f"drill only: {', '.join(FAULTS)}")


def run(args: argparse.Namespace) -> int:
    """Start the server; see `attention.serve.main.run`."""
    from attention.serve import main

    return main.run(args)
