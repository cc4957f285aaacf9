"""A traffic mix: how long prompts and answers are, and how much of a prompt the prefix cache holds.

    load_mix("chat").buckets()                    # a named mix, or the path of a file of that form
    mix_of("ours", lengths(requests, tokenizer))  # the user's own traffic

A mix is a joint histogram: classes of requests with their mean lengths. Mixes are never averaged into one: decode takes
a hundredth of the tokens of one and half of another's. The named ones lie in data/mixes/; `make_mixes` there says what
each was derived from, and makes them again.

A file is CSV with the columns of `COLUMNS`, below lines `# source: ...` and `# note: ...`; `requests` is how many
requests a class stands for, in any unit.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention.errors import UserError, is_file, nearest, shown
from data.requests import Bucket, RequestLength, shape_weights

FOLDER = Path(__file__).parent / "mixes"
COLUMNS = ("prompt_tokens", "cached_tokens", "output_tokens", "requests")


@dataclass(frozen=True)
class LengthClass:
    """Requests of about one shape, in tokens."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    share: float  # of the mix's requests; the classes of a mix sum to 1


@dataclass(frozen=True)
class Mix:
    """Classes of requests, with where they come from and what was derived."""

    name: str
    source: str
    note: str
    classes: tuple[LengthClass, ...]

    def lengths(self) -> list[RequestLength]:
        """A class as one request that stands for its share."""
        return [
            RequestLength(f"{self.name}-{i}", one.prompt_tokens, one.output_tokens, one.cached_tokens, one.share)
            for i, one in enumerate(self.classes)
        ]

    def buckets(self) -> list[Bucket]:
        """Where the attention work of the mix lies, by family and KV length."""
        return shape_weights(self.lengths())

    def sample(self, n: int, seed: int) -> list[LengthClass]:
        """`n` independent draws; equal seeds give equal draws."""
        shares = [one.share for one in self.classes]
        return random.Random(seed).choices(self.classes, shares, k=n)  # noqa: S311 - not for secrets


def mix_of(name: str, lengths: Sequence[RequestLength], *, source: str = "recorded traffic", note: str = "") -> Mix:
    """The mix of requests whose lengths are known, exactly: equal ones share a class. UserError for none."""
    if not lengths:
        raise UserError(f"mix {name}: no requests; give traffic that holds one at least")
    counts: dict[tuple[int, int, int], float] = defaultdict(float)
    for one in lengths:
        counts[one.prompt_tokens, one.cached_tokens, one.output_tokens] += one.count
    total = sum(counts.values())
    classes = tuple(LengthClass(*key, count / total) for key, count in sorted(counts.items()))
    return Mix(name, source, note, classes)


def load_mix(name: str) -> Mix:
    """A mix by name (data/mixes/<name>.csv) or by path. Raises UserError with what is wrong on which line."""
    path = Path(name) if name.endswith(".csv") else FOLDER / f"{name}.csv"
    if not is_file(path):
        raise UserError(f"mix {shown(name)}: no file {path}; {nearest(name, (p.stem for p in FOLDER.glob('*.csv')))}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"mix {path}: cannot be read: {error}") from error
    about = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
    if not rows or rows[0][1] != ",".join(COLUMNS):
        raise UserError(f"mix {path}: the first line that is no comment must be {','.join(COLUMNS)}")
    lengths = [_length(path, number, line) for number, line in rows[1:]]
    return mix_of(path.stem, lengths, source=about.get("source", "not stated"), note=about.get("note", ""))


def _length(path: Path, number: int, line: str) -> RequestLength:
    fields = next(csv.reader([line]))
    try:
        prompt, cached, output = map(int, fields[:3])
        (count,) = map(float, fields[3:])
    except ValueError as error:
        raise UserError(f"mix {path}: line {number}: give four numbers, {', '.join(COLUMNS)}") from error
    if prompt < 1 or output < 1:
        raise UserError(
            f"mix {path}: line {number}: prompt_tokens {prompt} and output_tokens {output} must be 1 or more"
        )
    return RequestLength(f"{path}: line {number}", prompt, output, cached, count)
