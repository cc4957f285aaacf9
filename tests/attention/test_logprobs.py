"""Log-probabilities: the model's own, for every token of prompt and answer, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.limits import Limits
from attention.logprobs import Scored, score, score_drawn
from attention.model import Runner
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler
from tests.attention.fake_runner import FakeRunner
from tests.attention.test_scheduler import SMALL, generation, run

NUM_TOP = 5


def asking(prompt: list[int], max_tokens: int, request_id: str = "r", **asked: int) -> Generation:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.3, top_p=0.8, seed=4, **asked)
    return Generation(request_id, tuple(prompt), params)


def test_a_token_is_scored_by_log_softmax_and_ranked_from_1() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    expected = torch.log_softmax(logits, -1)[0]
    [found] = score(logits, [2], 3)
    assert (found.token.token_id, found.token.rank) == (2, 2)
    assert found.token.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert [(one.token_id, one.rank) for one in found.top] == [(1, 1), (2, 2), (0, 3)]
    assert [one.logprob for one in found.top] == pytest.approx(expected[[1, 2, 0]].tolist(), abs=1e-6)
    assert score(logits, [3], 0)[0].top == ()
    assert len(score(logits, [3], 20)[0].top) == 4, "never more than there are"


def test_rows_that_ask_are_scored_and_the_others_are_not() -> None:
    logits = torch.randn(4, 30)
    found = score_drawn(logits, [3, None, 7, 9], [None, 2, 0, 4])
    assert [one and (one.token.token_id, len(one.top)) for one in found] == [None, None, (7, 0), (9, 4)]
    assert found[3] == score(logits[3:], [9], 4)[0]


def test_logprobs_of_prompt_and_answer_are_those_of_transformers(
    tiny_model: Path, make_runner: Callable[..., Runner]
) -> None:
    from transformers import AutoModelForCausalLM

    runner = make_runner()
    scheduler = Scheduler(runner, Limits())
    # Longer than a prefill chunk (128), beside others that ask for nothing.
    prompt = [1 + (7 * i * i) % 250 for i in range(200)]
    one = asking(prompt, 20, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    others = [generation([i + 1] * (10 * i + 1), 12, f"other-{i}") for i in range(4)]
    run(scheduler, others[0], one, *others[1:])

    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    ids = [*prompt, *one.output_ids]
    with torch.inference_mode():
        expected = torch.log_softmax(reference(input_ids=torch.tensor([ids])).logits[0].float(), -1)
    assert one.prompt_logprobs[0] is None
    told = [*one.prompt_logprobs[1:], *one.output_logprobs]
    assert len(told) == len(ids) - 1
    for position, scored in enumerate(told):
        assert scored is not None
        assert scored.token.token_id == ids[position + 1]
        assert scored.token.logprob == pytest.approx(float(expected[position, ids[position + 1]]), abs=1e-4)
        best = expected[position].topk(NUM_TOP)
        assert [c.logprob for c in scored.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [c.token_id for c in scored.top] == best.indices.tolist()
    assert not any(other.output_logprobs for other in others)


def test_asking_changes_no_token() -> None:
    plain = asking([5, 6, 7], 12)
    told = asking([5, 6, 7], 12, logprobs=3, prompt_logprobs=0)
    run(Scheduler(FakeRunner(), SMALL), plain)
    run(Scheduler(FakeRunner(), SMALL), told)
    assert plain.output_ids == told.output_ids
    assert [s.token.token_id for s in told.output_logprobs] == told.output_ids
    assert (plain.output_logprobs, plain.prompt_logprobs) == ([], [None])


def test_only_steps_with_a_prompt_that_asks_keep_all_rows_and_logits_never_exceed_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, rows, num_logits = FakeRunner(num_pages=256), [], []
    forward, logits = runner.forward, runner.logits

    def watched_forward(chunks, *, rows="last"):  # type: ignore[no-untyped-def]
        asked.append(rows)
        return forward(chunks, rows=rows)

    def watched_logits(hidden: torch.Tensor) -> torch.Tensor:
        num_logits.append(len(hidden))
        return logits(hidden)

    asked: list[str] = rows
    monkeypatch.setattr(runner, "forward", watched_forward)
    monkeypatch.setattr(runner, "logits", watched_logits)
    scheduler = Scheduler(runner, SMALL)
    run(scheduler, generation([3] * 30, 6, "plain"))
    assert set(asked) == {"last"}
    asked.clear()
    run(scheduler, asking([4] * 30, 6, "a", prompt_logprobs=2), asking([5] * 30, 6, "b", prompt_logprobs=2))
    assert asked.count("all") == 4  # two prompts of four chunks of 8, two chunks a step
    assert asked[-1] == "last"
    assert max(num_logits) <= SMALL.prefill_chunk


def test_a_prompt_that_is_run_again_is_told_once() -> None:
    scheduler = Scheduler(FakeRunner(), SMALL)
    one = asking(list(range(20)), 0, prompt_logprobs=1)
    scheduler.submit(one)
    scheduler.step()
    one.num_cached = 0  # as a fallback of the request would do
    while scheduler.has_work:
        scheduler.step()
    told = one.prompt_logprobs[1:]
    assert [s.token.token_id for s in told if s is not None] == list(range(1, 20))


def test_a_prompt_alone_is_scored_without_an_answer() -> None:
    runner = FakeRunner()
    one = asking(list(range(13)), 0, prompt_logprobs=0)
    run(Scheduler(runner, SMALL), one)
    assert (one.finish_reason, one.output_ids, len(one.prompt_logprobs)) == ("length", [], 13)
    assert runner.pool.num_free == 64
    assert one.max_cached == 13


def test_a_row_of_nan_is_told_as_nan() -> None:
    [found] = score(torch.tensor([[0.0, math.nan]]), [0], 1)
    assert isinstance(found, Scored)
    assert math.isnan(found.token.logprob)
