"""Hash of tensors' bits that is computed where they lie: of a GPU's memory 16 bytes a piece leave it, in one copy.

The bytes are words of 64 bits. Each is mixed with its place by the finalizer mixLea64 (Steele and Vigna, LXM, OOPSLA
2021), and the mixed words are added modulo 2^64; a round more, with the word once more, gives a second sum. A change
of one word always shows, since the mix has an inverse. Changes of several cancel as rarely as chance has it, that of
the same bit in two words included. numpy on the host and torch on a device do the same arithmetic.

It guards against accidents: other inputs, a bit that flipped, an edit, a file that is cut off. Whoever wants two
tensors of one digest can make them; it is no SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_GOLDEN, _FACTOR = 0x9E3779B97F4A7C15, 0xDABA0B6EB09322E3
_WORD = (1 << 64) - 1
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}  # words: what a core's cache holds; a GPU counts launches


def digest(*tensors: torch.Tensor) -> str:
    """128 bits in hex: of the tensors' dtypes and shapes, and of all their bits in logical order.

    The tensors lie on one device; the digest does not depend on which, nor on their strides. Waits once for a GPU.
    """
    about = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    sums = _sums([_words(tensor) for tensor in tensors])
    return hashlib.blake2b(f"{about}|{sums}".encode(), digest_size=16).hexdigest()


class Running:
    """The digest of rows that come in blocks, on any device: the same however they are cut. Rows are words of their
    own, filled up with zeros. Waits for a GPU at the end alone."""

    def __init__(self) -> None:
        self._num_words = 0
        self._sums: list[tuple[Any, Any]] = []

    def add(self, rows_RX: torch.Tensor) -> None:
        raw_RB = rows_RX.detach().contiguous().view(torch.uint8)
        raw_RB = torch.nn.functional.pad(raw_RB, (0, -raw_RB.shape[1] % 8))
        words = _words(raw_RB)
        self._sums += (_on_device if words.is_cuda else _on_host)([words], self._num_words + 1)
        self._num_words += len(words)

    def hex(self) -> str:
        """128 bits in hex: of how many words there were, and of all their bits in order."""
        first, second = _added(self._sums)
        return hashlib.blake2b(f"{self._num_words}|{first}|{second}".encode(), digest_size=16).hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as int64, zeros behind the last."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.storage_offset() % 8:
        flat = torch.cat([flat, flat.new_zeros(missing)])  # always a copy, which begins at a word
    return flat.view(torch.int64)


def _sums(parts: list[torch.Tensor]) -> tuple[int, int]:
    """Both sums over the words of all parts, as if they were one."""
    if len(parts) > 1 and (parts[0].is_cuda or sum(map(len, parts)) <= _PIECE["cpu"]):
        parts = [torch.cat(parts)]  # a copy costs less than a dozen calls a part
    on_device = any(part.is_cuda for part in parts)
    return _added(list((_on_device if on_device else _on_host)(parts)))


def _added(pairs: list[tuple[Any, Any]]) -> tuple[int, int]:
    if pairs and isinstance(pairs[0][0], torch.Tensor):
        pairs = torch.stack([one for pair in pairs for one in pair]).view(-1, 2).tolist()
    return sum(int(first) for first, _ in pairs) & _WORD, sum(int(second) for _, second in pairs) & _WORD


def _on_host(parts: list[torch.Tensor], place: int = 1) -> Iterator[tuple[Any, Any]]:
    """In numpy: a call of it costs a fifth of torch's, and it has words without a sign."""

    def upper(words: Any, into: Any) -> Any:
        return np.right_shift(words, 32, out=into)

    for first, piece in _pieces(parts, place):
        words = piece.numpy().view(np.uint64)
        places = np.arange(first, first + len(words), dtype=np.uint64)
        yield _pair(words, places, np.empty_like(places), np.uint64(_GOLDEN), np.uint64(_FACTOR), upper)


def _on_device(parts: list[torch.Tensor], place: int = 1) -> Iterator[tuple[Any, Any]]:
    def upper(words: Any, into: Any) -> Any:  # torch's shift copies the sign
        return torch.bitwise_right_shift(words, 32, out=into).bitwise_and_((1 << 32) - 1)

    for first, words in _pieces(parts, place):
        places = torch.arange(first, first + len(words), device=words.device)
        yield _pair(words, places, torch.empty_like(places), _GOLDEN - (1 << 64), _FACTOR - (1 << 64), upper)


def _pieces(parts: list[torch.Tensor], first: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Places count from 1: at place 0 a word of zeros would mix to 0."""
    for part in parts:
        for words in part.split(_PIECE[part.device.type]):
            yield first, words
            first += len(words)


def _pair(words: Any, places: Any, spare: Any, golden: Any, factor: Any, upper: Callable[..., Any]) -> tuple[Any, Any]:
    """Sums of one piece, without a wait; `places` and `spare` are written over."""
    mixed = places
    mixed *= golden
    mixed += words
    for _ in range(2):
        mixed ^= upper(mixed, spare)
        mixed *= factor
    mixed ^= upper(mixed, spare)
    first = mixed.sum()
    mixed += words
    mixed ^= upper(mixed, spare)
    mixed *= factor
    mixed ^= upper(mixed, spare)
    return first, mixed.sum()
