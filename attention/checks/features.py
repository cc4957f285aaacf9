"""Checks of what a kernel computes: numbers, needles, the LSE, and every feature that it may silently ignore.

A feature check runs inputs on which the feature decides the answer, and when the answer is wrong looks for the
misreading of the spec that gives it (a `Suspect`): softcap ignored, window one key too wide, causal mask aligned
top-left. What no suspect explains is NUMERIC_DRIFT. Other features of the case that are ignored as well are
tried along, so that each check names its own defect and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from attention.backends.base import AttentionSpec, Backend
from attention.backends.oracle import attend
from attention.cases import REPLAY_INPUTS, AttentionCase
from attention.checks.common import (
    LSE_ERROR,
    MAX_RATIO,
    SAME_ANSWER,
    Skip,
    batch_text,
    distance,
    dtype_class,
    judge,
    non_finite,
    plain,
    reason,
    run,
    sinks_over,
    variant,
)
from attention.reasons import Code, Reason
from attention.replay.figures import half_ulp
from attention.replay.members import Member
from attention.replay.problems import Problem, build, make, members_of, spec_of

Edit = Callable[[AttentionSpec, Member], tuple[AttentionSpec, torch.Tensor | None]]


@dataclass(frozen=True)
class Suspect:
    """A misreading of the spec, and the reason that it stands for."""

    code: Code
    dimension: str
    observed: str
    allowed: str
    message: str
    edit: Edit

    def reason(self) -> Reason:
        return reason(self.code, self.dimension, self.observed, self.allowed, self.message)


def numeric(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Random, needle and large-logit inputs against the oracle, unowned slots NaN."""
    found: list[Reason] = []
    for inputs in REPLAY_INPUTS:
        problem = make(case, inputs, 7, device=device)
        out, _ = run(backend, problem)
        found += judge(out, problem, case, f"error against the fp64 oracle on {inputs} inputs, in dtype-class units")
    return list(dict.fromkeys(found))


def needles(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """One key that weighs more than all others, at the first, last, page-boundary and window-edge positions.

    Query head h of the last row looks for needle h; V is position-coded. A key that is lost changes its head's
    row by its whole length, where random inputs average it away.
    """
    spec = spec_of(case)
    places = [_places(kv, case) for kv in (m.kv_len for m in case.members)]
    count = min(max(map(len, places)), case.head_dim_qk)
    if not count:
        raise Skip("no member has a key")
    lost: dict[str, Reason] = {}
    for turn in range(-(-count // case.heads_q)):
        target_H = [(h + turn * case.heads_q) % count for h in range(case.heads_q)]
        members = []
        for member, at in zip(members_of(case, spec, "normal", 5), places, strict=True):
            members.append(_with_needles(member, [p for p, _ in at[:count]], target_H, spec))
        problem = build(case, spec, members, seed=5, device=device, poison=(0.0, 0.0))
        out, _ = run(backend, problem)
        found = non_finite(out, problem.truth)
        if found:
            return found
        row = -1
        for one, at in zip(case.members, places, strict=True):
            row += one.q_len
            for head, target in enumerate(target_H if one.q_len else []):
                if target < len(at) and _row_ratio(out, problem, row, head) > MAX_RATIO[dtype_class(case)]:
                    error = distance(out[row, head], problem.truth.out_QHD[row, head])
                    lost[at[target][1]] = reason(
                        Code.NUMERIC_DRIFT,
                        f"needle at the {at[target][1]}",
                        f"relative error {error:.2g} at key {at[target][0]} of {one.kv_len}",
                        f"R_row <= {MAX_RATIO[dtype_class(case)]:g}",
                        "this key is lost or weighed wrongly",
                    )
    return list(lost.values())


def _places(kv_len: int, case: AttentionCase) -> list[tuple[int, str]]:
    """Key positions that kernels lose, of those that the last query of a member sees."""
    page, left = case.page_size or 64, case.window[0]
    wanted = [
        (0, "first key"),
        (kv_len - 1, "last key"),
        (page - 1, "last key of the first page"),
        (page, "first key of the second page"),
        ((kv_len - 1) // page * page, "first key of the last page"),
        (kv_len - 1 - (left or 0), "window edge" if left is not None else "last key"),
    ]
    lowest = 0 if left is None else max(0, kv_len - 1 - left)
    seen: dict[int, str] = {}
    for place, name in wanted:
        if lowest <= place < kv_len:
            seen.setdefault(place, name)
    return list(seen.items())


def _with_needles(member: Member, places: list[int], target_H: list[int], spec: AttentionSpec) -> Member:
    """Query head h points along axis `target_H[h]`; the key at `places[j]` along axis j, with a logit that weighs
    it some fifty times as much as all others together."""
    q, k = torch.zeros_like(member.q_QHD), member.k_LGD.clone()
    for head, target in enumerate(target_H):
        q[:, head, target] = 1 / spec.scale
    for axis, place in enumerate(places):
        logit = math.log(max(2, len(k))) + 4
        needle = torch.zeros(spec.head_dim_qk)
        needle[axis] = logit / spec.k_scale
        k[place] = needle.to(k.dtype)
    code = torch.linspace(-1, 1, max(1, len(k)))[: len(k), None, None] / spec.v_scale
    return replace(member, q_QHD=q, k_LGD=k, v_LGD=(member.v_LGD.float() + code).to(member.v_LGD.dtype))


def _row_ratio(out: torch.Tensor, problem: Problem, row: int, head: int) -> float:
    exact = problem.truth.out_QHD[row, head]
    own = torch.maximum((problem.truth.rounded_QHD[row, head] - exact).abs(), half_ulp(exact, problem.spec.dtype))
    return float((out[row, head].double() - exact).norm() / own.norm())


def lse(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The LSE is the natural log of the softmax's sum, sink included, and -inf where a row sees no key."""
    problem, members = plain(case, device)
    _, found_TH = run(backend, problem)
    if found_TH is None:
        raise Skip(f"{backend.name} gives no LSE")
    truth_TH = problem.truth.lse_QH
    if found_TH.shape != truth_TH.shape:
        return [reason(Code.NUMERIC_DRIFT, "lse", str(tuple(found_TH.shape)), str(tuple(truth_TH.shape)), "shape")]
    some_TH = torch.isfinite(truth_TH)
    found: list[Reason] = []
    if not bool(torch.isneginf(found_TH[~some_TH]).all()):
        text = "the LSE of a row that sees no key must be -inf"
        found.append(reason(Code.EMPTY_ROW_SEMANTICS, "lse", "finite, +Inf or NaN", "-inf", text))
    limit = LSE_ERROR[dtype_class(case)]

    def error(wanted_TH: torch.Tensor) -> float:
        largest = float((found_TH.double() - wanted_TH)[some_TH].abs().max()) if bool(some_TH.any()) else 0.0
        return largest if math.isfinite(largest) else math.inf

    if error(truth_TH) <= limit:
        return found
    if error(truth_TH / math.log(2)) <= 2 * limit:
        text = "the LSE is a base-2 logarithm: multiply by ln 2"
        return [*found, reason(Code.LSE_BASE, "lse", "base 2", "base e", text)]
    text = "error of the LSE"
    if problem.spec.sinks is not None:
        bare = _truth(members, replace(problem.spec, sinks=None), [], device)[1]
        text = "the sink is missing in the LSE" if error(bare) <= limit else text
    return [*found, reason(Code.NUMERIC_DRIFT, "lse", f"max abs {error(truth_TH):.3g}", f"<= {limit:g}", text)]


def softcap(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Logits far above the cap: capped and uncapped attention have nothing in common there."""
    if case.softcap is None:
        raise Skip("the case has no softcap")
    return _find(backend, case, device, spec_of(case), [_NO_SOFTCAP], q_factor=4 * case.softcap)


def kv_scales(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Quantised K and V with scales 1/4 and 1/2."""
    spec = spec_of(case)
    if spec.kv_dtype is None:
        raise Skip("K and V are not quantised")
    return _find(backend, case, device, spec, [_NO_K_SCALE, _NO_V_SCALE])


def sinks(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Sinks that take most of the softmax's sum."""
    if not case.sinks:
        raise Skip("the case has no sinks")
    longest = max(m.kv_len for m in case.members)
    spec = replace(spec_of(case), sinks=sinks_over(longest, case.heads_q))
    return _find(backend, case, device, spec, [_NO_SINKS])


def alibi(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Slopes with which only the nearest keys count."""
    if not case.alibi:
        raise Skip("the case has no ALiBi slopes")
    spec = replace(spec_of(case), alibi_slopes=tuple(2.0 ** -(1 + h % 4) for h in range(case.heads_q)))
    return _find(backend, case, device, spec, [_NO_ALIBI])


def causal_alignment(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The last query of a member sees its last key, also when there are fewer queries than keys."""
    if not case.causal:
        raise Skip("the case is not causal")
    unequal = [(m.q_len, m.kv_len) for m in case.members if 0 < m.q_len != m.kv_len]
    if not unequal:
        raise Skip("every member has as many queries as keys: both alignments agree")
    one = variant(backend, case, batch=batch_text(unequal))
    return _find(backend, one, device, spec_of(one), [_TOP_LEFT])


def window_edge(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The key at the window's edge, and the one just outside, weigh more than all others."""
    left, right = case.window
    if case.causal and right is not None:
        right = None if right >= 0 else right
    if left is None and right is None:
        raise Skip("the case has no window")
    found: list[Reason] = []
    first = max(case.members, key=lambda m: m.q_len)
    for side, width in (("left", left), ("right", right)):
        if width is None or width > 1 << 14:
            continue
        q_len = max(1, min(first.q_len, 16)) if side == "left" else width + 3
        kv_len = max(q_len, width + 8)
        if first.q_len == first.kv_len:  # a whole prefill stays one
            q_len = kv_len = max(q_len, kv_len)
        one = variant(backend, case, batch=batch_text([(q_len, kv_len)]))
        found += _edge(backend, one, device, side, width, q_len, kv_len)
    return found


def _edge(
    backend: Backend, case: AttentionCase, device: str, side: str, width: int, q_len: int, kv_len: int
) -> list[Reason]:
    spec = spec_of(case)
    (member,) = members_of(case, spec, "normal", 3)
    row = q_len - 1 if side == "left" else 0
    diagonal, step = kv_len - q_len + row, -1 if side == "left" else 1
    edge = diagonal + step * width
    q, k, v = member.q_QHD.clone(), member.k_LGD.float(), member.v_LGD.float()
    # Heads of a group look for the same key.
    ratio = spec.heads_q // spec.heads_kv
    q[row] = q[row].view(spec.heads_kv, ratio, -1)[:, :1].expand(-1, ratio, -1).reshape(q[row].shape)
    one_G1D = q[row].float().view(spec.heads_kv, ratio, -1)[:, 0]
    needle = one_G1D * ((math.log(kv_len) + 2) / spec.scale / one_G1D.square().sum(-1, keepdim=True))
    far = 0 if side == "left" else kv_len - 1
    for axis, place in enumerate((far, edge + step, edge)):
        if 0 <= place < kv_len:
            k[place] = needle / spec.k_scale
            v[place] = 0
            v[place, :, axis % spec.head_dim_vo] = 4 / spec.v_scale
    mask = None if member.mask_QL is None else torch.ones_like(member.mask_QL)
    stored = Member(q, k.to(member.k_LGD.dtype), v.to(member.v_LGD.dtype), mask)

    def window(value: int | None) -> Edit:
        def edit(spec: AttentionSpec, member: Member) -> tuple[AttentionSpec, torch.Tensor | None]:
            sides = (value, spec.window[1]) if side == "left" else (spec.window[0], value)
            return replace(spec, window=sides), member.mask_QL

        return edit

    def suspect(observed: str, message: str, value: int | None) -> Suspect:
        return Suspect(Code.SWA_IGNORED, "window", observed, f"{side} {width}", message, window(value))

    suspects = [suspect("ignored", f"the {side} side of the window is ignored", None)]
    wide = f"off by one: the key at distance {width + 1} {side} is seen, the window ends at {width}"
    suspects.append(suspect(f"{side} {width + 1}", wide, width + 1))
    if width > 0:
        narrow = f"off by one: the key at distance {width} {side} is not seen, the window ends there"
        suspects.append(suspect(f"{side} {width - 1}", narrow, width - 1))
    problem = build(case, spec, [stored], seed=3, device=device, poison=(0.0, 0.0))
    return _explain(backend, case, device, problem, [stored], suspects, slice(row, row + 1))


def _find(
    backend: Backend,
    case: AttentionCase,
    device: str,
    spec: AttentionSpec,
    suspects: list[Suspect],
    q_factor: float = 1.0,
) -> list[Reason]:
    members = members_of(case, spec, "normal", 3)
    members = [replace(m, q_QHD=(m.q_QHD.float() * q_factor).to(spec.dtype)) for m in members]
    problem = build(case, spec, members, seed=3, device=device, poison=(0.0, 0.0))
    return _explain(backend, case, device, problem, members, suspects, slice(None))


def _explain(
    backend: Backend,
    case: AttentionCase,
    device: str,
    problem: Problem,
    members: list[Member],
    suspects: list[Suspect],
    rows: slice,
) -> list[Reason]:
    """Run, and name the suspects whose misreading gives the output that came out."""
    near = SAME_ANSWER[dtype_class(case)]
    truth = problem.truth.out_QHD[rows]
    told = [s for s in suspects if distance(_truth(members, problem.spec, [s], device)[0][rows], truth) > 3 * near]
    if not told:
        raise Skip("on this shape the feature changes nothing")
    whole, _ = run(backend, problem)
    found, out = non_finite(whole, problem.truth), whole[rows]
    if found or distance(out, truth) <= near:
        return found
    named = {s.dimension for s in suspects}
    others = [s for s in _ignorable(problem.spec) if s.dimension not in named]
    # The fewest misreadings that explain the output, its own before others'.
    sets = [(own, more) for own in _subsets(told) for more in _subsets(others) if own or more]
    for own, more in sorted(sets, key=lambda pair: (len(pair[0]) + len(pair[1]), len(pair[1]))):
        if distance(out, _truth(members, problem.spec, [*more, *own], device)[0][rows]) <= near:
            return [s.reason() for s in own]
    text = f"relative L2 {distance(out, truth):.3g}"
    names = ", ".join(dict.fromkeys(s.dimension for s in suspects))
    message = "wrong, and not as if the feature were ignored"
    return [reason(Code.NUMERIC_DRIFT, names, text, f"<= {near:g}", message)]


def _subsets(suspects: Sequence[Suspect]) -> list[list[Suspect]]:
    """All sets of suspects that can hold at once, the smallest first: of one dimension's, only one."""
    found = [list(c) for n in range(len(suspects) + 1) for c in combinations(suspects, n)]
    return [c for c in found if len({s.dimension for s in c}) == len(c)]


def _truth(
    members: list[Member], spec: AttentionSpec, suspects: Sequence[Suspect], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact output and LSE of the batch under a misread spec."""
    outs, lses = [], []
    for member in members:
        seen, mask = spec, member.mask_QL
        for suspect in suspects:
            seen, mask = suspect.edit(seen, replace(member, mask_QL=mask))
        q, k, v = (t.to(device) for t in (member.q_QHD, member.k_LGD, member.v_LGD))
        truth = attend(q, k, v, seen, None if mask is None else mask.to(device))
        outs.append(truth.out_QHD)
        lses.append(truth.lse_QH)
    return torch.cat(outs), torch.cat(lses)


def _ignoring(**changes: object) -> Edit:
    return lambda spec, member: (replace(spec, **changes), member.mask_QL)  # type: ignore[arg-type]


def _top_left(spec: AttentionSpec, member: Member) -> tuple[AttentionSpec, torch.Tensor | None]:
    """Causal and window relative to the diagonal that starts at the first key."""
    q_len, kv_len = len(member.q_QHD), len(member.k_LGD)
    away_QL = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None]
    seen_QL = away_QL <= 0
    if spec.window[0] is not None:
        seen_QL &= away_QL >= -spec.window[0]
    if member.mask_QL is not None:
        seen_QL &= member.mask_QL.cpu()
    return replace(spec, causal=False, window=(None, None)), seen_QL


_NO_SOFTCAP = Suspect(
    Code.SOFTCAP_IGNORED, "softcap", "uncapped", "capped", "the softcap is ignored", _ignoring(softcap=None)
)
_NO_SINKS = Suspect(
    Code.SINK_IGNORED, "sinks", "no sink", "sinks in the sum", "the sinks are ignored", _ignoring(sinks=None)
)
_NO_ALIBI = Suspect(
    Code.ALIBI_IGNORED, "alibi", "no bias", "biased", "the ALiBi slopes are ignored", _ignoring(alibi_slopes=None)
)
_NO_K_SCALE = Suspect(
    Code.KV_SCALE_IGNORED, "k_scale", "1", "k_scale", "the scale of K is ignored", _ignoring(k_scale=1.0)
)
_NO_V_SCALE = Suspect(
    Code.KV_SCALE_IGNORED, "v_scale", "1", "v_scale", "the scale of V is ignored", _ignoring(v_scale=1.0)
)
_NO_WINDOW = Suspect(
    Code.SWA_IGNORED, "window", "ignored", "windowed", "the window is ignored", _ignoring(window=(None, None))
)
_TOP_LEFT = Suspect(
    Code.CAUSAL_ALIGNMENT,
    "causal",
    "top-left",
    "bottom-right",
    "query row i sees keys up to i, not up to kv_len - q_len + i",
    _top_left,
)


def _ignorable(spec: AttentionSpec) -> list[Suspect]:
    """The features of a spec, each ignored."""
    used = {
        _NO_SOFTCAP: spec.softcap is not None,
        _NO_SINKS: spec.sinks is not None,
        _NO_ALIBI: spec.alibi_slopes is not None,
        _NO_K_SCALE: spec.k_scale != 1.0,
        _NO_V_SCALE: spec.v_scale != 1.0,
        _NO_WINDOW: spec.window != (None, None),
    }
    return [suspect for suspect, on in used.items() if on]
