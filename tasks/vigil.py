"""Whether a candidate may keep its traffic, seen while it has it: from outside, and from the rows that it writes.

A dead process writes no row, so the record's processes, `/health`, what users lost and the router's own count of
errors are looked at beside the rows. Trouble of the control ends it too: users are on both arms.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from gates import canary as gate
from gates.served import Span
from gates.thresholds import load_limits
from gates.verdict import Breach
from tasks import lifecycle
from tasks.context import Context
from tasks.processes import ask_health, is_alive
from tasks.record import Instance
from tasks.router import Router, RouterError
from tasks.traffic import OTHERS, Played

# Of two seconds each: a candidate under full load answered within 0.6 s.
MISSES = 3


class Vigil:
    """Watches candidate and control while they hold traffic, or may get some.

    `router`: also count the errors that it sees from now on. `since`, `share`: also read the rows of both arms from
    then on, at that share of the candidate in percent.
    """

    def __init__(
        self, context: Context, router: Router | None = None, *, since: datetime | None = None, share: int = 100
    ) -> None:
        self._context, self._router, self._since, self._share = context, router, since, share
        self._missed: Counter[str] = Counter()
        limits = load_limits("canary", context.plan.name)
        self._last, self._errors = int(limits.value("breach_last")), int(limits.value("breach_errors"))
        self._counted: tuple[int, int] | None = None  # requests and errors where the router's count began
        self.breach: Breach | None = None  # what `trouble` found last

    def trouble(self, played: Played | None = None) -> str | None:
        """Why the candidate must not keep its traffic, or None."""
        record = self._context.store.load()
        if record.candidate_instance is None:
            self.breach = Breach("the record names no candidate instance")
        else:
            self.breach = (
                self._silent(record.candidate_instance)
                or (record.control_instance and self._silent(record.control_instance))
                or self._lost(played)
                or self._failed()
                or self._slow_or_wrong()
            )
        return None if self.breach is None else self.breach.why

    def _silent(self, instance: Instance) -> Breach | None:
        if not is_alive(instance.pid, instance.started):
            return Breach(f"the process of {instance.name} died")
        self._missed[instance.name] = 0 if ask_health(instance.port) is not None else self._missed[instance.name] + 1
        return Breach(f"{instance.name} does not answer /health") if self._missed[instance.name] >= MISSES else None

    def _lost(self, played: Played | None) -> Breach | None:
        replies = played.replies[-self._last :] if played is not None else []
        # What champion, control or router lost is not the candidate's.
        lost = sum(not reply.ok and reply.role not in OTHERS for reply in replies)
        if lost < self._errors:
            return None
        return Breach(f"users lost {lost} of the last {len(replies)} requests", lost, self._errors - 1)

    def _failed(self) -> Breach | None:
        """Errors by the router's count, over windows of as many requests as the limit speaks of."""
        if self._router is None:
            return None
        try:
            counts = self._router.observe().counts["candidate"]
        except RouterError:
            return None  # it is asked again, and the supervisor starts it again
        total, errors = counts.total, counts.errors_5xx
        if self._counted is None or total < self._counted[0]:  # a router that was started anew counts from 0
            self._counted = (total, errors)
        served, failed = total - self._counted[0], errors - self._counted[1]
        if failed >= self._errors and failed * self._last >= self._errors * served:
            why = f"{failed} of the candidate's last {served} requests failed, by the router's count"
            return Breach(why, failed, self._errors - 1)
        if served >= self._last:
            self._counted = (total, errors)
        return None

    def _slow_or_wrong(self) -> Breach | None:
        if self._since is None:
            return None
        context, span = self._context, Span(self._since, datetime.now(UTC))
        candidate, control = gate.recent(context.lake, context.release_id, share=self._share, span=span)
        return gate.breach(candidate, control, context.plan)


def watched(context: Context, router: Router, vigil: Vigil, played: Played) -> str | None:
    """One look at a candidate that holds traffic; where something is wrong the traffic goes back before all else.

    The reason, or None. Raises LeaseLostError and RouterError.
    """
    context.check()
    trouble = vigil.trouble(played)
    if trouble is not None:
        lifecycle.withdraw(context, router, trouble)
    return trouble
