"""Tensor layer: run a seeded plan of cases on the resolved backends and compare with the oracle.

The shapes are those of the model: its heads and head dim, prefill, decode and extend, single and
batched, in the serving dtype and in bfloat16 (whose class rounds P, where kernels differ most).
A case that raises is a row with `error`; the run goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Inputs, Phase, parse_batch, replay_shapes
from attention.job import Setup, TensorPlan
from attention.replay.figures import Measured, measure
from attention.replay.inputs import Captured
from attention.replay.problems import Problem, build, members_of, spec_of
from attention.replay.quantisation import quantisation_row
from attention.replay.throughput import Meter
from attention.replay.truths import Oracle, compute

T = TypeVar("T")
S = TypeVar("S")
Result = tuple[torch.Tensor, torch.Tensor | None]

NUM_AHEAD = 4  # problems that are made while a GPU works, a thread each


def cases(
    spec: AttentionSpec, dtype: str, page_size: int, max_kv_len: int, kv_dtype: str = "auto"
) -> Iterator[AttentionCase]:
    """Cases of one model in one dtype, up to a KV length."""
    for phase, batch in replay_shapes(max_kv_len):
        yield AttentionCase(
            phase=phase,
            batch=batch,
            heads_q=spec.heads_q,
            heads_kv=spec.heads_kv,
            head_dim_qk=spec.head_dim_qk,
            head_dim_vo=spec.head_dim_vo,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=spec.window,
            softcap=spec.softcap,
            page_size=page_size,
        )


def longest(max_kv_len: int) -> int:
    """KV length of the longest member of the plan's cases, in tokens: as many activations are worth capturing."""
    return max((m.kv_len for _, batch in replay_shapes(max_kv_len) for m in parse_batch(batch)), default=1)


@dataclass(frozen=True)
class Sources:
    """Where problems come from: activations of each kind of layer, and who knows the truth."""

    captured: Mapping[AttentionSpec, Captured] = field(default_factory=dict)
    oracle: Oracle = compute
    backwards: bool = False  # the last case first: two sides that share truths meet in the middle
    meter: Meter = field(default_factory=Meter)


def rows(
    setup: Setup,
    plan: TensorPlan,
    specs: list[AttentionSpec],
    dtypes: tuple[str, ...],
    resolved: dict[Phase, str],
    scale_factor: float,
    progress: Any = lambda done, total: None,
    sources: Sources | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of `tensor_replay`, one a (case, inputs, seed)."""
    sources = sources or Sources()
    questions = [
        _Question(case, inputs, seed, sources.captured.get(spec), resolved[case.phase])
        for spec in dict.fromkeys(specs)
        for dtype in dict.fromkeys(dtypes)
        for kv_dtype in plan.kv_dtypes
        for case in cases(spec, dtype, setup.page_size, plan.max_kv_len, kv_dtype)
        for inputs in plan.inputs
        if inputs != "window_edge" or case.windowed
        for seed in plan.seeds
    ]
    if sources.backwards:
        questions.reverse()
    found = _Recorder(setup.device, scale_factor, sources).figures(questions)
    for done, (one, figures) in enumerate(zip(questions, found, strict=True), 1):
        yield {
            "backend": one.backend,
            "case_id": one.case.case_id,
            "case_json": one.case.model_dump_json(),
            "inputs": one.inputs,
            "seed": one.seed,
            "dtype_class": one.case.dtype,
            **figures,
            "time": datetime.now(UTC),
        }
        progress(done, len(questions))


@dataclass(frozen=True)
class _Question:
    case: AttentionCase
    inputs: Inputs
    seed: int
    captured: Captured | None
    backend: str


@dataclass(frozen=True)
class _Made:
    question: _Question
    problem: Problem
    quantisation: dict[str, float]


@dataclass(frozen=True)
class _Launched:
    made: _Made
    measured: Measured
    confirmed: str


class _Recorder:
    """Figures of questions, in order. A GPU is kept fed: threads make the next problems while it works, and figures are
    fetched some cases later, so that an illegal access may show in the rows before its own too."""

    def __init__(self, device: str, scale_factor: float, sources: Sources) -> None:
        self._device, self._scale_factor, self._sources = device, scale_factor, sources
        self._num_ahead = NUM_AHEAD if device.startswith("cuda") else 0
        self._confirmed: dict[tuple[str, AttentionCase], str] = {}

    def figures(self, questions: Iterable[_Question]) -> Iterator[dict[str, Any]]:
        launched: deque[_Launched | Exception] = deque()
        for made in _in_threads(partial(_or_error, self._make), questions, self._num_ahead):
            launched.append(made if isinstance(made, Exception) else _or_error(self._launch, made))
            if len(launched) > self._num_ahead:
                yield _columns(launched.popleft())
        while launched:
            yield _columns(launched.popleft())

    def _make(self, one: _Question) -> _Made:
        case, spec = one.case, spec_of(one.case)
        about: dict[str, Any] = {"device": self._device, "oracle": self._sources.oracle}
        with self._sources.meter.span("inputs"):
            members = members_of(case, spec, one.inputs, one.seed, one.captured, self._device)
        problem = build(case, spec, members, seed=one.seed, **about)
        row = quantisation_row(case, one.inputs, one.seed, problem, captured=one.captured, **about)
        return _Made(one, problem, row)

    def _launch(self, made: _Made) -> _Launched:
        problem, one = made.problem, made.question
        spec = replace(problem.spec, scale=problem.spec.scale * self._scale_factor)
        meter = self._sources.meter
        with torch.inference_mode():
            planned = create(one.backend, self._device).plan(problem.batch, spec)
            with meter.span("kernel"):
                (out, lse), confirmed = self._run(one, lambda: planned.run(problem.q_THD, problem.k, problem.v))
            with meter.span("comparison"):
                measured = measure(out, lse, problem.truth, problem.spec.dtype, problem.batch.q_lens)
        return _Launched(made, measured, confirmed)

    def _run(self, one: _Question, call: Callable[[], Result]) -> tuple[Result, str]:
        """The kernel depends on a case's shape and layout, never on its numbers: one look a case confirms it."""
        key = (one.backend, one.case)
        if key in self._confirmed:
            return call(), self._confirmed[key]
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()  # the profiler sees the whole device, earlier cases too
        result, self._confirmed[key] = confirm.watch(call, device=self._device)
        return result, self._confirmed[key]


def _columns(launched: _Launched | Exception) -> dict[str, Any]:
    """Figures of a case, or why there are none: a case that raises is a row, never the end of the run."""
    fetched = launched if isinstance(launched, Exception) else _or_error(launched.measured.fetch)
    if isinstance(fetched, Exception):
        return {"error": f"{type(fetched).__name__}: {fetched}"[:500]}
    assert isinstance(launched, _Launched)
    return {"confirmed_backend": launched.confirmed, **fetched.row(), **launched.made.quantisation}


def _or_error(call: Callable[..., T], *arguments: Any) -> T | Exception:
    try:
        return call(*arguments)
    except Exception as error:
        return error


def _in_threads(call: Callable[[S], T], items: Iterable[S], num_ahead: int) -> Iterator[T]:
    """`map`, in order, `num_ahead` calls ahead of who asks; 0: no thread at all."""
    if not num_ahead:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(num_ahead) as pool:
        waiting: deque[Future[T]] = deque()
        for item in items:
            waiting.append(pool.submit(call, item))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
