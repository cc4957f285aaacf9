"""Measurement: a resident worker that times attention calls and model steps on request.

    python -m attention bench --job job.json      # then one JSON command a line on stdin

Champion and candidate usually live in two environments. Each has a worker like this one; the caller
alternates between them (A B B A), so that both see the same minutes of the same machine. A worker
holds its buffers and only runs when asked. Inputs are random: constant data draws less power and
measures faster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import torch
from pydantic import BaseModel, ValidationError

from attention import confirm
from attention.backends import create
from attention.cases import AttentionCase
from attention.dispatch import Dispatcher
from attention.job import BenchCommand, BenchJob
from attention.model import Chunk, Runner
from attention.replay.problems import spec_of


class Sample(BaseModel):
    """Answer: mean seconds a call over `calls`, what ran, and the first call's time (once a case)."""

    seconds: float
    calls: int
    confirmed: str
    first_call_s: float | None = None
    error: str | None = None


class Bench:
    """The calls of one environment, built once per (metric, case)."""

    def __init__(self, dispatcher: Dispatcher, device: str, runner: Runner | None) -> None:
        self._dispatcher = dispatcher
        self._device = device
        self._runner = runner
        self._calls: dict[tuple[str, str], tuple[Callable[[], Any], str, float]] = {}

    def run(self, command: BenchCommand) -> Sample:
        key = (command.metric, command.case.case_id)
        first = None
        if key not in self._calls:
            call = self._build(command)
            started = time.perf_counter()
            _, confirmed = self._watched(call, command)
            first = time.perf_counter() - started
            self._calls[key] = (call, confirmed, first)
        call, confirmed, _ = self._calls[key]
        calls, started = 0, time.perf_counter()
        while True:
            call()
            calls += 1
            if self._device.startswith("cuda"):
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - started
            if elapsed >= command.min_s:
                return Sample(seconds=elapsed / calls, calls=calls, confirmed=confirmed, first_call_s=first)

    def _watched(self, call: Callable[[], Any], command: BenchCommand) -> tuple[Any, str]:
        if command.metric == "kernel_s":
            return confirm.watch(call, device=self._device)
        call()
        return None, self._dispatcher.confirmed[command.case.phase]

    def _build(self, command: BenchCommand) -> Callable[[], Any]:
        if command.metric == "kernel_s":
            return self._attention(command.case)
        if self._runner is None:
            raise ValueError(f"{command.metric} needs the model: set with_model in the job")
        return _model_step(self._runner, command.case)

    def _attention(self, case: AttentionCase) -> Callable[[], Any]:
        from attention.backends.base import Batch

        spec = spec_of(case)
        page = case.page_size or 16
        pages_of = [-(-m.kv_len // page) for m in case.members]
        order = torch.randperm(sum(pages_of)).tolist()
        tables, used = [], 0
        for count in pages_of:
            tables.append(tuple(order[used : used + count]))
            used += count
        batch = Batch(tuple(m.q_len for m in case.members), tuple(m.kv_len for m in case.members), tuple(tables), page)
        shape = (len(order), page, spec.heads_kv)
        q = torch.randn(sum(batch.q_lens), spec.heads_q, spec.head_dim_qk).to(spec.dtype).to(self._device)
        k = torch.randn(*shape, spec.head_dim_qk).to(spec.dtype).to(self._device)
        v = torch.randn(*shape, spec.head_dim_vo).to(spec.dtype).to(self._device)
        planned = create(self._dispatcher.resolved[case.phase], self._device).plan(batch, spec)

        def call() -> None:
            with torch.inference_mode():
                planned.run(q, k, v)

        return call


def _model_step(runner: Runner, case: AttentionCase) -> Callable[[], Any]:
    """One forward and its logits: a whole prefill (TTFT without queue), or one decode step (TPOT)."""
    ids = torch.randint(10, min(10_000, len(runner.tokenizer)), (max(m.kv_len for m in case.members),)).tolist()
    tables = [tuple(runner.pool.alloc(-(-m.kv_len // runner.page_size))) for m in case.members]
    chunks = [
        Chunk(tuple(ids[m.kv_len - m.q_len : m.kv_len]), m.kv_len - m.q_len, table)
        for m, table in zip(case.members, tables, strict=True)
    ]
    for member, table in zip(case.members, tables, strict=True):
        if member.kv_len > member.q_len:
            runner.forward([Chunk(tuple(ids[: member.kv_len - member.q_len]), 0, table)])
    return lambda: runner.logits(runner.forward(chunks))


def serve(job: BenchJob, source: IO[str], sink: IO[str]) -> None:
    """Answer commands until the source ends. A command that fails is answered with its error."""
    from attention.startup import decide, identify, load

    torch.set_num_threads(job.setup.num_threads)
    dispatcher = decide(job.setup, [])
    runner = load(job.setup, dispatcher) if job.with_model else None
    bench = Bench(dispatcher, job.setup.device, runner)
    ready = {"ready": True, "resolved": dispatcher.resolved, "fingerprint_id": identify(job.setup, dispatcher).id}
    print(json.dumps(ready), file=sink, flush=True)
    for line in source:
        try:
            answer = bench.run(BenchCommand.model_validate_json(line))
        except (ValidationError, ValueError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}"[:500]
            answer = Sample(seconds=float("nan"), calls=0, confirmed="", error=text)
        print(answer.model_dump_json(), file=sink, flush=True)


def main(job: BenchJob) -> None:
    # stdout is the channel: whatever a library prints must not enter it.
    channel, sys.stdout = sys.stdout, sys.stderr
    serve(job, sys.stdin, channel)
