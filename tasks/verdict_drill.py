"""Can this machine tell 1 from 1.02 and 1.05? The verdicts of a baseline on differences that are known.

    python -m tasks.verdict_drill --matrix cpu --cells 6 --out drill.json
    python -m tasks.verdict_drill --matrix hopper --cells 50 --budget-s 300 --out drill.json     # on a GPU

A cell is one backend on one case of the matrix. Champion and candidate are two processes with the same backend; in
the first pass they are equal, then each call of the candidate is followed by a spin of 5 %, then of 2 % of its time: at
least what a GPU's shortest kernel takes, so that the shortest calls become slower than was asked for. The verdicts
should be SAME, SLOW and anything but SAME. As in a release, two equal processes give the floor first, and what is below
it is no difference. Exit 1: a verdict was wrong; 3: this machine cannot tell, since too few verdicts are as they should
be (`ASKED`), a cell was lost, or two equal processes differ by 2 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from attention.errors import UserError, exit_code
from attention.flags import check_count, check_seconds
from attention.job import BenchCommand, BenchJob
from attention.matrix import declared_reasons
from attention.replaced import replaced
from data.baseline_matrix import BaselineMatrix, cells, load_matrix
from data.environment import load_environment
from data.mix import load_mix
from tasks.measurement import Compared, Contender, Crew, Effort, Pair, compare, noise_floor
from tasks.survey import setup_of_shape

Pass = Literal["equal", "5 % slower", "2 % slower"]

PASSES: dict[Pass, float] = {"equal": 0.0, "5 % slower": 0.05, "2 % slower": 0.02}
#: What is asked of a pass: the verdict, and which share of its cells has it.
ASKED: dict[Pass, tuple[str, float]] = {"equal": ("SAME", 0.9), "5 % slower": ("SLOW", 0.95)}
MARGIN, MOST_FLOOR = 0.01, 0.02
FIRST_BLOCKS, MOST_BLOCKS, PROCESSES = 8, 48, 2
_MIN_BLOCK_S = 0.01


@dataclass(frozen=True)
class Verdict:
    """What was said of one cell in one pass."""

    drilled: Pass
    backend: str
    case_id: str
    layout: str
    execution: str
    said: str | None  # None: lost
    ratio: float | None
    low: float | None
    high: float | None
    margin: float
    error: float | None  # standard error of the log ratio
    block_error: float | None  # its part that more blocks make smaller
    blocks: int
    seconds: float
    lost: str | None = None  # why there is no verdict

    @property
    def wrong(self) -> bool:
        """Whether it says what is not so: AMBG never does, nor SAME of what lies below the floor."""
        share = PASSES[self.drilled]
        if share == 0:
            return self.said in ("FAST", "SLOW")
        return self.said == "FAST" or (self.said == "SAME" and share > self.margin)


def drillable(matrix: BaselineMatrix, mix: str, device: str) -> list[Pair]:
    """Pairs of a backend and a case that its declared rules let run, in an order that a fixed seed gives."""
    found = [
        Pair(one.case, backend=backend)
        for one in cells(matrix, load_mix(mix))
        for backend in matrix.contenders()
        if not declared_reasons(backend, one.case, device=device)
    ]
    if not found:
        raise UserError(f"no backend of the matrix runs any of its cases on {device}")
    random.Random(0).shuffle(found)  # noqa: S311 - which cells, nothing secret
    return found


def drill(
    matrix: BaselineMatrix,
    mix: str,
    device: str,
    num: int,
    *,
    work: Path,
    budget_s: float | None,
    heard: Callable[[Verdict], None],
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """All passes over `num` cells, of which the first pass takes those that run; each pass may use `budget_s`."""
    offered = drillable(matrix, mix, device)
    setup = setup_of_shape(offered[0].case, matrix.contenders(), device, work)
    base = Contender("champion", BenchJob(setup=setup), load_environment("current"))
    with Crew([base, replace(base, name="candidate")], work) as crew:
        crew.wait_ready()
        chosen = _running(crew, offered, num)
        first = {pair.case.phase: pair for pair in reversed(chosen)}  # one a family, as in a release
        floor = noise_floor(crew, list(first.values()), "champion", "candidate", _effort(MARGIN, budget_s))
        say(f"equal processes are within {100 * floor:.2g} %")
        for drilled, share in PASSES.items():
            crew.contenders["candidate"] = replace(base, name="candidate", slowdown=share)
            effort = _effort(max(MARGIN, floor), budget_s)
            began = time.monotonic()

            def built(one: Compared, drilled: Pass = drilled, began: float = began) -> None:
                where, blocks = f"{one.pair.backend} {one.pair.case.case_id}", one.num_blocks
                say(f"{drilled}, {time.monotonic() - began:.0f} s: {where}, {blocks} blocks")

            for one in compare(crew, chosen, "champion", "candidate", effort, heard=built):
                heard(_verdict(drilled, one, effort.margin))


def _effort(margin: float, budget_s: float | None) -> Effort:
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    return Effort(FIRST_BLOCKS, MOST_BLOCKS, PROCESSES, margin, _MIN_BLOCK_S, deadline)


def _running(crew: Crew, offered: Sequence[Pair], num: int) -> list[Pair]:
    """The first `num` that are not refused: a plan may refuse what rules let through. First calls compile here, so that
    the passes are of a warm service."""
    found: list[Pair] = []
    for pair in offered:
        command = BenchCommand(metric="kernel_s", case=pair.case, min_s=0.0, backend=pair.backend)
        answers = [crew.ask(name, command) for name in crew.contenders]
        if all(answer.outcome != "refused" for answer in answers):
            found.append(pair)
        if len(found) == num:
            return found
    raise UserError(f"only {len(found)} cells of the matrix run here: ask for --cells {len(found)}")


def _verdict(drilled: Pass, one: Compared, margin: float) -> Verdict:
    case, interval = one.pair.case, None if one.judged is None else one.judged.interval
    told = None if one.judged is None else one.estimate("champion", "candidate")
    pages = "" if case.page_size is None else f"/{case.page_size}"
    return Verdict(
        drilled=drilled,
        backend=str(one.pair.backend),
        case_id=case.case_id,
        layout=f"{case.layout}{pages}",
        execution=case.execution,
        said=None if one.judged is None else one.judged.verdict,
        ratio=None if interval is None else interval.value,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        margin=margin,
        error=None if told is None else told.error,
        block_error=None if told is None else told.block_error,
        blocks=one.num_blocks,
        seconds=one.seconds,
        lost="; ".join(f"{name} {answer.outcome}: {answer.error}" for name, answer in one.run.lost.items()) or None,
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """By pass: how many of each verdict, seconds, blocks, and how many were wrong."""
    found: dict[str, Any] = {}
    for drilled in PASSES:
        mine = [one for one in verdicts if one.drilled == drilled]
        if mine:
            found[drilled] = {
                "cells": len(mine),
                **Counter(one.said or "lost" for one in mine),
                "wrong": sum(one.wrong for one in mine),
                "margin": max(one.margin for one in mine),
                "seconds": round(sum(one.seconds for one in mine), 1),
                "blocks": sum(one.blocks for one in mine),
            }
    return found


def exit_of(verdicts: Sequence[Verdict]) -> int:
    """0 all is as asked; 1 a verdict is wrong; 3 the machine cannot tell."""
    if any(one.wrong for one in verdicts):
        return 1
    if not verdicts or any(one.said is None or one.margin >= MOST_FLOOR for one in verdicts):
        return 3
    for drilled, (said, share) in ASKED.items():
        mine = [one for one in verdicts if one.drilled == drilled]
        if sum(one.said == said for one in mine) < share * len(mine):
            return 3
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.verdict_drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--matrix", default="cpu", help="name or file of a baseline matrix (default: %(default)s)")
    parser.add_argument("--mix", default="chat", help="traffic mix (default: %(default)s)")
    parser.add_argument("--cells", type=int, default=6, help="cells of each pass (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, help="seconds of each pass: past it, what is ambiguous stays so")
    parser.add_argument("--out", type=Path, required=True, help="a .json file of verdicts, written after each pass")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
    check_count("--cells", options.cells)
    check_seconds("--budget-s", options.budget_s, or_none=True)
    if options.out.suffix != ".json" or not options.out.resolve().parent.is_dir():
        raise UserError(f"--out {options.out}: a .json file in a folder that is there")
    matrix = load_matrix(options.matrix)
    if "any" in matrix.gpus:
        raise UserError(f"--matrix {options.matrix}: one that names its GPUs, or cpu")
    verdicts: list[Verdict] = []

    def heard(one: Verdict) -> None:
        verdicts.append(one)
        with replaced(options.out) as fresh:
            document = {"summary": summary(verdicts), "verdicts": [asdict(v) for v in verdicts]}
            fresh.write_text(json.dumps(document, indent=1) + "\n")
        ratio = one.lost if one.ratio is None else f"{one.ratio:.4f} ({one.low:.4f} to {one.high:.4f})"
        said = one.said or "lost"
        line = f"{one.drilled:10} {said:4} {one.backend} {one.case_id}: {ratio}, {one.blocks} blocks"
        _say(line)

    work = options.out.with_suffix(".work")
    device = "cpu" if matrix.covers("cpu") else "cuda"
    counts = {"work": work, "budget_s": options.budget_s}
    drill(matrix, options.mix, device, options.cells, **counts, heard=heard, say=_say)
    print(json.dumps(summary(verdicts), indent=1))
    return exit_of(verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
