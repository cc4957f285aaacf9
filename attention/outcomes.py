"""What came of one measurement, in a fixed vocabulary, so that failures can be counted and compared."""

from __future__ import annotations

from typing import Literal

from attention.errors import UserError

Outcome = Literal[
    "measured",
    "refused",  # the backend's declared rules leave the case out
    "out_of_memory",
    "illegal_access",  # the device is lost: only a fresh process goes on
    "compile_failed",
    "capture_failed",  # runs, but not inside a CUDA graph
    "timed_out",
    "crashed",  # the process died
    "wrong_kernel",  # the execution layer names another backend
    "wrong_numbers",  # beside the fp64 oracle
    "warm_cache",  # faster than with buffers that no cache can hold
    "above_limit",  # faster than the machine
    "failed",  # anything else
]

_ILLEGAL = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "illegal instruction",
)
_COMPILE = ("ninja", "nvcc", "compilationerror", "inductorerror", "ptxas", "backendcompilerfailed", "failed to compile")


class MeasurementError(Exception):
    """A measurement that must not be used, with its outcome."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def outcome_of(error: BaseException) -> Outcome:
    """The outcome that an exception of a backend stands for; `failed` where its text says nothing known."""
    if isinstance(error, MeasurementError):
        return error.outcome
    if isinstance(error, UserError):
        return "refused"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; torch loads slowly
        return "out_of_memory"
    text = f"{type(error).__name__}: {error}".lower()
    if any(part in text for part in _ILLEGAL):
        return "illegal_access"
    if "out of memory" in text:
        return "out_of_memory"
    if any(part in text for part in _COMPILE):
        return "compile_failed"
    return "failed"
