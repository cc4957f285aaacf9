"""Draws side by side: a process each."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from attention.errors import UserError
from attention.lifetime import die_with_parent


@contextmanager
def mapped(num: int, *, ordered: bool = True) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` over `num` processes, in this one where one would do. An interruption ends them at once.

    Raises UserError where a process dies: a draw of it has no result, and to wait for it would be to wait for ever.
    """
    if num < 2:
        yield map
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num, multiprocessing.get_context("spawn"), initializer=_alone)

    def spread(call: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        # Not `pool.map`: it cancels what an interruption leaves, and the pool's own thread trips over that (3.11).
        tasks = [pool.submit(call, item) for item in items]
        yield from (task.result() for task in (tasks if ordered else as_completed(tasks)))

    try:
        yield spread
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died (killed, out of memory, or a kernel that crashed): run it again"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()


def _alone() -> None:
    """Ctrl-C reaches the whole process group; the parent ends its workers, and they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
