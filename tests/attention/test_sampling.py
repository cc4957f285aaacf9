"""Sampling: what temperature, top_p and seed do, and what NaN and Inf cannot do."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from attention import sampling
from attention.sampling import Sampler, SamplingParams, sample


def sampler(request_id: str = "r", **params: float | int) -> Sampler:
    return Sampler(SamplingParams(max_tokens=8, **params), request_id)  # type: ignore[arg-type]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [sampler(temperature=0), sampler(temperature=0)]) == [1, 0]


def test_top_p_zero_takes_the_largest_logit() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), [sampler(temperature=1, top_p=0)]) == [1]


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    one = sampler(temperature=2.0, seed=1)
    counts = Counter(one.draw(logits) for _ in range(20_000))
    probs = torch.softmax(logits / 2.0, -1).tolist()
    for token, prob in enumerate(probs):
        # Five standard errors: a false alarm in two million runs, and the seed is fixed anyway.
        assert abs(counts[token] / 20_000 - prob) < 5 * math.sqrt(prob * (1 - prob) / 20_000)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    one = sampler(top_p=0.7, seed=3)
    assert {one.draw(logits) for _ in range(500)} == {1, 3}


def test_top_p_is_right_when_the_nucleus_is_larger_than_the_head() -> None:
    logits = torch.zeros(5000)
    one = sampler(top_p=0.9, seed=3)
    drawn = {one.draw(logits) for _ in range(5000)}
    assert len(drawn) > 1024
    assert len(drawn) <= 4500


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = torch.randn(500)
    first, second, other = (sampler(seed=seed) for seed in (7, 7, 8))
    draws = [[s.draw(logits) for _ in range(20)] for s in (first, second, other)]
    assert draws[0] == draws[1] != draws[2]


def test_without_a_seed_a_shadow_draws_like_its_primary() -> None:
    logits = torch.randn(500)
    primary, shadow, other = sampler("id-1"), sampler("id-1"), sampler("id-2")
    draws = [[s.draw(logits) for _ in range(20)] for s in (primary, shadow, other)]
    assert draws[0] == draws[1] != draws[2]


def test_what_is_drawn_does_not_depend_on_the_rest_of_the_batch() -> None:
    rows = torch.randn(8, 1000)
    alone = sample(rows[3:4], [sampler(seed=5, top_p=0.9)])
    others = [sampler(f"o{i}", temperature=i / 8) for i in range(8)]
    others[3] = sampler(seed=5, top_p=0.9)
    assert sample(rows, others)[3] == alone[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_do(bad: float) -> None:
    logits = torch.zeros(3, 100)
    logits[:, 4] = 1.0
    logits[1, 50] = bad
    assert sample(logits, [sampler(temperature=0)] * 3) == [4, None, 4]


def test_large_finite_logits_are_no_fault() -> None:
    assert sample(torch.tensor([[1e30, -1e30]]), [sampler(temperature=1.0)]) == [0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": 3},
        {"top_p": 2},
        {"max_tokens": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**{"max_tokens": 1, **params})  # type: ignore[arg-type]


def test_what_a_gpu_sends_in_one_transfer_is_what_the_cpu_finds() -> None:
    logits = torch.randn(6, 50_000)
    logits[1, 7], logits[2, 9], logits[3, 0] = float("inf"), float("-inf"), float("nan")
    for here, there in zip(sampling._extremes(logits), sampling._in_one_transfer(logits), strict=True):
        assert [value for value in here if value == value] == [value for value in there if value == value]
    low, high, _ = sampling._in_one_transfer(logits)
    assert [math.isfinite(low[row]) and math.isfinite(high[row]) for row in range(6)] == [
        True, False, False, False, True, True,
    ]  # fmt: skip
