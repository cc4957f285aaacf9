"""Prefix reuse: keys and values of prompt pieces that several requests begin with, computed once.

    cache = PrefixCache(pool, piece=128, page_size=16)
    held = cache.match(prompt_ids)        # pieces that are there, longest way; taken until `release`
    held = cache.extend(held, prompt_ids, block_table)      # a piece more, once it is computed
    cache.release(held)

Only whole pieces are reused, cut where the scheduler cuts prompts: what a request reads is then bit by bit what it
would have computed itself. Pages of a piece belong to the cache from when it is taken in. A piece that nobody holds
stays until its pages are needed; the one used longest ago goes first, and never before what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol


class Pool(Protocol):
    """Where pages come from (attention.model.PagePool)."""

    def free(self, pages: Sequence[int]) -> None: ...


@dataclass(eq=False)
class Piece:
    """One piece of a prompt in the cache, and what it follows."""

    parent: Piece | None
    ids: tuple[int, ...]
    pages: tuple[int, ...]
    holders: int = 0
    used: int = 0
    children: dict[tuple[int, ...], Piece] = field(default_factory=dict)
    lost: bool = False  # not to be found any more: its pages go with its last holder


class PrefixCache:
    """Pieces of `piece` tokens, a multiple of `page_size`. One thread uses it."""

    def __init__(self, pool: Pool, *, piece: int, page_size: int) -> None:
        if piece % page_size:
            raise ValueError(f"a piece of {piece} tokens is no whole number of pages of {page_size}")
        self._pool = pool
        self._piece = piece
        self._pages = piece // page_size
        self._root = Piece(None, (), ())
        self._idle: set[Piece] = set()  # that nobody holds
        self._clock = count(1)

    @property
    def num_idle_pages(self) -> int:
        """Pages that could be had at once."""
        return len(self._idle) * self._pages

    def match(self, prompt_ids: Sequence[int]) -> list[Piece]:
        """The pieces with which the prompt begins, held from now on. Its last token is in none of them: a request has
        to compute something."""
        found: list[Piece] = []
        at = self._root
        for start in range(0, len(prompt_ids) - self._piece, self._piece):
            following = at.children.get(tuple(prompt_ids[start : start + self._piece]))
            if following is None:
                break
            found.append(following)
            at = following
        for piece in found:
            self._hold(piece)
        return found

    def extend(self, held: list[Piece], prompt_ids: Sequence[int], block_table: Sequence[int]) -> list[Piece]:
        """`held` and the next piece of the prompt, which is computed and lies in `block_table`: its pages are the
        cache's from now on. As it was where another request was first."""
        start = len(held) * self._piece
        ids = tuple(prompt_ids[start : start + self._piece])
        at = held[-1] if held else self._root
        if len(ids) < self._piece or ids in at.children or at.lost:
            return held
        pages = tuple(block_table[len(held) * self._pages : (len(held) + 1) * self._pages])
        piece = at.children[ids] = Piece(at, ids, pages)
        self._hold(piece)
        return [*held, piece]

    def release(self, held: Sequence[Piece]) -> None:
        """Nobody's any more, once its last holder releases it."""
        for piece in reversed(held):
            piece.holders -= 1
            if piece.holders:
                continue
            if piece.lost:
                self._pool.free(piece.pages)
            else:
                self._idle.add(piece)

    def evict(self, num_pages: int) -> None:
        """Give back so many pages, or all that can be."""
        while num_pages > 0:
            leaves = [piece for piece in self._idle if not piece.children]
            if not leaves:
                return
            oldest = min(leaves, key=lambda piece: piece.used)
            self._forget(oldest)
            self._pool.free(oldest.pages)
            num_pages -= self._pages

    def clear(self) -> None:
        """Forget everything: what was computed is not to be trusted."""
        waiting = list(self._root.children.values())
        while waiting:
            piece = waiting.pop()
            waiting += piece.children.values()
            piece.lost = True
            if not piece.holders:
                self._pool.free(piece.pages)
        self._idle.clear()
        self._root = Piece(None, (), ())

    def _hold(self, piece: Piece) -> None:
        piece.holders += 1
        piece.used = next(self._clock)
        self._idle.discard(piece)

    def _forget(self, piece: Piece) -> None:
        self._idle.discard(piece)
        if piece.parent is not None:
            del piece.parent.children[piece.ids]
