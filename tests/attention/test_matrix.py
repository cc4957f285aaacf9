"""The matrix: every failing dimension is reported, and nothing that is undeclared passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention import matrix
from attention.backends import NAMES
from attention.cases import AttentionCase
from attention.matrix import Rule, declared, declared_reasons
from attention.reasons import Code


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "decode",
        "batch": "q1s64",
        "heads_q": 8,
        "heads_kv": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "dtype": "float32",
    }
    return AttentionCase(**{**fields, **changes})


def codes(backend: str, one: AttentionCase, device: str = "cpu") -> list[Code]:
    return [reason.code for reason in declared_reasons(backend, one, device=device)]


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "torch_sdpa:math"])
def test_what_the_cpu_kernels_serve_has_no_reason(backend: str) -> None:
    served: tuple[dict[str, Any], ...] = (
        {},
        {"window": (7, 0)},
        {"dtype": "bfloat16"},
        {"heads_kv": 1},
        {"causal": False},
        {"alibi": True},
        {"custom_mask": True},
        {"layout": "paged_hnd"},
        {"layout": "ragged", "page_size": None},
        {"batch": "q1s64_q0s0_q9s3"},
    )
    for changes in served:
        assert codes(backend, case(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"softcap": 30.0}, Code.SOFTCAP_UNSUPPORTED),
        ({"sinks": True}, Code.SINK_UNSUPPORTED),
        ({"kv_dtype": "fp8_e4m3"}, Code.KV_DTYPE_UNSUPPORTED),
        ({"execution": "cuda_graph"}, Code.GRAPH_CAPTURE_FAILED),
        ({"head_dim_vo": 32}, Code.HEAD_DIM_UNSUPPORTED),
    ],
)
def test_each_dimension_fails_with_its_own_code(changes: dict[str, Any], code: Code) -> None:
    assert codes("torch_sdpa:flash", case(**changes)) == [code]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with every package, for whoever only reads the rules."""
    monkeypatch.setattr(matrix, "_importable", lambda package: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("backend", "changes", "code"),
    [
        ("flash_attn:fa2", {"sinks": True}, Code.SINK_UNSUPPORTED),
        ("flash_attn:fa2", {"page_size": 16}, Code.PAGE_SIZE_UNSUPPORTED),
        ("flash_attn:fa2", {"head_dim_qk": 264, "head_dim_vo": 264}, Code.HEAD_DIM_UNSUPPORTED),
        ("flash_attn:fa2", {"head_dim_vo": 128}, Code.HEAD_DIM_UNSUPPORTED),
        ("flash_attn:fa2", {"custom_mask": True}, Code.MASK_UNSUPPORTED),
        ("flash_attn:fa3", {"alibi": True}, Code.ALIBI_UNSUPPORTED),
        ("flash_attn:fa4", {"alibi": True}, Code.ALIBI_UNSUPPORTED),
        ("flash_attn:fa4", {"page_size": 128}, Code.PAGE_SIZE_UNSUPPORTED),
        ("flash_attn:fa4", {"batch": "q1s9_q1s8", "layout": "contiguous", "page_size": None}, Code.PAD_POISON),
        ("flash_attn:fa4", {"kv_dtype": "float8_e4m3fn"}, Code.KV_DTYPE_UNSUPPORTED),
        ("torch_sdpa:flash", {"window": (7, 0)}, Code.SWA_UNSUPPORTED),
        ("torch_sdpa:flash", {"alibi": True}, Code.ALIBI_UNSUPPORTED),
        ("torch_sdpa:flash", {"custom_mask": True}, Code.MASK_UNSUPPORTED),
        ("torch_sdpa:cudnn", {"batch": "q1s1_q1s64"}, Code.EMPTY_KV_UNSUPPORTED),
        ("flex_attention:triton", {"execution": "cuda_graph"}, Code.GRAPH_CAPTURE_FAILED),
    ],
)
def test_on_a_gpu_too(hopper: None, backend: str, changes: dict[str, Any], code: Code) -> None:
    page = 256 if backend == "flash_attn:fa2" else 16
    one = {"dtype": "bfloat16", "page_size": page, **changes}
    assert codes(backend, case(**one), device="cuda") == [code]


def test_every_failing_dimension_is_reported_at_once() -> None:
    one = case(softcap=30.0, sinks=True, execution="compile", head_dim_vo=32, kv_dtype="int8")
    assert set(codes("torch_sdpa:flash", one)) == {
        Code.SOFTCAP_UNSUPPORTED,
        Code.SINK_UNSUPPORTED,
        Code.GRAPH_CAPTURE_FAILED,
        Code.HEAD_DIM_UNSUPPORTED,
        Code.KV_DTYPE_UNSUPPORTED,
    }


def test_a_reason_says_what_was_asked_what_is_allowed_and_who_says_so() -> None:
    (reason,) = declared_reasons("torch_sdpa:math", case(execution="cuda_graph"), device="cpu")
    assert (reason.dimension, reason.observed, reason.allowed) == ("execution", "cuda_graph", "eager")
    assert reason.source
    assert str(reason) == "GRAPH_CAPTURE_FAILED: eager only (execution=cuda_graph, allowed eager)"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: False)
    found = declared_reasons("torch_sdpa:math", case(softcap=1.0), device="cpu")
    assert [reason.code for reason in found] == [Code.IMPORT_FAILED, Code.SOFTCAP_UNSUPPORTED]
    assert found[0].message == "torch cannot be imported: pip install torch"


def test_a_missing_package_is_named_also_where_the_platform_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: False)
    arch, package = declared_reasons("flash_attn:fa2", case(), device="cpu")
    assert (arch.code, arch.observed, arch.allowed) == (Code.ARCH_UNSUPPORTED, "cpu", "cuda")
    assert package.code == Code.IMPORT_FAILED
    assert "attention-release[gpu]" in package.message


def test_an_installed_package_does_not_hide_that_the_platform_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: True)
    assert codes("flash_attn:fa2", case()) == [Code.ARCH_UNSUPPORTED]


@pytest.mark.parametrize("backend", ["flashinfer:cudnn", "nobody:knows"])
def test_a_backend_without_any_declaration_never_passes(backend: str) -> None:
    (reason,) = declared_reasons(backend, case(), device="cpu")
    assert (reason.code, reason.allowed) == (Code.ARCH_UNSUPPORTED, "none")


def test_flex_attention_says_why_it_is_not_for_the_cpu() -> None:
    (reason,) = declared_reasons("flex_attention:triton", case(), device="cpu")
    assert (reason.code, reason.allowed) == (Code.ARCH_UNSUPPORTED, "cuda")
    assert "return_lse is not supported" in reason.source


def test_a_dotted_package_whose_parent_is_missing_is_missing() -> None:
    assert not matrix._importable("no_such_parent.child")
    assert matrix._importable("torch.nn")


def test_sheets_name_known_backends_and_dimensions_that_exist() -> None:
    dimensions = {*matrix._dimensions(case(), "cpu"), "compute_capability"}
    for backend, platforms in declared().items():
        assert backend in NAMES
        for platform, sheet in platforms.items():
            assert platform in ("cpu", "cuda")
            for rule in sheet.rules:
                assert rule.dimension in dimensions, (backend, rule)
                assert rule.allowed_text(), (backend, rule)


def test_rules_permit_what_lies_inside_and_nothing_else() -> None:
    def rule(**limits: Any) -> Rule:
        return Rule(dimension="d", code=Code.HEAD_DIM_UNSUPPORTED, source="s", message="m", **limits)

    assert [rule(maximum=128, multiple_of=8).permits(n) for n in (64, 128, 129, 136, 60)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [rule(minimum=90, maximum=90).permits(n) for n in (80, 90, 100)] == [False, True, False]
    assert [rule(allowed=(False,)).permits(v) for v in (False, True)] == [True, False]
    assert rule(maximum=128, multiple_of=8).allowed_text() == "<= 128 and multiple of 8"
