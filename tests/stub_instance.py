"""A serving instance without a model: answers as `python -m attention serve` does and remembers what it got.

In a test: `with StubInstance("champion") as stub:` then `stub.port`, `stub.requests`. As a process, for
tests that kill it: `python tests/stub_instance.py --port N --instance NAME [--release-id R]
[--ready-after S]`; other flags of the real command are accepted and ignored.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    request_id: str
    session_id: str
    role: str  # x-attention-role
    shadow: bool  # Host ends in -shadow
    time: float


class StubInstance:
    """An HTTP/1.1 server on a loopback port of its own; `hang` makes it swallow requests."""

    def __init__(self, name: str, port: int = 0, release_id: str = "stub", ready_after_s: float = 0.0) -> None:
        self.name = name
        self.release_id = release_id
        self.ready_at = time.monotonic() + ready_after_s
        self.requests: list[Seen] = []
        self.hang = threading.Event()
        self.token_gap_s = 0.0
        self.server = _Server(("127.0.0.1", port), _Handler)
        self.server.stub = self
        self.port: int = self.server.server_address[1]

    def __enter__(self) -> StubInstance:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang.clear()
        self.server.shutdown()
        self.server.server_close()

    def live(self) -> list[Seen]:
        return [seen for seen in self.requests if not seen.shadow]

    def shadows(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.shadow]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    stub: StubInstance


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        stub = self.server.stub
        if self.path == "/health":
            ready = time.monotonic() >= stub.ready_at
            body = {"status": "ready"} if ready else {"status": "starting", "reasons": ["probes are running"]}
            self._send_json(200 if ready else 503, body)
        else:
            self._send_json(404, {"error": self.path})

    def do_POST(self) -> None:
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stub.requests.append(
            Seen(
                path=self.path,
                request_id=self.headers.get("x-request-id", ""),
                session_id=self.headers.get("x-session-id", ""),
                role=self.headers.get("x-attention-role", ""),
                shadow=self.headers.get("host", "").split(":")[0].endswith("-shadow"),
                time=time.time(),
            )
        )
        while stub.hang.is_set():
            time.sleep(0.02)
        if body.get("stream"):
            self._stream(int(body.get("max_tokens", 4)))
        else:
            choice = {"index": 0, "text": "word " * int(body.get("max_tokens", 4)), "finish_reason": "length"}
            self._send_json(200, {"object": "text_completion", "choices": [choice]})

    def _stream(self, num_tokens: int) -> None:
        self._start(200, "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index in range(num_tokens):
            time.sleep(self.server.stub.token_gap_s)
            finish = "length" if index == num_tokens - 1 else None
            choice = {"index": 0, "text": "word ", "finish_reason": finish}
            self._chunk(f"data: {json.dumps({'choices': [choice]})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self._start(status, "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _start(self, status: int, kind: str) -> None:
        stub = self.server.stub
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-request-id", self.headers.get("x-request-id", ""))
        self.send_header("x-attention-release", stub.release_id)
        self.send_header("x-attention-fingerprint", "stub")
        self.send_header("x-attention-instance", stub.name)
        self.send_header("x-attention-backend", "prefill=stub,decode=stub")

    def log_message(self, *_: object) -> None:
        """Silence: the tests read `requests`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--instance", default="stub")
    parser.add_argument("--release-id", default="stub")
    parser.add_argument("--ready-after", type=float, default=0.0)
    args, _ = parser.parse_known_args()
    with StubInstance(args.instance, args.port, args.release_id, args.ready_after):
        print(f"{args.instance} listens on {args.port}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
