"""A real instance as a process of its own: `python -m attention serve` on a small random model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.attention.conftest import llama_config, save_model
from tests.attention.serve.fake_instance import wait_until

POLICY = "attention_policy: {mode: pinned, preferred: [torch_sdpa:flash]}\n"
NUM_TOKENS = 257  # the end token and the bytes: every token that the model can draw is text


@dataclass
class Process:
    """A process that serves; `events` are the lines that it logged."""

    child: subprocess.Popen[str]
    model: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        port = next(event["port"] for event in self.events if event["event"] == "listening")
        return f"http://127.0.0.1:{port}"

    def read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.events.append(json.loads(line))

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()
        return found

    def is_idle(self) -> bool:
        """Nothing runs and every page of the cache is free."""
        health = self.health()
        pages = health["kv_pages"]
        return health["running"] == health["waiting"] == 0 and pages["free"] == pages["total"]

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving_process(folder: Path, *flags: str, **config: object) -> Iterator[Process]:
    """Start an instance on a two-layer Llama with random weights; stops it with SIGTERM and checks that it ends well.

    `config` changes the model's; `flags` are added to the command.
    """
    model = save_model(folder / "tiny-llama", llama_config(vocab_size=NUM_TOKENS, **config))
    (folder / "policy.yaml").write_text(POLICY)
    command = [
        *(sys.executable, "-m", "attention", "serve"),
        *("--model", model, "--policy", folder / "policy.yaml", "--port", "0", "--release-id", "r-1"),
        *("--side", "candidate", "--instance", "candidate-1", "--lake", folder / "lake", *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment)
    process = Process(child, model.name)
    reader = threading.Thread(target=process.read, daemon=True)
    reader.start()
    try:
        wait_until(lambda: any(e["event"] == "ready" for e in process.events) or child.poll() is not None, 120)
        assert child.poll() is None, process.events
        yield process
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        reader.join(10)
