"""Tables for a terminal of any width, in which nothing that a person copies is cut.

Needs `rich` alone: `doctor` prints with it where the rest may be broken.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

WIDTH = 120  # of a table that nobody watches
GAP = 2  # spaces between columns
LEAST_TEXT = 24  # columns that free text needs beside a row
UNDER = "    "  # before free text under its row

STYLES = {
    "pass": "green",
    "ok": "green",
    "alive": "green",
    "warn": "yellow",
    "dead": "red",
    "promoted": "bold green",
    "fail": "bold red",
    "error": "bold magenta",
    "inconclusive": "yellow",
}


class Rows:
    """A table in which ids, check names and figures stay whole, however narrow the terminal is.

    Only free text wraps, which with `text` is the last column: beside its row, or under it where the place is
    too narrow. A row that is wider than the terminal is told as `name value` pairs, as many a line as fit.
    `stacked` breaks the names at each `_`, so that a name is no wider than what stands under it need be.
    """

    def __init__(self, *names: str, text: bool = True, right: Collection[str] = (), stacked: bool = False) -> None:
        self._text, self._right = text, [name in right for name in names]
        self._names = names
        self._stacked = stacked
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    @property
    def width(self) -> int:
        """Of the columns that stay whole."""
        widths = self._widths()
        return sum(widths) + GAP * (len(widths) - 1)

    def _heads(self) -> list[list[Text]]:
        """The names: a line, or as many as the longest has parts, each at the bottom."""
        parts = [name.split("_") if self._stacked else [name] for name in self._names]
        most = max(map(len, parts))
        padded = [[""] * (most - len(one)) + one for one in parts]
        return [[Text(one[line], style="dim") for one in padded] for line in range(most)]

    def _widths(self) -> list[int]:
        table = [*self._heads(), *self._rows]
        return [max(row[i].cell_len for row in table) for i in range(len(self._names) - self._text)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        table, widths = [*self._heads(), *self._rows], self._widths()
        indent = sum(widths) + GAP * len(widths)
        if indent - GAP > options.max_width:
            for row in self._rows:
                yield from self._pairs(console, row, options.max_width)
            return
        texts = [row[-1] for row in table] if self._text else []
        beside = options.max_width - indent >= max((_least(text) for text in texts), default=0)
        for row in table:
            line = self._line(row, widths)
            if not self._text:
                yield line
            elif beside:
                line.append(" " * (indent - line.cell_len))
                yield from _hanging(console, line, row[-1], options.max_width)
            elif "\n" not in row[-1].plain and line.cell_len + GAP + row[-1].cell_len <= options.max_width:
                yield from _hanging(console, line.append(" " * GAP), row[-1], options.max_width)
            else:
                yield line
                yield from _hanging(console, Text(UNDER), row[-1], options.max_width)

    def _line(self, row: list[Text], widths: list[int]) -> Text:
        """The columns of a row that stay whole, padded."""
        line = Text()
        for cell, width, right in zip(row, widths, self._right, strict=False):
            padding = " " * (width - cell.cell_len)
            line.append_text(Text.assemble(padding, cell) if right else Text.assemble(cell, padding))
            line.append(" " * GAP)
        line.rstrip()
        return line

    def _pairs(self, console: Console, row: list[Text], width: int) -> Iterator[Text]:
        line = Text()
        for name, cell in zip(self._names[: len(self._names) - self._text], row, strict=False):
            if not cell:
                continue
            pair = Text.assemble((f"{name} ", "dim") if name else "", cell)
            if line and line.cell_len + GAP + pair.cell_len > width:
                yield line
                line = Text("  ")
            elif line:
                line.append(" " * GAP)
            line.append_text(pair)
        yield line
        if self._text:
            yield from _hanging(console, Text(UNDER), row[-1], width)


class FirstThatFits:
    """The first of some choices, each a sequence of tables, that is no wider than the terminal; else the last."""

    def __init__(self, *choices: Sequence[Rows]) -> None:
        self._choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Rows | Text]:
        fitting = (one for one in self._choices if max(rows.width for rows in one) <= options.max_width)
        for number, rows in enumerate(next(fitting, self._choices[-1])):
            if number:
                yield Text("")
            yield rows


def _least(text: Text) -> int:
    """Columns that free text needs: its longest word, and LEAST_TEXT where it is long enough to fill them."""
    longest = max((len(word) for word in text.plain.split()), default=0)
    return max(longest, min(LEAST_TEXT, text.cell_len))


def _hanging(console: Console, first: Text, text: Text, width: int) -> Iterator[Text]:
    """Free text after `first`, wrapped, further lines under its beginning; `first` alone for no text."""
    if not text:
        first.rstrip()
        if first:
            yield first
        return
    indent = first.cell_len
    for number, line in enumerate(text.wrap(console, max(width - indent, 1), overflow="fold")):
        line.rstrip()
        yield Text.assemble(" " * indent if number else first, line)


def console_of_width() -> Console:
    """As wide as the terminal, or as COLUMNS says; a file or a pipe gets lines that hold the table."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=WIDTH)


def word(text: str, verdict: str) -> Text:
    return Text(text, style=STYLES.get(verdict, "bold"))
