"""Whether the candidate still answers, seen from outside it: a dead process writes no row for a gate to read."""

from __future__ import annotations

from gates.thresholds import load_limits
from tasks.context import Context
from tasks.processes import ask_health, is_alive
from tasks.traffic import Played

# Of two seconds each: a candidate under full load answered within 0.6 s.
MISSES = 3


class Vigil:
    """Watches one candidate while it holds traffic, or may get some."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._missed = 0
        limits = load_limits("canary", context.plan.name)
        self._last, self._errors = int(limits.value("breach_last")), int(limits.value("breach_errors"))

    def trouble(self, played: Played | None = None) -> str | None:
        """Why the candidate must not keep its traffic, or None: its process, its `/health`, what users lost."""
        instance = self._context.store.load().candidate_instance
        if instance is None:
            return "the record names no candidate instance"
        if not is_alive(instance.pid, instance.started):
            return f"the process of {instance.name} died"
        self._missed = 0 if ask_health(instance.port) is not None else self._missed + 1
        if self._missed >= MISSES:
            return f"{instance.name} does not answer /health"
        if played is not None:
            # What champion or control lost is not the candidate's.
            replies = played.replies[-self._last :]
            lost = sum(not reply.ok and reply.role not in ("champion", "control") for reply in replies)
            if lost >= self._errors:
                return f"users lost {lost} of the last {len(replies)} requests"
        return None
