"""Faults for drills: what a deliberately faulty candidate does wrong.

A drill proves that a gate stops what it is there to stop. A fault is switched on by `--fault NAME`
alone, is logged, and shows in `/health` and `/fingerprint`, so that nobody takes the instance for a
sound one. `wrong_scale` is applied where the softmax scale is (the dispatcher), `slow_decode` in the
scheduler, which knows whether a step decodes a live request.
"""

from __future__ import annotations

from attention.errors import UserError, nearest

WRONG_SCALE = "wrong_scale"
SLOW_DECODE = "slow_decode"

FAULTS: dict[str, str] = {
    WRONG_SCALE: "the softmax scale is 1.05 times what it should be",
    SLOW_DECODE: "numerically right, but a step that decodes a live request takes four times as long",
}

SLOW_DECODE_FACTOR = 4.0
SLOW_DECODE_MIN_S = 0.060


def check_fault(name: str | None) -> str | None:
    """`name` itself if it is a fault or None. Raises UserError with the nearest names."""
    if name is not None and name not in FAULTS:
        raise UserError(f"fault {name!r} is unknown; {nearest(name, FAULTS)}")
    return name


def slow_decode_pause_s(step_s: float) -> float:
    """Seconds to sleep after a step of `step_s` seconds, so that it takes four times as long, at least
    60 ms longer: offline measuring and shadow traffic never see it, only users do."""
    return max((SLOW_DECODE_FACTOR - 1.0) * step_s, SLOW_DECODE_MIN_S)
