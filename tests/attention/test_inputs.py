"""Kinds of inputs: each makes one kind of fault visible that random numbers average away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.backends.base import AttentionSpec, member_keys
from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase, Inputs
from attention.errors import UserError
from attention.replay.figures import compare
from attention.replay.inputs import NUM_SINKS, SINK_SHARE, Captured
from attention.replay.problems import Problem, make, members_of, spec_of


def case(batch: str = "q4s200", **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 32, "head_dim_vo": 32, "dtype": "bfloat16"}
    return AttentionCase(phase="extend", batch=batch, **{**fields, **changes})


def attended(problem: Problem, spec: AttentionSpec) -> Truth:
    """The oracle's answer to a batch of one member under another spec."""
    k, v = (member_keys(cache, problem.batch, 0) for cache in (problem.k, problem.v))
    return attend(problem.q_THD, k, v, spec)


def off_by(problem: Problem, **changes: Any) -> float:
    """R_row of an exact kernel that misreads the spec."""
    wrong = attended(problem, replace(problem.spec, **changes))
    return compare(wrong.out_QHD, None, problem.truth, problem.spec.dtype).r_row


@pytest.mark.parametrize("window", [(62, 0), (64, 0), (None, None)])
def test_a_window_off_by_one_or_ignored_shows_at_its_edge(window: tuple[int | None, int | None]) -> None:
    edge, normal = (make(case("q1s200", window=(63, 0)), inputs, 3) for inputs in ("window_edge", "normal"))
    assert off_by(edge, window=window) > 50
    if window != (None, None):  # ignored, it shows anywhere
        assert off_by(edge, window=window) > 3 * off_by(normal, window=window)


def test_the_right_edge_of_a_window_has_its_needles_too() -> None:
    problem = make(case("q60s200", window=(None, 20), causal=False), "window_edge", 3)
    for right in (19, 21):
        assert off_by(problem, window=(None, right)) > 50


def test_a_window_that_hides_nothing_has_no_edge() -> None:
    assert not case("q4s64", window=(63, 0)).windowed
    assert case("q4s65", window=(63, 0)).windowed
    assert case("q4s64", window=(None, 0), causal=False).windowed
    assert not case("q4s64", window=(None, 0)).windowed, "causal masking hides as much"
    make(case("q4s64", window=(63, 0)), "window_edge", 0)


def test_a_few_keys_at_the_start_take_nine_tenths_of_every_row() -> None:
    shares = []
    for seed in range(8):
        problem = make(case("q4s400", dtype="float32"), "sink", seed)
        sinks = AttentionSpec(4, 2, 32, 32, torch.float32, problem.spec.scale, causal=False)
        k, v = (member_keys(cache, problem.batch, 0)[:NUM_SINKS] for cache in (problem.k, problem.v))
        shares.append((attend(problem.q_THD, k, v, sinks).lse_QH - problem.truth.lse_QH).exp())
    share_NQH = torch.stack(shares)
    assert abs(float(share_NQH.mean()) - SINK_SHARE) < 0.04
    assert 0.5 < float(share_NQH.min()) <= float(share_NQH.max()) < 0.999


def test_what_stands_beside_the_sinks_makes_the_output() -> None:
    """So an order that rounds P to few bits while it looks at the sinks loses most of it, yet does well on `normal`."""
    lost = {}
    for inputs in ("sink", "normal"):
        problem = make(case("q4s400", dtype="float32"), inputs, 1)
        k, v = (member_keys(cache, problem.batch, 0).double().transpose(0, 1) for cache in (problem.k, problem.v))
        q = problem.q_THD.double().transpose(0, 1)
        s = q @ k.repeat_interleave(2, 0).transpose(1, 2) * problem.spec.scale
        s = s.masked_fill(torch.arange(400) > torch.arange(396, 400)[:, None], -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        coarse = p.to(torch.float8_e4m3fn).double()  # forward order: the sinks' maximum comes first
        out = (coarse @ v.repeat_interleave(2, 0) / p.sum(-1, keepdim=True)).transpose(0, 1)
        lost[inputs] = float((out - problem.truth.out_QHD).norm() / problem.truth.out_QHD.norm())
    assert lost["sink"] > 3 * lost["normal"]


def captured(tokens: int = 60, heads_kv: int = 2) -> Captured:
    """Token i holds i everywhere, so that a cut can be read."""
    rows = torch.arange(tokens).float()[:, None, None]
    return Captured(rows.expand(-1, 4, 32), rows.expand(-1, heads_kv, 32), -rows.expand(-1, heads_kv, 32))


def test_activations_are_cut_from_the_text_and_the_queries_are_its_last_tokens() -> None:
    starts = set()
    one = case("q4s20_q1s10_2q20", dtype="float32")
    for seed in range(8):
        for size, member in zip(
            one.members, members_of(one, spec_of(one), "activations", seed, captured()), strict=True
        ):
            start = int(member.k_LGD[0, 0, 0])
            starts.add(start)
            assert member.k_LGD[:, 0, 0].tolist() == list(range(start, start + size.kv_len))
            assert torch.equal(member.v_LGD, -member.k_LGD)
            assert member.q_QHD[:, 0, 0].tolist() == member.k_LGD[size.kv_len - size.q_len :, 0, 0].tolist()
    assert 0 in starts, "where the sinks are"
    assert len(starts) > 3


def test_a_text_that_is_shorter_than_the_keys_repeats() -> None:
    one = case("q1s130", dtype="float32")
    (member,) = members_of(one, spec_of(one), "activations", 0, captured())
    assert member.k_LGD[:, 0, 0].tolist() == [i % 60 for i in range(130)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "none were captured"),
        (captured(heads_kv=4), "heads and dims"),
        (replace(captured(), k_TGD=torch.full((60, 2, 32), torch.nan)), "not finite"),
    ],
)
def test_activations_that_do_not_fit_are_refused(given: Captured | None, named: str) -> None:
    with pytest.raises(UserError, match=named):
        make(case(), "activations", 0, captured=given)


@pytest.mark.parametrize("inputs", ["needle", "sink", "window_edge", "large_logit"])
def test_no_number_is_too_large_for_quantised_kv(inputs: Inputs) -> None:
    problem = make(case(kv_dtype="float8_e4m3fn", window=(63, 0), head_dim_qk=8), inputs, 0)
    assert torch.isfinite(problem.truth.out_QHD).all()
