"""An instance on a fake model: the real application on a real port, in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import uvicorn

from attention.limits import Limits
from attention.probe import ProbeResult
from attention.serve.app import create_app
from attention.serve.engine import Engine
from attention.serve.fallbacks import FallbackNotice
from attention.serve.metrics import Metrics
from attention.serve.request_log import Instance, RequestLog
from attention.serve.service import Service
from attention.serve.tracing import Trace, no_trace
from tests.attention.fake_runner import FakeDispatcher, FakeRunner

INSTANCE = Instance(
    release_id="r-1", side="candidate", name="candidate-1", model="fake-1m", gpu="cpu", node="here", fault=None
)


@dataclass(frozen=True)
class FakeFingerprint:
    id: str = "f1f2f3"
    identity: None = None

    def model_dump(self, mode: str) -> dict[str, Any]:
        return {"id": self.id, "identity": {"torch": "2"}, "attestation": {}}


@dataclass(frozen=True)
class FakeStarted:
    """What `attention.startup.prepare` gives, as far as serving reads it."""

    runner: FakeRunner
    fingerprint: FakeFingerprint = FakeFingerprint()
    probes: list[ProbeResult] = field(default_factory=list)
    seconds: float = 0.1
    replayed: None = None

    def tolerated(self) -> dict[str, list[str]]:
        return {}

    @property
    def dispatcher(self) -> FakeDispatcher:
        return self.runner.dispatcher


@dataclass(frozen=True)
class Running:
    """A started instance, seen from outside and inside."""

    client: httpx.Client
    service: Service
    runner: FakeRunner
    lake: Path
    server: uvicorn.Server

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        dashed = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(path, json=body, headers=dashed)

    def rows(self, table: str = "requests") -> list[dict[str, Any]]:
        self.service.log.flush()
        return read_rows(self.lake, table)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition)


def read_rows(lake: Path, table: str) -> list[dict[str, Any]]:
    files = sorted(lake.glob(f"{table}/*/*.parquet"))
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(rows, key=lambda row: row["time"])


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    lake: Path,
    runner: FakeRunner | None = None,
    *,
    limits: Limits | None = None,
    instance: Instance = INSTANCE,
    prepare: Callable[[], Any] | None = None,
    trace: Trace = no_trace,
    admin_token: str | None = None,
) -> Iterator[Running]:
    """Start an instance; leaves it drained and stopped."""
    runner = runner or FakeRunner(num_pages=256)
    fake = FakeStarted(runner)
    metrics = Metrics(node=instance.node, gpu=instance.gpu, model=instance.model)
    log = RequestLog(lake, instance)
    notice = FallbackNotice(metrics, log, emit=True)
    engine = Engine(prepare or (lambda: fake), limits or Limits(), metrics, notice, fault=instance.fault)
    service = Service(instance, engine, metrics, log, trace)
    config = uvicorn.Config(
        create_app(service, admin_token), log_config=None, access_log=False, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            if prepare is None:
                wait_until(lambda: service.engine.started is not None)
            yield Running(client, service, runner, lake, server)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
