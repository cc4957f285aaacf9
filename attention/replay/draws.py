"""Random numbers by counter: a seed gives the same bits on every machine, device and torch version.

torch's own generators promise that for none of the three, and inputs that are drawn on the CPU keep a GPU waiting.
Words are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from a start that the seed gives; each holds four
16-bit places in a table of normal quantiles. So a normal number is one of 65,536, none beyond 4.33.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_PLACES = 1 << 16
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}  # words: what a CPU's cache holds; a GPU counts launches


class Draws:
    """Draws of one seed, one after another; `ahead` drawn at once give the same numbers, in few launches."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = device
        self._start, self._at = _mixed(seed & _WORD), 0  # the next word
        self._ahead, self._first = torch.empty(0, device=device), 0  # numbers from that word on

    def normal(self, *shape: int) -> torch.Tensor:
        """N(0, 1) in float32."""
        num = math.prod(shape)
        begin = 4 * (self._at - self._first)
        if begin + num > len(self._ahead):
            self.ahead(num)
            begin = 0
        self._at += -(-num // 4)
        return self._ahead[begin : begin + num].view(shape)

    def ahead(self, num: int) -> None:
        """Draw the next `num` normal numbers now."""
        table = _quantiles(self.device)
        self._ahead = torch.cat([table.index_select(0, places) for places in self._places(num)])
        self._first = self._at

    def chance(self, share: float, *shape: int) -> torch.Tensor:
        """True for that share, in the mean."""
        num = math.prod(shape)
        found = torch.cat([places < round(share * _PLACES) for places in self._places(num)])
        self._at += -(-num // 4)
        return found.view(shape)

    def below(self, limit: int) -> int:
        """A whole number from 0 on."""
        self._at += 1
        return _mixed(self._start + self._at * _GOLDEN & _WORD) % limit

    def _places(self, num: int) -> Iterator[torch.Tensor]:
        """Whole numbers in [0, 65536) of the next words, int32, in pieces."""
        most = 4 * _PIECE[self.device.split(":")[0]]
        for first in range(0, max(1, num), most):
            count = min(num - first, most)
            words = torch.arange(-(-count // 4), device=self.device)
            words *= _signed(_GOLDEN)
            words += _signed(self._start + (self._at + first // 4 + 1) * _GOLDEN & _WORD)
            for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
                words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # torch's shift copies the sign
                words *= _signed(factor)
            yield words.view(torch.int16)[:count].to(torch.int32).add_(_PLACES // 2)


@cache
def _quantiles(device: str) -> torch.Tensor:
    quantiles: torch.Tensor = torch.special.ndtri((torch.arange(_PLACES, dtype=torch.float64) + 0.5) / _PLACES)
    return quantiles.float().to(device)


def _mixed(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
