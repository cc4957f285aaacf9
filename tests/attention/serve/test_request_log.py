"""The request log: every served request becomes one complete row, whatever the lake does meanwhile."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from attention.schemas import SCHEMAS
from attention.serve import request_log
from attention.serve.request_log import RequestLog, RequestRow, now, peak_memory_bytes
from tests.attention.fake_runner import FakeRunner, expected_tokens
from tests.attention.serve.fake_instance import INSTANCE, read_rows, serving, wait_until


def row(request_id: str = "id") -> RequestRow:
    return RequestRow(
        fingerprint_id="f",
        time=now(),
        request_id=request_id,
        session_id=None,
        role="champion",
        shadow=False,
        endpoint="/v1/completions",
        stream=False,
        status=200,
        finish_reason="stop",
        e2e_s=0.5,
        peak_memory_bytes=peak_memory_bytes(),
    )


def test_a_served_request_fills_every_column(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.002, eos_token_ids=frozenset())
    before = datetime.now(UTC)
    with serving(tmp_path, runner) as running:
        running.post(
            "/v1/completions",
            {"prompt": "hello", "max_tokens": 6, "temperature": 0},
            x_request_id="id-1",
            x_session_id="session-1",
            x_attention_role="champion",
            host="127.0.0.1-shadow:8700",
        )
        (got,) = running.rows()
    tokens = expected_tokens(b"hello", 6, frozenset())
    figures = {"time", "queue_s", "ttft_s", "tpot_s", "e2e_s", "peak_memory_bytes"}
    assert {name: value for name, value in got.items() if name not in figures} == {
        "release_id": "r-1",
        "fingerprint_id": "f1f2f3",
        "node": "here",
        "gpu": "cpu",
        "model": "fake-1m",
        "side": "candidate",
        "instance": "candidate-1",
        "request_id": "id-1",
        "session_id": "session-1",
        "role": "champion",
        "shadow": True,
        "endpoint": "/v1/completions",
        "stream": False,
        "status": 200,
        "finish_reason": "length",
        "prompt_tokens": 5,
        "output_tokens": 6,
        "requested_backend": "torch_sdpa:flash",
        "resolved_prefill": "torch_sdpa:math",
        "resolved_decode": "torch_sdpa:math",
        "confirmed_prefill": "torch_sdpa:math",
        "confirmed_decode": "torch_sdpa:math",
        "fallback": False,
        "fallback_reason": None,
        "num_nonfinite": 0,
        "batch_size_mean": 1.0,
        "prompt_text": "hello",
        "output_text": bytes(t for t in tokens if t < 256).decode(errors="replace"),
        "token_ids": tokens,
        "error": None,
    }
    assert before <= got["time"] <= datetime.now(UTC)
    assert 0 <= got["queue_s"] <= got["ttft_s"] <= got["e2e_s"] < 10
    assert got["tpot_s"] >= 0.002
    assert got["peak_memory_bytes"] > 10_000_000
    assert set(got) == set(SCHEMAS["requests"].names)


def test_a_mistake_of_the_client_is_no_served_request(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        assert running.post("/v1/completions", {"prompt": ""}).status_code == 400
        assert running.post("/v1/completions", {"prompt": "x", "model": "other"}).status_code == 404
        assert running.rows() == []


def test_rows_are_flushed_within_half_a_second_and_at_the_end(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, INSTANCE)
    log.add(row("first"))
    wait_until(lambda: len(read_rows(tmp_path, "requests")) == 1, timeout_s=5)
    log.add(row("last"))
    log.close()
    assert [r["request_id"] for r in read_rows(tmp_path, "requests")] == ["first", "last"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_shutdown_writes_the_rows_of_what_was_in_flight(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.05, eos_token_ids=frozenset())
    statuses: list[int] = []
    with serving(tmp_path, runner) as running:

        def ask() -> None:
            response = running.post("/v1/completions", {"prompt": "hello", "max_tokens": 12, "temperature": 0})
            statuses.append(response.status_code)

        thread = threading.Thread(target=ask)
        thread.start()
        running.wait_until(lambda: running.service.engine.num_running == 1)
        running.server.should_exit = True
        thread.join()
    assert statuses == [200]
    assert [r["output_tokens"] for r in read_rows(tmp_path, "requests")] == [12]


def test_what_the_grace_period_does_not_cover_is_cancelled_with_a_row(tmp_path: Path) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.1, eos_token_ids=frozenset())
    answers: list[httpx.Response] = []
    with serving(tmp_path, runner) as running:

        def ask() -> None:
            body = {"prompt": "hello", "max_tokens": 100, "temperature": 0}
            answers.append(running.post("/v1/completions", body))

        thread = threading.Thread(target=ask)
        thread.start()
        running.wait_until(lambda: running.service.engine.num_running == 1)
        running.service.engine.halt()
        thread.join()
    assert answers[0].status_code == 503
    assert "shutting down" in answers[0].json()["error"]["message"]
    (got,) = read_rows(tmp_path, "requests")
    assert (got["status"], got["finish_reason"]) == (503, "cancelled")
    assert runner.pool.num_free == 256


def test_rows_wait_while_the_lake_is_away_and_health_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = True
    write = request_log.write_rows

    def write_rows(*args: Any, **kwargs: Any) -> Path | None:
        if away:
            raise OSError("No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(request_log, "write_rows", write_rows)
    monkeypatch.setattr(request_log, "FLUSH_S", 60)
    with serving(tmp_path) as running:
        running.service.log.add(row("first"))
        running.service.log.flush()
        health = running.client.get("/health")
        assert health.status_code == 200
        assert "No space left on device" in health.json()["warnings"][0]
        assert "request_log_failed" in capsys.readouterr().err
        away = False
        running.service.log.add(row("second"))
        running.service.log.flush()
        assert running.client.get("/health").json()["warnings"] == []
    assert [r["request_id"] for r in read_rows(tmp_path, "requests")] == ["first", "second"]


def test_a_buffer_that_overflows_counts_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_BUFFERED", 2)
    monkeypatch.setattr(request_log, "FLUSH_S", 60)
    log = RequestLog(tmp_path, INSTANCE)
    for i in range(5):
        log.add(row(str(i)))
    log.close()
    assert log.num_dropped == 3
    assert len(read_rows(tmp_path, "requests")) == 2


def test_events_go_to_their_own_table(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, INSTANCE)
    log.fingerprint_id = "f1"
    log.add_event("startup_fallback", "warning", "a:x", "a:x gave way to b:y", {"phase": "decode"})
    log.close()
    (got,) = read_rows(tmp_path, "events")
    assert (got["kind"], got["subject"], got["detail_json"]) == ("startup_fallback", "a:x", '{"phase": "decode"}')
    assert (got["side"], got["fingerprint_id"]) == ("candidate", "f1")


def test_files_carry_the_schema_with_its_version(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, INSTANCE)
    log.add(row())
    log.close()
    (file,) = tmp_path.glob("requests/release_id=r-1/*.parquet")
    schema = pq.read_schema(file)
    assert schema.names == SCHEMAS["requests"].names
    assert schema.metadata[b"attention_release.version"] == b"1"


def test_a_flush_waits_for_the_rows_that_the_thread_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, write_rows = threading.Event(), request_log.write_rows

    def slowly(lake: Path, table: str, rows: Any, *, release_id: str) -> Path | None:
        if rows:
            begun.set()
            time.sleep(0.2)
        return write_rows(lake, table, rows, release_id=release_id)

    monkeypatch.setattr(request_log, "write_rows", slowly)
    log = RequestLog(tmp_path, INSTANCE)
    log.add(row())
    assert begun.wait(10)
    log.flush()
    assert len(read_rows(tmp_path, "requests")) == 1
    log.close()


@pytest.mark.parametrize("num_tokens", [129, 200, 300])
def test_a_prompt_whose_beginning_was_reused_names_the_backend_of_its_rest(tmp_path: Path, num_tokens: int) -> None:
    runner = FakeRunner(num_pages=512, max_context=1024)
    with serving(tmp_path, runner) as running:
        for _ in range(2):
            body = {"prompt": "x" * num_tokens, "max_tokens": 1, "temperature": 0}
            usage = running.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
        for row in running.rows():
            assert row["resolved_prefill"] == row["confirmed_prefill"] == "torch_sdpa:math"
