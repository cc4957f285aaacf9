"""Make data/mixes/*.csv from public traces: a joint histogram of prompt, cached and output tokens each.

    python -m data.mixes.make_mixes TRACES_DIR [OUT_DIR]

TRACES_DIR holds `azure2023/AzureLLMInferenceTrace_{conv,code}.csv`, `mooncake/conversation_trace.jsonl` and `STATS.csv`
(quantiles and means of traces, one row each). The same traces give the same files, byte for byte.

A class stands there with the means of its requests; none has prompts on both sides of a power of two, where shape
buckets end. Of the traces' own rows none is here, and none ever held a text. Shares of work by shape bucket come out
within 0.3 percent points of the traces' own for prefill and extend, 1.3 for decode (tests/data/test_mix.py).
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from attention.errors import UserError
from attention.replaced import replaced
from data.mix import COLUMNS, FOLDER
from data.readers.mooncake import BLOCK_TOKENS

Request = tuple[int, int, int]  # prompt, cached and output tokens

MAX_CLASSES = 150
PROMPT_STEPS, OUTPUT_STEPS = 4, 1  # parts of an octave, at first
CACHED_PARTS = 8  # of the cached share of a prompt, beside none
SYNTHETIC_REQUESTS = 20_000
LEAST_TOKENS = 16  # of a synthetic prompt or answer
GOLDEN = (math.sqrt(5) - 1) / 2

AZURE = "Azure LLM inference trace 2023 ({}), Azure/AzurePublicDataset, CC-BY 4.0; Patel et al., Splitwise, ISCA 2024"
NOTES = {
    "chat": (
        AZURE.format("conversation"),
        "histogram of ContextTokens and GeneratedTokens; no prefix cache was logged",
    ),
    "code": (AZURE.format("code"), "histogram of ContextTokens and GeneratedTokens; no prefix cache was logged"),
    "long-context": (
        "Mooncake conversation trace, FAST 2025, kvcache-ai/Mooncake, Apache-2.0",
        "histogram of input_length and output_length; cached are the leading 512-token blocks of hash_ids that an "
        "earlier request had, in a cache that forgets nothing; all prompts share their first block, so one request "
        "alone is a whole prefill",
    ),
    "reasoning": (
        "synthesised; quantiles and means of DeepSeek-R1 requests in ServeGen, alibaba/ServeGen, Apache-2.0",
        f"{SYNTHETIC_REQUESTS} synthetic requests, prompt and output independent; between {LEAST_TOKENS} tokens, p50, "
        "p90, p99 and max the logarithm of a length rises as a power of the quantile's way through its range, one "
        "power chosen so that the mean is the published one; no prefix cache",
    ),
}


def azure(path: Path) -> list[Request]:
    """Requests of an Azure trace; nothing is cached."""
    with path.open(encoding="utf-8") as file:
        return [(int(row["ContextTokens"]), 0, int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def mooncake(path: Path) -> list[Request]:
    """Requests of a Mooncake trace; cached are the leading blocks that were seen before, short of the last token."""
    seen: set[int] = set()
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt, blocks = row["input_length"], row["hash_ids"]
        hits = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        found.append((prompt, min(hits * BLOCK_TOKENS, prompt - 1), row["output_length"]))
    return found


def synthetic(stats: Path, trace: str) -> list[Request]:
    """Requests that have the quantiles and means of one row of STATS.csv. UserError when there is no such row.

    Prompt and output take the two coordinates of a lattice of the unit square, which makes them independent
    (https://en.wikipedia.org/wiki/Low-discrepancy_sequence, additive recurrence).
    """
    with stats.open(encoding="utf-8") as file:
        row = next((row for row in csv.DictReader(file) if row["trace"] == trace), None)
    if row is None:
        raise UserError(f"{stats}: no row of trace {trace}; give the table that holds it")
    ranks = [(i + 0.5) / SYNTHETIC_REQUESTS for i in range(SYNTHETIC_REQUESTS)]
    turned = [(i * GOLDEN) % 1.0 for i in range(SYNTHETIC_REQUESTS)]
    prompts, outputs = (
        quantiles(
            [float(row[f"{side}_{mark}"]) for mark in ("p50", "p90", "p99", "max")], float(row[f"{side}_mean"]), at
        )
        for side, at in (("in", ranks), ("out", turned))
    )
    return [(round(prompt), 0, round(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def quantiles(knots: Sequence[float], mean: float, at: Sequence[float]) -> list[float]:
    """Lengths at ranks `at` (0..1, evenly spread) of a distribution with these p50, p90, p99 and max, and this mean.

    Between two knots a and b the length at the share t of the way is a (b / a)^(t^power): 1 is log-uniform, more keeps
    lengths near the lower knot. The power is found by bisection, since the mean falls with it.
    """
    edges, values = (0.0, 0.5, 0.9, 0.99, 1.0), (float(LEAST_TOKENS), *knots)

    def drawn(power: float) -> list[float]:
        found = []
        for rank in at:
            i = max(k for k in range(4) if edges[k] <= rank)
            way = (rank - edges[i]) / (edges[i + 1] - edges[i])
            found.append(values[i] * (values[i + 1] / values[i]) ** (way**power))
        return found

    low, high = 0.25, 8.0
    for _ in range(40):
        power = (low + high) / 2
        low, high = (power, high) if math.fsum(drawn(power)) / len(at) > mean else (low, power)
    return drawn(low)


def histogram(requests: Iterable[Request]) -> list[tuple[int, int, int, int]]:
    """Rows of COLUMNS: mean lengths of each class, and how many requests are in it; MAX_CLASSES at most.

    It starts with a fine grid. As long as there are too many, the class with the fewest tokens joins the nearest one of
    the same octave of prompts, so that what is common, or long, keeps its detail.
    """
    grid: dict[tuple[int, ...], list[Request]] = defaultdict(list)
    for prompt, cached, output in requests:
        parts = math.ceil(CACHED_PARTS * cached / prompt)  # 0: nothing is cached
        grid[_step(PROMPT_STEPS, prompt), parts, _step(OUTPUT_STEPS, output)].append((prompt, cached, output))
    groups: dict[tuple[int, bool], list[_Class]] = defaultdict(list)
    for (step, parts, _), members in sorted(grid.items()):
        groups[math.ceil(step / PROMPT_STEPS), parts > 0].append(
            _Class(len(members), *map(sum, zip(*members, strict=True)))
        )
    while sum(map(len, groups.values())) > MAX_CLASSES:
        group = min((group for group in groups.values() if len(group) > 1), key=lambda group: min(map(_tokens, group)))
        least = min(group, key=_tokens)
        group.remove(least)
        near = min(range(len(group)), key=lambda i: _distance(least, group[i]))
        group[near] = _Class(*map(sum, zip(least, group[near], strict=True)))
    return sorted((*_means(one), one.num) for group in groups.values() for one in group)


class _Class(NamedTuple):
    """Requests of a class, and sums of their tokens."""

    num: int
    prompt: int
    cached: int
    output: int


def _step(steps: int, tokens: int) -> int:
    """Which of `steps` equal parts of an octave a length is in, counted from 1 token on."""
    return math.ceil(steps * math.log2(tokens))


def _tokens(one: _Class) -> int:
    return one.prompt + one.output


def _means(one: _Class) -> tuple[int, int, int]:
    return round(one.prompt / one.num), round(one.cached / one.num), round(one.output / one.num)


def _distance(one: _Class, other: _Class) -> float:
    """Distance of mean lengths, in octaves of the prompt: an octave of output counts twice, the whole cached share
    four times. Of weights that were tried these keep the shares of work best."""
    prompt = math.log2(one.prompt / one.num / (other.prompt / other.num))
    output = math.log2(one.output / one.num / (other.output / other.num))
    return math.hypot(prompt, 2 * output, 4 * (one.cached / one.prompt - other.cached / other.prompt))


def text_of(name: str, requests: Sequence[Request]) -> str:
    """The file of a mix."""
    source, note = NOTES[name]
    rows = [",".join(map(str, row)) for row in histogram(requests)]
    return "\n".join([f"# source: {source}", f"# note: {note}", ",".join(COLUMNS), *rows]) + "\n"


def make(traces: Path) -> dict[str, str]:
    """Text of every named mix."""
    requests = {
        "chat": azure(traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv"),
        "code": azure(traces / "azure2023" / "AzureLLMInferenceTrace_code.csv"),
        "long-context": mooncake(traces / "mooncake" / "conversation_trace.jsonl"),
        "reasoning": synthetic(traces / "STATS.csv", "servegen_deepseek-r1"),
    }
    return {name: text_of(name, found) for name, found in requests.items()}


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python -m data.mixes.make_mixes TRACES_DIR [OUT_DIR]")
    folder = Path(sys.argv[2]) if len(sys.argv) == 3 else FOLDER
    for mix, text in make(Path(sys.argv[1])).items():
        with replaced(folder / f"{mix}.csv") as fresh:
            fresh.write_text(text, encoding="utf-8")
        print(f"{folder / mix}.csv: {text.count(chr(10)) - 3} classes")
