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
        ({"kv_lens": ()}, "kv_lens is empty"),
        ({"dtype": "float64"}, "dtype: .*'float64'"),
        ({"kv_dtype": "fp9"}, "kv_dtype: .*did you mean"),
        ({"layout": "ragged"}, "layout=ragged and page_size=16 do not go together"),
        ({"page_size": 0}, "page_size: "),
        ({"capture_sizes": (10**7,)}, "more than 1000000 members"),
    ],
)
def test_a_set_up_that_launches_nothing_is_named(folder: Folder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        cases_of(folder(LLAMA), **changes)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    "document",
    ["[]", "null", '"text"', "{", b"\xff\xfe", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}"],
    ids=lambda document: str(document)[:16],
)
def test_a_config_that_is_no_object_is_one_line(tmp_path: Path, document: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(document if isinstance(document, bytes) else document.encode())
    with pytest.raises(UserError, match=r"config\.json: (not JSON|holds)") as caught:
        layer_kinds(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "abc"}, "num_attention_heads: .*'abc'"),
        ({"num_attention_heads": 0}, "num_attention_heads: "),
        ({"num_attention_heads": -4}, "num_attention_heads: "),
        ({"num_attention_heads": True}, "num_attention_heads: "),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value"),
        ({"text_config": [1]}, "text_config: "),
        ({"text_config": {"num_attention_heads": "abc"}}, "num_attention_heads: "),
        ({"sliding_window": "x"}, "sliding_window: "),
        ({"sliding_window": -1}, "sliding_window: "),
        ({"num_hidden_layers": 0}, "num_hidden_layers: "),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: "),
        ({"layer_types": 5}, "layer_types: "),
        ({"layer_types": "ab"}, "layer_types: "),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: 'linear_attention' is not served"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 of num_hidden_layers 4"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types names 5 of num_hidden_layers 4"),
        ({"attn_logit_softcapping": "x"}, "attn_logit_softcapping: "),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping: "),
        ({"query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar: "),
        ({"head_dim": -3}, "head_dim: "),
        ({"sliding_window": 8, "sliding_window_pattern": "x"}, "sliding_window_pattern 'x'"),
        ({"sliding_window": 8, "max_window_layers": "x"}, "max_window_layers: "),
        ({"hidden_size": 2}, "without head_dim, hidden_size 2 is too small"),
        ({"kv_lora_rank": 512}, "kv_lora_rank .* needs qk_rope_head_dim"),
    ],
)
def test_a_config_that_describes_no_attention_of_ours_names_the_file_and_the_key(
    folder: Folder, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: {message}") as caught:
        layer_kinds(folder(LLAMA, **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_null_is_as_if_the_key_were_not_there(folder: Folder) -> None:
    keys = ("text_config", "head_dim", "num_key_value_heads", "sliding_window", "layer_types", "kv_lora_rank")
    (kind,) = set(layer_kinds(folder(LLAMA, **dict.fromkeys(keys))))
    assert (kind.heads_kv, kind.head_dim_qk, kind.window, kind.latent) == (64, 128, (None, None), None)


def test_whole_numbers_may_stand_where_fractions_do(folder: Folder) -> None:
    (kind,) = set(layer_kinds(folder(LLAMA, attn_logit_softcapping=50, query_pre_attn_scalar=256)))
    assert (kind.softcap, kind.scale) == (50.0, 0.0625)


def test_the_kinds_of_layers_are_known_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, attention.engine_cases; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
