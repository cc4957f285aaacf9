"""The matrix: every failing dimension is reported, and nothing that is undeclared passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import matrix
from attention.__main__ import main
from attention.backends import NAMES
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.matrix import KnownBad, Range, Rule, declared, declared_reasons, is_known_bad, known_bad
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
        ("torch_sdpa:efficient", {"alibi": True}, Code.ALIBI_UNSUPPORTED),
        ("torch_sdpa:cudnn", {"alibi": True}, Code.ALIBI_UNSUPPORTED),
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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": "q3s0_q5s40"}, [Code.EMPTY_KV_UNSUPPORTED]),
        ({"batch": "q1s0_q1s40"}, []),
        ({"batch": "q3s0_q5s40", "layout": "ragged", "page_size": None}, []),
    ],
)
def test_flash_attention_2_over_pages_wants_keys_for_all_but_decodes(
    hopper: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: list[Code]
) -> None:
    monkeypatch.setattr(matrix, "version_of", lambda package: "2.8.3")
    one = {"dtype": "bfloat16", "page_size": 256, **changes}
    assert codes("flash_attn:fa2", case(**one), device="cuda") == expected


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
    assert package.message == "flash_attn_2_cuda cannot be imported: pip install flash-attn"


def test_a_package_that_lacks_what_it_imports_names_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: package != "cutlass")
    reasons = declared_reasons("flash_attn:fa4", case(), device="cpu")
    assert reasons[-1].code == Code.IMPORT_FAILED
    assert "needs the module cutlass" in reasons[-1].message
    assert "nvidia_cutlass_dsl/python_packages" in reasons[-1].message
    assert "flash-attn-4" not in reasons[-1].message


def test_a_remedy_names_packages_of_an_index_or_what_to_build() -> None:
    """This project itself is on no index."""
    remedies = {name: sheet.remedy for name, sheets in matrix.declared().items() for sheet in sheets.values()}
    assert all(remedy.startswith(("pip install ", "build ")) for remedy in remedies.values())
    assert not any("attention-release" in remedy for remedy in remedies.values())
    assert remedies["flash_attn:fa4"] == "pip install flash-attn-4"
    assert remedies["flashinfer:cudnn"] == "pip install flashinfer-python nvidia-cudnn-frontend"


def test_an_installed_package_does_not_hide_that_the_platform_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_importable", lambda package: True)
    assert codes("flash_attn:fa2", case()) == [Code.ARCH_UNSUPPORTED]


def test_a_backend_without_any_declaration_never_passes() -> None:
    (reason,) = declared_reasons("nobody:knows", case(), device="cpu")
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
            assert platform in ("cpu", "cuda", "rocm")
            for rule in sheet.rules:
                assert {rule.dimension, *rule.when} <= dimensions, (backend, rule)
                assert rule.allowed_text(), (backend, rule)


def test_rules_permit_what_lies_inside_and_nothing_else() -> None:
    def rule(**limits: Any) -> Rule:
        return Rule(dimension="head_dim_qk", code=Code.HEAD_DIM_UNSUPPORTED, source="s", message="m", **limits)

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


# Versions, platforms, and what public reports found.


def with_rule(monkeypatch: pytest.MonkeyPatch, version: str | None, **fields: Any) -> None:
    """torch_sdpa:math on the CPU with one rule, at a version of torch."""
    sheet = declared()["torch_sdpa:math"]["cpu"]
    rule = Rule(dimension="head_dim_qk", code=Code.HEAD_DIM_UNSUPPORTED, maximum=32, source="s", message="m", **fields)
    changed = {"torch_sdpa:math": {"cpu": sheet.model_copy(update={"rules": (rule,)})}}
    monkeypatch.setattr(matrix, "declared", lambda: changed)
    monkeypatch.setattr(matrix, "version_of", lambda package: version)


@pytest.mark.parametrize(
    ("version", "holds"),
    [("2.8.0", True), ("2.13.0+cpu", True), ("2.7.9", False), ("3.0", False), ("2.9.0b3", True), (None, True)],
)
def test_a_rule_holds_for_its_versions_only(monkeypatch: pytest.MonkeyPatch, version: str | None, holds: bool) -> None:
    with_rule(monkeypatch, version, versions=">=2.8,<3")
    assert codes("torch_sdpa:math", case()) == ([Code.HEAD_DIM_UNSUPPORTED] if holds else [])


def test_a_range_of_versions_that_is_none_is_refused_when_it_is_read() -> None:
    with pytest.raises(ValueError, match="Invalid specifier"):
        Rule(dimension="head_dim_qk", code=Code.LAUNCH_FAILED, source="s", message="m", versions="from 2.8 on")


RULE = "dimension: head_dim_qk, code: HEAD_DIM_UNSUPPORTED, source: s, message: m"
SHEET = "backends: {mine: {cpu: {package: torch, remedy: r, rules: [{RULE}]}}}"
ENTRY = "- {backend: mine, code: LAUNCH_FAILED, source: s, message: m, WHEN}"


@pytest.fixture
def sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sheets in place of ours: a sound one, and no known bad cells."""
    (tmp_path / "mine.yaml").write_text(SHEET.replace("RULE", RULE))
    (tmp_path / "known_bad.yaml").write_text("[]")
    monkeypatch.setattr(matrix, "_FOLDER", tmp_path)
    for read in (declared, known_bad):
        read.cache_clear()
    yield tmp_path
    for read in (declared, known_bad):
        read.cache_clear()


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of `matrix`, which exits 2."""
    assert main(["matrix"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_sound_sheet_is_read(sheets: Path) -> None:
    assert (set(declared()), known_bad()) == ({"mine"}, ())


@pytest.mark.parametrize(
    ("sheet", "message"),
    [
        ("", "mine.yaml: Input should be a valid dict"),
        ("backends: {mine: {cpu: {package: torch}}}", "backends.mine.cpu.remedy: this key is missing"),
        (SHEET.replace("RULE", f"{RULE}, minimun: 8"), "rules.0.minimun: unknown key; did you mean minimum"),
        (SHEET.replace("RULE", RULE.replace("HEAD_DIM", "HEAD")), "rules.0.code: Input should be"),
        (SHEET.replace("RULE", f"{RULE}, versions: from 2 on"), "rules.0.versions: Invalid specifier"),
        (SHEET.replace("RULE", f"{RULE}, multiple_of: 0"), "rules.0.multiple_of: "),
        (SHEET.replace("RULE", f"{RULE}, minimum: .nan"), "rules.0.minimum: "),
        (SHEET.replace("RULE", f"{RULE}, when: {{same_head_dimz: [true]}}"), "did you mean same_head_dims"),
        (SHEET.replace("RULE", RULE.replace("head_dim_qk", "same_head_dimz")), "did you mean same_head_dims"),
        (SHEET.replace("RULE", RULE.replace("head_dim_qk", "phase") + ", minimum: 8"), "'phase' is not always a num"),
        (SHEET.replace("RULE", RULE.replace("head_dim_qk", "page_size") + ", multiple_of: 8"), "'page_size' is not al"),
        (SHEET.replace("RULE", RULE.replace("head_dim_qk", "compute_capability")), "of CUDA devices alone"),
    ],
)
def test_a_sheet_that_would_fail_later_is_one_line_when_it_is_read(
    sheets: Path, capsys: pytest.CaptureFixture[str], sheet: str, message: str
) -> None:
    (sheets / "mine.yaml").write_text(sheet)
    line = refused(capsys)
    assert line.startswith(f"error: {sheets}/mine.yaml: ") and message in line


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("", "known_bad.yaml: Input should be a valid tuple"),
        ("- 5", "known_bad.yaml: 0: Input should be a valid dict"),
        (ENTRY.replace(", WHEN", ""), "0.when: this key is missing"),
        (ENTRY.replace("WHEN", "when: {same_head_dimz: {allowed: [true]}}"), "did you mean same_head_dims"),
        (ENTRY.replace("WHEN", "when: {phase: {maximum: 3}}"), "'phase' is not always a number"),
        (ENTRY.replace("WHEN", "when: {head_dim_qk: {multiple_of: 0}}"), "0.when.head_dim_qk.multiple_of: "),
        (ENTRY.replace("WHEN", "platforms: [cpu], when: {compute_capability: {minimum: 90}}"), "of CUDA devices alone"),
    ],
)
def test_known_bad_cells_that_would_fail_later_are_one_line_when_they_are_read(
    sheets: Path, capsys: pytest.CaptureFixture[str], entries: str, message: str
) -> None:
    (sheets / "known_bad.yaml").write_text(entries)
    assert message in refused(capsys)


def test_the_version_is_that_of_the_distribution_behind_the_import_name() -> None:
    import torch

    assert matrix.version_of("torch") == torch.__version__
    assert matrix.version_of("no_such_package") is None


def test_a_device_that_is_not_there_is_told_in_a_line() -> None:
    with pytest.raises(UserError, match=r"device cuda: this PyTorch sees \d+ CUDA devices"):
        declared_reasons("flash_attn:fa3", case(), device="cuda")


def test_an_amd_device_is_rocm_and_has_no_cell_until_someone_declares_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert matrix.platform_of("cuda:0") == "rocm"
    (reason,) = declared_reasons("torch_sdpa:math", case(), device="cuda")
    assert (reason.code, reason.observed) == (Code.ARCH_UNSUPPORTED, "rocm")


def bad(**fields: Any) -> KnownBad:
    default = {"backend": "torch_sdpa:math", "platforms": ("cpu",), "code": Code.NUMERIC_DRIFT, "source": "project#1"}
    return KnownBad(**{**default, "message": "m", **fields})


def test_a_cell_that_a_report_found_broken_is_known_bad_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = bad(when={"phase": Range(allowed=("decode",)), "head_dim_qk": Range(minimum=64)})
    monkeypatch.setattr(matrix, "known_bad", lambda: (entry,))
    (reason,) = found = declared_reasons("torch_sdpa:math", case(), device="cpu")
    assert (reason.code, reason.source, reason.observed) == (Code.NUMERIC_DRIFT, "known_bad: project#1", "decode, 64")
    assert is_known_bad(found)
    for other in (case(phase="extend", batch="q5s64"), case(head_dim_qk=32, head_dim_vo=32)):
        assert declared_reasons("torch_sdpa:math", other, device="cpu") == []
    assert declared_reasons("torch_sdpa:flash", case(), device="cpu") == []
    assert not is_known_bad(declared_reasons("torch_sdpa:math", case(softcap=1.0), device="cpu"))


def test_a_report_ends_with_its_versions_and_is_of_its_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in (bad(when={}, versions="<1"), bad(when={}, platforms=("cuda",))):
        monkeypatch.setattr(matrix, "known_bad", lambda entry=entry: (entry,))
        assert declared_reasons("torch_sdpa:math", case(), device="cpu") == []


def test_known_bad_cells_name_backends_and_dimensions_that_exist_and_their_reports() -> None:
    dimensions = {*matrix._dimensions(case(), "cpu"), "compute_capability"}
    assert len(known_bad()) >= 12
    for entry in known_bad():
        assert entry.backend in NAMES
        assert entry.when, entry
        assert set(entry.when) <= dimensions, entry
        assert all(limits.allowed_text() for limits in entry.when.values())
        seen = re.search(r"\((data/evidence/\w+)\)", entry.source)
        assert "#" in entry.source or (seen and Path(seen[1], "README.md").is_file()), entry.source
