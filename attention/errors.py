"""Mistakes that a person can mend: one line that says what, where and what to do; exit code 2."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """Bad input or set-up. The command line prints its text alone and exits 2, without a traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean a, b?` for a mistyped name, else the known names."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"


def piped(run: Callable[[], int]) -> int:
    """Exit code of `run`; 0 when whoever reads stdout (`| head`) has seen enough and gone."""
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
