"""Cases: the batch grammar, the masks' arithmetic by brute force, and the ways in and out of JSON."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from attention.backends.base import AttentionSpec, positions_mask
from attention.backends.oracle import attend
from attention.cases import (
    AttentionCase,
    causal_of_top_left,
    natural_lse,
    parse_batch,
    phase_of,
    shape_bucket,
    window_of_flash_attention,
    window_of_flashinfer,
    window_of_hf,
    window_of_sglang,
    window_of_vllm,
)
from attention.errors import UserError

REPO = Path(__file__).parents[2]


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
        ("3q0s0_q7s0_q9s2", [(0, 0)] * 3 + [(7, 0), (9, 2)]),
    ],
)
def test_a_batch_reads_as_its_members(text: str, members: list[tuple[int, int]]) -> None:
    assert [(m.q_len, m.kv_len) for m in parse_batch(text)] == members


@pytest.mark.parametrize(
    "text",
    [
        "",
        "512",
        "q",
        "s5",
        "q5s",
        "q5_",
        "q5m",
        "q-5",
        "q5 q6",
        "Q5",
        "q5s6s7",
        "0q5",
        "q1\n",
        "q\u0663",
        "q" + "9" * 5000,
    ],
)
def test_a_batch_outside_the_grammar_is_named(text: str) -> None:
    with pytest.raises(UserError, match="2q2k_32q1s1k") as caught:
        parse_batch(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["9999999999q1", "1000000q1_q1"])
def test_a_batch_of_more_members_than_memory_holds_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="more than 1000000 members"):
        parse_batch(text)


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("q1s1024", "q1s1k"),
        ("1q1s1024_q1s1k", "2q1s1k"),
        ("q512s512", "q512"),
        ("q0s0", "q0"),
        ("q0100s1000", "q100s1000"),
        # As they stand in committed evidence, so that its ids stay.
        ("64q1s4k", "64q1s4k"),
        ("q8k", "q8k"),
        ("4q1s512_q1s1000_q1s17", "4q1s512_q1s1000_q1s17"),
    ],
)
def test_equal_batches_have_one_text_and_so_one_id(text: str, one: str) -> None:
    assert (case(batch=text).batch, case(batch=text).case_id) == (one, case(batch=one).case_id)
    assert parse_batch(one) == parse_batch(text)


def test_ids_of_committed_evidence_stand() -> None:
    rows = pq.read_table(REPO / "data/evidence/h200/probes.parquet", columns=["case_json"])["case_json"].to_pylist()
    assert rows
    for row in set(rows):
        assert AttentionCase.model_validate_json(row).model_dump_json() == row


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
    for _ in range(600):
        # Empty members and queries longer than their keys among them.
        q_len, kv_len = rng.randint(0, 12), rng.randint(0, 24)
        causal = rng.random() < 0.6
        left, right = (rng.choice([None, *range(6), 40]) for _ in range(2))
        seen = brute_force(q_len, kv_len, causal, (left, right))
        one = case(phase="extend", batch=f"q{q_len}s{kv_len}", causal=causal, window=(left, right))
        assert one.num_pairs() == sum(map(sum, seen)), (q_len, kv_len, causal, left, right)
        keys = sum(any(row[key] for row in seen) for key in range(kv_len))
        read = one.num_bytes() - 2 * q_len * 8 * (64 + 64)
        assert read == 2 * keys * 2 * (64 + 64), "a key that nobody sees need not be read"
        spec = AttentionSpec(8, 2, 64, 64, torch.float32, 1.0, causal=causal, window=(left, right))
        mask = positions_mask(q_len, kv_len, spec, torch.device("cpu"))
        assert mask is None or mask.tolist() == seen
        assert mask is not None or all(map(all, seen)), "no mask means that nothing is masked"


def test_a_batch_counts_as_the_sum_of_its_members() -> None:
    rng = random.Random(5)
    for _ in range(50):
        parts = [f"{rng.randint(1, 3)}q{rng.randint(0, 9)}s{rng.randint(0, 20)}" for _ in range(4)]
        window = (rng.choice([None, 3]), None)
        whole, members = case(batch="_".join(parts), window=window), [case(batch=p, window=window) for p in parts]
        for figure in ("num_pairs", "flops", "num_bytes", "num_exps"):
            assert getattr(whole, figure)() == sum(getattr(m, figure)() for m in members)


def test_the_figures_of_128k_tokens_take_no_loop_over_rows() -> None:
    one = case(batch="256q128k", window=(4095, 0))
    started = time.perf_counter()
    tokens = 128 * 1024
    assert one.num_pairs() == 256 * (4096 * 4097 // 2 + (tokens - 4096) * 4096)
    assert one.limit_seconds(flops_per_s=1e15, bytes_per_s=1e12) > 0
    assert time.perf_counter() - started < 0.05


def test_causal_is_aligned_bottom_right() -> None:
    # Four new tokens over six cached ones see 7, 8, 9 and 10 keys.
    assert case(phase="extend", batch="q4s10").num_pairs() == 7 + 8 + 9 + 10


def test_a_hugging_face_window_counts_the_current_token() -> None:
    assert window_of_hf(4096) == (4095, 0)
    assert case(phase="decode", batch="q1s100", window=window_of_hf(8)).num_pairs() == 8
    with pytest.raises(UserError, match="counts the current token"):
        window_of_hf(0)


def test_every_library_says_the_same_window_in_its_own_way() -> None:
    # Eight tokens, the current one among them: off by one here is off by one in every answer.
    ours = window_of_hf(8)
    assert window_of_vllm(8) == ours
    assert window_of_sglang(7) == ours
    assert window_of_flash_attention((7, 0)) == ours
    left_only = window_of_flashinfer(7)
    assert left_only == (7, None)
    pairs = [case(phase="extend", batch="q5s40", window=window).num_pairs() for window in (ours, left_only)]
    assert pairs[0] == pairs[1] == 5 * 8, "under a causal mask the open right side changes nothing"
    assert window_of_vllm(8, encoder_only=True) == (7, 7)


def test_no_window_is_no_window_in_every_library() -> None:
    for window in (
        window_of_vllm(None),
        window_of_sglang(None),
        window_of_sglang(-1),
        window_of_flash_attention((-1, -1)),
        window_of_flashinfer(-1),
    ):
        assert window == (None, None)
    assert window_of_flash_attention((-1, 0)) == (None, 0)
    with pytest.raises(UserError, match="window_left=-2: -1 means unlimited"):
        window_of_flashinfer(-2)


def test_a_top_left_causal_mask_becomes_ours_or_is_refused() -> None:
    rng = random.Random(11)
    for _ in range(100):
        kv_len = rng.randint(0, 12)
        q_len = kv_len + rng.randint(0, 6)
        causal, window = causal_of_top_left(q_len, kv_len)
        top_left = [[key <= row for key in range(kv_len)] for row in range(q_len)]
        assert brute_force(q_len, kv_len, causal, window) == top_left
    with pytest.raises(UserError, match=r"the last 99 keys are seen by no query.*CAUSAL_ALIGNMENT"):
        causal_of_top_left(1, 100)


def test_a_base_2_lse_is_brought_to_the_natural_one() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 1, 16, generator=generator) for n in (3, 9, 9))
    spec = AttentionSpec(1, 1, 16, 16, torch.float32, 0.25)
    truth = attend(q, k, v, spec).lse_QH
    scores = (q[:, 0].double() @ k[:, 0].double().T * spec.scale).masked_fill(
        ~torch.ones(3, 9, dtype=torch.bool).tril(6), float("-inf")
    )
    base2 = torch.log2(torch.exp(scores).sum(-1))
    torch.testing.assert_close(natural_lse(base2), truth[:, 0])
    assert natural_lse(1.0) == math.log(2)
    assert natural_lse(float("-inf")) == float("-inf"), "an empty row stays empty"


def test_flops_and_bytes_are_those_of_the_shape() -> None:
    one = case(phase="decode", batch="2q1s100", heads_q=8, heads_kv=2, head_dim_qk=64, head_dim_vo=32)
    assert one.flops() == 2 * 8 * (2 * 100) * (64 + 32)
    query_and_out, keys_and_values = 2 * 8 * (64 + 32), 200 * 2 * (64 + 32)
    assert one.num_bytes() == 2 * (query_and_out + keys_and_values)
    assert one.num_exps() == 8 * 200


@pytest.mark.parametrize(("kv_dtype", "width"), [("auto", 2), ("float8_e4m3fn", 1), ("fp8_e5m2", 1), ("int8", 1)])
def test_quantised_keys_are_read_at_their_own_width(kv_dtype: str, width: int) -> None:
    one = case(phase="decode", batch="q1s100", kv_dtype=kv_dtype)
    assert one.num_bytes() == 2 * 8 * 128 + width * 100 * 2 * 128
    assert one.flops() == case(phase="decode", batch="q1s100").flops()


def test_absorbed_mla_reads_its_latent_once() -> None:
    shape: dict[str, Any] = {"phase": "decode", "batch": "q1s1k", "heads_q": 128, "heads_kv": 1}
    one = case(**shape, head_dim_qk=576, head_dim_vo=512)
    assert one.shares_latent
    assert one.num_bytes() == 2 * (128 * (576 + 512) + 1024 * 576)
    assert not case(**shape, head_dim_qk=192, head_dim_vo=128).shares_latent


@pytest.mark.parametrize("dim", [16, 72, 256, 576])
def test_head_dims_from_16_to_576_have_their_figures(dim: int) -> None:
    one = case(batch="q2", head_dim_qk=dim, head_dim_vo=dim)
    assert one.flops() == 2 * 8 * 3 * 2 * dim
    assert one.num_bytes() == 2 * (2 * 8 + 2 * 2) * 2 * dim


def test_an_engines_name_of_a_kv_dtype_is_torchs() -> None:
    assert case(kv_dtype="fp8").kv_dtype == case(kv_dtype="fp8_e4m3").kv_dtype == "float8_e4m3fn"
    assert case(kv_dtype="fp8_e5m2") == case(kv_dtype="float8_e5m2")
    assert getattr(torch, case(kv_dtype="fp8_e5m2").kv_dtype).itemsize == 1


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
        ({"kv_dtype": "fp8_e4"}, "did you mean fp8_e4m3"),
        ({"softcap": math.inf}, "softcap"),  # JSON has no infinity: its id would be that of no softcap
        ({"softcap": math.nan}, "softcap"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -5.0}, "softcap"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -4}, "page_size"),
        ({"window": (-1, 0)}, "convert -1 with window_of_flash_attention"),
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


def test_a_case_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        case().batch = "q1"


def test_empty_members_and_long_queries_have_a_phase_and_a_bucket() -> None:
    assert (phase_of(0, 0), phase_of(7, 3), phase_of(1, 0)) == ("prefill", "extend", "decode")
    assert case(batch="q0s0").shape_bucket == "prefill/kv<=16"


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
