"""The log's line of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attention import startup
from attention.job import Setup
from attention.sampling import SamplingParams
from attention.scheduler import Generation
from attention.serve.request_line import request_line
from attention.serve.request_log import RequestRow, now
from tests.attention.serve.fake_instance import serving


def lines(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == "request_finished"]


def test_every_request_leaves_a_line_without_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as running:
        running.post("/v1/completions", {"prompt": "a secret", "max_tokens": 3, "temperature": 0}, x_session_id="s1")
        running.post("/v1/completions", {"prompt": "a secret" * 99, "max_tokens": 3})
        text = capfd.readouterr().err
    (line,) = lines(text)
    assert "secret" not in text
    assert (line["status"], line["prompt_tokens"], line["output_tokens"], line["session_id"]) == (200, 8, 3, "s1")
    assert (line["fallback"], line["graph_hits"], line["reused_prompt_tokens"]) == (False, 0, 0)
    assert set(line["phases"]) == {"prefill", "decode"}
    assert line["phases"]["decode"]["confirmed"] == "torch_sdpa:math"
    assert line["phases"]["decode"]["shape_bucket"] == "decode/kv<=16"


def test_the_line_names_revision_package_and_signature(setup: Setup) -> None:
    identity = startup.identify(setup).identity
    one = Generation("r", tuple(range(40)), SamplingParams(max_tokens=2))
    one.resolved["decode"] = one.confirmed["decode"] = "torch_sdpa:flash"
    row = RequestRow(
        fingerprint_id="f", time=now(), request_id="r", session_id=None, role=None, shadow=False, endpoint="/v1",
        stream=False, status=200, finish_reason="stop", e2e_s=0.1, peak_memory_bytes=1, prompt_text="secret",
    )  # fmt: skip
    line = request_line(row, one, identity)
    assert line["model_revision"] == identity.model_revision
    assert line["phases"]["decode"]["package"] == f"torch {identity.torch}"
    assert line["phases"]["decode"]["kernel_signature"] == "torch_sdpa:flash decode/kv<=64 float32"
    assert "secret" not in json.dumps(line)
    with_kernels = identity.model_copy(update={"distributions": {"flash-attn": "2.8.3.post2+0123456789ab"}})
    one.resolved["decode"] = one.confirmed["decode"] = "flash_attn:fa2"
    assert request_line(row, one, with_kernels)["phases"]["decode"]["package"] == "flash-attn 2.8.3.post2"
