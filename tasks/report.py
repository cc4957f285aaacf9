"""report.html: one file that a reviewer can open anywhere, mail, or read inside MLflow.

    write(story, folder)      # folder/report.html, with the pictures of every stage that lie in the folder

Everything is inlined, nothing is fetched and nothing runs: no script, no link, no font. All text is
escaped, because messages quote names from candidates and errors from libraries.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gates.replay_model import Bucket, Divergence
from gates.replay_tensor import Beside
from gates.report import Row, table
from gates.verdict import GateReport
from tasks.figures import PICTURES
from tasks.figures.canvas import Picture
from tasks.files import write_atomically
from tasks.story import STAGES, Story

MAX_EVENTS = 200

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
       max-width: 1040px; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h1 .word { padding: 1px 10px; border-radius: 4px; color: #fff; margin-right: 6px; }
.PASS { background: #00785a; } .FAIL { background: #b34700; } .HOLD { background: #8a6100; }
.OPEN { background: #555; }
p.reason { margin: 0 0 16px; font-size: 16px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid #e3e3e3; }
th { color: #555; font-weight: 600; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.gate td { background: #f4f4f4; font-weight: 600; padding-left: 6px; }
td { overflow-wrap: anywhere; }
b.pass { color: #00785a; } b.fail, b.error { color: #b34700; } b.inconclusive { color: #8a6100; }
small { color: #666; display: block; }
figure { margin: 0 0 20px; } figcaption { color: #555; font-size: 13.5px; }
img { max-width: 100%; border: 1px solid #e3e3e3; border-radius: 4px; }
pre { background: #f6f6f6; padding: 10px 12px; overflow-x: auto; font-size: 12.5px; border-radius: 4px; }
summary { cursor: pointer; font-weight: 600; }
"""
# Should an escape ever be forgotten, the browser still runs and fetches nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write(story: Story, folder: Path) -> Path:
    """Write `folder/report.html` with every picture of a stage (`figures.PICTURES`) that is there."""
    path = folder / "report.html"
    write_atomically(path, render(story, folder))
    return path


def render(story: Story, folder: Path | None = None) -> str:
    """The page, with the pictures that lie in the folder."""
    parts = (
        _head(story),
        _gates(story.gates),
        *(_pictures(stage, folder) for stage in STAGES if folder is not None),
        _tensor(story.tensor),
        _model(story.buckets, story.divergences),
        _events(story),
        _block("Fingerprint", story.fingerprint_json, is_open=False),
        _block("Policy", story.policy_yaml, is_open=True),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(story.headline)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _head(story: Story) -> str:
    word, _, rest = story.headline.partition(" ")
    facts = {
        "release": story.release_id,
        "state": story.state,
        "model family, GPU": f"{story.family}, {story.gpu}",
        "compared with": story.champion,
        "confirmed backend": story.confirmed_backend,
        "fingerprint": story.fingerprint_id,
        "tags": ", ".join(story.tags),
    }
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    reason = f'<p class="reason">{escape(story.reason)}</p>' if story.reason else ""
    return f'<h1><span class="word {word}">{word}</span>{escape(rest)}</h1>\n{reason}<dl>{lines}</dl>'


def _gates(gates: Iterable[GateReport]) -> str:
    rows = "\n".join(_gate(gate) for gate in gates)
    if not rows:
        return "<h2>Gates</h2><p>No gate has judged yet.</p>"
    heads = "".join(
        f"<th>{name}</th>"
        for name in ("check", "verdict", "observed", "limit", "smallest visible effect", "evidence", "owner")
    )
    return f"<h2>Gates</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _gate(gate: GateReport) -> str:
    head = f'<tr class="gate"><td colspan="7">{escape(gate.stage)}: {_verdict(gate.verdict.value)}</td></tr>'
    return "\n".join([head, *(_check(row) for row in table(gate))])


def _check(row: Row) -> str:
    why = "".join(
        f"<small>{escape(text)}</small>"
        for text in (
            row.message if row.verdict != "pass" else "",
            f"limit: {row.reason}" if row.reason else "",
        )
        if text
    )
    return (
        f"<tr><td>{escape(row.check)}{why}</td><td>{_verdict(row.verdict)}</td>"
        f'<td class="number">{escape(row.observed)}</td><td class="number">{escape(row.limit)}</td>'
        f'<td>{escape(row.detectable)}</td><td class="number">{row.num_evidence}</td>'
        f"<td>{escape(row.owner)}</td></tr>"
    )


def _verdict(verdict: str) -> str:
    return f'<b class="{escape(verdict)}">{escape(verdict)}</b>'


def _pictures(stage: str, folder: Path) -> str:
    """The stage's pictures under its name, the main one first; nothing where none was drawn."""
    drawn = [(path, picture) for picture in PICTURES[stage] if (path := folder / f"{picture.name}.png").is_file()]
    return "\n".join([f"<h2>{escape(stage)}</h2>", *(_picture(*one) for one in drawn)]) if drawn else ""


def _picture(path: Path, picture: Picture) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = escape(picture.caption)
    image = f'<img alt="{escape(picture.name)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _tensor(cases: Sequence[Beside]) -> str:
    """One row a case: the champion's own ratios stand beside the candidate's."""
    if not cases:
        return ""
    heads = (
        "case",
        "inputs",
        "candidate",
        "champion",
        "R_rms",
        "R_max",
        "R_row",
        "quantisation",
        "row of largest relative error",
    )
    rows = "".join(
        f"<tr><td>{escape(one.case_id)}</td><td>{escape(one.inputs)}</td><td>{escape(one.backend)}</td>"
        f"<td>{escape(one.champion_backend or '-')}</td>"
        f"{_pair(one.r_rms, one.champion_r_rms)}{_pair(one.r_max, one.champion_r_max)}"
        f"{_pair(one.r_row, one.champion_r_row)}"
        f'<td class="number">{_ratio(one.quantisation_r_rms)}</td><td>{escape(one.worst_row_at or "")}</td></tr>'
        for one in cases
    )
    note = (
        f"<p>The {len(cases)} cases whose error is largest over the champion's. Candidate | champion, in units of the "
        "dtype class's own error; over quantised KV that is the kernel's part, and quantisation stands apart.</p>"
    )
    row = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<h2>Tensor replay, case by case</h2>\n{note}<table><thead><tr>{row}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _model(buckets: Sequence[Bucket], divergences: Sequence[Divergence]) -> str:
    """One row a bucket, beside the floor; then where the most likely tokens first part."""
    if not buckets:
        return ""
    heads = ("mode", "bucket", "positions", "KL mean | floor", "KL 99.9 %", "top-10 overlap", "agreement", "flips")
    rows = "".join(
        f"<tr><td>{escape(one.mode)}</td><td>{escape(one.bucket)}{'' if one.judged else ' (not judged)'}</td>"
        f'<td class="number">{one.positions} of {one.prompts} prompts</td>{_pair(one.kl_mean, one.floor_kl_mean)}'
        f'<td class="number">{_ratio(one.kl_p999)}</td><td class="number">{_ratio(one.topk_overlap)}</td>'
        f'<td class="number">{_ratio(1 - one.flips / one.positions)}</td>'
        f'<td class="number">{one.flips}, up to {_ratio(one.flip_margin)} nats</td></tr>'
        for one in buckets
    )
    parted = "".join(
        f"<p>{escape(one.mode)}: the most likely token parts in {one.diverged} of {one.prompts} prompts"
        + (
            f", in the median first after {_ratio(one.median_tokens)} tokens at {_ratio(one.median_margin)} nats"
            if one.diverged
            else ""
        )
        + ".</p>"
        for one in divergences
    )
    note = (
        "<p>Teacher-forced on the same tokens; KL in nats a position. The floor is the champion beside itself, "
        "executed a second sound way. A bucket with few positions is shown and not judged.</p>"
    )
    row = "".join(f"<th>{name}</th>" for name in heads)
    table_ = f"<table><thead><tr>{row}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<h2>Model replay, by language, length and position</h2>\n{note}{parted}{table_}"


def _pair(candidate: float | None, champion: float | None) -> str:
    return f'<td class="number">{_ratio(candidate)} | {_ratio(champion)}</td>'


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _events(story: Story) -> str:
    if not story.events:
        return ""
    shown = story.events[-MAX_EVENTS:]
    rows = "".join(
        f"<tr><td class='number'>{event.time.strftime('%H:%M:%S') if event.time else ''}</td>"
        f"<td>{escape(event.severity)}</td><td>{escape(event.kind)}</td><td>{escape(event.subject)}</td>"
        f"<td>{escape(event.message)}</td></tr>"
        for event in shown
    )
    heads = "".join(f"<th>{name}</th>" for name in ("time", "severity", "event", "subject", "what happened"))
    earlier = len(story.events) - len(shown)
    note = f"<p>The last {len(shown)}; {earlier} earlier ones are in the lake.</p>" if earlier else ""
    return f"<h2>Events</h2>\n{note}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _block(title: str, text: str | None, *, is_open: bool) -> str:
    if not text:
        return ""
    opened = " open" if is_open else ""
    return f"<h2>{title}</h2>\n<details{opened}><summary>show</summary><pre>{escape(text)}</pre></details>"
