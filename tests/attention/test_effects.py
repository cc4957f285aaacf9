"""Effects: what is known of a difference between two fingerprints, in words and with a source."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from attention.difference import ABSENT, Change, difference
from attention.effects import explain, known_effects, lines
from attention.fingerprint import ENVIRONMENT, Identity, fingerprint
from attention.policy import Policy


def known(path: str, old: Any, new: Any) -> str:
    return "; ".join(effect.effect for effect in known_effects() if effect.holds(Change(path, old, new)))


@pytest.mark.parametrize(
    ("path", "old", "new", "sentence"),
    [
        ("cudnn", "91002", "91900", "first choice for SDPA on Hopper"),
        ("cudnn", "91900", "91002", "first choice for SDPA on Hopper"),
        ("torch", "2.10.1+cu128", "2.11.0+cu130", "SDPA's priority order"),
        ("distributions.flashinfer-python", "0.5.3+aaaa", "0.6.13+bbbb", "from fa2 to fa3"),
        ("distributions.vllm", "0.22.1+aa", "0.33.0+bb", "priority list of backends"),
        ("gpu", "nvidia-h200", "nvidia-b200", "every cell of the matrix is unknown"),
        ("driver", "580.1", "590.2", "other plans"),
        ("num_threads", 1, 2, "split their sums by threads"),
        ("dtype", "bfloat16", "float16", "errors of another size"),
        ("head_dim_vo", 128, 64, "some head dims only"),
        ("num_kv_heads", 8, 3, "ratio of query to KV heads"),
        ("environment.CC", "gcc", ABSENT, "another C compiler"),
        ("kv_cache_dtype", "auto", "float8_e5m2", "never e5m2"),
        ("page_size", 16, 64, "replace one silently"),
        ("environment.TORCH_CUDNN_SDPA_DEPRIORITIZED", ABSENT, "1", "cuDNN goes behind"),
        ("environment.MKL_CBWR", ABSENT, "COMPATIBLE", "round in another order"),
        ("environment.DNNL_DEFAULT_FPMATH_MODE", ABSENT, "BF16", "in bfloat16"),
        ("environment.ONEDNN_DEFAULT_FPMATH_MODE", ABSENT, "BF16", "in bfloat16"),
        ("environment.DNNL_MAX_CPU_ISA", ABSENT, "AVX2", "no newer instructions"),
        ("environment.PYTORCH_ALLOC_CONF", ABSENT, "expandable_segments:True", "another number of KV pages"),
        ("environment.PYTORCH_CUDA_ALLOC_CONF", ABSENT, "expandable_segments:True", "another number of KV pages"),
        ("attention_backend_policy.preferred", ["flashinfer"], ["math"], "asked for first"),
        ("execution.cuda_graph", False, True, "captured decodes are padded"),
        ("engine_limits.max_running", 32, 64, "batch compositions"),
    ],
)
def test_a_known_difference_says_what_it_changes(path: str, old: Any, new: Any, sentence: str) -> None:
    assert sentence in known(path, old, new)


@pytest.mark.parametrize(
    ("path", "old", "new", "sentence"),
    [
        ("cudnn", "91500", "91400", "first choice"),  # 9.15.0 itself is not above it
        ("cudnn", "91600", "91900", "first choice"),
        ("torch", "2.11.0+cu130", "2.11.1+cu130", "minor version"),
        ("distributions.flashinfer-python", "0.6.1+aa", "0.6.2+bb", "from fa2 to fa3"),
        ("distributions.flashinfer-python", ABSENT, "0.6.2+bb", "from fa2 to fa3"),
        ("attention_backend_policy.preferred", ["a"], ["b"], "the same kernels"),
    ],
)
def test_a_difference_on_one_side_of_a_version_does_not_say_it(path: str, old: Any, new: Any, sentence: str) -> None:
    assert sentence not in known(path, old, new)


def test_every_effect_is_about_a_field_that_exists_and_names_its_source(tiny_model: Path) -> None:
    identity = fingerprint(tiny_model, Policy(preferred=("math",)), dtype="float32").identity.model_dump(mode="json")
    keys = {name: tuple(value) for name, value in identity.items() if isinstance(value, dict)}
    keys["environment"] = ENVIRONMENT
    keys |= dict.fromkeys(("distributions", "jit_sources", "compilers", "engine_limits"), ())  # any key may come
    for effect in known_effects():
        field, _, key = effect.path.partition(".")
        assert any(fnmatchcase(name, field) for name in Identity.model_fields), effect.path
        if key and keys[field]:
            assert any(fnmatchcase(name, key) for name in keys[field]), effect.path
        assert len(effect.source) > 3


def test_a_difference_that_nothing_is_known_of_is_shown_all_the_same() -> None:
    found = explain({"machine": "x86_64", "torch": "2.11.0"}, {"machine": "aarch64", "torch": "2.11.0"})
    assert lines(found) == ["machine  x86_64  -> aarch64", "    no known effect; probes and replay decide"]
    assert found[0].document() == {"field": "machine", "old": "x86_64", "new": "aarch64", "effects": []}


def test_fields_and_values_stand_in_columns() -> None:
    found = explain({"dtype": "bfloat16", "page_size": 16}, {"dtype": "float16", "page_size": 128})
    rows = [line for line in lines(found) if not line.startswith(" ")]
    assert rows == ["dtype      bfloat16  -> float16", "page_size  16        -> 128"]
    assert len({row.index("->") for row in rows}) == 1


def test_what_is_known_comes_first_and_packages_without_effect_last_and_together() -> None:
    old = {
        "machine": "x86_64",
        "torch": "2.11.0",
        "distributions": {"attrs": "1+aa", "triton": "3.6.0+aa", "yarl": "1+b"},
    }
    new = {
        "machine": "arm64",
        "torch": "2.13.0",
        "distributions": {"attrs": "2+aa", "triton": "3.9.0+aa", "yarl": None},
    }
    shown = lines(explain(old, new))
    fields = [line.split()[0] for line in shown if not line.startswith(" ")]
    assert fields == ["distributions.triton", "torch", "machine", "2"]
    assert shown[-2:] == ["2 packages of which this sheet says nothing by name:", "    attrs, yarl"]


def test_equal_documents_have_no_difference() -> None:
    assert lines(explain({"a": {"b": 1}}, {"a": {"b": 1}})) == ["no difference"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ({"a": 1}, {"a": True}, "a: 1 -> true"),
        ({"a": [0]}, {"a": [False]}, "a: [0] -> [false]"),
        ({}, {"a": None}, "a: absent -> null"),
        ({"a": {"b": None}}, {"a": {}}, "a.b: null -> absent"),
        ({}, {"a": {"b": 1}}, 'a: absent -> {"b": 1}'),
    ],
)
def test_what_has_another_id_has_a_difference(old: dict[str, Any], new: dict[str, Any], line: str) -> None:
    assert difference(old, new) == [line]
    assert lines(explain(old, new)) != ["no difference"]


def test_a_machine_tells_null_from_a_field_that_is_not_there() -> None:
    (one,) = explain({}, {"a": None})
    assert one.document() == {"field": "a", "new": None, "effects": []}
