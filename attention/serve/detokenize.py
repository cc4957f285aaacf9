"""Text from tokens as they come: whole characters only, and nothing after a stop string.

A token may end inside a UTF-8 character, and a stop string may begin in one token and end in another.
Text that may still change is held back: incomplete characters, and a tail with which a stop string
could begin.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder writes for an incomplete or invalid character
# An incomplete character ends within 4 bytes; a longer run of replacements is invalid for good.
_MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Turns the tokens of one answer into text, piece by piece.

    `push` and `finish` return the text that became final; `text` is all of it. `stopped` says that a
    stop string was met: text ends before it. `offsets` holds, for each token pushed, the characters before it; a
    token that is a part of a character stands where the character begins.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Tokens before `_read` are in text. Decoding starts at `_prefix`, some tokens earlier, because
        # tokenizers write a token differently at the start of a text.
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""
        self._held = ""
        self.text = ""
        self.stopped = False
        self.offsets: list[int] = []

    def push(self, token_id: int) -> str:
        """Take one token; the text that became final, often empty."""
        if self.stopped:
            return ""
        self.offsets.append(len(self.text) + len(self._held))
        self._ids.append(token_id)
        decoded = self._decode(self._ids[self._prefix :])
        pending = len(self._ids) - self._read
        if decoded.endswith(_REPLACEMENT) and pending < _MAX_PENDING_TOKENS:
            return ""
        self._held += decoded[len(self._prefix_text) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._prefix_text = self._decode(self._ids[self._prefix :])
        return self._release(hold=True)

    def finish(self) -> str:
        """The rest of the text once no token follows."""
        if self.stopped:
            return ""
        decoded = self._decode(self._ids[self._prefix :])
        self._held += decoded[len(self._prefix_text) :]
        self._prefix_text = decoded
        return self._release(hold=False)

    def num_told(self, *, last: bool = False) -> int:
        """Tokens that begin in the text that is out; at the end all, unless a stop string cut some off."""
        if last and not self.stopped:
            return len(self.offsets)
        return bisect_left(self.offsets, len(self.text))

    def decode_all(self, ids: list[int]) -> None:
        """Set `text` from all tokens at once: cheaper, for an answer that nobody reads as it comes."""
        self.text = self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, *, hold: bool) -> str:
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)], ""
        else:
            keep = self._num_held() if hold else 0
            split = len(self._held) - keep
            piece, self._held = self._held[:split], self._held[split:]
        self.text += piece
        return piece

    def _num_held(self) -> int:
        """Length of the longest tail with which a stop string could begin."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0


@dataclass(frozen=True)
class TokenText:
    """One token alone: as text, and its bytes where they are known."""

    text: str
    raw: bytes | None


class Vocabulary:
    """Text and bytes of single tokens.

    A token that is a part of a character has no text of its own: it is written `bytes:\\xe6\\x97`, as OpenAI does.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}  # at most the vocabulary

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> TokenText:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # a row of the model's matrix that no token uses
            return TokenText(f"token_id:{token_id}", None)
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if _REPLACEMENT not in text:
            # Decoders drop the space that begins a text; within one it is there.
            text = f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text
            return TokenText(text, text.encode())
        raw = _raw(piece)
        return TokenText(text, None) if raw is None else TokenText("bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw)


def _raw(piece: str) -> bytes | None:
    """Bytes of a piece that is no text: `<0xE6>` of a byte fallback, or letters that stand for bytes."""
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(fallback[1])
    try:
        return bytes(_BYTE_OF[letter] for letter in piece)
    except KeyError:
        return None


def bytes_by_letter() -> dict[str, int]:
    """Byte-level tokenizers write printable Latin-1 as itself and the other bytes as letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{chr(b): b for b in plain}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


_BYTE_OF = bytes_by_letter()
