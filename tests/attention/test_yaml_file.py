from __future__ import annotations

from pathlib import Path

import pytest

from attention.errors import UserError, shown
from attention.yaml_file import read_json, read_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join(['*' + before] * 9)}]\n" for before, key in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        b"name: 2024-99-99",
        b"name: !!int foo",
        b"name: !!int ''",
        b"name: !!bool foo",
        b"name: !!timestamp foo",
        b"name: " + b"9" * 5000,
        b"[" * 5000,
        b"a: [unclosed",
        b"a: !!python/object:os.system {}",
        b"\xff\xfe\x00\x81",
        b"name: a\nplan: demo\nname: b",
        b"waves: [{gpu: cpu, gpu: h200}]",
    ],
    ids=lambda content: content[:24].decode(errors="replace"),
)
def test_whatever_is_no_yaml_is_one_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.yaml: not YAML") as raised:
        read_yaml(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["nowhere.yaml", "x" * 5000, ".", "a\0b"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as raised:
        read_yaml(tmp_path / name)
    assert "\n" not in str(raised.value) and "\0" not in str(raised.value)


def test_a_value_is_shown_in_short_however_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    assert len(shown(read_yaml(path))) < 2000
    assert len(shown("x" * 10**6)) < 200
    assert shown(10**5000) == "a int too long to show"
    assert shown("cpu") == "'cpu'"


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"9" * 5000, b"{", b"\xff\xfe\x00\x81", b'{"a": 1, "b": 2, "a": 3}', None],
    ids=lambda content: str(content)[:24],
)
def test_whatever_is_no_json_is_one_line_that_names_the_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.json: (not JSON|cannot be read)") as raised:
        read_json(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_json_may_come_with_a_mark_or_in_utf_16(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "a.json").write_text('{"gpu": "H200\u2028"}', encoding=encoding)
        assert read_json(tmp_path / "a.json") == {"gpu": "H200\u2028"}


def test_anchors_and_merges_may_be_used_twice_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\ntheirs: [*b, {<<: *b, x: 4}]\n")
    assert read_yaml(path) == {
        "base": {"x": 1, "y": 2},
        "mine": {"x": 1, "y": 3},
        "theirs": [{"x": 1, "y": 2}, {"x": 4, "y": 2}],
    }
