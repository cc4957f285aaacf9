"""A threshold is data with an owner and a reason; a mistyped one is one line to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.errors import UserError
from gates.thresholds import load_limits

DEFAULT = "default:\n  canary:\n    errors: {value: 0.01, owner: serving, reason: proven by 299}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "thresholds.yaml"
    path.write_text(text)
    return path


def test_a_plan_replaces_value_and_reason_and_the_owner_stays(tmp_path: Path) -> None:
    path = written(tmp_path, DEFAULT + "demo:\n  canary:\n    errors: {value: 0.08, reason: 40 requests}\n")
    assert load_limits("canary", "full", path)["errors"].value == 0.01
    demo = load_limits("canary", "demo", path)["errors"]
    assert (demo.value, demo.owner, demo.reason) == (0.08, "serving", "40 requests")


def test_the_least_evidence_comes_from_the_plan(tmp_path: Path) -> None:
    limits = load_limits("canary", "demo", written(tmp_path, DEFAULT)).least(min_pairs=30)
    assert limits.value("min_pairs") == 30
    assert limits["min_pairs"].owner == "plan demo"
    with pytest.raises(KeyError, match="min_paris"):
        limits["min_paris"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (DEFAULT + "demo:\n  canary:\n    error: {value: 1, reason: x}\n", "did you mean errors?"),
        (DEFAULT + "demo:\n  canarry: {}\n", "did you mean canary?"),
        (DEFAULT.replace("owner: serving, ", ""), "default.canary.errors.owner"),
        (DEFAULT.replace("reason: proven by 299", "because: x"), "default.canary.errors"),
        (DEFAULT.replace("0.01", ".nan"), "default.canary.errors.value"),
        ("demo: {}\n", "default"),
        ("default: [", "not YAML"),
    ],
)
def test_an_unknown_key_or_a_missing_field_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=r"thresholds\.yaml") as caught:
        load_limits("canary", "demo", written(tmp_path, text))
    assert named in str(caught.value)


def test_an_unknown_gate_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean canary"):
        load_limits("canari", "demo", written(tmp_path, DEFAULT))
