"""Draws by counter: known words, the moments of N(0, 1), independent calls and seeds."""

from __future__ import annotations

import pytest
import torch

from attention.replay import draws
from attention.replay.draws import Draws


def test_words_are_those_of_splitmix64() -> None:
    """Seed 1234567: the first outputs that SplitMix64's reference implementation prints."""
    words, state = [], 1234567
    for _ in range(3):
        state += draws._GOLDEN
        words.append(draws._mixed(state & draws._WORD))
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_tensor_of_places_holds_the_words_of_its_start() -> None:
    draw = Draws(0)
    draw._start = 1234567
    places = torch.cat(list(draw._places(12))).tolist()
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [((word >> 16 * part & 0xFFFF) + 0x8000) & 0xFFFF for word in words for part in range(4)]
    assert places == expected


def test_numbers_are_normal() -> None:
    found = Draws(5).normal(1000, 1000).double()
    assert abs(float(found.mean())) < 4e-3
    assert abs(float(found.var()) - 1) < 6e-3
    assert abs(float((found**4).mean()) - 3) < 0.05
    assert float(found.abs().max()) < 4.34
    assert abs(float(torch.corrcoef(found[:, :2].T)[0, 1])) < 0.15  # neighbours share a word


def test_a_seed_repeats_itself_and_calls_and_seeds_do_not() -> None:
    first, again, other = Draws(1), Draws(1), Draws(2)
    a, b = first.normal(3, 5), first.normal(3, 5)
    assert torch.equal(a, again.normal(3, 5))
    assert not torch.equal(a, b)
    assert not torch.equal(a, other.normal(3, 5))
    assert torch.equal(Draws(1).normal(2, 3), Draws(1).normal(3, 5).flatten()[:6].view(2, 3))


def test_pieces_join(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Draws(3).normal(7, 13)
    monkeypatch.setitem(draws._PIECE, "cpu", 5)
    assert torch.equal(Draws(3).normal(7, 13), whole)


def test_numbers_that_were_drawn_ahead_are_those_that_would_have_come() -> None:
    one, ahead = Draws(3), Draws(3)
    ahead.ahead(40)
    for shape in ((2, 3), (5,), (4, 4), (30,), (7,)):
        assert torch.equal(one.normal(*shape), ahead.normal(*shape))
    assert one.below(1000) == ahead.below(1000)


def test_chance_and_whole_numbers() -> None:
    assert abs(float(Draws(3).chance(2 / 3, 400, 500).float().mean()) - 2 / 3) < 5e-3
    draw = Draws(4)
    assert {draw.below(5) for _ in range(200)} == set(range(5))
    assert Draws(1).normal(0, 4).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits() -> None:
    assert torch.equal(Draws(7, "cuda").normal(101, 33).cpu(), Draws(7).normal(101, 33))
