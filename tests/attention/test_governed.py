"""`attn_implementation="governed"`: models of transformers, with their own caches and `generate`, give what their eager
attention gives, on the backend that the policy names.

No CPU kernel has softcap or sinks: there the oracle stands in for one, and Triton's interpreter runs the real one,
which takes longer and a process of its own (Triton decides at its import whether it interprets). On a GPU the same
tests run the compiled kernel.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import dense, dispatch, governed, matrix
from attention.backends import create
from attention.backends.base import AttentionSpec, Backend, Batch, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.dense import DenseDispatcher, all_rows, attend
from attention.dispatch import BackendFailedError, FallbackEvent
from attention.errors import UserError
from attention.model import Chunk, Runner
from attention.policy import Policy
from attention.reasons import Code, Reason

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
POLICY = Policy(preferred=(FLASH,), fallback=(MATH,), allow_runtime_fallback=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ON_CPU_KERNELS = ("llama", "qwen3", "mistral", "gpt_neox", "opt")
ON_TRITON = ("gemma2", "gpt_oss")


def config(name: str) -> Any:
    """A tiny config of one architecture: GQA, q and k norms, windows, softcap, sinks, MHA, a scale of 1."""
    import transformers as t

    few = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "head_dim")}
    opt = {key: value for key, value in few.items() if key not in ("intermediate_size", "initializer_range")}
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**SMALL),
        "qwen3": lambda: t.Qwen3Config(**SMALL),
        "mistral": lambda: t.MistralConfig(**SMALL, sliding_window=6),
        "gpt_neox": lambda: t.GPTNeoXConfig(**few),
        "opt": lambda: t.OPTConfig(**opt, ffn_dim=64, init_std=0.3, word_embed_proj_dim=64),
        "gemma2": lambda: t.Gemma2Config(
            **SMALL, query_pre_attn_scalar=16, sliding_window=6, attn_logit_softcapping=20.0
        ),
        "gpt_oss": lambda: t.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=6),
    }
    return made[name]()


def models(name: str, implementation: str = "governed", device: str = "cpu") -> tuple[Any, Any]:
    """(eager, governed) with the same random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config(name), attn_implementation="eager").eval()
    for parameter, values in eager.named_parameters():
        if parameter.endswith("sinks"):
            torch.nn.init.normal_(values)
    ours = AutoModelForCausalLM.from_config(config(name), attn_implementation=implementation).eval()
    ours.load_state_dict(eager.state_dict())
    return eager.to(device), ours.to(device)


def prompts(device: str = "cpu") -> torch.Tensor:
    return torch.randint(1, 300, (3, 10), generator=torch.Generator().manual_seed(1)).to(device)


def padding(kind: str) -> torch.Tensor | None:
    """[3, 10], 0 at padding."""
    mask = torch.ones(3, 10, dtype=torch.long)
    if kind == "none":
        return None
    if kind == "holes":
        mask[0, 2:5] = mask[1, 4] = mask[2, 0] = 0
        return mask
    mask[0, :4] = mask[1, :9] = 0  # a prompt of one token too
    return mask if kind == "left" else mask.flip(1)


@torch.inference_mode()
def assert_equal_logits(eager: Any, ours: Any, **inputs: Any) -> None:
    left, right = eager(**inputs).logits, ours(**inputs).logits
    mask = inputs.get("attention_mask")
    real = mask.bool() if mask is not None and mask.ndim == 2 else torch.ones(left.shape[:2], dtype=torch.bool)
    assert left[real].abs().max() > 1, "attention that matters"
    torch.testing.assert_close(right[real], left[real], rtol=0, atol=1e-4)


def assert_equal_tokens(eager: Any, ours: Any, device: str = "cpu", **options: Any) -> None:
    mask = padding("left")
    assert mask is not None
    asked = {"attention_mask": mask.to(device), "max_new_tokens": 12, "do_sample": False, **options}
    left, right = (model.generate(prompts(device), **asked) for model in (eager, ours))
    assert left.shape == (3, 22)
    assert torch.equal(left, right)


def ran(name: str = "governed") -> dict[tuple[str, str], tuple[str, str, str]]:
    """(layout, phase) -> requested, resolved, confirmed, of what ran."""
    rows = governed.report(name).phases
    return {(row.layout, row.phase): (row.requested, row.resolved, row.confirmed) for row in rows if row.steps}


@pytest.mark.parametrize("pads", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ON_CPU_KERNELS)
def test_logits_are_those_of_eager_attention(name: str, pads: str) -> None:
    governed.enable(POLICY, config(name))
    eager, ours = models(name)
    assert_equal_logits(eager, ours, input_ids=prompts(), attention_mask=padding(pads))


@pytest.mark.parametrize("name", ON_CPU_KERNELS)
def test_generate_over_left_padding_gives_the_same_tokens(name: str) -> None:
    governed.enable(POLICY, config(name))
    assert_equal_tokens(*models(name))


def on_triton(name: str, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Enable that architecture on triton:paged; outside of its interpreter the oracle stands in for it."""
    if device == "cpu" and not INTERPRETED:
        real = matrix.declared_reasons
        monkeypatch.setattr(
            matrix,
            "declared_reasons",
            lambda backend, case, *, device: [] if backend == "triton:paged" else real(backend, case, device=device),
        )
        monkeypatch.setattr(
            dispatch, "create", lambda backend, device: Oracle() if backend == "triton:paged" else create(backend)
        )
    policy = Policy(preferred=("torch_sdpa",), fallback=("triton:paged",))
    governed.enable(policy, config(name), device=device, dtype="float32")


class Oracle(OracleBackend):
    name = "triton:paged"


@pytest.mark.parametrize("name", ON_TRITON)
def test_softcap_sinks_and_layers_that_differ_give_what_eager_attention_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_triton(name, monkeypatch)
    eager, ours = models(name)
    for pads in ("none", "left", "right", "holes"):
        assert_equal_logits(eager, ours, input_ids=prompts(), attention_mask=padding(pads))
    assert_equal_tokens(eager, ours)
    layers = {(row.layers.split("float32 ")[1], row.layout) for row in governed.report().phases if row.steps}
    feature = "softcap" if name == "gemma2" else "sinks"
    assert layers == {
        *((f"sliding_window {feature}", layout) for layout in ("contiguous", "ragged")),
        *((feature, layout) for layout in ("contiguous", "ragged", "contiguous, custom mask")),
    }
    assert [(e.kind, e.phase, e.to_backend, steps) for e, steps in governed.report().fallbacks] == [
        ("startup_fallback", phase, "triton:paged", 0) for phase in ("prefill", "decode", "extend")
    ]
    if INTERPRETED:
        assert {row.confirmed for row in governed.report().phases if row.steps} == {"triton:paged"}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own process")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_real_kernel_of_softcap_and_sinks_holds_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__, "-k", "softcap_sinks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ON_CPU_KERNELS, *ON_TRITON])
def test_on_a_gpu_the_compiled_kernels_give_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_triton(name, monkeypatch, device="cuda")
    eager, ours = models(name, device="cuda")
    for pads in ("none", "left", "right", "holes"):
        mask = padding(pads)
        inputs = {"input_ids": prompts("cuda"), "attention_mask": None if mask is None else mask.to("cuda")}
        assert_equal_logits(eager, ours, **inputs)
    assert_equal_tokens(eager, ours, "cuda")


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_gives_the_same_tokens(name: str) -> None:
    governed.enable(POLICY)
    assert_equal_tokens(*models(name), cache_implementation="static")


def test_what_ran_is_told_by_phase_and_padding_is_no_mask() -> None:
    governed.enable(POLICY, config("mistral"))
    assert ran() == {}
    rows = governed.report().phases
    assert {(row.layers, row.phase, row.confirmed) for row in rows} == {
        ("h4/2 d16 float32 sliding_window", phase, "unconfirmed(nothing ran)")
        for phase in ("prefill", "decode", "extend")
    }
    eager, ours = models("mistral")
    assert_equal_logits(eager, ours, input_ids=prompts())
    assert_equal_tokens(eager, ours)
    # Once the window is full, every sequence has as many keys: nothing is packed any more.
    kinds = [("contiguous", "prefill"), ("contiguous", "decode"), ("ragged", "prefill"), ("ragged", "decode")]
    assert ran() == dict.fromkeys(kinds, (FLASH, FLASH, FLASH))
    assert governed.report().fallbacks == governed.report().events == ()
    assert governed.report().document()["phases"][0]["confirmed"] == FLASH


def test_a_window_over_holes_is_a_custom_mask_and_nothing_else_is() -> None:
    governed.enable(POLICY)
    for name, layout in (("llama", "ragged"), ("mistral", "contiguous, custom mask")):
        eager, ours = models(name)
        assert_equal_logits(eager, ours, input_ids=prompts(), attention_mask=padding("holes"))
        assert (layout, "prefill") in ran()
    assert len(ran()) == 2


@pytest.mark.parametrize("form", ["boolean", "added", "one for all"])
def test_a_mask_of_ones_own_is_served_as_it_is(form: str) -> None:
    governed.enable(POLICY)
    eager, ours = models("llama")
    seen = torch.rand(3, 1, 10, 10, generator=torch.Generator().manual_seed(2)) > 0.4
    seen |= torch.eye(10, dtype=torch.bool)
    if form == "one for all":
        seen = seen[:1]
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        left = eager(input_ids=prompts(), attention_mask=added).logits
        right = ours(input_ids=prompts(), attention_mask=added if form == "added" else seen).logits
    torch.testing.assert_close(right, left, rtol=0, atol=1e-4)
    assert list(ran()) == [("contiguous, custom mask", "prefill")]


def test_sequences_packed_by_their_positions_do_not_see_each_other() -> None:
    governed.enable(POLICY)
    eager, ours = models("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    assert_equal_logits(eager, ours, input_ids=prompts()[:1], position_ids=positions, use_cache=False)
    assert list(ran()) == [("contiguous, custom mask", "prefill")]


def test_a_chunk_of_a_prompt_over_a_cache_is_an_extend() -> None:
    governed.enable(POLICY)
    eager, ours = models("llama")
    with torch.inference_mode():
        logits = []
        for model in (eager, ours):
            first = model(input_ids=prompts()[:, :6])
            logits.append(model(input_ids=prompts()[:, 6:], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
    assert ran()["contiguous", "extend"] == (FLASH, FLASH, FLASH)


def test_a_mask_shorter_than_the_keys_hides_the_rest() -> None:
    governed.enable(POLICY)
    for model in ("llama", "mistral"):
        eager, ours = models(model)
        with torch.inference_mode():
            left, right = (m(input_ids=prompts(), attention_mask=torch.ones(3, 8)).logits for m in (eager, ours))
        torch.testing.assert_close(right, left, rtol=0, atol=1e-4)


def test_a_sequence_whose_new_tokens_are_padding_is_left_out() -> None:
    governed.enable(POLICY)
    eager, ours = models("llama")
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, 6:] = 0
    with torch.inference_mode():
        logits = []
        for model in (eager, ours):
            first = model(input_ids=prompts()[:, :6])
            more = {"input_ids": prompts()[:, 6:], "attention_mask": mask, "past_key_values": first.past_key_values}
            logits.append(model(**more).logits)
    torch.testing.assert_close(logits[1][1:], logits[0][1:], rtol=0, atol=1e-4)
    assert ran()["ragged", "extend"] == (FLASH, FLASH, FLASH)


def test_masks_are_forgotten_with_their_step() -> None:
    governed.enable(POLICY)
    _, ours = models("mistral")
    gc.collect()
    before = len(governed._MASKS)
    with torch.no_grad():
        for pads in ("none", "left", "holes"):
            ours(input_ids=prompts(), attention_mask=padding(pads))
        whole = torch.ones(2, 1, 4, 4, dtype=torch.bool)
        governed._MASKS[whole] = governed._exactly(whole, 2)
        del whole
    gc.collect()
    assert len(governed._MASKS) == before


def test_nothing_but_padding_gives_nothing_and_runs_nothing() -> None:
    governed.enable(POLICY)
    _, ours = models("llama")
    with torch.inference_mode():
        assert ours(input_ids=prompts(), attention_mask=torch.zeros(3, 10)).logits.isfinite().all()
    assert ran() == {}


def test_a_backend_gets_the_keys_that_there_are_and_no_more() -> None:
    class Seen:
        def run(self, layer: int, q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert (layer, q_THD.shape, k.shape, v.shape) == (3, (2, 4, 16), (2, 5, 1, 16), (2, 5, 1, 8))
            return q_THD[..., :8]

    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 1, 9, 16), torch.randn(2, 1, 9, 8)
    out = attend(Seen(), 3, all_rows(2, 1, 5), q, k, v)
    assert torch.equal(out, q.transpose(1, 2)[..., :8])


class Strides:
    """Notes whether keys come one after the other."""

    def __init__(self, inner: Backend, seen: list[bool]) -> None:
        self.inner, self.seen, self.name = inner, seen, inner.name

    def check(self, case: AttentionCase) -> list[Reason]:
        return self.inner.check(case)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = self.inner.plan(batch, spec, graph=graph, lse=lse)
        run = planned.run

        def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            self.seen.append(k.is_contiguous() and v.is_contiguous())
            return run(q, k, v)

        planned.run = noted  # type: ignore[method-assign]
        return planned


def test_keys_are_read_where_they_lie_but_by_backends_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(dispatch, "create", lambda name, device: Strides(create(name), seen))
    eager, ours = models("llama")
    for families in (dense._ANY_STRIDES, ()):
        monkeypatch.setattr(dense, "_ANY_STRIDES", families)
        governed.enable(POLICY)
        assert_equal_logits(eager, ours, input_ids=prompts())
    assert seen == [False, False, True, True]


class Counting:
    """Counts what a backend plans."""

    def __init__(self, inner: Backend, planned: list[AttentionSpec]) -> None:
        self.inner, self.planned, self.name = inner, planned, inner.name

    def check(self, case: AttentionCase) -> list[Reason]:
        return self.inner.check(case)

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        self.planned.append(spec)
        return self.inner.plan(batch, spec, graph=graph, lse=lse)


def test_a_step_is_planned_once_for_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[AttentionSpec] = []
    monkeypatch.setattr(dispatch, "create", lambda name, device: Counting(create(name), planned))
    governed.enable(POLICY, config("llama"))
    _, ours = models("llama")
    ours.generate(prompts(), max_new_tokens=5, do_sample=False)
    assert len(planned) == 5, "a prefill and four decodes, of two layers each"
    with torch.inference_mode():
        ours(input_ids=prompts())
        ours(input_ids=prompts())
    assert len(planned) == 7, "a step of the same shape is a step of its own"
    assert [row.steps for row in governed.report().phases] == [3, 4, 0]


OVERRIDES = {"preferred": [FLASH], "overrides": [{"phase": "decode", "kv_len": [12, None], "preferred": [MATH]}]}


def test_members_of_one_batch_run_on_different_backends_where_the_policy_says_so() -> None:
    governed.enable(Policy.model_validate(OVERRIDES))
    eager, ours = models("llama")
    assert_equal_tokens(eager, ours)
    said = {(row.layout, row.phase, row.confirmed) for row in governed.report().phases if row.steps}
    assert ("ragged", "decode", MATH) in said or ("ragged", "decode", FLASH) in said
    spec = AttentionSpec(2, 1, 16, 16, torch.float32, 0.25)
    one = DenseDispatcher(Policy.model_validate(OVERRIDES), [spec], layout="ragged", masked=False)
    one.plan(Batch((1, 1, 1), (5, 20, 11), layout="ragged"))
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((3, 2), (36, 1), (36, 1)))
    out = one.run(0, q, k, v)
    expected = OracleBackend().plan(Batch((1, 1, 1), (5, 20, 11), layout="ragged"), spec).run(q, k, v)[0]
    torch.testing.assert_close(out, expected)
    assert [(part.resolved, part.confirmed, part.num_members) for part in one.last_step().phases] == [
        (FLASH, FLASH, 2),
        (MATH, MATH, 1),
    ]


class Failing:
    """Raises at its third call."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name, self.calls = inner, inner.name, 0

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        planned = self.inner.plan(batch, spec, graph=graph, lse=lse)
        run = planned.run

        def failing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            self.calls += 1
            if self.calls >= 3:
                raise RuntimeError("the launch failed")
            return run(q, k, v)

        planned.run = failing  # type: ignore[method-assign]
        return planned


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "create", lambda name, device: Failing(create(name)) if name == FLASH else create(name)
    )


@pytest.mark.usefixtures("failing")
def test_a_backend_that_fails_is_replaced_within_the_step_and_it_is_told() -> None:
    heard: list[FallbackEvent] = []
    governed.enable(POLICY, on_event=lambda event: heard.append(governed.report().events[-1]))
    eager, ours = models("llama")
    assert torch.equal(*(m.generate(prompts(), max_new_tokens=6, do_sample=False) for m in (eager, ours)))
    assert ran() == {
        ("contiguous", "prefill"): (FLASH, MATH, FLASH),  # what was confirmed, before it failed
        ("contiguous", "decode"): (FLASH, MATH, MATH),
    }
    told = governed.report()
    assert [event.kind for event in told.events].count("request_fallback") == 1, "told once"
    assert {(event.kind, event.phase) for event in told.events} >= {
        ("backend_failed", "decode"),
        ("request_fallback", "decode"),
    }
    ((event, steps),) = told.fallbacks
    assert (event.from_backend, event.to_backend, event.reason, steps) == (FLASH, MATH, "LAUNCH_FAILED", 5)
    assert tuple(heard) == told.events
    assert "the launch failed" in told.document()["events"][0]["reasons"][0]


def test_a_backend_that_runs_another_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "create", lambda name, device: create(MATH))
    governed.enable(Policy(mode="pinned", preferred=(FLASH,)))
    _, ours = models("llama")
    with torch.inference_mode():
        ours(input_ids=prompts())
    assert ran() == {("contiguous", "prefill"): (FLASH, FLASH, MATH)}
    assert [(e.kind, e.from_backend, e.to_backend) for e in governed.report().events] == [
        ("backend_mismatch", FLASH, MATH)
    ]


@pytest.mark.usefixtures("failing")
def test_without_the_policys_leave_a_backend_that_fails_ends_the_request() -> None:
    governed.enable(POLICY.model_copy(update={"allow_runtime_fallback": False}))
    _, ours = models("llama")
    with pytest.raises(BackendFailedError, match="torch_sdpa:flash failed in decode: RuntimeError: the launch failed"):
        ours.generate(prompts(), max_new_tokens=6, do_sample=False)


def test_a_failed_probe_is_a_fallback_at_start_and_a_policy_that_serves_nobody_is_refused_there() -> None:
    reason = Reason(
        code=Code.NUMERIC_DRIFT, dimension="R_rms", observed="70", allowed="<= 10", source="probe", message="error"
    )
    governed.enable(POLICY, config("llama"), observed={FLASH: [reason]})
    assert {event.kind for event, _ in governed.report().fallbacks} == {"startup_fallback"}
    assert {row.resolved for row in governed.report().phases} == {MATH}
    with pytest.raises(UserError, match=r"no backend of the policy can serve prefill: .*SOFTCAP_UNSUPPORTED"):
        governed.enable(POLICY, config("gemma2"))
    closed = POLICY.model_copy(update={"fail_closed_features": ("sliding_window",)})
    with pytest.raises(UserError, match="POLICY_EXCLUDED"):
        governed.enable(closed, config("mistral"), observed={FLASH: [reason]})
    closed = POLICY.model_copy(update={"fail_closed_features": ("custom_mask",)})
    governed.enable(closed, config("llama"), observed={FLASH: [reason]})
    ask()
    with pytest.raises(UserError, match="POLICY_EXCLUDED"):
        ask(attention_mask=torch.ones(2, 1, 4, 4, dtype=torch.bool))


def test_two_policies_in_one_process_have_two_names(tiny_model: Path, policy_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    governed.enable(policy_file, tiny_model)
    governed.enable(Policy(mode="pinned", preferred=(MATH,)), str(tiny_model), name="pinned")
    logits = []
    for name, backend in (("governed", FLASH), ("pinned", MATH)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=name)
        with torch.inference_mode():
            logits.append(model(input_ids=prompts()).logits)
        assert ran(name) == {("contiguous", "prefill"): (backend,) * 3}
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="'other' is not enabled here: call attention"):
        governed.report("other")
    for taken in ("sdpa", "eager"):
        with pytest.raises(UserError, match=f"attention '{taken}' is another's in transformers"):
            governed.enable(policy_file, name=taken)


def test_the_runner_over_pages_is_not_touched(make_runner: Callable[..., Runner], tiny_model: Path) -> None:
    runner = make_runner()
    chunk = Chunk((5, 6, 7), 0, tuple(runner.pool.alloc(1)))
    before = runner.forward([chunk])
    governed.enable(POLICY, tiny_model)
    assert torch.equal(runner.forward([chunk]), before)
    assert ran() == {}


def test_threads_share_a_model_and_get_what_they_get_alone() -> None:
    governed.enable(POLICY)
    _, ours = models("llama")
    inputs = [prompts()[:, : 4 + i] for i in range(4)]
    with torch.inference_mode():
        alone = [ours(input_ids=ids).logits for ids in inputs]
    found: dict[int, list[torch.Tensor]] = {}

    def run(i: int) -> None:
        with torch.inference_mode():
            found[i] = [ours(input_ids=inputs[i]).logits for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(often)
    assert all(torch.equal(one, alone[i]) for i in range(4) for one in found[i])


def test_layers_that_differ_in_their_sinks_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    on_triton("gpt_oss", monkeypatch)
    made = len(governed.report().phases)
    q, k, v = (torch.randn(2, heads, 4, 16) for heads in (4, 2, 2))
    outs = [ask(query=q, key=k, value=v, s_aux=torch.full((4,), sink))[0] for sink in (0.0, 2.0, 0.0)]
    assert torch.equal(outs[0], outs[2])
    assert (outs[0] - outs[1]).abs().max() > 0.1
    assert len(governed.report().phases) == made


def test_sinks_that_change_are_seen() -> None:
    sinks = torch.nn.Parameter(torch.zeros(2))
    assert governed._values(sinks) == (0.0, 0.0)
    with torch.no_grad():
        sinks.fill_(1.5)
    assert governed._values(sinks) == (1.5, 1.5)


@pytest.mark.slow
def test_a_compiled_model_breaks_its_graph_at_attention_and_is_right() -> None:
    governed.enable(POLICY)
    eager, ours = models("llama")
    inputs = {"input_ids": prompts(), "attention_mask": padding("left")}
    assert_equal_logits(eager, torch.compile(ours, backend="eager"), **inputs)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.ops\.attention\.governed"), torch.inference_mode():
        torch.compile(ours, backend="eager", fullgraph=True)(**inputs)
    torch._dynamo.reset()


class Module(torch.nn.Module):
    """A layer that asks for attention by itself."""

    layer_idx = 0


def ask(**changes: Any) -> Any:
    """One call of the interface: 2 sequences of 4 tokens."""
    q, k, v = (torch.randn(2, heads, 4, 16) for heads in (4, 2, 2))
    arguments = {"query": q, "key": k, "value": v, "attention_mask": None, **changes}
    with torch.inference_mode(not changes.get("query", q).requires_grad):
        return governed._attention("governed", Module(), **arguments)


def test_a_layer_that_looks_both_ways_is_served() -> None:
    governed.enable(POLICY)
    q, k, v = (torch.randn(2, heads, 4, 16) for heads in (4, 2, 2))
    out, _ = ask(query=q, key=k, value=v, is_causal=False, scaling=0.5, position_ids=torch.arange(4)[None])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "Module: governed attention cannot serve position_bias"),
        ({"output_attentions": True, "cu_seq_lens_q": 1}, "cannot serve cu_seq_lens_q, output_attentions"),
        ({"dropout": 0.1}, r"dropout 0\.1: governed attention is for inference"),
        ({"query": torch.zeros(2, 4, 4, 16, requires_grad=True)}, "gives no gradients"),
        ({"query": torch.zeros(2, 4, 4, 16, device="meta")}, "enabled for device cpu, the model is on meta"),
        ({"key": torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16)}, "wants one dtype"),
        ({"query": torch.zeros(2, 3, 4, 16)}, "3 query heads over 2 KV heads"),
        ({"scaling": 0.0}, "scale must be positive"),
        ({"key": torch.zeros(2, 2, 9, 16), "value": torch.zeros(2, 2, 9, 16)}, "4 queries over 9 keys without a mask"),
        ({"attention_mask": torch.full((2, 1, 4, 4), 0.5)}, "adds to scores"),
        ({"attention_mask": torch.ones(2, 4, 4, 4, dtype=torch.bool)}, "one for all heads"),
        ({"attention_mask": torch.ones(2, 1, 4, 9, dtype=torch.bool)}, r"\(2, 4, 9\).*there are \(2, 4, 4\)"),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.bool)}, "was changed between the model and its layers"),
        ({"attention_mask": "full", "sliding_window": 2}, "asks for a window of 2, its mask has None"),
        ({"softcap": 30.0}, "SOFTCAP_UNSUPPORTED"),
        ({"s_aux": torch.zeros(4)}, "SINK_UNSUPPORTED"),
    ],
)
def test_what_cannot_be_served_is_one_line_that_names_it(changes: dict[str, Any], message: str) -> None:
    from transformers.masking_utils import causal_mask_function

    governed.enable(POLICY)
    if isinstance(changes.get("attention_mask"), str):
        changes = {**changes, "attention_mask": governed._mask(2, 4, 4, mask_function=causal_mask_function)}
    with pytest.raises(UserError, match=message) as caught:
        ask(**changes)
    assert "\n" not in str(caught.value)
