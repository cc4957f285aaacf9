"""Cases: the batch grammar, the masks' arithmetic by brute force, and the ways in and out of JSON."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from attention.backends.base import AttentionSpec, positions_mask
from attention.cases import AttentionCase, parse_batch, phase_of, shape_bucket, window_of_hf
from attention.errors import UserError


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "prefill",
        "batch": "q64",
        "heads_q": 8,
        "heads_kv": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "dtype": "bfloat16",
    }
    return AttentionCase(**{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("q512", [(512, 512)]),
        ("q2k", [(2048, 2048)]),
        ("32q1s1k", [(1, 1024)] * 32),
        ("2q2k_32q1s1k", [(2048, 2048)] * 2 + [(1, 1024)] * 32),
        ("q16s144_q5s300", [(16, 144), (5, 300)]),
        ("2q1ks4k", [(1024, 4096)] * 2),
    ],
)
def test_a_batch_reads_as_its_members(text: str, members: list[tuple[int, int]]) -> None:
    assert [(m.q_len, m.kv_len) for m in parse_batch(text)] == members


@pytest.mark.parametrize("text", ["", "512", "q", "s5", "q5s", "q5_", "q5m", "q-5", "q5 q6", "Q5", "q5s6s7"])
def test_a_batch_outside_the_grammar_is_named(text: str) -> None:
    with pytest.raises(UserError, match="2q2k_32q1s1k") as caught:
        parse_batch(text)
    assert "\n" not in str(caught.value)


def brute_force(q_len: int, kv_len: int, causal: bool, window: tuple[int | None, int | None]) -> list[list[bool]]:
    """Who sees whom, straight from the conventions: positions counted from the end of the keys."""
    left, right = window
    rows = []
    for row in range(q_len):
        own = kv_len - q_len + row
        rows.append(
            [
                not (causal and key > own)
                and not (left is not None and own - key > left)
                and not (right is not None and key - own > right)
                for key in range(kv_len)
            ]
        )
    return rows


def test_pairs_and_masks_agree_with_brute_force_for_every_window() -> None:
    rng = random.Random(3)
    for _ in range(300):
        q_len, kv_len = rng.randint(1, 12), rng.randint(1, 24)
        causal = rng.random() < 0.7
        left, right = (rng.choice([None, *range(6)]) for _ in range(2))
        seen = brute_force(q_len, kv_len, causal, (left, right))
        one = case(phase="extend", batch=f"q{q_len}s{kv_len}", causal=causal, window=(left, right))
        assert one.num_pairs() == sum(map(sum, seen))
        spec = AttentionSpec(8, 2, 64, 64, torch.float32, 1.0, causal=causal, window=(left, right))
        mask = positions_mask(q_len, kv_len, spec, torch.device("cpu"))
        assert mask is None or mask.tolist() == seen
        assert mask is not None or all(map(all, seen)), "no mask means that nothing is masked"


def test_causal_is_aligned_bottom_right() -> None:
    # Four new tokens over six cached ones see 7, 8, 9 and 10 keys.
    assert case(phase="extend", batch="q4s10").num_pairs() == 7 + 8 + 9 + 10


def test_a_hugging_face_window_counts_the_current_token() -> None:
    assert window_of_hf(4096) == (4095, 0)
    assert case(phase="decode", batch="q1s100", window=window_of_hf(8)).num_pairs() == 8


def test_flops_and_bytes_are_those_of_the_shape() -> None:
    one = case(phase="decode", batch="2q1s100", heads_q=8, heads_kv=2, head_dim_qk=64, head_dim_vo=32)
    assert one.flops() == 2 * 8 * (2 * 100) * (64 + 32)
    query_and_out, keys_and_values = 2 * 8 * (64 + 32), 200 * 2 * (64 + 32)
    assert one.num_bytes() == 2 * (query_and_out + keys_and_values)
    assert one.num_exps() == 8 * 200


def test_the_limit_is_the_slowest_of_compute_bandwidth_and_exponentials() -> None:
    one = case(phase="decode", batch="q1s1k")
    assert one.limit_seconds(flops_per_s=1e30, bytes_per_s=1.0) == one.num_bytes()
    assert one.limit_seconds(flops_per_s=1.0, bytes_per_s=1e30) == one.flops()
    assert one.limit_seconds(flops_per_s=1e30, bytes_per_s=1e30, exps_per_s=1.0) == one.num_exps()


def test_json_gives_the_same_case_back() -> None:
    one = case(window=(7, None), softcap=30.0, layout="ragged", page_size=None, execution="compile")
    again = AttentionCase.model_validate_json(one.model_dump_json())
    assert again == one
    assert again.case_id == one.case_id
    assert len({one, again}) == 1


def test_every_field_changes_the_case_id() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"phase": "extend"},
        {"batch": "q65"},
        {"heads_q": 16},
        {"heads_kv": 4},
        {"head_dim_qk": 128},
        {"head_dim_vo": 128},
        {"dtype": "float16"},
        {"kv_dtype": "fp8_e4m3"},
        {"causal": False},
        {"window": (7, 0)},
        {"softcap": 30.0},
        {"alibi": True},
        {"custom_mask": True},
        {"sinks": True},
        {"layout": "paged_hnd"},
        {"page_size": 32},
        {"execution": "cuda_graph"},
    ]
    assert len({case(**change).case_id for change in changes}) == len(changes)


def test_a_case_says_which_features_it_uses() -> None:
    assert case().features == ("causal",)
    assert case(causal=False, window=(3, 3), softcap=1.0).features == ("sliding_window", "softcap")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads_q": 7}, "no multiple of heads_kv=2"),
        ({"page_size": None}, "do not go together"),
        ({"layout": "contiguous"}, "do not go together"),
        ({"batch": "nonsense"}, "2q2k_32q1s1k"),
        ({"head_dim": 64}, "Extra inputs"),
    ],
)
def test_a_case_that_cannot_exist_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        case(**changes)


def test_phase_follows_from_the_lengths() -> None:
    assert [phase_of(5, 5), phase_of(1, 5), phase_of(3, 5), phase_of(1, 1)] == [
        "prefill",
        "decode",
        "extend",
        "prefill",
    ]


def test_buckets_are_powers_of_two_from_sixteen() -> None:
    assert [shape_bucket("decode", n) for n in (0, 1, 16, 17, 1024, 1025)] == [
        "decode/kv<=16",
        "decode/kv<=16",
        "decode/kv<=16",
        "decode/kv<=32",
        "decode/kv<=1024",
        "decode/kv<=2048",
    ]
    assert case(phase="decode", batch="q1s20_q1s600").shape_bucket == "decode/kv<=1024"
