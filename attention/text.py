"""The compatibility matrix, its drift and a resolved chain for a person, in lines that fit 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attention.drift import Drift
from attention.matrix import KnownBad

if TYPE_CHECKING:  # torch, which the matrix is shown without
    from attention.chains import Chain

_WIDTH = 80
_NAME = 20  # of a dimension or a probe, beside its text


def rules(backend: str, sheets: Mapping[str, Any], bad: Iterable[KnownBad]) -> list[str]:
    """What is declared of a backend, a platform after the other; what reports found broken at the end."""
    lines = [] if sheets else [f"{backend}  unknown (no declared rules)"]
    for platform, sheet in sorted(sheets.items()):
        lines.append(f"{backend}  {platform}")
        for rule in sheet.rules:
            lines += _entry(rule.dimension, rule.allowed_text(), f"{rule.code}, {_of(rule.versions)}{rule.source}")
        for entry in (entry for entry in bad if platform in entry.platforms):
            where = " and ".join(f"{name} {limits.allowed_text()}" for name, limits in entry.when.items())
            lines += _entry("known_bad", where, f"{entry.code}, {_of(entry.versions)}{entry.source}")
    return lines


def _of(versions: str) -> str:
    return f"{versions}, " if versions else ""


def drift(found: Iterable[Drift]) -> list[str]:
    """Cells on which two sources disagree, those of one probe and one reason together."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Drift]]] = {}
    for one in found:
        why = ", ".join(dict.fromkeys(f"{r.code} of {r.dimension}" for r in one.reasons))
        of_backend = groups.setdefault((one.backend, f"{one.before} -> {one.after}"), {})
        of_backend.setdefault((one.probe, why), []).append(one)
    lines = []
    for (backend, change), probes in sorted(groups.items()):
        lines.append(f"{backend}  {change}")
        for (probe, why), cells in sorted(probes.items()):
            num = "1 case" if len(cells) == 1 else f"{len(cells)} cases, the first of them"
            message = next((r.message for r in cells[0].reasons), "")
            told = textwrap.shorten(message, 200, placeholder=" ...")
            lines += _entry(probe, f"{num} {cells[0].case.case_id}", f"{why}: {told}" if why else "")
    return lines


def chains(found: Iterable[Chain]) -> list[str]:
    """What a policy comes to; what is the same of several phases and lengths is said together."""
    told: dict[tuple[str, ...], dict[tuple[str, str], list[str]]] = {}
    for one in found:
        lines = [f"requested {one.requested}, chain {' > '.join(one.chain) or 'none'}"]
        for name, why in one.excluded.items():
            lines += [f"  left out {name}", *(part for reason in why for part in _entry("", str(reason), indent=4))]
        where = ("{} to {} keys".format(*one.kv_len), ", ".join(one.features) or "no features")
        told.setdefault(tuple(lines), {}).setdefault(where, []).append(one.phase)
    return [
        line
        for (first, *others), places in told.items()
        for line in (
            *(f"{', '.join(phases)}, {kv_len}, {features}:" for (kv_len, features), phases in places.items()),
            *textwrap.wrap(f"  {first}", _WIDTH, subsequent_indent="    "),
            *others,
        )
    ]


def _entry(name: str, *paragraphs: str, indent: int = _NAME + 2) -> list[str]:
    """A name, and beside it paragraphs, wrapped; a word that is longer than the line stays whole."""
    body = [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(
            paragraph, _WIDTH - indent, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]
    return [f"{'' if number or not name else '  ' + name:{indent}}{line}" for number, line in enumerate(body)]
