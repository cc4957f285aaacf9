"""A cell of its own for a test: its folder, record and router, with stub instances that serve."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.paths import cell_dir
from tasks.processes import free_port, list_processes, start_instance, wait_ready
from tasks.record import LEASE_S, Deployed, Instance, Record, RecordStore, Shares, State
from tasks.router import EnvoyRouter

GPU, FAMILY = "cpu", "stub"
STUB = [sys.executable, str(Path(__file__).with_name("stub_instance.py"))]


@dataclass(frozen=True)
class StubCell:
    """The cell `cpu stub` under ATTENTION_RELEASE_HOME, which the test has set."""

    cell: Path
    store: RecordStore
    router: EnvoyRouter

    @classmethod
    def here(cls) -> StubCell:
        cell = cell_dir(GPU, FAMILY)
        return cls(cell, RecordStore(cell / "record.json"), EnvoyRouter(cell))

    def start(self, release_id: str, role: str) -> Instance:
        """A ready stub process that answers as `release_id`."""
        name = f"{role}-{release_id}"
        instance = start_instance(self.cell, name, role, stub_command(release_id, name), free_port())
        wait_ready(instance, 10)
        return instance

    def write(self, change: Callable[[Record], None]) -> Record:
        return self.store.update(change, over_lease=True)

    def expose(self, shares: Shares, state: State = "canary", lease_s: float = -1.0, mirror: float = 0.0) -> str:
        """Release `r9` holds traffic; its lease ends in `lease_s` seconds, at most `LEASE_S`. Returns the token."""
        token = self.store.acquire("r9")

        def change(record: Record) -> None:
            record.release_id, record.candidate, record.identity = "r9", "stub-next", "identity-r9"
            record.shares, record.state, record.mirror = shares, state, mirror
            assert record.lease is not None
            record.lease.expires_at = time.time() + min(lease_s, LEASE_S)

        generation = self.write(change).generation
        self.router.set_shares(shares.champion, shares.control, shares.candidate, generation)
        if mirror:
            self.router.set_mirror(mirror, generation=generation)
        return token

    def served_by(self) -> str:
        """Release that answers a live request; "" for a 503."""
        port = self.router.port
        assert port is not None, "Envoy does not run"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            body = json.dumps({"prompt": "a", "max_tokens": 2})
            connection.request("POST", "/v1/completions", body, {"x-session-id": os.urandom(8).hex()})
            response = connection.getresponse()
            response.read()
            return response.getheader("x-attention-release", "")
        finally:
            connection.close()

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for process in list_processes(self.cell) if process.alive()}


def stub_command(release_id: str, name: str) -> list[str]:
    return [*STUB, "--release-id", release_id, "--instance", name]


def deployed(release_id: str, instance: Instance | None = None) -> Deployed:
    return Deployed(
        release_id=release_id,
        candidate=f"stub-{release_id}",
        candidate_file="stub.yaml",
        identity=f"identity-{release_id}",
        fingerprint_id="stub",
        backends={"prefill": "torch_sdpa:math"},
        model_path="stub",
        policy="stub.yaml",
        environment="current",
        command=stub_command(release_id, f"champion-{release_id}"),
        instance=instance,
        promoted_at=1.0,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    """Seconds until the condition held; fails the test after `timeout_s`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - started
