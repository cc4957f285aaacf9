"""`python -m flows baseline`: survey the backends of a matrix on a traffic mix, choose, and propose a policy.

No candidate is judged and no traffic moves: it answers which backend this machine should run for this traffic, how far
each is from what the machine can do, and what one backend for everything would cost.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from attention.backends import chosen
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.policy import load_policy
from data.baseline_matrix import load_matrix
from data.candidate import OWN
from data.mix import Mix, load_mix, mix_of
from data.paths import lake_dir, models_dir, repo_dir, state_dir
from data.proposed_policy import check_ours, write_policy
from flows.tables import Rows
from gates.selection import Selection, Service, select
from tasks import survey

if TYPE_CHECKING:
    from rich.console import RenderableType

Say = Callable[[str], None]
Row = dict[str, Any]


class Asked(BaseModel):
    """What to survey; see `--help`."""

    matrix: str
    mix: str
    gpu: str | None = None  # default: the matrix's own
    traffic: Path | None = None  # of the mix `own`
    backends: str | None = None  # comma-separated; default: the matrix's
    blocks: int = 6
    startup: bool = False
    budget_s: float | None = None
    propose: Path | None = None
    base: Path = repo_dir() / "data" / "policies" / "document.yaml"  # what a proposal keeps: fallback, budget
    out: Path | None = None  # default: the lake and the state folder


class Baseline(BaseModel):
    """What a survey found, for machines; every row is in the lake too."""

    release_id: str
    matrix: str
    mix: str
    device: str
    num_left_out: int  # cells, for want of time
    covered: dict[str, float]  # share of each family's attention work that lies in the buckets measured
    cells: list[Row]  # rows of perf_backends
    selection: Selection
    sentence: str
    policy: str | None  # the proposed policy, where one was asked for
    figures: list[str]

    @property
    def exit_code(self) -> int:
        """0 measured; 1 some backend failed where its rules let it run; 3 cells were left out for want of time, or
        nothing was measured."""
        if self.num_left_out or not any(row["outcome"] == "measured" for row in self.cells):
            return 3
        return 1 if any(row["outcome"] not in ("measured", "refused") for row in self.cells) else 0


def run(asked: Asked, *, say: Say) -> Baseline:
    """Raises UserError for a matrix, mix, backend or file that is none, before anything is measured."""
    matrix, mix, base = load_matrix(asked.matrix), _mix(asked), load_policy(asked.base)
    gpu = asked.gpu or matrix.gpus[0]
    if gpu == "any":
        raise UserError(f"--matrix {asked.matrix} is for any GPU: say which one this is with --gpu, `cpu` without one")
    if not matrix.covers(gpu):
        raise UserError(f"--gpu {gpu}: matrix {asked.matrix} is for {', '.join(matrix.gpus)}")
    if asked.propose is not None:
        check_ours(asked.propose)
    name = Path(asked.matrix).stem
    own = f"{name}-{mix.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    folder = asked.out or state_dir() / "baselines" / own
    lake = lake_dir() if asked.out is None else asked.out / "lake"
    plan = survey.Plan(
        name=name,
        matrix=matrix,
        mix=mix,
        gpu=gpu,
        backends=() if asked.backends is None else chosen(asked.backends),
        blocks=asked.blocks,
        with_startup=asked.startup,
        budget_s=asked.budget_s,
    )
    found = survey.run(plan, lake=lake, work=folder / "work", say=say)
    selection = select(found.measured, mix.name)
    sentence = f"{selection.sentence}; {_covered_note(found.covered)}{_lost_note(found.rows)}"
    policy = None
    if asked.propose is not None and selection.services:
        note = f"{sentence}; evidence {found.release_id}"
        write_policy(asked.propose, selection.services[0], base, note)
        policy = str(asked.propose)
    return Baseline(
        release_id=found.release_id,
        matrix=name,
        mix=mix.name,
        device=found.device_name,
        num_left_out=found.num_left_out,
        covered=dict(found.covered),
        cells=list(found.rows),
        selection=selection,
        sentence=sentence,
        policy=policy,
        figures=[str(path) for path in _figures(found.release_id, lake, folder / "figures")],
    )


def _covered_note(covered: Mapping[Any, float]) -> str:
    """Of what share of the traffic's work the sentence speaks."""
    shares = ", ".join(f"{share:.0%} of the {family}" for family, share in covered.items())
    return f"measured {shares} work"


def _lost_note(rows: Iterable[Row]) -> str:
    """Which backends lost cells that their rules let them run: the choice is without those."""
    lost = Counter(row["backend"] for row in rows if row["outcome"] not in ("measured", "refused"))
    return "".join(f"; {backend} lost {count} of its cells" for backend, count in lost.items())


def _mix(asked: Asked) -> Mix:
    """A named mix or the file of one; `own` is made of a traffic file, counted with the small model's tokenizer."""
    if asked.mix != OWN:
        if asked.traffic is not None:
            raise UserError(f"--traffic is for --mix {OWN}, not for {asked.mix}")
        return load_mix(asked.mix)
    if asked.traffic is None:
        raise UserError(f"--mix {OWN}: name the traffic file with --traffic")
    from transformers import AutoTokenizer

    from data.model_setup import NAME
    from data.recorded import read_traffic
    from data.requests import lengths, with_texts

    tokenizer = AutoTokenizer.from_pretrained(models_dir() / NAME)
    return mix_of(asked.traffic.stem, lengths(with_texts(read_traffic(asked.traffic).requests, tokenizer), tokenizer))


def _figures(release_id: str, lake: Path, folder: Path) -> list[Path]:
    """The pictures; none on a machine that measures only, without what reads the lake."""
    try:
        from tasks import figures
    except ImportError:
        return []
    return figures.save("baseline", lake, release_id, folder)


def render(found: Baseline) -> RenderableType:
    """A table of the cells, one of the choices and one of the scores for each service, and the sentence at the end."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_cells(found.cells), Text("")]
    for service in found.selection.services:
        parts += [Text(f"{service.layout} {service.execution}", style="bold"), _choices(service), _scores(service)]
        parts += [Text(f"  {regret.sentence}") for regret in service.regrets] + [Text("")]
    if found.policy:
        parts.append(Text(f"policy   {found.policy}"))
    parts += [Text(f"figure   {path}") for path in found.figures]
    parts.append(Text(f"id       {found.release_id}"))
    parts.append(Text(found.sentence, style="bold"))
    return Group(*parts)


def _cells(rows: Iterable[Row]) -> Rows:
    right = ("p50_us", "p95_us", "of_limit")
    table = Rows("case", "backend", *right, "outcome", right=right)
    for row in rows:
        case = survey.where(AttentionCase.model_validate_json(row["case_json"]))
        if row.get("p50_s") is None:
            table.add(case, row["backend"], "-", "-", "-", _outcome(row))
            continue
        figures = (f"{1e6 * row[name]:.1f}" for name in ("p50_s", "p95_s"))
        ratio = "-" if row.get("limit_ratio") is None else f"{row['limit_ratio']:.2f}"
        table.add(case, row["backend"], *figures, ratio, _outcome(row))
    return table


def _outcome(row: Row) -> str:
    if row["outcome"] != "measured":
        return f"{row['outcome']}: {row['error']}"[:100]
    waited = row.get("num_waited") or 0
    return f"measured; host time in {waited} blocks" if waited else "measured"


def _choices(service: Service) -> Rows:
    table = Rows("bucket", "weight", "best", "gain", right=("weight",))
    for choice in service.choices:
        gain = "" if choice.gain is None else f"saves {choice.gain}"
        table.add(choice.shape_bucket, f"{100 * choice.weight:.1f} %", choice.backend, gain)
    return table


def _scores(service: Service) -> Rows:
    table = Rows("family", "backend", "s_per_1000", "worst_cell", right=("s_per_1000",))  # requests, one layer
    for score in service.scores:
        seconds = "-" if score.seconds is None else f"{score.seconds:.3f}"
        worst = f"lacks {len(score.lacks)} cells" if score.lacks else ""
        if score.worst is not None:
            worst = f"{score.worst.ratio:.2f} times the fastest at {score.worst.case_id.rsplit('-h', 1)[0]}"
        table.add(score.family, score.backend, seconds, worst)
    return table
