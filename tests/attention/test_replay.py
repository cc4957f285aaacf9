"""Numerical replay: identical sides are at zero, a wrong scale is not, and mixed-up recordings are refused."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attention.cases import REPLAY_SHAPES
from attention.errors import UserError
from attention.job import BusinessPlan, ModelPlan, Prompt, Setup, TensorPlan
from attention.model import Runner, specs_of
from attention.replay import business, compare, model, tensor
from attention.schemas import SCHEMAS
from tests.attention.conftest import llama_config, save_model

Make = Callable[..., Runner]
MATH = dict.fromkeys(("prefill", "decode", "extend"), "torch_sdpa:math")


def prompt(prompt_id: str, text: str, **changes: Any) -> Prompt:
    return Prompt(
        prompt_id=prompt_id, category="c", language="en", messages=({"role": "user", "content": text},), **changes
    )


PROMPTS = (
    prompt("p0", "The quick brown fox jumps over the lazy dog."),
    prompt("p1", "Hi"),
    prompt("p2", "A longer text, longer than what is kept of it, " * 3),
)
PLAN = ModelPlan(prompts=PROMPTS, max_tokens=64, decode_tokens=6)


def compared(tiny: Path, champion: Path, candidate: Path) -> list[dict[str, Any]]:
    by_id = {p.prompt_id: p for p in PROMPTS}
    return list(compare.rows(champion, candidate, compare.lm_head(tiny), by_id, 10))


@pytest.fixture(scope="module")
def champion(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from attention.dispatch import Dispatcher
    from attention.policy import Policy

    dispatcher = Dispatcher(Policy(preferred=("torch_sdpa:math",)), specs_of(tiny_model, "float32"))
    runner = Runner(tiny_model, dispatcher, num_pages=256)
    return model.record(runner, PLAN, tmp_path_factory.mktemp("champion"))


def test_a_text_of_one_token_has_nothing_to_force(make_runner: Make, tmp_path: Path) -> None:
    path = model.record(make_runner(), PLAN.model_copy(update={"max_tokens": 1}), tmp_path)
    with safe_open(path, framework="pt") as file:
        assert [len(file.get_tensor(f"p0/{mode}")) for mode in ("prefill", "decode")] == [1, 0]


def test_a_recording_of_another_plan_is_refused(tiny_model: Path, champion: Path) -> None:
    with pytest.raises(UserError, match="holds p0, which is none of the job's prompts"):
        list(compare.rows(champion, champion, compare.lm_head(tiny_model), {}, 10))


def test_a_recording_holds_every_token_once_in_each_mode_and_gives_its_pages_back(
    make_runner: Make, tmp_path: Path
) -> None:
    runner = make_runner()
    seen: list[tuple[int, int]] = []
    path = model.record(runner, PLAN, tmp_path / "new", lambda done, total: seen.append((done, total)))
    assert runner.pool.num_free == runner.pool.num_pages
    assert seen[-1][0] == seen[-1][1] > 0
    with safe_open(path, framework="pt") as file:
        assert len(list(file.keys())) == 9
        for one in PROMPTS:
            length = len(file.get_tensor(f"{one.prompt_id}/tokens"))
            assert length == min(64, len(one.messages[0]["content"]) + len("<user>\n<a>"))
            assert file.get_tensor(f"{one.prompt_id}/prefill").shape == (length, 64)
            assert file.get_tensor(f"{one.prompt_id}/decode").shape == (6, 64)


def test_forced_decode_and_prefill_agree_within_float32(champion: Path) -> None:
    with safe_open(champion, framework="pt") as file:
        for one in PROMPTS:
            scored, decoded = (file.get_tensor(f"{one.prompt_id}/{mode}") for mode in ("prefill", "decode"))
            torch.testing.assert_close(decoded, scored[-6:], rtol=1e-3, atol=1e-3)


def test_identical_sides_have_no_divergence(tiny_model: Path, champion: Path) -> None:
    rows = compared(tiny_model, champion, champion)
    assert {row["kl"] for row in rows} == {0.0}
    assert {row["topk_overlap"] for row in rows} == {1.0}
    assert all(row["next_token_equal"] and row["flip_margin"] is None for row in rows)
    assert all(row["nll_champion"] == row["nll_candidate"] for row in rows)
    assert set(rows[0]) <= set(SCHEMAS["model_replay"].names)
    assert all(row["nll_champion"] is None for row in rows if row["prompt_id"] == "p1" and row["position"] == 11)
    decoded = [row["position"] for row in rows if row["mode"] == "decode" and row["prompt_id"] == "p1"]
    assert decoded == [6, 7, 8, 9, 10, 11], "positions are those of the whole text"


def test_two_sound_backends_differ_by_rounding_only(
    tiny_model: Path, champion: Path, make_runner: Make, tmp_path: Path
) -> None:
    rows = compared(tiny_model, champion, model.record(make_runner("torch_sdpa:flash"), PLAN, tmp_path))
    assert all(0 <= row["kl"] < 1e-6 for row in rows)
    assert all(row["next_token_equal"] for row in rows)


def test_a_wrong_scale_diverges_and_flips_tokens_in_both_modes(
    tiny_model: Path, champion: Path, make_runner: Make, tmp_path: Path
) -> None:
    wrong = make_runner("torch_sdpa:math", scale_factor=1.05)
    rows = compared(tiny_model, champion, model.record(wrong, PLAN, tmp_path))
    for mode in ("prefill", "decode"):
        kl = [row["kl"] for row in rows if row["mode"] == mode]
        assert sum(kl) / len(kl) > 1e-3
    flips = [row for row in rows if not row["next_token_equal"]]
    assert flips
    assert all(row["flip_margin"] > 0 for row in flips)


def test_a_nan_stays_one(tiny_model: Path, champion: Path, tmp_path: Path) -> None:
    with safe_open(champion, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    tensors["p0/prefill"][3] = math.nan
    save_file(tensors, tmp_path / "nan.safetensors")
    rows = compared(tiny_model, champion, tmp_path / "nan.safetensors")
    (bad,) = [row for row in rows if math.isnan(row["kl"])]
    assert (bad["prompt_id"], bad["mode"], bad["position"]) == ("p0", "prefill", 3)


def test_recordings_of_other_prompts_or_tokens_are_refused(tiny_model: Path, champion: Path, tmp_path: Path) -> None:
    with safe_open(champion, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    fewer = {name: t for name, t in tensors.items() if not name.startswith("p1/")}
    save_file(fewer, tmp_path / "fewer.safetensors")
    with pytest.raises(UserError, match=r"recordings differ in prompts: .*p1/.*; record both again"):
        compared(tiny_model, champion, tmp_path / "fewer.safetensors")
    tensors["p2/tokens"] = tensors["p2/tokens"] + 1
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="differ in the tokens of p2; record both again"):
        compared(tiny_model, champion, tmp_path / "other.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_that_of_the_model_tied_or_not_in_any_number_of_shards(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "m", llama_config(tie_word_embeddings=tied), max_shard_size="2700KB")
    assert tied or len(list(folder.glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(compare.lm_head(folder), loaded.get_output_embeddings().weight)


def test_a_model_without_a_head_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no lm_head.weight or model.embed_tokens.weight"):
        compare.lm_head(tmp_path)


def tensor_rows(setup: Setup, scale_factor: float = 1.0, resolved: Any = MATH) -> list[dict[str, Any]]:
    plan = TensorPlan(seeds=(0,), max_kv_len=144)
    specs = specs_of(setup.model, "float32")
    return list(tensor.rows(setup, plan, specs, ("float32", "bfloat16"), resolved, scale_factor))


def test_the_tensor_layer_runs_every_case_input_and_seed_in_both_dtypes(setup: Setup) -> None:
    rows = tensor_rows(setup)
    # Four shapes of 144 keys at most; equal layers count once.
    shapes = [batch for _, batch in REPLAY_SHAPES if batch in ("q17", "q64_q33", "q1s63", "4q1s129", "q16s144")]
    assert len(rows) == len(shapes) * 3 * 2
    assert {(row["backend"], row["confirmed_backend"]) for row in rows} == {("torch_sdpa:math", "torch_sdpa:math")}
    assert not any("error" in row for row in rows)
    assert all(row["r_rms"] < 50 for row in rows)
    assert {row["dtype_class"] for row in rows} == {"float32", "bfloat16"}
    assert set(rows[0]) <= set(SCHEMAS["tensor_replay"].names)
    assert all(0 <= row["ulp_p50"] <= row["ulp_p99"] <= row["ulp_max"] for row in rows)
    assert all(re.fullmatch(r"member \d+ token \d+ head [0-3]", row["worst_row_at"]) for row in rows)
    assert any(row["worst_row_at"].startswith("member 1") for row in rows), "a batch of two is two members"
    assert all(json.loads(row["case_json"])["dtype"] == row["dtype_class"] for row in rows)


def test_a_plan_runs_the_inputs_that_it_names_and_window_edges_where_a_window_hides_something(setup: Setup) -> None:
    spec = replace(specs_of(setup.model, "float32")[0], window=(31, 0))
    plan = TensorPlan(seeds=(0, 1), max_kv_len=63, inputs=("window_edge", "sink"))
    rows = list(tensor.rows(setup, plan, [spec], ("float32",), MATH, 1.0))
    found = Counter((json.loads(row["case_json"])["batch"], row["inputs"]) for row in rows)
    assert found == {("q17", "sink"): 2, ("q1s63", "sink"): 2, ("q1s63", "window_edge"): 2}
    assert not any("error" in row for row in rows)


def test_only_a_table_whose_columns_changed_has_another_version() -> None:
    versions = {name: schema.metadata[b"attention_release.version"] for name, schema in SCHEMAS.items()}
    assert versions.pop("tensor_replay") == b"2"
    assert versions["requests"] == b"1"


def test_a_wrong_scale_shows_in_every_float32_case(setup: Setup) -> None:
    for row in tensor_rows(setup, scale_factor=1.05):
        assert row["r_rms"] > (1000 if row["dtype_class"] == "float32" else 1.5)


def test_a_case_that_raises_is_a_row_and_the_run_goes_on(setup: Setup) -> None:
    rows = tensor_rows(setup, resolved={**MATH, "decode": "flashinfer:fa2"})
    failed = [row for row in rows if "error" in row]
    assert {json.loads(row["case_json"])["phase"] for row in failed} == {"decode"}
    assert len(failed) < len(rows)
    assert failed[0]["error"].startswith("UserError: flashinfer:fa2")


def test_answers_are_the_same_alone_and_batched(make_runner: Make) -> None:
    runner = make_runner()
    prompts = tuple(p.model_copy(update={"max_tokens": 4 + i}) for i, p in enumerate(PROMPTS))
    batched = business.answer(runner, BusinessPlan(prompts=prompts, batch=3)).answers
    alone = business.answer(runner, BusinessPlan(prompts=prompts, batch=1)).answers
    assert [a.prompt_id for a in batched] == ["p0", "p1", "p2"]
    assert [a.output_tokens for a in batched] == [a.output_tokens for a in alone]
    assert [a.error for a in batched] == [None] * 3
    assert {(a.confirmed_prefill, a.confirmed_decode) for a in batched} == {("torch_sdpa:flash",) * 2}
    assert all(0 < len(a.output_tokens) <= p.max_tokens for a, p in zip(batched, prompts, strict=True))
    assert runner.pool.num_free == runner.pool.num_pages


def test_a_prompt_longer_than_the_context_is_an_answer_with_its_error_and_the_others_go_on(make_runner: Make) -> None:
    long = PROMPTS[0].model_copy(update={"prompt_id": "long", "messages": ({"role": "user", "content": "x" * 600},)})
    answers = business.answer(make_runner(), BusinessPlan(prompts=(long, PROMPTS[1]))).answers
    assert [a.prompt_id for a in answers] == ["long", "p1"]
    assert "the context 512" in str(answers[0].error)
    assert (answers[1].error, len(answers[1].output_tokens) > 0) == (None, True)
