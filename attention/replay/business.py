"""Business layer, recording half: greedy answers to golden prompts, batched as in serving.

Answers are graded elsewhere (`tasks.grade`); here they are only produced, in the environment and by
the scheduler that would serve them.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel

from attention.errors import UserError
from attention.job import BusinessPlan, Prompt
from attention.limits import Limits
from attention.model import Runner
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler


class Answer(BaseModel):
    """One prompt's answer; `error` says why there is none."""

    prompt_id: str
    output_text: str
    output_tokens: list[int]
    confirmed_prefill: str | None = None
    confirmed_decode: str | None = None
    error: str | None = None


class Answers(BaseModel):
    answers: list[Answer]


def answer(
    runner: Runner, plan: BusinessPlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> Answers:
    """Answer every prompt of the plan, at most `plan.batch` at a time."""
    scheduler = Scheduler(runner, Limits(max_running=plan.batch, max_queue=len(plan.prompts), prefix_reuse=False))
    generations: list[Generation] = []
    for prompt in plan.prompts:
        params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
        # Marked as shadow: a drill's fault that waits for live traffic must not show offline.
        generation = Generation(
            request_id=prompt.prompt_id, prompt_ids=prompt_ids(runner, prompt), params=params, shadow=True
        )
        generations.append(generation)
        try:
            scheduler.submit(generation)
        except UserError as error:  # longer than the context, say: no reason to lose the other answers
            generation.finish_reason, generation.error = "error", str(error)
    while not all(g.finish_reason for g in generations):
        scheduler.step()
        progress(sum(1 for g in generations if g.finish_reason), len(generations))
    return Answers(answers=[_answer(runner, g) for g in generations])


def prompt_ids(runner: Runner, prompt: Prompt) -> tuple[int, ...]:
    """The prompt through the model's chat template."""
    ids = runner.tokenizer.apply_chat_template(
        list(prompt.messages), tools=list(prompt.tools) if prompt.tools else None, add_generation_prompt=True
    )["input_ids"]
    return tuple(int(i) for i in ids)


def _answer(runner: Runner, generation: Generation) -> Answer:
    return Answer(
        prompt_id=generation.request_id,
        output_text=runner.tokenizer.decode(generation.output_ids, skip_special_tokens=True),
        output_tokens=list(generation.output_ids),
        confirmed_prefill=generation.confirmed.get("prefill"),
        confirmed_decode=generation.confirmed.get("decode"),
        error=generation.error,
    )
