"""What commands print for people: progress lines, and the table of gates at the end.

Everything reads without colour: a verdict is a word first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flows.qualify import Qualified
    from tasks.lifecycle import ReleaseResult

WIDTH = 120  # of a table that nobody watches

STYLES = {
    "pass": "green",
    "promoted": "bold green",
    "fail": "bold red",
    "error": "bold magenta",
    "inconclusive": "yellow",
}


def progress(*, to_stderr: bool) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now."""
    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(Text(f"{time.monotonic() - started:6.1f} s  {line}"))

    return say


def show_release(results: Sequence[ReleaseResult]) -> None:
    """The table of gates, then the state as the last line."""
    console = _console()
    for result in results:
        if result.gates:
            console.print(_gates(f"{result.candidate} on {result.gpu}, {result.family}", result))
        if result.report:
            console.print(Text(f"report   {result.report}"), soft_wrap=True)
        if result.champion:
            console.print(Text(f"champion {result.champion}, previous {result.previous or 'none'}"), soft_wrap=True)
        if result.state != "promoted" or not result.changed:
            console.print(Text(result.reason), soft_wrap=True)
        console.print(_word(result.state.replace("_", " "), result.state))


def _gates(title: str, result: ReleaseResult) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, how in (
        ("gate", {}),
        ("verdict", {}),
        ("checks", {"justify": "right"}),
        ("seconds", {"justify": "right"}),
    ):
        table.add_column(name, no_wrap=True, **how)  # type: ignore[arg-type]
    table.add_column("smallest effect it could have seen, or why it did not pass")
    for gate in result.gates:
        said = gate.detectable if gate.verdict == "pass" else gate.reason
        table.add_row(gate.stage, _word(gate.verdict, gate.verdict), str(gate.checks), f"{gate.seconds:.0f}", said)
    return table


def _console() -> Console:
    """As wide as the terminal; a file or a pipe gets lines that hold the table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def show_qualified(found: Sequence[Qualified]) -> None:
    console = _console()
    for one in found:
        table = Table(title=f"{one.candidate} against {one.champion} on {one.gpu}", title_justify="left", box=None)
        for name in ("gate", "verdict", "checks"):
            table.add_column(name)
        for gate in one.gates:
            table.add_row(gate.stage, _word(str(gate.verdict), str(gate.verdict)), str(len(gate.checks)))
        console.print(table)
        console.print(Text(one.reason), soft_wrap=True)
        console.print(_word(one.verdict, one.verdict))


def _word(text: str, verdict: str) -> Text:
    return Text(text, style=STYLES.get(verdict, "bold"))
