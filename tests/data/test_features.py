from __future__ import annotations

from typing import Any

import pytest

from data.features import features, language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("请解释一下注意力机制的原理", "zh"),
        ("注意機構の仕組みを説明してください", "ja"),
        ("カタカナ", "ja"),
        ("어텐션 메커니즘을 설명해 주세요", "ko"),
        ("Εξήγησε τον μηχανισμό προσοχής", "el"),
        ("อธิบายกลไกความสนใจ", "th"),
        ("הסבר את מנגנון הקשב", "he"),
        ("Explain attention", "und"),
        ("Erklär mir die Aufmerksamkeit", "und"),
        ("Объясни механизм внимания", "und"),
        ("What does 注意 mean in a sentence of English words", "und"),
        ("x = 1 + 2", "und"),
        ("123 !?", "und"),
        ("", "und"),
    ],
)
def test_a_language_is_named_only_where_its_script_tells_it(text: str, language: str) -> None:
    assert language_of(text) == language


def said(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("body", "category", "wanted"),
    [
        (said("system", "user"), "", ()),
        (said("user", "assistant", "user"), "", ("multi_turn",)),
        (said("user") | {"tools": [{}], "stream": True}, "", ("tools", "stream")),
        (said("user") | {"tools": [], "stream": False}, "chat", ()),
        (said("user"), "json", ("json",)),
        (said("user") | {"response_format": {"type": "json_schema"}}, "", ("json",)),
        ({"prompt": "x"}, "", ()),
    ],
)
def test_features_are_what_the_body_asks_for(body: dict[str, Any], category: str, wanted: tuple[str, ...]) -> None:
    assert features(body, category) == wanted
