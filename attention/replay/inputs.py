"""Kinds of inputs of the tensor layer: what q, K and V hold, seeded, before they are stored and laid out.

    normal       N(0, 1): the bulk of the arithmetic. A lost key averages away (0.7 % of the output at 16k keys).
    needle       a key aligned with a query at the first, the last and a page-boundary position, position-coded V: a
                 lost key is 43 % of that row.
    large_logit  logits of several tens, where a kernel that rescales wrongly overflows.
    window_edge  needles at the first key inside the window of the last query and at the one just outside, and so at
                 the right edge of the first query: a window off by one, or ignored, changes those rows altogether.
    sink         the first keys of the sequence take nine tenths of every row and their values are small, as in trained
                 models (Xiao et al., arXiv 2309.17453): the output is what the other tenth adds up to, which a kernel
                 that starts with the sinks keeps only if its P and its accumulator are wide enough (arXiv 2606.06521).
    activations  q, K and V of a layer of the served model on a text (`attention.replay.activations`).

Shapes: q_QHD [q_len, H, D_qk], k_LGD [kv_len, G, D_qk], v_LGD [kv_len, G, D_vo], float32 on the device of the draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from attention.backends.base import AttentionSpec
from attention.cases import Inputs
from attention.errors import UserError
from attention.replay.draws import Draws

NUM_SINKS = 4  # as the paper finds in trained models
SINK_SHARE = 0.9  # of a row's weight
SINK_VALUE = 0.05  # size of a sink's values; those of other keys are N(1, 1), so that they do not average away

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Lengths of one member in tokens."""

    q_len: int
    kv_len: int
    page: int


@dataclass(frozen=True)
class Captured:
    """q, K and V of one layer on one text, token i in row i: q_THD, k_TGD, v_TGD, float32 on the CPU."""

    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor

    @cached_property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(t).all()) for t in (self.q_THD, self.k_TGD, self.v_TGD))


def draw(size: Size, spec: AttentionSpec, inputs: Inputs, draws: Draws, captured: Captured | None = None) -> Drawn:
    """q, K and V of one member. UserError for `activations` without a capture of the same heads."""
    if inputs == "activations":
        return _activations(size, spec, draws, captured)
    q_QHD = draws.normal(size.q_len, spec.heads_q, spec.head_dim_qk)
    k_LGD = draws.normal(size.kv_len, spec.heads_kv, spec.head_dim_qk)
    v_LGD = draws.normal(size.kv_len, spec.heads_kv, spec.head_dim_vo)
    if inputs == "large_logit":
        return q_QHD * 4, k_LGD * 2, v_LGD
    if inputs == "needle":
        # The last query gets the last key: under a causal mask no other query sees it.
        keys = sorted({0, min(size.page, size.kv_len - 1), size.kv_len - 1}, reverse=True)
        for row, key in enumerate(keys):
            _aim(k_LGD, q_QHD, spec, key, max(0, size.q_len - 1 - row))
        v_LGD += torch.linspace(-1, 1, size.kv_len, device=v_LGD.device)[:, None, None]
    if inputs == "window_edge":
        for row, inside, outside in _edges(size, spec):
            _aim(k_LGD, q_QHD, spec, inside, row)
            _aim(k_LGD, q_QHD, spec, outside, row)
        v_LGD += torch.linspace(-1, 1, size.kv_len, device=v_LGD.device)[:, None, None]
    if inputs == "sink":
        return _sink(size, spec, q_QHD, k_LGD, v_LGD, draws)
    return q_QHD, k_LGD, v_LGD


def num_drawn(size: Size, spec: AttentionSpec) -> int:
    """Numbers that `draw` takes for a member, or a few more: each tensor begins with a word, which holds four."""
    q, k = size.q_len * spec.heads_q, size.kv_len * spec.heads_kv
    axis = spec.heads_kv * spec.head_dim_qk  # of sinks
    return q * spec.head_dim_qk + k * (spec.head_dim_qk + spec.head_dim_vo) + axis + 4 * 4


def stored(spec: AttentionSpec, q_QHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor) -> Drawn:
    """The inputs as a cache holds them: in the spec's dtypes, divided by its scales, cut at the largest number."""
    store = spec.kv_dtype or spec.dtype
    top = torch.finfo(store).max  # torch makes NaN of what is larger than a float8 can hold
    k, v = ((t / scale).clamp(-top, top).to(store) for t, scale in ((k_LGD, spec.k_scale), (v_LGD, spec.v_scale)))
    return q_QHD.to(spec.dtype), k, v


def _aim(k_LGD: torch.Tensor, q_QHD: torch.Tensor, spec: AttentionSpec, key: int, row: int) -> None:
    """Align a key with a query: a logit near ln(kv_len) lets one key weigh about as much as all the others."""
    wanted = math.log(max(2, len(k_LGD))) / spec.scale
    target_GD = q_QHD[row].view(spec.heads_kv, spec.heads_q // spec.heads_kv, -1).mean(1)
    k_LGD[key] = target_GD * (wanted / target_GD.square().sum(-1, keepdim=True))


def _edges(size: Size, spec: AttentionSpec) -> list[tuple[int, int, int]]:
    """(query, first key inside, key just outside): left edge of the last query, right edge of the first."""
    left, right = spec.window
    found = []
    if left is not None and left < size.kv_len - 1:
        inside = size.kv_len - 1 - left
        found.append((size.q_len - 1, inside, inside - 1))
    if right is not None and not spec.causal:
        inside = size.kv_len - size.q_len + right
        found.append((0, inside, inside + 1))
    return [(row, *keys) for row, *keys in found if size.q_len and min(keys) >= 0 and max(keys) < size.kv_len]  # type: ignore[misc]


def _sink(
    size: Size,
    spec: AttentionSpec,
    q_QHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    draws: Draws,
) -> Drawn:
    """Queries share a direction that only the sinks' keys have, so that every row sees the same sinks."""
    axis_GD = torch.nn.functional.normalize(draws.normal(spec.heads_kv, spec.head_dim_qk), dim=-1)
    axis_HD = axis_GD.repeat_interleave(spec.heads_q // spec.heads_kv, 0)
    num, length = min(NUM_SINKS, size.kv_len), math.sqrt(spec.head_dim_qk)
    q_QHD = q_QHD + axis_HD * (length - (q_QHD * axis_HD).sum(-1, keepdim=True))
    k_LGD = k_LGD - axis_GD * (k_LGD * axis_GD).sum(-1, keepdim=True)
    # Others weigh exp(N(0, 1)) each, exp(0.5) in the mean.
    odds = SINK_SHARE / (1 - SINK_SHARE) * max(1, size.kv_len - num) * math.exp(0.5) / max(1, num)
    k_LGD[:num] += axis_GD * (math.log(odds) / (spec.scale * length))
    v_LGD[:num] *= SINK_VALUE
    v_LGD[num:] += 1
    return q_QHD, k_LGD, v_LGD


def _activations(size: Size, spec: AttentionSpec, draws: Draws, captured: Captured | None) -> Drawn:
    """A cut of the text: half of the members start with it, where its sinks are; a text that is too short repeats."""
    if captured is None:
        raise UserError("inputs `activations` need a model's activations: none were captured")
    found = (captured.q_THD.shape[1:], captured.k_TGD.shape[1:], captured.v_TGD.shape[1:])
    dims = spec.head_dim_qk, spec.head_dim_vo
    wanted = ((spec.heads_q, dims[0]), (spec.heads_kv, dims[0]), (spec.heads_kv, dims[1]))
    if tuple(map(tuple, found)) != wanted:
        raise UserError(f"captured activations have heads and dims {tuple(map(tuple, found))}, the case {wanted}")
    if not captured.is_finite:
        raise UserError("captured activations are not finite: a backend below their layer gave NaN or Inf")
    length = len(captured.k_TGD)
    offset = draws.below(max(1, length - size.kv_len + 1)) if draws.below(2) else 0
    rows = (torch.arange(size.kv_len) + offset) % length
    q_rows = (torch.arange(size.kv_len - size.q_len, size.kv_len) + offset) % length
    return tuple(t.to(draws.device) for t in (captured.q_THD[q_rows], captured.k_TGD[rows], captured.v_TGD[rows]))  # type: ignore[return-value]
