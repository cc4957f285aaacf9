"""Which golden prompts a candidate passes, on its own: a table by category and language, and by prompt length.

    python -m tasks.golden_table                                  # the declared champion, data/golden/golden.jsonl
    python -m tasks.golden_table --plan demo                      # only what a release under that plan asks, a minute
    python -m tasks.golden_table my-candidate.yaml                # another one, and the set that it names
    python -m tasks.golden_table --out data/golden/passed.json    # keep the outcome, ids and figures alone
    python -m tasks.golden_table --table data/golden/passed.json  # the table of an outcome that was kept

Without --plan every prompt is asked, also those that are longer than a plan allows; the table says which were.
All of it runs on a CPU, --table at once. Answers come from the code of the replay stage: same process set-up, greedy,
same batches, same graders.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from attention.errors import UserError, exit_code
from attention.job import BusinessPlan
from data.candidate import load_candidate
from data.golden_set import GoldenPrompt, GoldenSet, draw, load_golden
from data.paths import repo_dir
from data.plan import load_plan
from data.requests import bucket_end
from tasks.context import setup_of
from tasks.files import write_atomically
from tasks.grade import grade
from tasks.replay import as_prompt

if TYPE_CHECKING:
    from attention.replay.business import Answer

CHAMPION = Path("data/candidates/torch-math-cpu.yaml")
ALL = "every prompt of the set, whatever a plan allows"
EVERY_S = 5.0  # between two lines of progress


class Outcome(BaseModel):
    """One prompt, without its text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    category: str
    language: str
    prompt_tokens: int
    passed: bool


class Passed(BaseModel):
    """The outcome of a whole set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    golden_sha256: str  # of the file that was asked
    model: str
    confirmed: dict[str, str]  # backend by phase, as the execution layer says
    torch: str
    num_threads: int
    cpu_seconds: float  # of this process for all answers, prefill included, the loading of the model left out
    prompts: dict[str, Outcome]  # by prompt_id
    asked: str = ALL  # which prompts of the set, and by whose rule


def measure(candidate: Path, say: Callable[[str], None], plan: str | None = None) -> Passed:
    """Answer and grade the candidate's set, or what a plan asks of it, in this process. UserError for bad input."""
    import torch

    from attention import startup
    from attention.replay import business

    loaded = load_candidate(candidate)
    golden, asked = _asked(loaded.golden_path, plan)
    say(f"golden set: {asked}")
    for line in golden.rejected:
        say(f"{loaded.golden_path}: line {line.line} left out: {line.reason}")
    setup = setup_of(loaded, loaded.cells[0])
    dispatcher = startup.decide(setup, [])
    runner = startup.load(setup, dispatcher)
    prompts = tuple(as_prompt(prompt) for prompt in golden.prompts)
    started = time.process_time()
    answers = business.answer(runner, BusinessPlan(prompts=prompts), _progress(say)).answers
    seconds = time.process_time() - started
    lengths = [len(business.prompt_ids(runner, prompt)) for prompt in prompts]
    return Passed(
        golden_sha256=sha256_of(loaded.golden_path),
        model=runner.name,
        confirmed={str(phase): backend for phase, backend in dispatcher.confirmed.items()},
        torch=torch.__version__,
        num_threads=setup.num_threads,
        cpu_seconds=round(seconds, 1),
        prompts={
            prompt.prompt_id: _outcome(prompt, num_tokens, answer)
            for prompt, num_tokens, answer in zip(golden.prompts, lengths, answers, strict=True)
        },
        asked=asked,
    )


def _asked(path: Path, plan: str | None) -> tuple[GoldenSet, str]:
    """The prompts to ask, and in words which they are."""
    if plan is None:
        return load_golden(path), ALL
    found = load_plan(plan)
    drawn = draw(path, found.replay)
    words = f"the {len(drawn.prompts)} of {drawn.num_usable} prompts that plan {found.name} asks"
    return drawn, f"{words} ({found.replay.golden_lengths})"


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def table(passed: Passed) -> str:
    """Markdown: passed of asked, by category and language, then by prompt length."""
    outcomes = list(passed.prompts.values())
    languages = sorted({o.language for o in outcomes}, key=lambda name: (name != "en", name))
    rows = [["category", *languages, "all"]]
    for category in [*dict.fromkeys(o.category for o in outcomes), None]:
        of = [o for o in outcomes if category in (o.category, None)]
        cells = [_share([o for o in of if o.language == language]) for language in languages]
        rows.append([category or "all", *cells, _share(of)])
    ends = sorted({bucket_end(o.prompt_tokens) for o in outcomes})
    lengths = [["prompt tokens", *(f"up to {end}" for end in ends)]]
    lengths.append(
        ["all categories", *(_share([o for o in outcomes if bucket_end(o.prompt_tokens) == end]) for end in ends)]
    )
    failed = sorted(name for name, o in passed.prompts.items() if not o.passed)
    longest = max(o.prompt_tokens for o in outcomes)
    return "\n\n".join(
        [
            _markdown(rows),
            _markdown(lengths),
            f"Asked: {passed.asked}.",
            f"Longest prompt: {longest} tokens. {passed.model}, torch {passed.torch}, "
            f"{', '.join(sorted(set(passed.confirmed.values())))}, {passed.num_threads} thread: "
            f"{passed.cpu_seconds:.0f} s of processor time for all answers.",
            f"Not passed: {', '.join(f'`{name}`' for name in failed) or 'none'}.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """0 when the set was answered, whatever was passed; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.golden_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("candidate", nargs="?", type=Path, help=f"candidate file (default: {CHAMPION})")
    parser.add_argument("--plan", help="ask what a release under this plan asks (demo, full, or a file); default: all")
    parser.add_argument("--out", type=Path, help="file to keep the outcome in")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a kept outcome instead")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.table is not None:
        if options.candidate is not None or options.plan is not None or options.out is not None:
            raise UserError("--table shows an outcome that was kept: give it no candidate, --plan or --out")
        print(table(read_passed(options.table)))
        return 0
    candidate = options.candidate or repo_dir() / CHAMPION
    passed = measure(candidate, lambda line: print(line, file=sys.stderr, flush=True), options.plan)
    if options.out is not None:
        write_atomically(options.out, passed.model_dump_json(indent=1) + "\n")
    print(table(passed))
    return 0


def read_passed(path: Path) -> Passed:
    """An outcome that `--out` kept. Raises UserError for a file that is none."""
    try:
        return Passed.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError.of_system(error) from error
    except ValidationError as error:
        raise UserError(f"{path}: no outcome of a golden set; write one with --out {path}") from error


def _outcome(prompt: GoldenPrompt, num_tokens: int, answer: Answer) -> Outcome:
    passed = answer.error is None and grade(prompt, answer.output_text).passed
    return Outcome(category=prompt.category, language=prompt.language, prompt_tokens=num_tokens, passed=passed)


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    started = shown = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done == total or now - shown >= EVERY_S:
            shown = now
            say(f"golden set: {done} of {total} answered, {now - started:.0f} s")

    return tell


def _share(outcomes: list[Outcome]) -> str:
    return f"{sum(o.passed for o in outcomes)} of {len(outcomes)}" if outcomes else "-"


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
