"""A digest: the same on every device and for every layout in memory, another for anything else that differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from attention.replay import digest as module
from attention.replay.digest import Running, digest

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def numbers(dtype: torch.dtype = torch.bfloat16, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 3, 7)), generator=torch.Generator().manual_seed(1)).to(dtype)


def sums_by_hand(words: list[int]) -> tuple[int, int]:
    """The sums of some words, in Python's numbers."""
    factor, top = 0xDABA0B6EB09322E3, (1 << 64) - 1

    def multiplied(x: int) -> int:
        return (x ^ x >> 32) * factor & top

    first = second = 0
    for place, word in enumerate(words, 1):
        mixed = multiplied(multiplied(place * 0x9E3779B97F4A7C15 + word & top))
        mixed ^= mixed >> 32
        again = multiplied(mixed + word & top)
        first, second = first + mixed & top, second + (again ^ again >> 32) & top
    return first, second


def torch_sums(words: torch.Tensor) -> tuple[int, int]:
    """What a GPU does, on the CPU."""
    pairs = [(int(first), int(second)) for first, second in module._on_device([words])]
    return sum(first for first, _ in pairs) & module._WORD, sum(second for _, second in pairs) & module._WORD


@pytest.mark.parametrize("piece", [3, 64])
def test_host_and_device_add_the_same_mixed_words_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setitem(module._PIECE, "cpu", piece)
    words = torch.randint(-(2**63), 2**63 - 1, (10,), generator=torch.Generator().manual_seed(2))
    expected = sums_by_hand([word & module._WORD for word in words.tolist()])
    assert module._sums([words]) == module._sums([words[:4], words[4:]]) == torch_sums(words) == expected


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64], ids=str)
def test_equal_bits_have_one_digest_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    one = numbers(torch.float32, 4, 3, 8).gt(0) if dtype == torch.bool else numbers(dtype, 4, 3, 8)
    expected = digest(one)
    assert len(expected) == 32
    assert digest(one.clone()) == expected
    assert digest(one.transpose(0, 2).contiguous().transpose(0, 2)) == expected, "strides"
    assert digest(torch.cat([one.flatten()[:1], one.flatten()])[1:].view_as(one)) == expected, "no whole word before it"
    assert digest(torch.stack([one.flatten()] * 2, 1)[:, 0]) == digest(one.flatten()), "every other number"


def test_numbers_that_are_equal_but_have_other_bits_differ() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nan[:1]) != digest(nan[1:])


@pytest.mark.parametrize("size", range(18))
def test_any_bit_that_flips_shows(size: int) -> None:
    """Sizes in bytes, so the last word is whole or not."""
    data = torch.arange(size, dtype=torch.uint8)
    flipped = []
    for byte, bit in itertools.product(range(size), range(8)):
        other = data.clone()
        other[byte] ^= 1 << bit
        flipped.append(digest(other))
    assert len({digest(data), *flipped}) == 1 + 8 * size


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_the_same_bit_in_two_words_does_not_cancel(bit: int) -> None:
    """In a sum of words times factors the top bits of any two do."""
    words = torch.zeros(40, dtype=torch.int64)
    seen = set()
    for i, j in itertools.combinations(range(40), 2):
        other = words.clone()
        other[[i, j]] ^= -(1 << 63) if bit == 63 else 1 << bit
        seen.add(module._sums([other]))
    assert len({first for first, _ in seen}) == len({second for _, second in seen}) == 40 * 39 / 2


@pytest.mark.parametrize(
    "other",
    [
        lambda t: (t.flip(0),),
        lambda t: (t[:-1],),
        lambda t: (torch.cat([t, torch.zeros_like(t[:1])]),),
        lambda t: (t.view(7, 3, 5),),
        lambda t: (t.view(torch.float16),),
        lambda t: (t[:2], t[2:]),
        lambda t: (t, t[:0]),
        lambda t: (),
    ],
    ids=["order", "cut", "zeros behind", "shape", "dtype", "in two", "and an empty one", "nothing"],
)
def test_something_else_has_another_digest(other: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    one = numbers()
    assert digest(*other(one)) != digest(one)


def test_empty_tensors_and_scalars_have_digests_too() -> None:
    found = [digest(), digest(torch.empty(0)), digest(torch.empty(0, 4)), digest(torch.tensor(0.0))]
    assert len(set(found)) == 4


def test_tensors_together_are_their_order_and_the_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [numbers(dtype, 9, 5) for dtype in DTYPES]
    expected = digest(*parts)
    assert digest(*parts[::-1]) != expected
    monkeypatch.setitem(module._PIECE, "cpu", 4)  # so that they are not joined either
    assert digest(*parts) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("piece", [1000, 1 << 24])
def test_a_gpu_finds_the_same_digest(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setitem(module._PIECE, "cuda", piece)
    parts = [numbers(dtype, 101, 3, 33) for dtype in DTYPES]
    parts += [parts[1] > 0, parts[0].transpose(0, 2), parts[2][1:], parts[3][:0]]
    assert digest(*(part.cuda() for part in parts)) == digest(*parts)
    assert [digest(part.cuda()) for part in parts] == [digest(part) for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_one_digest_however_they_are_cut(dtype: torch.dtype) -> None:
    rows_RX = torch.randn(40, 7).to(dtype)  # rows that fill no whole words

    def digest_of(*cuts: int) -> str:
        seen = Running()
        for block in rows_RX.split(list(cuts)):
            seen.add(block)
        return seen.hex()

    whole = digest_of(40)
    assert digest_of(1, 13, 26) == whole
    rows_RX[[3, 4]] = rows_RX[[4, 3]]
    assert digest_of(40) != whole
    assert Running().hex() != whole
