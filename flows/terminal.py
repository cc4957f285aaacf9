"""What commands print for people: progress lines, and the table of gates at the end.

Everything reads without colour: a verdict is a word first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.tables import Rows, console_of_width, word

if TYPE_CHECKING:
    from flows.qualify import Qualified
    from tasks.lifecycle import Gate, ReleaseResult


def progress(*, to_stderr: bool) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now."""
    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(Text(f"{time.monotonic() - started:6.1f} s  {line}"))

    return say


def show_release(results: Sequence[ReleaseResult]) -> None:
    """The table of gates, then the state as the last line."""
    console = console_of_width()
    for result in results:
        if result.gates:
            console.print(Text(f"{result.candidate} on {result.gpu}, {result.family}"), soft_wrap=True)
            console.print(gate_table(result.gates))
        if result.report:
            console.print(Text(f"report   {result.report}"), soft_wrap=True)
        if result.champion:
            console.print(Text(f"champion {result.champion}, previous {result.previous or 'none'}"), soft_wrap=True)
        if result.state != "promoted" or not result.changed:
            console.print(Text(result.reason), soft_wrap=True)
        console.print(word(result.state.replace("_", " "), result.state))


def show_qualified(found: Sequence[Qualified]) -> None:
    """The same of the offline gates under the id that `why` takes, then the verdict as the last line."""
    console = console_of_width()
    for one in found:
        console.print(Text(f"{one.candidate} against {one.champion} on {one.gpu}, {one.family}"), soft_wrap=True)
        console.print(Text(f"id       {one.qualification_id}"), soft_wrap=True)
        console.print(gate_table(_offline(one)))
        console.print(Text(f"report   {one.report}"), soft_wrap=True)
        console.print(Text(one.reason), soft_wrap=True)
        console.print(word(one.verdict, one.verdict))


def _offline(one: Qualified) -> Iterator[Gate]:
    from tasks.lifecycle import Gate, detectable

    for report in one.gates:
        yield Gate(
            stage=report.stage,
            verdict=str(report.verdict),
            checks=len(report.checks),
            seconds=one.seconds.get(report.stage, 0.0),
            detectable=detectable(check.detectable for check in report.checks if check.detectable),
            reason=report.reason,
        )


def gate_table(gates: Iterable[Gate]) -> Rows:
    """A row a gate: what a pass could have seen, or why it is none."""
    effect = "smallest effect it could have seen, or why it did not pass"
    rows = Rows("gate", "verdict", "checks", "seconds", effect, right=("checks", "seconds"))
    for gate in gates:
        said = gate.detectable if gate.verdict == "pass" else gate.reason
        rows.add(gate.stage, word(gate.verdict, gate.verdict), str(gate.checks), f"{gate.seconds:.0f}", said)
    return rows
