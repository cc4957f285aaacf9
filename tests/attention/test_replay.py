"""Numerical replay: the tensor layer's rows and the business layer's answers (the model's: test_model_replay.py)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attention.cases import REPLAY_SHAPES
from attention.job import BusinessPlan, Prompt, Setup, TensorPlan
from attention.model import Runner, specs_of
from attention.replay import business, tensor
from attention.schemas import SCHEMAS

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
    assert versions.pop("tensor_replay") == versions.pop("model_replay") == b"2"
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
