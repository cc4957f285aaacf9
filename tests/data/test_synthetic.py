from __future__ import annotations

import random
from itertools import takewhile

import pytest

from attention.errors import UserError
from data.synthetic import PromptShape, single_token_words, synthetic_prompt
from tests.data.words import Words


def shape(prompt_tokens: int, *blocks: int, block_tokens: int = 8) -> PromptShape:
    return PromptShape(prompt_tokens=prompt_tokens, blocks=blocks, block_tokens=block_tokens)


class Pieces(Words):
    """Like a byte-pair vocabulary: a word without a space before it is two tokens, with it one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(text, add_special_tokens=add_special_tokens)
        return ids if text.startswith(" ") else [0, *ids]


class Letters(Words):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize("tokenizer", [Words(), Pieces()], ids=["words", "pieces"])
@pytest.mark.parametrize("num_tokens", [2, 7, 100, 5000])
def test_a_prompt_has_exactly_the_tokens_of_its_shape(tokenizer: Words, num_tokens: int) -> None:
    words = single_token_words(tokenizer)
    text = synthetic_prompt(shape(num_tokens), "r1", words, tokenizer)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == num_tokens
    assert text == synthetic_prompt(shape(num_tokens), "r1", words, tokenizer)
    assert num_tokens < 7 or text != synthetic_prompt(shape(num_tokens), "r2", words, tokenizer)


def test_equal_blocks_are_equal_text_and_the_first_unequal_one_ends_it() -> None:
    tokenizer = Words()
    words = single_token_words(tokenizer)
    draws = random.Random(5)
    for _ in range(20):
        shared = draws.randrange(5)
        heads = list(range(shared))
        texts = [
            synthetic_prompt(shape(8 * (shared + 2) - draws.randrange(8), *heads, own, own + 1), "r", words, tokenizer)
            for own in (100, 200)
        ]
        one, other = (text.split() for text in texts)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        assert 8 * shared <= common < 8 * (shared + 1)


def test_a_last_block_takes_what_the_others_leave() -> None:
    tokenizer = Words()
    words = single_token_words(tokenizer)
    short = synthetic_prompt(shape(20, 1, 2, 3), "r", words, tokenizer).split()
    longer = synthetic_prompt(shape(30, 1, 2, 3), "r", words, tokenizer).split()
    assert (len(short), len(longer)) == (20, 30)
    assert longer[:20] == short


def test_a_tokenizer_that_cannot_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="single tokens, 64 are needed; use a traffic file with texts"):
        single_token_words(Letters())
    with pytest.raises(UserError, match="makes no synthetic prompt of 1 tokens"):
        synthetic_prompt(shape(1), "r", ("a",), Pieces())
