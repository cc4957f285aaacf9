"""Policies: the document's loads as it stands, mistakes are one line, and a chain leaves nobody out silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from attention.cases import AttentionCase
from attention.errors import UserError
from attention.policy import Policy, Resolution, load_policy, resolve
from attention.reasons import Code, Reason

REPO = Path(__file__).parents[2]
FLASH, MATH, CUDNN, EFFICIENT = (f"torch_sdpa:{kernel}" for kernel in ("flash", "math", "cudnn", "efficient"))


def write(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def policy(**changes: Any) -> Policy:
    return Policy(**{"preferred": (FLASH,), "fallback": (MATH,), **changes})


def case(phase: str = "decode", batch: str = "q1s64", **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "head_dim_qk": 64, "head_dim_vo": 64, "dtype": "float32"}
    return AttentionCase(phase=phase, batch=batch, **{**fields, **changes})


def reason(code: Code = Code.DTYPE_UNSUPPORTED) -> Reason:
    return Reason(code=code, dimension="d", observed="o", allowed="a", source="s", message="m")


def allowed(name: str, one: AttentionCase) -> list[Reason]:
    return []


def test_the_policy_of_the_document_loads_unchanged() -> None:
    found = load_policy(REPO / "data/policies/document.yaml")
    assert found.preferred == ("flashinfer", "flashattention")
    assert found.fallback == ("pytorch_sdpa", "math")
    assert found.fail_closed_features == ("custom_mask", "sliding_window")
    assert found.reject_on == ("numerical_gate_failed", "capability_probe_failed")
    assert found.allow_runtime_fallback
    assert found.emit_fallback_event
    assert found.mode == "preferred-with-fallback"
    assert found.backends()[0] == "flashinfer:fa3"
    assert found.backends()[-1] == MATH
    assert len(set(found.backends())) == len(found.backends())


@pytest.mark.parametrize("name", ["cpu-flash", "cpu-math"])
def test_the_policies_of_this_repository_load(name: str) -> None:
    assert load_policy(REPO / f"data/policies/{name}.yaml").backends()[-1] == MATH


def test_a_policy_survives_yaml_and_json() -> None:
    one = policy(
        overrides=({"phase": "decode", "kv_len": (4096, None), "preferred": (CUDNN,)},),
        runtime_fallback_budget={"max_share": 0.02, "window_s": 60, "max_duration_s": 600, "on_exceeded": "drain"},
    )
    assert Policy.model_validate(yaml.safe_load(yaml.safe_dump(one.model_dump(mode="json")))) == one
    assert Policy.model_validate_json(one.model_dump_json()) == one


def test_a_mistake_is_found_by_its_line(tmp_path: Path) -> None:
    lines = ["attention_policy:", "  preferred: [math]", "  fallback:", "    - torch_sdpa:flash", "    - nope"]
    path = write(tmp_path, "\n".join([*lines, "  overrides:", "    - phase: decode", "      kv_length: [1, 2]", ""]))
    with pytest.raises(UserError, match=r"kv_length: unknown key; .* \(line 8\)$"):
        load_policy(path)
    path = write(tmp_path, "\n".join([*lines, ""]))
    with pytest.raises(UserError, match=r"unknown backend 'nope'.* \(line 3\)$"):
        load_policy(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{prefered: [math]}", "attention_policy.prefered: unknown key; did you mean preferred"),
        ("{preferred: [math], falback: []}", "attention_policy.falback: unknown key; did you mean fallback"),
        ("{fallback: [math]}", "attention_policy.preferred: this key is missing"),
        ("{preferred: []}", "attention_policy.preferred: "),
        ("{preferred: [flashinfr]}", "unknown backend 'flashinfr': did you mean flashinfer"),
        ("{preferred: [math], fallback: [mth]}", "unknown backend 'mth': did you mean math"),
        ("{preferred: [math], mode: fastest}", "attention_policy.mode: "),
        ("{preferred: [math], fail_closed_features: [mask]}", "attention_policy.fail_closed_features.0: "),
        ("{preferred: [math], runtime_fallback_budget: {max_share: 2, window_s: 1, max_duration_s: 1}}", "max_share"),
        ("{preferred: [math], overrides: [{phase: decode, preferred: [nope]}]}", "unknown backend 'nope'"),
        ("{preferred: [math], overrides: [{phase: decoding, preferred: [math]}]}", "overrides.0.phase: "),
        (
            "{preferred: [math], overrides: [{kv_length: [1, 2], phase: decode, preferred: [math]}]}",
            "did you mean kv_len",
        ),
        ("{preferred: [math], overrides: [{phase: decode, kv_len: [10, 5], preferred: [math]}]}", "holds no length"),
        ("{preferred: [math], overrides: [{phase: decode, kv_len: [-1, 5], preferred: [math]}]}", "holds no length"),
        ("{preferred: [math], overrides: [{phase: decode, kv_len: [5, 5], preferred: [math]}]}", "holds no length"),
        ("{preferred: [math], runtime_fallback_budget: {max_share: 0, window_s: .inf, max_duration_s: 1}}", "window_s"),
        ("{preferred: [math, torch_sdpa:flash], mode: pinned}", "pinned takes exactly one preferred backend"),
        ("{preferred: [math], fallback: [torch_sdpa:flash], mode: pinned}", "pinned takes exactly one"),
        (
            "{preferred: [math], mode: pinned, overrides: [{phase: decode, preferred: [torch_sdpa:flash]}]}",
            "pinned takes no overrides",
        ),
        ("{preferred: [torch_sdpa], mode: pinned}", "one kernel, not a family: name one of torch_sdpa:cudnn"),
        ("{preferred: [math]", "not YAML"),
        ("", "attention_policy: "),
    ],
)
def test_a_mistake_is_one_line_that_names_file_key_and_problem(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, f"attention_policy: {text}\n")
    with pytest.raises(UserError) as caught:
        load_policy(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "- a list\n", "preferred: [math]\n"])
def test_a_file_that_is_no_policy_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=r"policy\.yaml: ") as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_answered_with_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"cpu-flsh.yaml: no such file; did you mean cpu-flash.yaml"):
        load_policy(REPO / "data/policies/cpu-flsh.yaml")
    with pytest.raises(UserError, match=r"no such file$"):
        load_policy(Path("/no/such/folder/policy.yaml"))


def test_the_chain_is_preferred_then_fallback_without_repeats() -> None:
    found = resolve(policy(preferred=("torch_sdpa:cudnn", FLASH), fallback=("torch_sdpa",)), case(), allowed)
    assert found.chain == (CUDNN, FLASH, EFFICIENT, MATH)
    assert (found.requested, found.resolved, found.fell_back) == (CUDNN, CUDNN, False)


def test_whoever_is_left_out_has_all_its_reasons() -> None:
    declared, observed = reason(), reason(Code.NUMERIC_DRIFT)
    found = resolve(policy(), case(), lambda name, _: [declared] if name == FLASH else [], {FLASH: [observed]})
    assert found.chain == (MATH,)
    assert found.fell_back
    assert found.excluded == {FLASH: (declared, observed)}
    assert found.explain().startswith(f"{FLASH}: DTYPE_UNSUPPORTED: m")
    assert "NUMERIC_DRIFT" in found.explain()


def test_an_empty_chain_resolves_to_nothing() -> None:
    found = resolve(policy(), case(), lambda name, _: [reason()])
    assert (found.chain, found.resolved) == ((), None)
    assert set(found.excluded) == {FLASH, MATH}
    assert Resolution.model_validate_json(found.model_dump_json()) == found


def test_a_fail_closed_feature_takes_every_fallback_out() -> None:
    closed = policy(fail_closed_features=("sliding_window",))
    windowed = resolve(closed, case(window=(7, 0)), allowed)
    assert windowed.chain == (FLASH,)
    assert [r.code for r in windowed.excluded[MATH]] == [Code.POLICY_EXCLUDED]
    assert windowed.excluded[MATH][0].observed == "sliding_window"
    assert resolve(closed, case(), allowed).chain == (FLASH, MATH)
    lost = resolve(closed, case(window=(7, 0)), allowed, {FLASH: [reason()]})
    assert lost.chain == (), "such a request never changes backend unnoticed"


def test_an_override_holds_for_its_phase_and_range_and_the_last_one_wins() -> None:
    one = policy(
        overrides=(
            {"phase": "decode", "kv_len": (100, None), "preferred": (CUDNN,)},
            {"phase": "decode", "kv_len": (100, 200), "preferred": (EFFICIENT,)},
        )
    )

    def first(phase: str, batch: str) -> str:
        return resolve(one, case(phase, batch), allowed).requested

    assert [first("decode", f"q1s{n}") for n in (99, 100, 199, 200)] == [FLASH, EFFICIENT, EFFICIENT, CUDNN]
    assert first("decode", "q1s20_q1s150") == EFFICIENT, "the longest member decides"
    assert first("prefill", "q150") == FLASH
    assert resolve(one, case(batch="q1s150"), allowed).chain == (EFFICIENT, FLASH, MATH)
    assert one.backends() == (FLASH, MATH, CUDNN, EFFICIENT)
