"""Two recordings against the oracle and each other: `python -m attention compare A B`.

A is what serves (the champion), B what wants to (the candidate). B is judged by the replay gate's own limits, read from
its thresholds as data; A's ratios stand beside. What one side lacks, what raised and what was asked differently are
errors, never a smaller table that passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attention.backends.oracle import Truth
from attention.errors import UserError
from attention.replay.figures import Figures, compare
from attention.replay.recording import Entry, Output, Recording, question_again
from attention.replay.truths import Oracle, compute
from attention.yaml_file import read_yaml

RATIOS = ("r_rms", "r_max", "r_row")
LIMITS = (*RATIOS, "lse", "times_champion", "pooled_times_champion")
Verdict = Literal["pass", "error", "fail"]


@dataclass(frozen=True)
class Judged:
    """One case of both recordings. `reasons` say why it did not pass; ratios are None where there are no figures."""

    case_id: str
    inputs: str
    seed: int
    dtype_class: str
    backend_a: str | None
    backend_b: str | None
    verdict: Verdict
    reasons: tuple[str, ...]
    a: dict[str, Any] | None = None
    b: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self)


def load_limits(path: Path) -> dict[str, float]:
    """Limits of the replay gate (gates/thresholds.yaml), `r_rms` and, where stated, `r_rms.float32`."""
    document = read_yaml(path)
    try:
        section = document["default"]["replay"]
        found = {name: float(one["value"]) for name, one in section.items() if name.partition(".")[0] in LIMITS}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"limits {path}: no thresholds of a replay gate ({error!r}); see gates/thresholds.yaml"
        ) from error
    if missing := sorted(set(LIMITS) - found.keys()):
        raise UserError(f"limits {path}: default.replay lacks {', '.join(missing)}")
    return found


def judge(
    a: Recording,
    b: Recording,
    limits: dict[str, float],
    oracle: Oracle = compute,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Judged]:
    """Every case of either recording, in the order of A; then a row for each dtype class whose cases together fail."""
    giving = frozenset(entry.backend for entry in b.manifest.entries if entry.has_lse)
    keys, rows = dict.fromkeys([*a.index, *b.index]), []
    for key in keys:
        rows.append(_judge_one(key, a, b, limits, oracle, giving))
        progress(len(rows), len(keys))
    classes = dict.fromkeys(row.dtype_class for row in rows)
    pooled = (_pooled(name, [row for row in rows if row.dtype_class == name], limits) for name in classes)
    return rows + [row for row in pooled if row is not None]


def _pooled(dtype_class: str, rows: list[Judged], limits: dict[str, float]) -> Judged | None:
    """The root mean square of B's R_rms over A's, where it fails: rounding that is a little worse everywhere."""
    both = [(row.b["r_rms"], row.a["r_rms"]) for row in rows if row.a and row.b]
    pairs = [pair for pair in both if all(map(math.isfinite, pair))]  # the others have failed by themselves
    limit = limits.get(f"pooled_times_champion.{dtype_class}", limits["pooled_times_champion"])
    mine, theirs = (math.hypot(*(pair[side] for pair in pairs)) for side in (0, 1))
    if not pairs or mine <= limit * theirs:
        return None
    value = mine / theirs if theirs else math.inf
    reason = f"pooled_times_champion {value:.3g} > {limit:g}"
    return Judged(f"all of {dtype_class}", "all", -1, dtype_class, None, None, "fail", (reason,))


def worst(rows: list[Judged]) -> Verdict:
    """Of all rows; without a row there is no evidence, which is an error."""
    verdicts = {row.verdict for row in rows}
    return "fail" if "fail" in verdicts else "error" if "error" in verdicts or not rows else "pass"


def _judge_one(
    key: tuple[str, str, int],
    a: Recording,
    b: Recording,
    limits: dict[str, float],
    oracle: Oracle,
    giving: frozenset[str],  # backends of B that give an LSE
) -> Judged:
    one, other = a.entry(key), b.entry(key)
    known = one or other
    if known is None:
        raise ValueError(f"{key} is in neither recording")
    about = partial(
        Judged,
        *key,
        known.case.dtype,
        one.backend if one else None,
        other.backend if other else None,
    )
    if one is None or other is None:
        return about("error", (f"only {'B' if one is None else 'A'} has it",))
    if errors := [f"{name}: {entry.error}" for name, entry in (("A", one), ("B", other)) if entry.error]:
        return about("error", tuple(errors))
    if other.backend in giving and not other.has_lse:
        return about("error", (f"{other.backend} gave no LSE here, and does for other cases",))
    if one.has_lse and one.backend == other.backend and not other.has_lse:
        return about("error", (f"{other.backend} gave no LSE in B, and does in A",))
    problem = question_again(one, oracle) if one.question == other.question else None
    if problem is None:
        return about("error", ("the inputs differ: a seed draws other numbers in one of the environments",))
    outputs = [side.output(key) for side in (a, b)]
    if misshapen := _misshapen(outputs, problem.truth):
        return about("error", misshapen)
    figures = [compare(*output, problem.truth, problem.spec.dtype, problem.batch.q_lens) for output in outputs]
    rows = [found.row() for found in figures]
    if reasons := _reasons(figures[0], figures[1], other, limits):
        return about("fail", reasons, *rows)
    if not figures[0].finite_mask_equal:
        return about("error", (f"A has no figures to stand beside: {figures[0].first_finite_differ}",), *rows)
    if one.confirmed_backend != one.backend:
        return about("error", (f"A: {one.confirmed_backend} ran in place of {one.backend}",), *rows)
    return about("pass", (), *rows)


def _misshapen(outputs: list[Output], truth: Truth) -> tuple[str, ...]:
    """What of A's and B's output and LSE has another shape than the truth."""
    wanted = (("output", truth.out_QHD.shape), ("LSE", truth.lse_QH.shape))
    return tuple(
        f"{side}: {name} of shape {tuple(found.shape)}, not that of the case, {tuple(shape)}"
        for side, output in zip("AB", outputs, strict=True)
        for (name, shape), found in zip(wanted, output, strict=True)
        if found is not None and found.shape != shape
    )


def _reasons(a: Figures, b: Figures, entry: Entry, limits: dict[str, float]) -> tuple[str, ...]:
    def limit(name: str) -> float:
        return limits.get(f"{name}.{entry.case.dtype}", limits[name])

    if not b.finite_mask_equal:
        return (f"finite where the truth is not, or the reverse: {b.first_finite_differ}",)
    seen: dict[str, float] = {name: getattr(b, name) for name in RATIOS}
    if a.finite_mask_equal:
        seen["times_champion"] = b.r_rms / max(a.r_rms, 1.0)
    if b.lse_max_abs is not None:
        seen["lse"] = b.lse_max_abs
    found = [f"{name} {value:.3g} > {limit(name):g}" for name, value in seen.items() if not value <= limit(name)]
    if entry.confirmed_backend != entry.backend:
        found.append(f"{entry.confirmed_backend} ran in place of {entry.backend}")
    return tuple(found)
