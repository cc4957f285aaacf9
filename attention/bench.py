"""Measurement: a resident worker that times attention calls, model steps and ceilings on request.

    python -m attention bench --job job.json      # then one JSON command a line on stdin

Champion and candidate usually live in two environments. Each has a worker like this one; the caller
alternates between them (A B B A), so that both see the same minutes of the same machine. A worker
holds the buffers of the last thing it was asked for and only runs when asked. Inputs are random: constant data draws
less power and measures faster. A command that fails is answered with its outcome; after an illegal access the worker
ends, because its device is lost.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import torch
from pydantic import ValidationError

from attention import ceilings
from attention.cases import AttentionCase
from attention.contender import Ready, peak_bytes, prepare
from attention.dispatch import Dispatcher
from attention.errors import one_line
from attention.job import BenchCommand, BenchJob, BenchSample
from attention.model import Chunk, Runner
from attention.outcomes import MeasurementError, outcome_of
from attention.timing import Call, CudaClock, Rotation, clock_of


@dataclass(frozen=True)
class _Held:
    """What is being timed, and what its answers say beside the seconds."""

    rotation: Rotation
    sample: BenchSample
    held: Any  # whatever the call reads
    release: Callable[[], None] = lambda: None


class Bench:
    """The calls of one environment: the last one asked for, and the ceilings."""

    def __init__(self, dispatcher: Dispatcher, device: str, runner: Runner | None) -> None:
        self._dispatcher = dispatcher
        self._device = device
        self._runner = runner
        self._clock = clock_of(device)
        #: A shorter read than several times the L2 is mostly launch.
        self._least_read = 4 * self._clock.l2_bytes if isinstance(self._clock, CudaClock) else 0
        self._held: dict[str, tuple[str, _Held]] = {}  # by kind: attention or a step, and either ceiling

    def run(self, command: BenchCommand) -> BenchSample:
        kind, key = self._place(command)
        known, held = self._held.get(kind, ("", None))
        is_first = held is None or known != key
        if held is None or is_first:
            held = None  # its tensors must be gone before the next are made
            self._drop(kind)
            held = self._build(command)
            self._held[kind] = (key, held)
        seconds = self._clock.times(held.rotation, min_s=command.min_s)
        told = held.sample
        if not is_first:  # what the first run showed is told once
            told = BenchSample(**told.model_dump(include={"backend", "confirmed", "work", "num_replicas"}))
        waited = held.rotation.num_waited
        more = {"seconds": tuple(seconds), "peak_bytes": peak_bytes(self._device), "num_waited": waited}
        return told.model_copy(update=more)

    def _place(self, command: BenchCommand) -> tuple[str, str]:
        """Under which kind it is held, and what tells it from others of that kind: many cases share a ceiling."""
        if command.metric == "matmul_s":
            return command.metric, command.case.dtype
        if command.metric == "read_s":
            return command.metric, str(ceilings.num_words(command.case, self._least_read))
        return "measured", command.model_dump_json(exclude={"min_s"})

    def _drop(self, kind: str) -> None:
        """Free the tensors of what was timed before: the next case may need all the memory."""
        _, old = self._held.pop(kind, ("", None))
        if old is None:
            return
        old.release()
        del old
        gc.collect()
        if isinstance(self._clock, CudaClock):
            torch.cuda.empty_cache()

    def _build(self, command: BenchCommand) -> _Held:
        case = command.case
        if command.metric == "kernel_s":
            return self._attention(command)
        if command.metric in ("matmul_s", "read_s"):
            ceiling = self._ceiling(command)
            ceiling.call()
            return _Held(Rotation([ceiling.call]), BenchSample(work=ceiling.work), ceiling)
        if self._runner is None:
            raise ValueError(f"{command.metric} needs the model: set with_model in the job")
        step, free = _model_step(self._runner, case)
        started = time.perf_counter()
        step()
        first_call_s = time.perf_counter() - started
        sample = BenchSample(
            backend=self._dispatcher.resolved[case.phase],
            confirmed=self._dispatcher.confirmed[case.phase],
            first_call_s=first_call_s,
        )
        return _Held(self._slowed(Rotation([step]), command.slowdown), sample, None, free)

    def _attention(self, command: BenchCommand) -> _Held:
        backend = command.backend or self._dispatcher.resolved[command.case.phase]
        ready: Ready = prepare(backend, command.case, self._device, self._clock, command.replicas)
        sample = BenchSample(
            backend=ready.backend,
            confirmed=ready.confirmed,
            first_call_s=ready.first_call_s,
            cold_ratio=ready.cold_ratio,
            workspace_bytes=ready.workspace_bytes,
            graph_capture=ready.graph_capture,
            num_replicas=ready.rotation.replicas,
        )
        return _Held(self._slowed(ready.rotation, command.slowdown), sample, ready.held)

    def _slowed(self, rotation: Rotation, share: float) -> Rotation:
        """The calls of a drill's slower contender; as they are without one."""
        if not share:
            return rotation
        return Rotation([self._clock.slowed(call, share) for call in rotation.calls], rotation.replicas)

    def _ceiling(self, command: BenchCommand) -> ceilings.Ceiling:
        if command.metric == "matmul_s":
            return ceilings.matmul(getattr(torch, command.case.dtype), self._device)
        return ceilings.read(command.case, self._device, self._least_read)


def _model_step(runner: Runner, case: AttentionCase) -> tuple[Call, Callable[[], None]]:
    """One forward and its logits: a whole prefill (TTFT without queue), or one decode step (TPOT). And how its pages
    are given back."""
    ids = torch.randint(10, min(10_000, len(runner.tokenizer)), (max(m.kv_len for m in case.members),)).tolist()
    tables: list[tuple[int, ...]] = []

    def free() -> None:
        for table in tables:
            runner.pool.free(list(table))

    try:
        for m in case.members:
            tables.append(tuple(runner.pool.alloc(-(-m.kv_len // runner.page_size))))
        chunks = [
            Chunk(tuple(ids[m.kv_len - m.q_len : m.kv_len]), m.kv_len - m.q_len, table)
            for m, table in zip(case.members, tables, strict=True)
        ]
        for member, table in zip(case.members, tables, strict=True):
            if member.kv_len > member.q_len:
                runner.forward([Chunk(tuple(ids[: member.kv_len - member.q_len]), 0, table)])
    except Exception:
        free()
        raise
    return lambda: runner.logits(runner.forward(chunks)), free


def serve(job: BenchJob, source: IO[str], sink: IO[str]) -> None:
    """Answer commands until the source ends, or the device is lost. A command that fails is answered with its error."""
    from attention.startup import decide, identify, load

    torch.set_num_threads(job.setup.num_threads)
    dispatcher = decide(job.setup, [])
    runner = load(job.setup, dispatcher) if job.with_model else None
    bench = Bench(dispatcher, job.setup.device, runner)
    ready = {
        "ready": True,
        "resolved": dispatcher.resolved,
        "fingerprint_id": identify(job.setup, dispatcher).id,
        "device_name": torch.cuda.get_device_name(job.setup.device) if job.setup.device.startswith("cuda") else "cpu",
    }
    print(json.dumps(ready), file=sink, flush=True)
    with torch.inference_mode():
        for line in source:
            answer = _answered(bench, line)
            print(answer.model_dump_json(), file=sink, flush=True)
            if answer.outcome == "illegal_access":
                return


def _answered(bench: Bench, line: str) -> BenchSample:
    try:
        return bench.run(BenchCommand.model_validate_json(line))
    except ValidationError as error:
        return BenchSample(outcome="failed", error=f"not a command: {error.errors()[0]['msg']}")
    except Exception as error:  # whatever a backend raises is a row, and the next command is answered
        name = "" if isinstance(error, MeasurementError) else f"{type(error).__name__}: "
        return BenchSample(outcome=outcome_of(error), error=f"{name}{one_line(error)}"[:500])


def main(job: BenchJob) -> None:
    # stdout is the channel: whatever a library prints, from C too, must not enter it.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(job, sys.stdin, channel)
