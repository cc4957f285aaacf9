"""Stage `replay`: numbers in three layers, recorded in each environment and compared outside.

tensor: every case against the fp64 oracle, on both sides; model: teacher-forced hidden states of both
sides through one lm_head; business: greedy answers to the golden set, graded and paired by prompt.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from attention.job import BusinessPlan, CompareJob, ModelPlan, Prompt, ReplayJob, TensorPlan
from data.golden_set import SAMPLE_SEED, GoldenPrompt
from data.requests import TrafficRequest, with_texts
from gates import replay as gate
from tasks.context import SIDES, Context, Side, StageOutcome
from tasks.environment import Job, measure, measure_sides
from tasks.grade import grade


def run(context: Context) -> StageOutcome:
    """Record all layers (two processes at a time), compare, grade, judge."""
    golden = _golden(context)
    prompts = _model_prompts(context)
    results = measure_sides(context, lambda side: _job(context, side, prompts, golden))
    context.say(f"replay: tensor {results['candidate']['cases']} cases a side")
    shutil.rmtree(context.work / "truths", ignore_errors=True)  # both sides are done, and another release draws anew
    compared = measure(_compare(context, results), context.work)
    context.say(f"replay: model {compared['positions']} positions through one lm_head, floor {compared['floor']}")
    passed = {side: _grade(context, side, golden, results[side]) for side in SIDES}
    context.say(f"replay: business {passed['candidate']} of {len(golden)} passed, champion {passed['champion']}")
    report = gate.judge(context.lake, context.release_id, context.plan, num_golden=len(golden))
    return StageOutcome(report, {"positions": compared["positions"], "golden_passed": passed})


def _golden(context: Context) -> list[GoldenPrompt]:
    """The golden prompts of this release; what of the file is not asked is counted aloud."""
    golden = context.candidate.golden()
    plan, unfit = context.plan, ""
    if golden.num_unfit:
        unfit = f", {golden.num_unfit} are longer than plan {plan.name} allows ({plan.replay.golden_lengths})"
    context.say(f"golden set: {len(golden.prompts)} of {golden.num_usable} prompts{unfit}")
    for line in golden.rejected[:3]:
        context.say(f"golden set: line {line.line} left out: {line.reason}")
    if len(golden.rejected) > 3:
        context.say(f"golden set: {len(golden.rejected)} lines left out in all")
    return golden.prompts


def tensor_seeds(context: Context) -> tuple[int, ...]:
    """Fresh seeds a release, drawn from its id: a candidate cannot be fitted to them."""
    draw = random.Random(context.release_id)  # noqa: S311
    return tuple(draw.randrange(1 << 31) for _ in range(context.plan.replay.seeds))


def _model_prompts(context: Context) -> tuple[Prompt, ...]:
    """Chat requests of the traffic, spread over its lengths, as teacher-forced texts; without any, its prompts."""
    requests = context.candidate.traffic().requests
    requests = [r for r in requests if r.body.messages] or requests
    draw = random.Random(SAMPLE_SEED)  # noqa: S311
    chosen = draw.sample(requests, min(context.plan.replay.model_prompts, len(requests)))
    if any(r.shape for r in chosen):
        from transformers import AutoTokenizer

        chosen = with_texts(chosen, AutoTokenizer.from_pretrained(context.cell.model_path))
    return tuple(
        Prompt(
            prompt_id=r.custom_id,
            category=r.category,
            language=r.language,
            messages=_turns(r),
            tools=r.body.tools,
        )
        for r in chosen
    )


def _turns(request: TrafficRequest) -> tuple[dict[str, Any], ...]:
    """The messages; a plain prompt is what a user says."""
    if request.body.messages:
        return tuple(message.for_template() for message in request.body.messages)
    return ({"role": "user", "content": request.body.prompt},)


def _job(context: Context, side: Side, prompts: tuple[Prompt, ...], golden: list[GoldenPrompt]) -> ReplayJob:
    plan = context.plan.replay
    return ReplayJob(
        setup=context.setup(side),
        evidence=context.evidence(side),
        tensor=TensorPlan(
            seeds=tensor_seeds(context),
            max_kv_len=plan.max_kv_len,
            inputs=plan.inputs,
            kv_dtypes=plan.kv_dtypes,
            activations=context.work / "activations.safetensors",  # one file for both sides: equal inputs
            truths=context.work / "truths",
        ),
        model=ModelPlan(
            prompts=prompts,
            max_tokens=plan.model_tokens,
            decode_tokens=plan.decode_tokens,
            # The champion's alone: the floor is how far two sound executions of what serves are apart.
            floors=context.folder / "floors" if side == "champion" else None,
        ),
        business=BusinessPlan(prompts=tuple(as_prompt(g) for g in golden)),
    )


def as_prompt(golden: GoldenPrompt) -> Prompt:
    """A golden prompt as the measuring command is told of it: without its grader."""
    return Prompt(
        prompt_id=golden.prompt_id,
        category=golden.category,
        language=golden.language,
        messages=tuple(m.for_template() for m in golden.messages),
        tools=golden.tools,
        max_tokens=golden.max_tokens,
    )


def _compare(context: Context, results: dict[Side, dict[str, Any]]) -> Job:
    champion, candidate = results["champion"], results["candidate"]
    job = CompareJob(
        setup=context.setup("candidate"),
        evidence=context.evidence("candidate"),
        champion=Path(champion["states"]),
        candidate=Path(candidate["states"]),
        floor=champion["floor"],
        known_floor=champion["known_floor"],
    )
    return Job("replay-compare", job, context.environment("candidate"))


def _grade(context: Context, side: Side, golden: list[GoldenPrompt], result: dict[str, Any]) -> int:
    """Grade one side's answers into `business_replay`; how many passed."""
    answers = {a["prompt_id"]: a for a in result["answers"]}
    rows = []
    for prompt in golden:
        answer = answers[prompt.prompt_id]
        verdict = grade(prompt, answer["output_text"])
        rows.append(
            {
                "side": side,
                "fingerprint_id": result["fingerprint_id"],
                "backend": answer["confirmed_decode"] or answer["confirmed_prefill"],
                "confirmed_backend": answer["confirmed_decode"] or answer["confirmed_prefill"],
                "prompt_id": prompt.prompt_id,
                "category": prompt.category,
                "language": prompt.language,
                "passed": verdict.passed,
                "grader": verdict.grader,
                "detail": verdict.detail,
                "output_text": answer["output_text"],
                "output_tokens": answer["output_tokens"],
                "error": answer["error"],
            }
        )
    context.write("business_replay", rows)
    return sum(bool(row["passed"]) for row in rows)
