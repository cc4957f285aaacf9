"""Children that end with their parent, or with all that they started, so that none is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE_S = 5.0  # a killed process that the kernel holds (a driver call) is not waited for longer


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_on_sigterm() -> None:
    """A service manager's stop is a Ctrl-C: what this process started is ended and nothing is half-written."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_group(leader: subprocess.Popen[Any]) -> None:
    """Kill the leader of a process group and the whole group: a compiler outlives the worker that called it."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        leader.wait(_PATIENCE_S)


def end_session(leader: subprocess.Popen[Any]) -> None:
    """Kill the leader of a session and all groups in it. Outside Linux its own group only."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(status.read_text().rpartition(")")[2].split()[3]) == leader.pid:
                os.kill(int(status.parent.name), signal.SIGKILL)
    end_group(leader)
