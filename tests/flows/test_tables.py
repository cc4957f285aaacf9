"""Tables of a terminal: what a person copies is whole at any width; only free text wraps."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.tables import WIDTH, FirstThatFits, Rows, console_of_width, word

ID = "torch-flash-cpu-20261130-042333"
REASON = "median TPOT of the candidate's last 12 requests is 3.6 times control's"


def printed(rows: Rows, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(rows)
    return [line.rstrip() for line in console.export_text().splitlines()]


def table() -> Rows:
    rows = Rows("release", "verdict", "figure", "why", right=("figure",))
    rows.add(ID, word("fail", "fail"), "1.234e-05", REASON)
    rows.add("short", "pass", "2", "")
    return rows


def test_a_wide_terminal_has_one_line_a_row() -> None:
    assert printed(table(), 140) == [
        f"{'release':31}  verdict     figure  why",
        f"{ID}  fail     1.234e-05  {REASON}",
        f"{'short':31}  pass             2",
    ]


def test_text_wraps_beside_its_row_where_its_words_fit() -> None:
    assert printed(table(), 80)[1:4] == [
        f"{ID}  fail     1.234e-05  median TPOT of the",
        f"{'':53}candidate's last 12",
        f"{'':53}requests is 3.6 times",
    ]


def test_text_goes_under_its_row_where_they_do_not() -> None:
    assert printed(table(), 60)[1:4] == [
        f"{ID}  fail     1.234e-05",
        "    median TPOT of the candidate's last 12 requests is 3.6",
        "    times control's",
    ]


def test_a_row_wider_than_the_terminal_is_told_in_pairs() -> None:
    assert printed(table(), 40) == [
        f"release {ID}",
        "  verdict fail  figure 1.234e-05",
        "    median TPOT of the candidate's last",
        "    12 requests is 3.6 times control's",
        "release short  verdict pass  figure 2",
    ]


def test_names_that_are_stacked_are_no_wider_than_their_parts() -> None:
    rows = Rows("kind", "allclose_1e-2", "fa2", text=False, right=("allclose_1e-2", "fa2"), stacked=True)
    rows.add("zeros", "12", "12345")
    assert printed(rows, 80) == ["       allclose", "kind       1e-2    fa2", "zeros        12  12345"]
    assert printed(rows, 20) == ["kind zeros", "  allclose_1e-2 12", "  fa2 12345"]


def test_of_some_choices_the_first_that_fits_is_shown_and_else_the_last() -> None:
    def one(*names: str) -> Rows:
        rows = Rows(*names, text=False)
        rows.add(*names)
        return rows

    choice = FirstThatFits([one("aaaaaaaaaa", "bbbbbbbbbb")], [one("aaaaaaaaaa"), one("bbbbbbbbbb")])
    for width, lines in ((22, 2), (21, 5), (9, 9)):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(choice)
        assert console.export_text().count("\n") == lines


def test_an_empty_cell_is_no_pair() -> None:
    rows = Rows("release", "verdict", "figure", text=False)
    rows.add("short", "", "2")
    rows.add(ID, "fail", "2")
    assert printed(rows, 35)[0] == "release short  figure 2"


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 100, 200])
def test_figures_are_whole_at_any_width(width: int) -> None:
    text = "\n".join(printed(table(), width))
    assert "1.234e-05" in text
    assert width < len(ID) or ID in text
    assert max(map(len, text.splitlines())) <= width


def test_brackets_are_text_and_no_markup() -> None:
    rows = Rows("name", "why")
    rows.add("[bold]", "a [red] word")
    assert printed(rows, 80)[1] == "[bold]  a [red] word"


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console_of_width().width == WIDTH
    monkeypatch.setenv("COLUMNS", "77")
    assert console_of_width().width == 77
