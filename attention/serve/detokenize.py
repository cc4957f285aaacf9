"""Text from tokens as they come: whole characters only, and nothing after a stop string.

A token may end inside a UTF-8 character, and a stop string may begin in one token and end in another.
Text that may still change is held back: incomplete characters, and a tail with which a stop string
could begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder writes for an incomplete or invalid character
# An incomplete character ends within 4 bytes; a longer run of replacements is invalid for good.
_MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Turns the tokens of one answer into text, piece by piece.

    `push` and `finish` return the text that became final; `text` is all of it. `stopped` says that a
    stop string was met: text ends before it.
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

    def push(self, token_id: int) -> str:
        """Take one token; the text that became final, often empty."""
        if self.stopped:
            return ""
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
