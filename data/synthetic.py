"""Prompts of a known length for traces that hold no text: words, one token each, drawn from a seed.

A trace of lengths (Azure, Mooncake, BurstGPT, a log without its texts) says how long a prompt was and, at
best, which of its blocks it shared with others. Such a prompt is made anew: exactly as many tokens, the same
at every run, and equal text for equal block ids, so that what a prefix cache saves is saved here too. The
text means nothing: it is fit for timing and for comparing numbers, not for judging answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from attention.errors import UserError

if TYPE_CHECKING:
    from data.requests import Tokenizer

# Short and common: one token each, with the space before it, in the vocabularies of today's models.
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have an had they you were "
    "their one all we can her has there been if more when will would who so no out up into than them only its "
    "some could time these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each just those people "
    "how too little state good very make world still own see men work long get here between both life being under "
    "never day same another know while last might us great old year off come since against go came right used take "
    "three house water place small large number part high light side hand point form line city open white kind end"
)
_LEAST_WORDS = 64  # fewer would make texts that a prefix cache or a draft model finds too easy
_ATTEMPTS = 8


class PromptShape(BaseModel):
    """What a trace tells of a prompt: its length, and which blocks of it others share."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_tokens: int = Field(ge=1)
    blocks: tuple[int, ...] = ()  # ids from the start on; equal ids are equal text. Empty: shared with nobody
    block_tokens: int = Field(default=512, ge=1)  # tokens a block, but for the last


def single_token_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words that are one token each in this vocabulary. Raises UserError when there are too few."""
    words = tuple(word for word in _COMMON.split() if len(_encode(f" {word}", tokenizer)) == 1)
    if len(words) < _LEAST_WORDS:
        raise UserError(
            f"traffic: this model's tokenizer has {len(words)} of the words that synthetic prompts are made of as "
            f"single tokens, {_LEAST_WORDS} are needed; use a traffic file with texts"
        )
    return words


def synthetic_prompt(shape: PromptShape, own: str, words: Sequence[str], tokenizer: Tokenizer) -> str:
    """A prompt of exactly `shape.prompt_tokens` tokens; prompts with the same first blocks have the same start.

    `own` seeds what no other prompt has: all of it without blocks. Raises UserError when the tokenizer joins
    words in a way that reaches no such length.
    """
    drawn = _words(shape, own, words)
    length = shape.prompt_tokens  # in words
    for _ in range(_ATTEMPTS):
        text = " ".join((drawn + _draw(f"{own}/rest", max(0, length - len(drawn)), words))[:length])
        excess = len(_encode(text, tokenizer)) - shape.prompt_tokens
        if excess == 0:
            return text
        length = max(1, length - excess)
    raise UserError(
        f"traffic: this model's tokenizer makes no synthetic prompt of {shape.prompt_tokens} tokens; "
        f"use a traffic file with texts"
    )


def _words(shape: PromptShape, own: str, words: Sequence[str]) -> list[str]:
    """One word a token; the last block takes what the others leave."""
    if not shape.blocks:
        return _draw(own, shape.prompt_tokens, words)
    *full, last = shape.blocks
    drawn = [word for block in full for word in _draw(f"block/{block}", shape.block_tokens, words)]
    return (drawn + _draw(f"block/{last}", max(0, shape.prompt_tokens - len(drawn)), words))[: shape.prompt_tokens]


def _draw(seed: str, num: int, words: Sequence[str]) -> list[str]:
    """The first `num` words of an endless sequence that the seed names: a shorter draw is a longer one's head."""
    return random.Random(seed).choices(words, k=num)  # noqa: S311


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
