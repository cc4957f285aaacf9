"""A tokenizer for tests that need none in particular."""

from __future__ import annotations

import json
import re
from typing import Any


class Words:
    """A tokenizer of words: the arithmetic under test does not depend on which tokenizer it is."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids = []
        for word in re.findall(r"\S+", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            ids.append(self.ids[word])
        return ids

    def decode(self, token_ids: list[int], /) -> str:
        return " ".join(self.words[index] for index in token_ids)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        turns = [f"<{message['role']}> {message['content']} <end>" for message in conversation]
        return "\n".join([*(json.dumps(tool) for tool in tools or ()), *turns, "<assistant>"])
