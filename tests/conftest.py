"""Tests run side by side (`make test`), but for one marked `alone`: it waits for the others, and they for it.

A limit on wall time that stands in the README must not be missed because another test uses the same cores.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

# Locks of an open file, so that a dead process leaves none. Who waits for the room to be empty keeps the door shut.
DOOR, ROOM = (os.open(path, os.O_RDONLY) for path in (__file__, Path(__file__).parent))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    fcntl.flock(DOOR, fcntl.LOCK_EX)
    fcntl.flock(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    fcntl.flock(DOOR, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        fcntl.flock(ROOM, fcntl.LOCK_UN)
