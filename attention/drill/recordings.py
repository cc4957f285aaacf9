"""Recordings of one real model, sound and with each fault: what a release's replay stage would read.

The model is loaded once, and the champion's floor recorded once. A fault's effect is what it does to the hidden states
when it goes into the float64 oracle, over the error that the sound champion makes there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, DType
from attention.checks import fails, run_check
from attention.dispatch import Dispatcher
from attention.drill.backends import Emulated
from attention.drill.emulator import EXACT
from attention.drill.kernel import Fault, run
from attention.drill.plan import Draw, DrillPlan, Shape
from attention.drill.whole import SOUND, FaultyRunner, ModelFault
from attention.job import BusinessPlan, ModelPlan, Prompt, Setup, TensorPlan
from attention.model import specs_of
from attention.oracle_dispatcher import OracleDispatcher
from attention.replay import business, compare, floor, model, prompts, tensor
from attention.replay.problems import make
from attention.replay.states import MODES, Manifest, States, positions

SERVED = "float32"
ANSWERED_AT_ONCE = 8  # of more prompts, so that prefills and decodes meet in a step

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompts:
    """What is asked: teacher-forced texts, and prompts to answer."""

    forced: ModelPlan
    asked: tuple[Prompt, ...]


class Recorder:
    """One model that records under any dispatcher and fault. Files go into `work`."""

    def __init__(self, path: Path, champion: Dispatcher, candidate: Dispatcher, asked: Prompts, work: Path) -> None:
        self._runner = FaultyRunner(path, champion, dtype=SERVED, num_pages=_NUM_PAGES)
        self._champion, self._candidate = champion, candidate
        self._oracle = OracleDispatcher(champion.specs)
        self._prompts, self._work = asked, work
        self._told = _manifest(path)
        self._head = compare.Head.read(path)
        self._own = self._record(champion, SOUND, "champion")
        self._few = asked.forced.model_copy(update={"prompts": asked.forced.prompts[:_NUM_FOR_EFFECT]})
        self._truth = self._record(self._oracle, SOUND, "truth", self._few)

    def candidate_rows(self, fault: ModelFault = SOUND) -> Rows:
        """Rows of `model_replay` of a candidate with a fault."""
        return self._beside_champion(self._record(self._candidate, fault, "candidate"))

    def floor_rows(self) -> Rows:
        """Rows of `model_replay` of the champion beside itself, executed a second sound way."""
        self._begin(self._champion, SOUND)
        way = floor.second(self._runner)
        return self._beside_champion(self._record(way.dispatcher, SOUND, "floor", how=way.how))

    def _beside_champion(self, recorded: States) -> Rows:
        columns = prompts.compared(self._own, recorded, self._head)
        num = len(columns["kl"])
        lists = {name: one if isinstance(one, list) else [one] * num for name, one in columns.items()}
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]

    def effect(self, fault: ModelFault) -> float:
        """Change of the oracle's hidden states by a fault over the champion's own error, in the worst text."""
        faulty = self._record(self._oracle, fault, "faulty", self._few)
        return _largest_error(faulty, self._truth) / _largest_error(self._own, self._truth)

    def answers(self, side: str, fault: ModelFault = SOUND) -> list[business.Answer]:
        """Answers of the champion or the candidate to the prompts to answer."""
        dispatcher = self._champion if side == "champion" else self._candidate
        return self._answers(dispatcher, fault, self._prompts.asked)

    def changes_answers(self, fault: ModelFault) -> bool:
        """Whether the float64 oracle answers some prompt otherwise with the fault; enough are asked that phases mix."""
        few = self._prompts.asked[: ANSWERED_AT_ONCE + 2]
        sound, faulty = (self._answers(self._oracle, one, few) for one in (SOUND, fault))
        return [answer.output_tokens for answer in sound] != [answer.output_tokens for answer in faulty]

    def _answers(self, dispatcher: Any, fault: ModelFault, asked: tuple[Prompt, ...]) -> list[business.Answer]:
        self._begin(dispatcher, fault)
        return business.answer(self._runner, BusinessPlan(prompts=asked, batch=ANSWERED_AT_ONCE)).answers

    def _begin(self, dispatcher: Any, fault: ModelFault) -> None:
        self._runner.dispatcher = dispatcher
        self._runner.begin(fault)

    def _record(
        self,
        dispatcher: Any,
        fault: ModelFault,
        name: str,
        plan: ModelPlan | None = None,
        how: model.Batching | None = None,
    ) -> States:
        self._begin(dispatcher, fault)
        return States(model.record(self._runner, plan or self._prompts.forced, self._told, self._work / name, how=how))


_NUM_PAGES = 512
_NUM_FOR_EFFECT = 2  # texts that the oracle, which is slow, records; two, since members may disturb each other


def _manifest(path: Path) -> Manifest:
    """Who records, as far as a recording that nobody keeps has to say it."""
    return Manifest(
        fingerprint_id="drill",
        torch=torch.__version__,
        python="",
        gpu="cpu",
        distributions={},
        model=path,
        model_id="drill",
        head=compare.Head.read(path).digest,
        dtype=SERVED,
    )


def _largest_error(recorded: States, truth: States) -> float:
    """Relative L2 error of the hidden states of the worst text and mode, of the truth's texts; NaN is one."""
    errors = []
    for mode in MODES:
        start = 0
        for _, where in positions(truth.manifest, mode):
            exact, mine = (side.rows(mode, start, start + len(where)).double() for side in (truth, recorded))
            errors.append(float((mine - exact).norm() / exact.norm()))
            start += len(where)
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def tensor_rows(setup: Setup, dispatcher: Dispatcher, seed: int, max_kv_len: int) -> Rows:
    """Rows of `tensor_replay` of one side, as the replay stage makes them."""
    plan = TensorPlan(seeds=(seed,), max_kv_len=max_kv_len)
    specs: list[AttentionSpec] = specs_of(setup.model, SERVED)
    return list(tensor.rows(setup, plan, specs, (SERVED, "bfloat16"), dispatcher.resolved, 1.0))


def repeat_rows(plan: DrillPlan, kernel: Emulated) -> Rows:
    """Rows of `probes`: `repeatability` of a pseudo-kernel, one for each dtype and shape of the plan."""
    rows = []
    for dtype in plan.dtypes:
        for shape in plan.shapes:
            case = _case(plan, dtype, shape)
            failed = fails(run_check("repeatability", kernel, case))
            rows.append(
                {
                    "backend": kernel.name,
                    "confirmed_backend": kernel.name,
                    "probe": f"repeatability {dtype} {shape.batch}",
                    "level": "execute",
                    "case_json": case.model_dump_json(),
                    "status": "fail" if failed else "pass",
                }
            )
    return rows


def race_shows(plan: DrillPlan, fault: Fault) -> bool:
    """Whether a second call of the float64 oracle with the fault gives other bits, on some shape."""
    for shape in plan.shapes:
        problem = make(_case(plan, "float32", shape), "normal", 0)
        exact = replace(problem, q_THD=problem.q_THD.double())
        first, second = (run(exact, EXACT, seed=0, fault=fault, call=call).out_THD for call in range(2))
        if not first.equal(second):
            return True
    return False


def _case(plan: DrillPlan, dtype: DType, shape: Shape) -> AttentionCase:
    return Draw(dtype, shape.phase, shape.batch, plan.layouts[0], seed=0).case("plain", plan)
