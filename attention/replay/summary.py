"""Figures of two recordings of prompts held against the limits of the replay gate, for `compare A B`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attention.errors import UserError
from attention.yaml_file import read_yaml

FIGURES = ("kl_mean", "kl_p999", "flip_rate", "flip_margin")
#: Figure -> the multiple of the floor that is allowed, and the least floor that is believed.
LIMITS = tuple(name for figure in FIGURES for name in (figure, f"{figure}_floor_ratio", f"{figure}_floor_least"))

Figures = dict[str, dict[str, float]]


def load_limits(path: Path, dtype: str) -> dict[str, float]:
    """Limits of the model layer (gates/thresholds.yaml); `kl_mean.float32` replaces `kl_mean` for float32 states."""
    document = read_yaml(path)
    try:
        section = document["default"]["replay"]
        found = {name: float(section.get(f"{name}.{dtype}", section[name])["value"]) for name in LIMITS}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"limits {path}: no thresholds of a replay gate ({error!r}); see gates/thresholds.yaml"
        ) from error
    return found


def reasons(figures: Figures, floors: Figures | None, limits: dict[str, float]) -> list[str]:
    """What is beyond a limit or beyond its multiple of the floor; without one, of the least floor that is believed.

    NaN is beyond every limit.
    """
    found = []
    for mode, mine in figures.items():
        for name in FIGURES:
            least, ratio = limits[f"{name}_floor_least"], limits[f"{name}_floor_ratio"]
            floor = least if floors is None else max(_value(floors[mode], name), least)
            bounds = {f"{limits[name]:g}": limits[name], f"{ratio:g} times the floor of {floor:.3g}": ratio * floor}
            value = _value(mine, name)
            for bound, allowed in bounds.items():
                if not value <= _slack(name, allowed, mine["positions"]):
                    found.append(f"{mode} {name} {value:.3g} > {bound}")
    return found


def _slack(name: str, allowed: float, positions: float) -> float:
    """A rate of few positions scatters: two standard deviations of what is allowed are added."""
    return allowed + 2 * math.sqrt(allowed / positions) if name == "flip_rate" else allowed


def _value(figures: dict[str, float], name: str) -> float:
    return figures["flips"] / figures["positions"] if name == "flip_rate" else figures[name]


def lines(figures: Figures, floors: Figures | None) -> list[str]:
    """A line a mode, the floor's below it."""
    found = []
    for mode, mine in figures.items():
        found.append(f"{mode}: {_line(mine)}")
        if floors:
            found.append(f"  floor: {_line(floors[mode])}")
    return found


def _line(one: dict[str, float]) -> str:
    return (
        f"{one['positions']:.0f} positions, KL mean {one['kl_mean']:.3g}, 99.9 % {one['kl_p999']:.3g} nats, top-10 "
        f"overlap {one['topk_overlap']:.2%}, {one['flips']:.0f} flips up to {one['flip_margin']:.3g} nats"
    )


def finite(value: Any) -> Any:
    """JSON has no NaN: a figure that could not be measured is null."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
