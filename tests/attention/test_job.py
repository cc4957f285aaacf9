"""Jobs: checked before any work, and a result that is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from attention.errors import UserError
from attention.job import (
    BenchJob,
    CompareJob,
    FingerprintJob,
    ProbeJob,
    ReplayJob,
    Setup,
    read_job,
    write_result,
)

SETUP = {"model": "models/m", "policy": "policies/p.yaml"}
EVIDENCE = {"lake": "lake", "release_id": "r1", "side": "candidate"}
PROMPT = {"prompt_id": "p1", "category": "c", "language": "en", "messages": [{"role": "user", "content": "Hi"}]}
JOBS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (FingerprintJob, {"setup": SETUP}),
    (ProbeJob, {"setup": SETUP, "evidence": EVIDENCE, "timeout_s": 5}),
    (BenchJob, {"setup": SETUP, "with_model": True}),
    (
        ReplayJob,
        {
            "setup": SETUP,
            "evidence": EVIDENCE,
            "tensor": {"seeds": [0, 1], "max_kv_len": 300},
            "model": {"prompts": [PROMPT], "max_tokens": 32, "decode_tokens": 8},
            "business": {"prompts": [PROMPT]},
        },
    ),
    (
        CompareJob,
        {
            "setup": SETUP,
            "evidence": EVIDENCE,
            "champion": "a",
            "candidate": "b",
            "floor": "c",
            "known_floor": "floors/f.json",
        },
    ),
]


def write(folder: Path, text: str) -> Path:
    path = folder / "job.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("kind", "fields"), JOBS, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_a_job_reads_back_as_it_was_written(tmp_path: Path, kind: type[BaseModel], fields: dict[str, Any]) -> None:
    job = kind.model_validate(fields)
    assert read_job(write(tmp_path, job.model_dump_json()), kind) == job


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "valid dictionary"),
        ("{}", "setup: Field required"),
        (json.dumps({"setup": {**SETUP, "modle": "x"}}), "setup.modle: Extra inputs"),
        (json.dumps({"setup": {"model": "m"}}), "setup.policy: Field required"),
        (json.dumps({"verb": "replay", "setup": SETUP}), "verb: Input should be 'probe'"),
        (json.dumps({"setup": SETUP, "evidence": {**EVIDENCE, "side": "both"}}), "evidence.side: "),
    ],
)
def test_a_bad_job_is_one_line_that_names_file_key_and_problem(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_job(path, ProbeJob)
    assert str(caught.value).startswith(f"job {path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.json: cannot be read \(No such file or directory\)"):
        read_job(tmp_path / "none.json", ProbeJob)


def test_jobs_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Setup.model_validate(SETUP).page_size = 32  # type: ignore[misc]


def test_a_result_replaces_the_last_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    write_result(out, {"cases": 1})
    write_result(out, Setup.model_validate(SETUP))
    assert json.loads((out / "result.json").read_text())["model"] == "models/m"
    assert [path.name for path in out.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_result(tmp_path, {"bad": object()})
    assert not (tmp_path / "result.json").exists()
