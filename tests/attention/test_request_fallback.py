"""A backend that fails while it serves: nobody's answer changes, nobody falls back unseen, and the budget holds."""

from __future__ import annotations

import random

import pytest

from attention.fallback import FallbackBudget, FallbackRefusedError, FallenClasses
from attention.limits import Limits
from attention.policy import Budget
from attention.request_fallback import RequestFallback
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler, StepResult
from tests.attention.fake_runner import FakeRunner, expected_tokens

SMALL = Limits(
    max_running=4, max_step_tokens=16, prefill_chunk=8, max_queue=64, max_output_tokens=64, prefix_reuse=False
)
FIRST, SECOND, THIRD = "torch_sdpa:math", "torch_sdpa:flash", "torch_sdpa:efficient"


def generation(prompt: list[int] | range, max_tokens: int = 6, name: str = "r") -> Generation:
    return Generation(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0))


def runner(*chain: str) -> FakeRunner:
    one = FakeRunner()
    one.dispatcher.chain = list(chain)
    return one


def served(one: FakeRunner, *generations: Generation, share: float = 1.0) -> list[StepResult]:
    """Run all to their end under a budget; a request is counted when it is queued."""
    budget = FallbackBudget(Budget(max_share=share, window_s=60, max_duration_s=600))
    fallback = RequestFallback(one.dispatcher, SMALL.prefill_chunk, budget, FallenClasses(60))
    scheduler = Scheduler(one, SMALL, fallback=fallback)  # type: ignore[arg-type]
    for each in generations:
        fallback.take(each)
        scheduler.submit(each)
    results = []
    while scheduler.has_work:
        results.append(scheduler.step())
    assert one.pool.num_free == one.pool.num_pages, "no page is lost"
    return results


def test_a_backend_that_raises_is_retired_and_its_step_runs_again_on_the_next() -> None:
    one = runner(SECOND)
    one.dispatcher.raises = {FIRST}
    both = [generation(range(20), 8, "a"), generation([7, 9], 8, "b")]
    results = served(one, *both)
    assert [g.output_ids for g in both] == [expected_tokens(range(20), 8), expected_tokens([7, 9], 8)]
    (error,) = [error for result in results for error in result.backend_failures]
    assert str(error) == f"{FIRST} failed in prefill: RuntimeError: no kernel image"
    (reason,) = one.dispatcher.retired[FIRST]
    assert (reason.code, reason.message) == ("LAUNCH_FAILED", "RuntimeError: no kernel image")
    assert all(set(g.resolved.values()) == {SECOND} for g in both)
    told = [(event.phase, event.to_backend) for result in results for event in result.fallbacks]
    assert sorted(told) == sorted(
        [("prefill", SECOND), ("extend", SECOND), ("decode", SECOND), ("prefill", SECOND), ("decode", SECOND)]
    ), "once a request and phase"


def test_with_nothing_to_stand_in_the_requests_of_the_step_end_with_the_reason() -> None:
    one = runner()
    one.dispatcher.raises = {FIRST}
    both = [generation(range(20), 8, "a"), generation([7, 9], 8, "b")]
    served(one, *both)
    assert all(g.refused and "no backend of the policy can serve decode" in str(g.error) for g in both)


def test_the_budget_says_how_many_go_on() -> None:
    one = FakeRunner(eos_token_ids=frozenset())
    one.dispatcher.chain = [SECOND]
    four = [generation([i, i + 1], 12, str(i)) for i in range(4)]
    fallback = RequestFallback(
        one.dispatcher, 8, FallbackBudget(Budget(max_share=0.5, window_s=60, max_duration_s=600))
    )
    scheduler = Scheduler(one, SMALL, fallback=fallback)  # type: ignore[arg-type]
    for each in four:
        fallback.take(each)
        scheduler.submit(each)
    for _ in range(3):
        scheduler.step()
    one.dispatcher.raises = {FIRST}
    while scheduler.has_work:
        scheduler.step()
    kept = [g for g in four if not g.refused]
    assert len(kept) == 2
    expected = [expected_tokens(g.prompt_ids, 12, frozenset()) for g in kept]
    assert [g.output_ids for g in kept] == expected, "they go on from where they were"
    assert {str(g.error) for g in four if g.refused} == {
        "2 of 4 requests of the last 60 s fell back; the policy bears 50.00%"
    }
    assert one.pool.num_free == one.pool.num_pages


def test_logits_without_numbers_begin_again_on_the_fallback_once() -> None:
    one = runner(SECOND)
    one.nan_for_prompt, one.nan_on = tuple(range(24)), {FIRST}
    bad, good = generation(range(20), 12, "bad"), generation([5, 6, 7], 12, "good")
    one.nan_for_prompt = (*range(20), *expected_tokens(range(20), 3))  # after three tokens
    results = served(one, bad, good)
    assert bad.output_ids == expected_tokens(range(20), 12), "what was generated stays, the rest is another backend's"
    assert good.output_ids == expected_tokens([5, 6, 7], 12)
    assert (bad.num_nonfinite, good.num_nonfinite) == (1, 0)
    assert [reason.code for reason in one.dispatcher.retired[FIRST]] == ["NUMERIC_DRIFT"]
    assert bad.fallback_reasons == ["NUMERIC_DRIFT"]
    after = generation([1, 2, 3], 4, "after")
    served(one, after)
    assert set(after.resolved.values()) == {SECOND}, "the next request does not meet it"
    assert [token for result in results for owner, token in result.tokens if owner is bad] == bad.output_ids


def test_logits_without_numbers_on_both_are_the_requests_own() -> None:
    one = runner(SECOND)
    one.nan_for_prompt = tuple(range(20))
    bad, good = generation(range(20), 12, "bad"), generation([5, 6, 7], 12, "good")
    served(one, bad, good)
    assert bad.num_nonfinite == 2
    assert bad.error == f"the logits of output token 0 hold NaN or Inf, on {SECOND} as on {FIRST}"
    assert one.dispatcher.retired == {}, "no backend is blamed"
    assert good.output_ids == expected_tokens([5, 6, 7], 12)


def test_without_a_fallback_logits_without_numbers_end_the_request() -> None:
    one = runner()
    one.nan_for_prompt = tuple(range(20))
    bad = generation(range(20), 12)
    served(one, bad)
    assert (bad.num_nonfinite, bad.error) == (1, "the logits of output token 0 hold NaN or Inf")


def test_a_budget_without_room_ends_it_too() -> None:
    one = runner(SECOND)
    one.nan_for_prompt, one.nan_on = tuple(range(20)), {FIRST}
    bad = generation(range(20), 12)
    (refusal,) = [error for result in served(one, bad, share=0.0) for error in result.refusals]
    assert "0 of 1 requests" in str(refusal)
    assert (bad.num_nonfinite, bad.error) == (1, "the logits of output token 0 hold NaN or Inf")


def test_two_backends_may_fail_one_after_the_other() -> None:
    one = runner(SECOND, THIRD)
    one.dispatcher.raises = {FIRST, SECOND}
    alone = generation(range(20), 8)
    served(one, alone)
    assert alone.output_ids == expected_tokens(range(20), 8)
    assert set(one.dispatcher.retired) == {FIRST, SECOND}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_when_every_request_ends_once_and_right(seed: int) -> None:
    rng = random.Random(seed)
    one = FakeRunner(num_pages=rng.choice([16, 48]), page_size=4, max_context=60, eos_token_ids=frozenset())
    one.dispatcher.chain = [SECOND, THIRD]
    limits = Limits(rng.randint(1, 6), max_step_tokens=24, prefill_chunk=8, max_queue=1000, prefix_reuse=seed % 3 > 0)
    share = rng.choice([0.0, 0.3, 1.0])
    budget = FallbackBudget(Budget(max_share=share, window_s=60, max_duration_s=600))
    fallback = RequestFallback(one.dispatcher, limits.prefill_chunk, budget, FallenClasses(60))
    scheduler = Scheduler(one, limits, fallback=fallback)  # type: ignore[arg-type]
    stem = [rng.randrange(256) for _ in range(24)]
    asked: list[Generation] = []
    ended: list[Generation] = []
    told: dict[int, list[int]] = {}
    for turn in range(160):
        if turn == 50 and rng.random() < 0.7:
            one.dispatcher.raises.add(FIRST)
        if turn == 90 and rng.random() < 0.5:
            one.dispatcher.raises.add(SECOND)
        if turn == 30:
            one.nan_on = {rng.choice([FIRST, SECOND])}
            one.nan_for_prompt = tuple(stem[: rng.choice([8, 16, 20])])
        if turn < 110 and rng.random() < 0.4:
            prompt = [*stem[: rng.choice([0, 8, 20])], *(rng.randrange(256) for _ in range(rng.randint(1, 9)))]
            new = generation(prompt, rng.randint(1, 12), str(turn))
            try:
                fallback.take(new)
            except FallbackRefusedError:
                continue
            scheduler.submit(new)
            asked.append(new)
        if rng.random() < 0.08 and asked:
            scheduler.cancel(rng.choice(asked), "cancelled")
        result = scheduler.step()
        ended += result.finished
        for owner, token in result.tokens:
            told.setdefault(id(owner), []).append(token)
        held = {page for g in asked for page in g.block_table}
        assert scheduler.num_free_pages + len(held) == one.pool.num_pages
    while scheduler.has_work:
        result = scheduler.step()
        ended += result.finished
        for owner, token in result.tokens:
            told.setdefault(id(owner), []).append(token)
    assert scheduler.num_free_pages == one.pool.num_pages
    assert len(ended) == len(set(map(id, ended)))
    for each in asked:
        assert each.finish_reason is not None
        right = expected_tokens(each.prompt_ids, each.params.max_tokens, frozenset())
        assert each.output_ids == right[: len(each.output_ids)], "never a wrong token"
        assert told.get(id(each), []) == each.output_ids, "each told once"
        assert each.finish_reason != "length" or len(each.output_ids) == each.params.max_tokens
        assert each.finish_reason != "error" or each.refused or each.num_nonfinite
