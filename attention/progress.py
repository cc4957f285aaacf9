"""Progress of long work for a person: a line on stderr now and then, none where the work is short."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_S = 5.0


def now_and_then(what: str, every_s: float = EVERY_S) -> Callable[[int, int], None]:
    """Told (done, total), says so when `every_s` have passed since it last did, or since it was made."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every_s:
            last = now
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return tell
