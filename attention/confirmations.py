"""What the execution layer said of each signature, and when.

A signature (phase, shape bucket, backend) keeps its confirmed backend for `CONFIRMATION_TTL_S`; after that nobody
knows any more what it runs. It is confirmed where it is new, where it is old, and before it grows old in a moment when
nobody waits for a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from attention.cases import Phase

CONFIRMATION_TTL_S = 900.0
NOTHING_RAN = "unconfirmed(nothing ran)"
STALE = "unconfirmed(too long ago)"


class Signature(NamedTuple):
    """What is confirmed together."""

    phase: Phase
    bucket: str
    backend: str


@dataclass(frozen=True)
class _Confirmed:
    backend: str
    at: float
    q_len: int  # of the first member that had this signature, to ask again with
    kv_len: int


class Confirmations:
    """By signature. One thread writes; others may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[Signature, _Confirmed] = {}

    def of(self, signature: Signature) -> str:
        """The backend that was confirmed last; `unconfirmed(...)` for what never ran, or ran too long ago."""
        found = self._found.get(signature)
        if found is None:
            return NOTHING_RAN
        return found.backend if self._clock() - found.at <= CONFIRMATION_TTL_S else STALE

    def is_new(self, signature: Signature) -> bool:
        return signature not in self._found

    def is_due(self, signature: Signature) -> bool:
        found = self._found.get(signature)
        return found is None or self._clock() - found.at > CONFIRMATION_TTL_S

    def note(self, signature: Signature, backend: str, q_len: int, kv_len: int) -> None:
        self._found[signature] = _Confirmed(backend, self._clock(), q_len, kv_len)

    def forget(self, backend: str) -> None:
        """All signatures of a backend that serves no more."""
        self._found = {signature: one for signature, one in self._found.items() if signature.backend != backend}

    def oldest(self, age_s: float) -> tuple[Signature, int, int] | None:
        """The signature that was confirmed longest ago, at least `age_s`, with the lengths to ask again with."""
        now = self._clock()
        old = [(one.at, signature) for signature, one in self._found.items() if now - one.at >= age_s]
        if not old:
            return None
        signature = min(old)[1]
        return signature, self._found[signature].q_len, self._found[signature].kv_len
