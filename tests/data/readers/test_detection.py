"""Which reader a file gets, and files that are one JSON array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import data.readers
from attention.errors import UserError
from data.jsonl import Rejected
from data.readers import FORMATS, format_of, read
from tests.data.readers import test_langfuse, test_litellm, test_mooncake, test_otel, test_vllm_log
from tests.data.readers.logs import rows, write
from tests.data.readers.test_csv_trace import AZURE_HEADER, BURST_1, BURST_3
from tests.data.readers.test_openai_batch import PLAIN

EXAMPLES: list[tuple[str, Any]] = [
    ("openai-batch", PLAIN),
    ("openai-batch", PLAIN | {"t_s": 0.0, "session_id": "s", "category": "chat", "language": "en"}),
    ("otel", test_otel.export(test_otel.span(test_otel.USAGE))),
    ("litellm", test_litellm.spent()),
    ("langfuse", test_langfuse.generation()),
    ("vllm", test_vllm_log.received("x")),
    ("mooncake", test_mooncake.request()),
    ("azure", AZURE_HEADER + "\r\n2023-11-16 18:15:46.6805900,374,44\r"),
    ("burstgpt", BURST_1 + "\n5,ChatGPT,472,18,490,Conversation log"),
    ("burstgpt", BURST_3 + "\n5.0,a,1,ChatGPT,472,18,490,Conversation log"),
]


def test_there_is_an_example_of_every_format() -> None:
    assert {name for name, _ in EXAMPLES} == set(FORMATS)


@pytest.mark.parametrize(("name", "content"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("before", [[], ["", "{broken", "\ufeff"]], ids=["at once", "after bad lines"])
def test_a_file_is_known_by_its_content_whatever_it_is_called(
    tmp_path: Path, name: str, content: Any, before: list[str]
) -> None:
    path = write(tmp_path / "azure.csv", *before, content)
    assert format_of(path) == name
    good = [found for found in read(path, name) if not isinstance(found, Rejected)]
    assert len(good) == (0 if before and name in ("azure", "burstgpt") else 1)


def test_a_vllm_log_is_known_after_a_long_start_up(tmp_path: Path) -> None:
    started = ["INFO 08-06 10:19:00 [config.py:1] loading {weights}"] * 500
    assert format_of(write(tmp_path / "log", *started, test_vllm_log.received("x"))) == "vllm"


def test_an_unknown_file_is_an_error_that_lists_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no line is of a known format") as caught:
        format_of(write(tmp_path / "t.txt", "hello", "a,b,c"))
    assert all(name in str(caught.value) for name in FORMATS)


def test_objects_of_no_known_form_are_taken_for_ours_which_says_line_and_field(tmp_path: Path) -> None:
    assert format_of(write(tmp_path / "t", {"prompt": "x"})) == "openai-batch"
    assert format_of(write(tmp_path / "t", {"log": test_vllm_log.received("x")})) == "openai-batch"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_a_json_array_is_read_item_by_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, chunk: int
) -> None:
    monkeypatch.setattr(data.readers, "_CHUNK", chunk)
    items = [test_langfuse.generation(id=f"o{number}", input="]},{[ \u4f60") for number in range(5)]
    path = tmp_path / "export.json"
    path.write_text("\ufeff\n" + json.dumps(items, indent=indent, ensure_ascii=False))
    assert format_of(path) == "langfuse"
    found = list(read(path, "langfuse"))
    assert [row["custom_id"] for row in rows(found)] == ["o0", "o1", "o2", "o3", "o4"]


def test_an_array_that_breaks_off_gives_what_came_before_and_one_rejected_line(tmp_path: Path) -> None:
    text = json.dumps([test_litellm.spent(request_id="a"), test_litellm.spent(request_id="b")])
    path = tmp_path / "t.json"
    path.write_text(text[:-100])
    good, broken = read(path, "litellm")
    assert [row["custom_id"] for row in rows([good])] == ["a"]
    assert isinstance(broken, Rejected)
    assert broken.line == 2
