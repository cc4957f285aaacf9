"""Prefix reuse: the same answers, less computed, no page lost and none in two hands."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from attention.limits import Limits
from attention.model import PagePool
from attention.prefix_cache import PrefixCache
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler
from tests.attention.fake_runner import FakeRunner, expected_tokens

LIMITS = Limits(max_running=4, max_step_tokens=16, prefill_chunk=8, max_queue=64, max_output_tokens=64)


def generation(prompt: list[int] | range, max_tokens: int = 4, name: str = "r") -> Generation:
    return Generation(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0))


def run(scheduler: Scheduler, *generations: Generation) -> None:
    for one in generations:
        scheduler.submit(one)
    while scheduler.has_work:
        scheduler.step()


def num_computed(runner: FakeRunner) -> int:
    return sum(len(chunk.token_ids) for step in runner.steps for chunk in step)


def test_a_prompt_that_begins_like_another_computes_only_the_rest() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, LIMITS)
    first, second = generation(range(30)), generation([*range(24), 99, 98])
    run(scheduler, first)
    before = num_computed(runner)
    run(scheduler, second)
    assert second.num_reused == 24
    assert num_computed(runner) - before == 2 + 3, "two tokens of the prompt, and three that were generated"
    assert [first.output_ids, second.output_ids] == [
        expected_tokens(range(30), 4), expected_tokens([*range(24), 99, 98], 4),
    ]  # fmt: skip
    assert scheduler.num_free_pages == runner.pool.num_pages > runner.pool.num_free, "kept, and to be had"


def test_a_prompt_of_whole_pieces_computes_its_last_one() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, LIMITS)
    run(scheduler, generation(range(24)))
    again = generation(range(24))
    run(scheduler, again)
    assert again.num_reused == 16
    assert again.output_ids == expected_tokens(range(24), 4)


def test_pieces_are_cut_where_prompts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, LIMITS)
    run(scheduler, generation(range(20)))
    runner.steps.clear()
    run(scheduler, generation(range(20)))
    chunks = [chunk for step in runner.steps for chunk in step]
    assert (chunks[0].start, len(chunks[0].token_ids)) == (16, 4)


def test_any_company_gets_the_models_answers_and_no_page_is_lost() -> None:
    rng = random.Random(3)
    stems = [[rng.randrange(256) for _ in range(24)] for _ in range(3)]
    for num_pages in (24, 64):  # with the small one, prefixes are given up for those who run
        runner = FakeRunner(num_pages=num_pages)
        scheduler = Scheduler(runner, LIMITS)
        asked = []
        for i in range(60):
            tail = [rng.randrange(256) for _ in range(rng.randint(0, 12))]
            prompt = [*rng.choice(stems)[: rng.choice([8, 13, 24])], *tail, i]
            asked.append(generation(prompt, rng.randint(1, 8), str(i)))
        run(scheduler, *asked)
        for one in asked:
            assert one.output_ids == expected_tokens(one.prompt_ids, one.params.max_tokens)
        assert scheduler.num_free_pages == num_pages
        assert any(one.num_reused for one in asked)


def test_who_is_cancelled_gives_its_pages_back_and_keeps_the_prefix_for_others() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, LIMITS)
    one = generation(range(30), 20)
    scheduler.submit(one)
    for _ in range(5):
        scheduler.step()
    scheduler.cancel(one, "cancelled")
    assert scheduler.num_free_pages == runner.pool.num_pages
    other = generation(range(30))
    run(scheduler, other)
    assert (other.num_reused, other.output_ids) == (24, expected_tokens(range(30), 4))


def test_two_at_once_compute_the_same_and_keep_it_once() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, LIMITS)
    both = [generation(range(30), 4, "a"), generation(range(30), 4, "b")]
    run(scheduler, *both)
    assert both[0].output_ids == both[1].output_ids == expected_tokens(range(30), 4)
    assert runner.pool.num_pages - runner.pool.num_free == 6, "three pieces of two pages"


def test_after_a_backend_gave_no_numbers_nothing_of_it_is_reused() -> None:
    runner = FakeRunner()
    runner.dispatcher.chain = ["torch_sdpa:flash"]
    scheduler = Scheduler(runner, LIMITS)
    run(scheduler, generation(range(30)))
    runner.nan_for_prompt, runner.nan_on = (7, 7, 7), {"torch_sdpa:math"}
    run(scheduler, generation([7, 7, 7, 7]))
    assert "torch_sdpa:math" in runner.dispatcher.retired
    after = generation(range(30))
    run(scheduler, after)
    assert after.num_reused == 0


def test_reuse_can_be_off() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner, replace(LIMITS, prefix_reuse=False))
    run(scheduler, generation(range(30)))
    assert runner.pool.num_free == runner.pool.num_pages


def cache(num_pages: int = 16) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, piece=8, page_size=4)


def test_the_piece_used_longest_ago_goes_first_and_never_before_what_follows_it() -> None:
    pool, one = cache()
    table = pool.alloc(4)
    held = one.extend(one.extend([], range(16), table), range(16), table)
    other_table = pool.alloc(2)
    other = one.extend([], [9] * 8, other_table)
    assert one.num_idle_pages == 0
    one.evict(2)
    assert pool.num_free == 10, "what is held stays"
    one.release(held)
    one.release(other)
    one.evict(1)
    assert [len(one.match(ids)) for ids in ([*range(16), 0], [9] * 9)] == [1, 1], "the end of the older one went"


def test_what_is_forgotten_goes_with_its_last_holder() -> None:
    pool, one = cache()
    held = one.extend([], range(8), pool.alloc(2))
    again = one.match([*range(8), 1])
    one.clear()
    assert one.match([*range(8), 1]) == []
    assert one.extend(held, range(16), [*range(4)]) is held, "nothing follows what cannot be found"
    one.release(held)
    assert pool.num_free == 14
    one.release(again)
    assert pool.num_free == 16


def test_a_piece_is_a_whole_number_of_pages() -> None:
    with pytest.raises(ValueError, match="no whole number of pages"):
        PrefixCache(PagePool(4), piece=6, page_size=4)
