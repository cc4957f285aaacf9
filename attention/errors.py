"""Mistakes that a person can mend: one line that says what, where and what to do; exit code 2."""

from __future__ import annotations

import difflib
import io
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Bad input or set-up. The command line prints its text alone and exits 2, without a traceback.

    One line, whatever a name in it holds: line breaks become spaces, control characters are escaped.
    """

    def __str__(self) -> str:
        text = " ".join(super().__str__().split())
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

    @classmethod
    def of_system(cls, error: OSError) -> UserError:
        """What the system refused, with the file that it was about."""
        where = f"{error.filename}: " if error.filename is not None else ""
        return cls(f"{where}{error.strerror or error}")


class EvidenceError(UserError):
    """Evidence that cannot be read: a gate makes an error of it, a command its one line."""


_OURS = ("attention", "data", "flows", "gates", "tasks", "")  # a module of these that lacks is a defect
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 80


def shown(value: object) -> str:
    """`repr` of a value that a person gave, kept short: aliases in YAML can make one that never ends."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"a {type(value).__name__} too long to show"


def is_file(path: Path) -> bool:
    """Whether a file is there; False for a name that can be none (too long, a NUL) or that may not be looked at."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_dir(path: Path) -> bool:
    """The same of a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


_FOLDERS = re.compile(r"(?<![\w/])(?:/[\w.+@-]+)+/(?=[\w.-]+\.py\b)")


def readable(text: str) -> str:
    """What a person typed in another encoding than UTF-8, with `?` in a diamond for what cannot be read.

    Python keeps such bytes as half characters, which no file in UTF-8 can hold.
    """
    return os.fsencode(text).decode("utf-8", "replace")


def one_line(error: BaseException) -> str:
    """An exception's text in one line, its source files by name alone: evidence travels, folders do not."""
    return _FOLDERS.sub("", " ".join(str(error).split()))


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean a, b?` for a mistyped name, else the known names."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"


def exit_code(run: Callable[[], int]) -> int:
    """Exit code of `run`: 2 after one line on stderr for what a person can mend, 130 after Ctrl-C."""
    try:
        return piped(run)
    except OSError as error:  # a disk that is full or read only, a name that is too long
        print(f"error: {UserError.of_system(error)}", file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        print(f"error: this command needs {error.name}, which is not installed: pip install it", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


class _Unread(io.FileIO):
    """A pipe whose reader may leave: what nobody reads is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def piped(run: Callable[[], int]) -> int:
    """Exit code of `run`, also when whoever reads stdout (`| head`, `| grep -q`) has seen enough and gone: a verdict
    does not depend on who reads it."""
    usual = sys.stdout
    try:
        descriptor = usual.fileno()
    except (AttributeError, OSError, ValueError):  # no stdout, or one that is no file
        return run()
    usual.flush()
    file = io.BufferedWriter(_Unread(descriptor, "wb", closefd=False))
    told = io.TextIOWrapper(file, encoding=usual.encoding, errors=usual.errors, line_buffering=usual.isatty())
    sys.stdout = told
    try:
        code = run()
        told.flush()
        return code
    except BaseException:
        with suppress(OSError):  # what was said stands before the line that says why there is no more
            told.flush()
        raise
    finally:
        sys.stdout = usual
