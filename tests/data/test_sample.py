from __future__ import annotations

import random
from collections import Counter

import pytest

from data.sample import Entry, SampleReport, Stratum, draw


def entries(seed: int, num: int, num_strata: int) -> list[Entry]:
    """Strata of very unlike sizes: halves, quarters, eighths, ..."""
    draws = random.Random(seed)
    found = []
    for _ in range(num):
        rank = min(int(draws.expovariate(0.7)), num_strata - 1)
        found.append(
            Entry(draws.randrange(1, 900), draws.randrange(1, 90), 16 << rank, "en" if rank % 2 else "zh", "plain")
        )
    return found


def of_stratum(entry: Entry) -> tuple[int, str, str]:
    return entry.prompt_bucket, entry.language, entry.features


@pytest.mark.parametrize("wanted", [1, 3, 8, 50, 299, 300, 1000])
def test_as_many_are_drawn_as_wanted_and_every_stratum_is_in_as_far_as_they_reach(wanted: int) -> None:
    population = entries(1, 300, 8)
    numbers, report = draw(population, wanted, "s")
    sizes = Counter(map(of_stratum, population))
    drawn = Counter(of_stratum(population[number]) for number in numbers)
    assert len(numbers) == min(wanted, 300) == report.sampled
    assert len(drawn) == min(wanted, len(sizes))
    assert all(sizes[one] >= num for one, num in drawn.items())
    assert {(s.prompt_bucket, s.language, s.features): s.requests for s in report.strata} == sizes
    assert {(s.prompt_bucket, s.language, s.features): s.sampled for s in report.strata if s.sampled} == drawn


def test_beyond_one_each_the_shares_are_those_of_the_population() -> None:
    population = entries(2, 5000, 6)
    _, report = draw(population, 500, "s")
    assert len(report.strata) == 6
    for stratum in report.strata:
        assert stratum.sampled == pytest.approx(1 + 494 * (stratum.requests - 1) / 4994, abs=1)


def test_a_seed_names_a_sample_and_another_seed_another() -> None:
    population = entries(3, 400, 4)
    once, again, other = (draw(population, 40, seed)[0] for seed in ("a", "a", "b"))
    assert once == again != other


def test_within_a_stratum_every_request_has_the_same_chance() -> None:
    population = [Entry(10, 5, 16, f"l{number // 20}", "plain") for number in range(200 * 20)]
    hits = Counter(number % 20 for number in draw(population, 200 * 5, "s")[0])
    assert len(hits) == 20
    assert all(25 <= num <= 80 for num in hits.values())  # 50 expected, sigma 6


def test_the_report_says_what_the_sample_stands_for() -> None:
    population = [Entry(90, 10, 128, "und", "plain")] * 6 + [Entry(900, 100, 1024, "und", "stream")] * 3
    _, report = draw(population, 1, "s", rejected=1)
    assert report.strata == (
        Stratum(128, "und", "plain", requests=6, tokens=600, sampled=1),
        Stratum(1024, "und", "stream", requests=3, tokens=3000, sampled=0),
    )
    assert report.request_share == 6 / 10
    assert report.token_share == 600 / 3600
    assert str(report) == (
        "1 of 9 requests drawn, 1 of 2 strata; they stand for 60.0% of the recorded requests and 16.7% of their tokens"
    )


def test_nothing_recorded_is_an_empty_sample() -> None:
    assert draw([], 5, "s") == (frozenset(), SampleReport((), 0))
