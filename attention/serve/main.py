"""`python -m attention serve`: one instance, from its flags to its last row.

Listens at once, so that /health can say why it is not ready, then starts the model on the engine
thread. SIGTERM stops admitting, lets what is in flight finish for ten seconds, writes the rows and
exits 0; Ctrl-C does the same and exits 130.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import uvicorn

from attention.errors import UserError
from attention.faults import FAULTS, check_fault
from attention.fingerprint import node
from attention.scheduler import Limits
from attention.serve.app import DRAIN_S, create_app
from attention.serve.engine import Engine
from attention.serve.log import event, log_libraries_as_events
from attention.serve.metrics import Metrics
from attention.serve.request_log import RequestLog
from attention.serve.service import Instance, Service

HOST = "127.0.0.1"
# Longer than a proxy's idle timeout (Envoy: one hour): whoever closes first must be the proxy, or it
# sends a request into a connection that is just being closed.
KEEP_ALIVE_S = 3700


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m attention serve`."""
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers causal LM")
    parser.add_argument("--policy", type=Path, required=True, help="attention policy (YAML)")
    parser.add_argument("--port", type=int, required=True, help=f"port on {HOST}")
    parser.add_argument("--release-id", required=True, help="release that this instance serves under")
    parser.add_argument("--side", choices=("champion", "control", "candidate"), required=True)
    parser.add_argument("--instance", required=True, help="name of this process in rows and headers")
    parser.add_argument("--lake", type=Path, required=True, help="evidence lake that rows are written to")
    parser.add_argument("--gpu", default="cpu", help="GPU model as records name it; cpu without one")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--fault", help=f"drill only: {', '.join(FAULTS)}")


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal before rows are written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code. Raises UserError for bad input or a start that it prevents."""
    log_libraries_as_events()
    _check(args)
    if args.fault:
        event("fault_injected", severity="critical", fault=args.fault, effect=FAULTS[args.fault])
    listener = _bind(args.port)
    instance = Instance(
        release_id=args.release_id,
        side=args.side,
        name=args.instance,
        model=args.model.name,
        gpu=args.gpu,
        node=node(),
        fault=args.fault,
    )
    return _Process(args, instance, listener).run()
