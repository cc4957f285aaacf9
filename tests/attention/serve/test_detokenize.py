"""Text from tokens: whole characters, nothing after a stop string, the same in pieces as at once."""

from __future__ import annotations

import random

import pytest

from attention.serve.detokenize import Detokenizer
from tests.attention.fake_runner import FakeTokenizer


def pieces(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    one = Detokenizer(FakeTokenizer(), stop)
    found = [one.push(token) for token in text]
    return [*found, one.finish()], one


def test_an_incomplete_character_is_held_back() -> None:
    found, one = pieces("aé日😀".encode())
    assert found == ["a", "", "é", "", "", "日", "", "", "", "😀", ""]
    assert one.text == "aé日😀"


def test_bytes_that_never_make_a_character_come_out_in_the_end() -> None:
    found, _ = pieces(b"a" + b"\xff" * 3)
    assert "".join(found) == "a\ufffd\ufffd\ufffd"
    found, one = pieces(b"\xff" * 20 + b"end")
    assert one.text == "\ufffd" * 20 + "end"
    assert found[10] == "" or "\ufffd" in "".join(found[:12])


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    found, one = pieces(b"one two END three", ("END",))
    assert "".join(found) == one.text == "one two "
    assert one.stopped


def test_a_tail_that_only_looks_like_a_stop_string_is_shown_later() -> None:
    found, one = pieces(b"EN passant, E", ("END",))
    assert found[:3] == ["", "", "EN "]
    assert one.text == "EN passant, E"
    assert not one.stopped


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert pieces(b"a b c d", ("d", "b"))[1].text == "a "


@pytest.mark.parametrize("seed", range(10))
def test_pieces_make_the_text_that_decoding_at_once_makes(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab é日😀\n") for _ in range(80)).encode()
    if seed % 2:
        text = bytes(rng.randrange(256) for _ in range(80))
    at_once = Detokenizer(FakeTokenizer())
    at_once.decode_all(list(text))
    assert "".join(pieces(text)[0]) == at_once.text
