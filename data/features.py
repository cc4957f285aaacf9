"""What strata of traffic are made of: the features of a request, and its language where its script tells it."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

UNDETERMINED = "und"  # ISO 639-2: a language that was not determined
_LOOKED_AT = 2000  # characters of a text: more would not change the answer
_LEAST_SHARE = 0.2  # of the letters, so that a quoted word does not name the language
# Scripts that write one language. Latin, Cyrillic, Arabic and Devanagari write many.
_SCRIPTS = {"HANGUL": "ko", "GREEK": "el", "THAI": "th", "HEBREW": "he", "GEORGIAN": "ka", "ARMENIAN": "hy"}
_JAPANESE = ("HIRAGANA", "KATAKANA")
_LETTER = re.compile(r"[^\W\d_]")


def features(body: Mapping[str, Any], category: str = "") -> tuple[str, ...]:
    """Features of an OpenAI body, in a fixed order: `tools`, `json`, `multi_turn`, `stream`."""
    kind = (body.get("response_format") or {}).get("type", "")
    roles = Counter(message.get("role") for message in body.get("messages") or ())
    found = {
        "tools": bool(body.get("tools")),
        "json": category == "json" or kind.startswith("json"),
        "multi_turn": roles["user"] > 1,
        "stream": bool(body.get("stream")),
    }
    return tuple(name for name, there in found.items() if there)


def language_of(text: str) -> str:
    """ISO 639-1 code where the script alone tells the language, else `und`.

    Kana beside Han is Japanese, Han alone Chinese; text in several of these scripts goes to the most frequent.
    """
    head = text[:_LOOKED_AT]
    letters = [] if head.isascii() else _LETTER.findall(head)
    if not letters:
        return UNDETERMINED
    scripts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in letters)
    kana = sum(scripts[name] for name in _JAPANESE)
    han = scripts["CJK"]
    counts = {language: scripts[script] for script, language in _SCRIPTS.items()}
    counts["ja" if kana >= _LEAST_SHARE * (kana + han) else "zh"] = kana + han
    language, most = max(counts.items(), key=lambda item: item[1])
    return language if most >= _LEAST_SHARE * len(letters) and most > 0 else UNDETERMINED
