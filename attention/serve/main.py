"""`python -m attention serve`: one instance, from its flags to its last row.

Listens at once, so that /health can say why it is not ready, then starts the model on the engine
thread. Where the policy leaves no backend it stays, unready, and says why. Where a backend hangs it begins
anew: the same process, port and queue of connections, without that backend. SIGTERM stops admitting, lets what
is in flight finish for ten seconds, writes the rows and exits 0; Ctrl-C does the same and exits 130.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping

import torch
import uvicorn

from attention import confirm
from attention.backends import NAMES
from attention.dispatch import NoBackendError
from attention.errors import UserError, nearest
from attention.faults import FAULTS, check_fault
from attention.fingerprint import node
from attention.flags import check_count, check_seconds
from attention.job import Setup
from attention.limits import Limits
from attention.model_config import read_config
from attention.policy import load_policy
from attention.reasons import Code, Reason
from attention.serve.admin import read_token
from attention.serve.app import DRAIN_S, create_app
from attention.serve.engine import SHUTTING_DOWN, Engine
from attention.serve.fallbacks import FallbackNotice
from attention.serve.flags import HOST, add_arguments
from attention.serve.log import event, log_libraries_as_events
from attention.serve.metrics import Metrics
from attention.serve.request_log import Instance, RequestLog
from attention.serve.service import Service
from attention.serve.tracing import tracing
from attention.startup import prepare

__all__ = ["add_arguments", "run"]

# Longer than a proxy's idle timeout (Envoy: one hour): whoever closes first must be the proxy, or it
# sends a request into a connection that is just being closed.
KEEP_ALIVE_S = 3700
# Between the answers to those whose backend hangs and the end of this life of the process.
GOODBYE_S = 0.5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal before rows are written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Exit code: 0, 130 after Ctrl-C, 3 when the model crashed while it started.

    Raises UserError for bad input, and when no backend of the policy can serve.
    """
    log_libraries_as_events()
    _check(args)
    if args.fault:
        event("fault_injected", severity="critical", fault=args.fault, effect=FAULTS[args.fault])
    token = read_token(args.admin_token_file) if args.admin_token_file else None
    # The profiler that confirms backends must be started first on the main thread, or it complains.
    confirm.watch(lambda: None)
    listener = socket.socket(fileno=args.listen_fd) if args.listen_fd is not None else _bind(args.port)
    return _Process(args, listener, token).run()


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything starts."""
    check_fault(args.fault)
    read_config(args.model)
    load_policy(args.policy)
    for flag, text in (("--release-id", args.release_id), ("--instance", args.instance)):
        # Both stand in a header of every response; the release id also names a folder of the lake.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", text):
            allowed = "1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first"
            raise UserError(f"{flag} {text!r}: it goes into response headers and file names; write {allowed}")
    if args.threads < 1:
        raise UserError(f"--threads {args.threads}: at least 1")
    for name in ("max_queue", "max_running", "max_prompt_tokens", "max_output_tokens", "max_body_bytes"):
        check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    check_seconds("--request-timeout-s", args.request_timeout_s)
    check_seconds("--step-timeout-s", args.step_timeout_s)
    if args.cuda_graphs and args.gpu == "cpu":
        raise UserError("--cuda-graphs: there are none on a CPU; name the GPU with --gpu")
    for name in retired_of(args.retired):
        if name not in NAMES:
            raise UserError(f"--retired {name}: no backend; {nearest(name, NAMES)}")


def retired_of(flags: list[str]) -> Mapping[str, Reason]:
    """`NAME=TEXT` of an earlier life of this process, by backend."""
    return {
        name: Reason(
            code=Code.TIMEOUT, dimension="step", observed=text, allowed="a result", source="serving", message=text
        )
        for name, _, text in (flag.partition("=") for flag in flags)
    }


def limits_of(args: argparse.Namespace) -> Limits:
    """The flags as limits; a step grows with the requests that it must hold, beside one piece of a prompt."""
    return Limits(
        max_running=args.max_running,
        max_step_tokens=max(Limits.max_step_tokens, args.max_running + Limits.prefill_chunk),
        max_queue=args.max_queue,
        max_prompt_tokens=args.max_prompt_tokens,
        max_output_tokens=args.max_output_tokens,
        max_body_bytes=args.max_body_bytes,
        request_timeout_s=args.request_timeout_s,
        cuda_graphs=args.cuda_graphs,
    )


def _bind(port: int) -> socket.socket:
    """A listening socket on loopback. Raises UserError when the port is taken or no port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Without it a port stays unusable for a minute after the instance before.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            text = f"port {port} on {HOST} is in use; stop what listens there or choose another --port"
            raise UserError(text) from error
        raise UserError(f"--port {port}: cannot listen on {HOST}: {error}") from error
    return listener


class _Process:
    """One run of the server: wires the parts, reacts to signals and to the engine."""

    def __init__(self, args: argparse.Namespace, listener: socket.socket, admin_token: str | None) -> None:
        instance = Instance(
            release_id=args.release_id,
            side=args.side,
            name=args.instance,
            model=args.model.resolve().name,
            gpu=args.gpu,
            node=node(),
            fault=args.fault,
        )
        setup = Setup(
            model=args.model,
            policy=args.policy,
            device="cpu" if args.gpu == "cpu" else "cuda",
            dtype=args.dtype,
            num_threads=args.threads,
            limits=limits_of(args),
            fault=args.fault,
        )
        metrics = Metrics(node=instance.node, gpu=instance.gpu, model=instance.model)
        log = RequestLog(args.lake, instance)
        notice = FallbackNotice(metrics, log, emit=load_policy(args.policy).emit_fallback_event)
        engine = Engine(
            lambda: prepare(
                setup,
                notice,
                retired=retired_of(args.retired),
                with_replay=args.replay,
                on_confirmation=metrics.observe_confirmation,
            ),
            setup.limits,
            metrics,
            notice,
            fault=args.fault,
            on_change=self._on_change,
        )
        self._step_timeout_s: float = args.step_timeout_s
        self._notice = notice
        self._service = Service(instance, engine, metrics, log, tracing(model=instance.model, instance=instance.name))
        self._listener = listener
        self._signal: int | None = None
        config = uvicorn.Config(
            create_app(self._service, admin_token),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            # What the grace period does not cover is ended by the engine, with an answer that says so.
            timeout_graceful_shutdown=int(DRAIN_S) + 2,
        )
        self._server = _Server(config)

    def run(self) -> int:
        """Serve until a signal or a failed start."""
        asyncio.run(self._serve())
        failure = self._service.engine.failure
        if isinstance(failure, UserError):
            raise failure
        if failure is not None:
            return 3
        event("stopped", release=self._service.instance.release_id, instance=self._service.instance.name)
        code = 130 if self._signal == signal.SIGINT else 0
        if self._service.engine.alive:
            # Still loading a model: the interpreter must not be torn down under it.
            os._exit(code)
        return code

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        event("listening", host=HOST, port=self._listener.getsockname()[1], **self._service.about())
        watching = asyncio.create_task(self._watch_steps())
        await self._server.serve(sockets=[self._listener])
        watching.cancel()

    async def _watch_steps(self) -> None:
        while self._service.engine.step_seconds() < self._step_timeout_s:
            await asyncio.sleep(min(1.0, self._step_timeout_s / 4))
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        """A step never ended, and its thread cannot be ended: answer those who wait, then be a fresh process without
        the backend that was at work. Who connects meanwhile waits in the queue of the same socket."""
        engine = self._service.engine
        at_work = engine.at_work
        text = f"a step has not ended for {self._step_timeout_s:g} s"
        message = f"{text}; at work: {', '.join(at_work) or 'no backend'}; the process begins anew"
        event("engine_hung", severity="critical", backends=list(at_work), message=message)
        self._service.log.add_event("engine_hung", "critical", ", ".join(at_work), message, {"backends": list(at_work)})
        self._service.draining = True
        engine.abandon("error", text)
        await asyncio.sleep(GOODBYE_S)
        await asyncio.to_thread(self._service.log.close)
        descriptor = self._listener.fileno()
        os.set_inheritable(descriptor, True)
        flags = ["--listen-fd", str(descriptor)]
        for name in at_work:
            flags += ["--retired", f"{name}={text}"]
        os.execv(sys.executable, [sys.executable, "-m", "attention", *sys.argv[1:], *flags])  # noqa: S606

    def _stop(self, number: int) -> None:
        """First signal: drain. A second one ends what is still in flight."""
        event("stopping", signal=signal.Signals(number).name, running=self._service.engine.num_running)
        self._server.force_exit = self._signal is not None
        self._signal = number
        self._service.draining = True
        self._server.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(DRAIN_S, self._service.engine.halt)
        loop.call_later(DRAIN_S + 1, self._give_up)

    def _give_up(self) -> None:
        """A step that does not end with the grace period: who waits for it is answered all the same."""
        if self._service.engine.step_seconds() > 1:
            self._service.engine.abandon("cancelled", SHUTTING_DOWN)

    def _on_change(self) -> None:
        """On the engine thread: the model has started, or cannot."""
        engine = self._service.engine
        if engine.started is None:
            event(
                "start_failed",
                severity="critical",
                error=str(engine.failure),
                traceback=traceback.format_exception(engine.failure),
            )
            # With no backend left, whoever asks is told why; anything else is for whoever started this.
            self._server.should_exit = not isinstance(engine.failure, NoBackendError)
            return
        self._service.log.fingerprint_id = engine.started.fingerprint.id
        self._service.metrics.observe_build(
            fingerprint=engine.started.fingerprint.id,
            policy_mode=engine.started.dispatcher.policy.mode,
            torch=torch.__version__,
        )
        for fallback in engine.started.dispatcher.fallbacks:
            self._notice(fallback)
        for phase, found in engine.started.dispatcher.resolutions.items():
            event(
                "backend_resolved",
                phase=phase,
                mode=engine.started.dispatcher.policy.mode,
                requested=found.requested,
                resolved=found.resolved,
                chain=list(found.chain),
                left_out={name: [str(reason) for reason in reasons] for name, reasons in found.excluded.items()},
            )
        for backend, reasons in engine.started.tolerated().items():
            message = f"{backend} serves although: {'; '.join(reasons)}"
            event("tolerated", severity="warning", backend=backend, message=message)
        event("ready", seconds=round(engine.started.seconds, 3), **self._service.about())
