"""`python -m flows drill`: faults on purpose, to see that each layer catches its own and nothing sound.

A row a kind of fault: runs in which it changed the float64 oracle, how many of them its own check caught, and how
many the published rules of other projects reject, which judge tensors alone. A run is one draw with its three kinds of
inputs, or one release; the rows `alone` count single problems that a fault changes (`normal inputs` are all that those
projects draw). Then the sound runs, and what changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.tables import FirstThatFits, Rows, word

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from gates.drill import KindResult
    from tasks.drill import Drill

_OURS = ("runs", "no-op", "ours")


def render(found: Drill) -> RenderableType:
    """The table, the sound runs under it, the no-ops, and the verdict as the last line."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [kind_table(found), Text(""), benign_table(found), Text("")]
    if any(not kind.published for kind in found.kinds):
        lines += [release_table(found), Text("")]
    lines += [Text(line) for line in no_op_lines(found.no_ops)]
    if found.not_carried:
        lines.append(Text(f"not shown here, as they go around no backend of the plan: {', '.join(found.not_carried)}"))
    lines.append(Text(f"limits {found.limits_sha256[:12]}, seed {found.seed}, {found.num_draws} draws, {found.device}"))
    lines += [Text(problem) for problem in found.problems]
    verdict = "fail" if found.problems else "pass"
    lines.append(word(verdict, verdict))
    return Group(*lines)


def no_op_lines(no_ops: Sequence[str]) -> list[str]:
    """One line a kind: on which dtype, phase and batch it changed nothing beyond the class's error, how often."""
    where: dict[str, Counter[str]] = {}
    for one in no_ops:
        kind, rest = one.split(": ", 1)
        where.setdefault(kind, Counter())[" ".join(rest.split(", ")[-1].split()[:3])] += 1
    return [
        f"no-op: {kind} on " + ", ".join(f"{case} ({count})" for case, count in cases.items())
        for kind, cases in where.items()
    ]


def kind_table(found: Drill) -> FirstThatFits:
    """Runs caught of those that changed the oracle; `no-op` those that did not. The rules of others stand beside ours,
    or in a table of their own where the terminal is too narrow for both."""
    return FirstThatFits(
        [_kinds(found, (*_OURS, *found.rules))],
        [_kinds(found, (*_OURS, *found.rules), stacked=True)],
        [_kinds(found, _OURS), _kinds(found, found.rules, stacked=True)],
    )


def _kinds(found: Drill, numbers: tuple[str, ...], *, stacked: bool = False) -> Rows:
    """The columns `numbers` of the table."""
    ours = _OURS[0] in numbers
    names = ("fault", "check") if ours else ("fault, rejected by",)
    rows = Rows(*names, *numbers, text=False, right=numbers, stacked=stacked)
    tensor = [kind for kind in found.kinds if kind.published]
    for kind in tensor:
        caught = word(str(kind.caught), "pass" if kind.caught == kind.effective else "fail")
        cells: dict[str, str | Text] = {"runs": str(kind.effective), "no-op": str(kind.no_ops), "ours": caught}
        cells.update(_texts(kind.published))
        rows.add(kind.kind, *([kind.check] if ours else []), *(cells[name] for name in numbers))
    total = {rule: sum(kind.published[rule] for kind in tensor) for rule in found.rules}
    sums = {**dict(zip(_OURS, _sums(tensor), strict=True)), **_texts(total)}
    rows.add("all", *([""] if ours else []), *(sums[name] for name in numbers))
    for inputs, (changed, rejected) in found.singles.items():
        alone = {"runs": str(changed), "no-op": "", **_texts(rejected)}
        rows.add(f"alone, {inputs}", *([""] if ours else []), *(alone[name] for name in numbers))
    return rows


def _texts(numbers: dict[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items()}


def release_table(found: Drill) -> Rows:
    """The same of what whole releases show, which no published rule judges."""
    rows = Rows("fault of a release", *_OURS, "check", right=_OURS)
    whole = [kind for kind in found.kinds if not kind.published]
    for kind in whole:
        caught = word(str(kind.caught), "pass" if kind.caught == kind.effective else "fail")
        rows.add(kind.kind, str(kind.effective), str(kind.no_ops), caught, kind.check)
    rows.add("all", *_sums(whole), "")
    return rows


def _sums(kinds: Sequence[KindResult]) -> list[str]:
    """Effective runs, no-ops and caught ones of some kinds."""
    return [str(sum(getattr(kind, name) for kind in kinds)) for name in ("effective", "no_ops", "caught")]


def benign_table(found: Drill) -> FirstThatFits:
    """False alarms of every rule on what is sound."""
    return FirstThatFits([_benign(found)], [_benign(found, stacked=True)])


def _benign(found: Drill, *, stacked: bool = False) -> Rows:
    benign = found.benign
    numbers = ("runs", "ours", *found.rules)
    rows = Rows("sound kernels", *numbers, text=False, right=numbers, stacked=stacked)
    alarms = word(str(benign.false_alarms), "fail" if benign.false_alarms else "pass")
    theirs = [str(benign.published[rule]) for rule in found.rules]
    rows.add("false alarms", str(benign.num_runs), alarms, *theirs)
    return rows
