"""`python -m flows drill`: faults on purpose, to see that the tensor layer catches them and nothing sound.

A row a kind of fault: runs in which it changed the float64 oracle, how many of them its own check caught, and how
many the published rules of other projects reject. A run is one draw with its three kinds of inputs; the rows `alone`
count single problems that a fault changes (`normal inputs` are all that those projects draw). Then the sound runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.tables import Rows, word

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tasks.drill import Drill


def render(found: Drill) -> RenderableType:
    """The table, the sound runs under it, what is not run here, and the verdict as the last line."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [kind_table(found), Text(""), benign_table(found), Text("")]
    lines += [Text(f"not run here: {one['name']} ({one['layer']} layer, {one['check']})") for one in found.elsewhere]
    lines.append(Text(f"limits {found.limits_sha256[:12]}, seed {found.seed}, {found.num_draws} draws"))
    lines += [Text(problem) for problem in found.problems]
    verdict = "fail" if found.problems else "pass"
    lines.append(word(verdict, verdict))
    return Group(*lines)


def kind_table(found: Drill) -> Rows:
    """Runs caught of those that changed the oracle; `no-op` those that did not."""
    numbers = ("runs", "no-op", "ours", *found.rules)
    rows = Rows("fault", "check", *numbers, text=False, right=numbers)
    for one in found.kinds:
        caught = word(str(one.caught), "pass" if one.caught == one.effective else "fail")
        theirs = [str(one.published[rule]) for rule in found.rules]
        rows.add(one.kind, one.check, str(one.effective), str(one.no_ops), caught, *theirs)
    total = [sum(one.published[rule] for one in found.kinds) for rule in found.rules]
    effective, no_ops, ours = (sum(getattr(k, name) for k in found.kinds) for name in ("effective", "no_ops", "caught"))
    rows.add("all", "", str(effective), str(no_ops), str(ours), *map(str, total))
    for inputs, (changed, rejected) in found.singles.items():
        rows.add(f"alone, {inputs}", "", str(changed), "", *(str(rejected[name]) for name in ("ours", *found.rules)))
    return rows


def benign_table(found: Drill) -> Rows:
    """False alarms of every rule on what is sound."""
    benign = found.benign
    numbers = ("runs", "ours", *found.rules)
    rows = Rows("sound kernels", *numbers, text=False, right=numbers)
    alarms = word(str(benign.false_alarms), "fail" if benign.false_alarms else "pass")
    theirs = [str(benign.published[rule]) for rule in found.rules]
    rows.add("false alarms", str(benign.num_runs), alarms, *theirs)
    return rows
