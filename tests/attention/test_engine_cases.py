"""Engine cases: what one rank of an engine launches for a model folder, without its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention.engine_cases import cases_of, of_rank
from attention.errors import UserError
from attention.model_config import LayerKind, layer_kinds

LLAMA: dict[str, Any] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "hidden_size": 8192,
}
DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 3,
    "hidden_size": 7168,
    "head_dim": 64,  # what transformers saves; it is the rotary part
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def write(config: dict[str, Any], **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return write


def test_a_rank_launches_prefill_chunks_decodes_in_captured_sizes_and_a_mixed_step(folder: Folder) -> None:
    cases = cases_of(folder(LLAMA), tp=8, capture_sizes=(1, 8), chunk=512, kv_lens=(1024,))
    assert [(c.phase, c.batch, c.execution) for c in cases] == [
        ("prefill", "q512", "eager"),
        ("extend", "q512s1536", "eager"),
        ("decode", "q1s1k", "cuda_graph"),
        ("decode", "8q1s1k", "cuda_graph"),
        ("decode", "2q1s1k_6q1s0", "cuda_graph"),
        ("extend", "q504s1528_8q1s1k", "eager"),
    ]
    assert {(c.heads_q, c.heads_kv, c.head_dim_qk) for c in cases} == {(8, 1, 128)}
    assert {len(c.members) for c in cases if c.execution == "cuda_graph"} == {1, 8}, "a graph has its size of members"


def test_speculation_adds_verify_batches_of_one_more_token_than_it_drafts(folder: Folder) -> None:
    cases = cases_of(folder(LLAMA), speculative_k=3, capture_sizes=(4,), chunk=64, kv_lens=(256,))
    verify = [c.batch for c in cases if c.execution == "cuda_graph" and c.phase == "extend"]
    assert verify == ["4q4s256", "q4s256_3q4s0"]
    mixed = cases[-1]
    assert mixed.batch == "q48s304_4q4s256"
    assert sum(m.q_len for m in mixed.members) == 64, "the step's tokens are its budget"


def test_an_engine_without_graphs_decodes_eagerly(folder: Folder) -> None:
    cases = cases_of(folder(LLAMA), capture_sizes=(), chunk=1)
    assert [(c.batch, c.execution) for c in cases if c.phase == "decode"] == [("q1s1k", "eager")]
    assert all(c.execution == "eager" for c in cases)


def test_every_distinct_kind_of_layer_is_launched_once(folder: Folder) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = folder(LLAMA, sliding_window=128, layer_types=kinds, attn_logit_softcapping=50.0)
    cases = cases_of(model, capture_sizes=(1,))
    assert [c.window for c in cases if c.phase == "prefill"] == [(127, 0), (None, None)]
    assert len(set(cases)) == len(cases)
    assert {c.softcap for c in cases} == {50.0}


def test_mla_prefills_expanded_and_decodes_over_the_shared_latent(folder: Folder) -> None:
    cases = cases_of(folder(DEEPSEEK), tp=8, capture_sizes=(2,), chunk=512, kv_dtype="fp8", page_size=64)
    expanded = [c for c in cases if c.layout == "ragged"]
    assert [(c.phase, c.batch, c.causal) for c in expanded] == [
        ("prefill", "q512", True),
        ("extend", "q512s1k", False),  # over the cached context; merged by LSE
    ]
    assert {(c.heads_q, c.heads_kv, c.head_dim_qk, c.head_dim_vo, c.kv_dtype) for c in expanded} == {
        (16, 16, 192, 128, "auto")
    }
    absorbed = [c for c in cases if c not in expanded]
    assert [c.batch for c in absorbed] == ["2q1s1k", "q1s1k_q1s0"]
    assert {(c.heads_q, c.heads_kv, c.head_dim_qk, c.head_dim_vo, c.kv_dtype, c.page_size) for c in absorbed} == {
        (16, 1, 576, 512, "float8_e4m3fn", 64)
    }
    assert all(c.shares_latent for c in absorbed)


@pytest.mark.parametrize(
    ("heads", "tp", "rank"),
    [
        ((64, 8), 1, (64, 8)),
        ((64, 8), 4, (16, 2)),
        ((64, 8), 8, (8, 1)),
        ((64, 8), 16, (4, 1)),  # each KV head on two ranks
        ((9, 3), 3, (3, 1)),
        ((32, 1), 8, (4, 1)),
    ],
)
def test_kv_heads_divide_over_the_ranks_or_are_replicated(
    heads: tuple[int, int], tp: int, rank: tuple[int, int]
) -> None:
    mine = of_rank(LayerKind(*heads, 64, 64, 0.125), tp)
    assert (mine.heads_q, mine.heads_kv) == rank


@pytest.mark.parametrize(
    ("heads", "tp", "message"),
    [((9, 3), 2, "9 query heads do not divide over 2 ranks"), ((24, 6), 4, "6 KV heads neither divide")],
)
def test_heads_that_do_not_divide_are_an_error(heads: tuple[int, int], tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_rank(LayerKind(*heads, 64, 64, 0.125), tp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "tp=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"capture_sizes": (0,)}, r"capture_sizes=\(0,\)"),
        ({"speculative_k": 4, "kv_lens": (4,)}, "at least as many keys"),
    ],
)
def test_a_set_up_that_launches_nothing_is_named(folder: Folder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cases_of(folder(LLAMA), **changes)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, [False] * 4),
        ({"sliding_window": 8}, [True] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [False] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [False, False, False, True]),
        ({"sliding_window": 8, "model_type": "gemma2"}, [True, False, True, False]),
        ({"sliding_window": 8, "sliding_window_pattern": 4}, [True, True, True, False]),
        ({"text_config": {"sliding_window": 8}}, [True] * 4),
    ],
)
def test_which_layers_have_a_window_is_read_as_transformers_reads_it(
    folder: Folder, changes: dict[str, Any], windowed: list[bool]
) -> None:
    assert [kind.window == (7, 0) for kind in layer_kinds(folder(LLAMA, **changes))] == windowed


def test_layers_that_see_everything_may_have_wider_heads(folder: Folder) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    wide = {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "head_dim": 256}
    kinds = layer_kinds(folder(LLAMA, sliding_window=512, layer_types=types, **wide))
    assert [(k.head_dim_qk, k.heads_kv) for k in kinds[:2]] == [(256, 8), (512, 2)]


def test_the_kinds_of_layers_are_known_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, attention.engine_cases; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
