"""Users as they are played: what is counted, what is lost, and who serves whom."""

from __future__ import annotations

import http.server
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from data.requests import RequestBody, TrafficRequest
from tasks.processes import free_port
from tasks.record import Shares
from tasks.router import EnvoyRouter
from tasks.traffic import Played, endless, play, ring_position, role_on_ring
from tests.stub_instance import StubInstance


def requests(
    num: int, *, stream: bool = False, gap_s: float = 0.0, sessions: int | None = None
) -> list[TrafficRequest]:
    return [
        TrafficRequest(
            custom_id=f"r{index}",
            endpoint="/v1/completions",
            body=RequestBody(model="m", prompt="a", max_tokens=2, stream=stream),
            t_s=index * gap_s,
            session_id=f"s{index % (sessions or num)}",
            category="chat",
            language="en",
        )
        for index in range(num)
    ]


def run(played: list[TrafficRequest], port: int, most: int, **options: object) -> Played:
    chosen: dict[str, object] = {"max_in_flight": 4, "enough": lambda so_far: False, **options}
    return play(endless(played), f"http://127.0.0.1:{port}", most=most, **chosen)  # type: ignore[arg-type]


@contextmanager
def server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[int]:
    """A server that answers every POST by `answer`; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer(self)

        def log_message(self, *_: object) -> None:
            """Silence."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


def send(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


# ------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_answered_to_its_end_is_whole(stream: bool) -> None:
    with StubInstance("champion", release_id="r7") as stub:
        played = run(requests(5, stream=stream), stub.port, 12)
    outcome = played.outcome()
    assert (outcome.sent, outcome.ok, outcome.lost) == (12, 12, 0)
    assert {reply.release for reply in played.replies} == {"r7"}
    ids = [reply.request_id for reply in played.replies]
    assert len(set(ids)) == 12 and sorted(ids) == sorted(seen.request_id for seen in stub.requests)


def test_a_stream_without_its_end_is_lost_although_its_status_is_200() -> None:
    def torso(handler: http.server.BaseHTTPRequestHandler) -> None:
        send(handler, 200, b'data: {"choices": [{"text": "word"}]}\n\n', content_type="text/event-stream")

    with server(torso) as port:
        played = run(requests(2, stream=True), port, 2)
    assert [(reply.status, reply.complete) for reply in played.replies] == [(200, False)] * 2
    assert played.outcome().lost == 2


def test_a_connection_that_breaks_in_the_middle_is_lost() -> None:
    def broken(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"5\r\ndata:\r\n")
        handler.close_connection = True

    with server(broken) as port:
        played = run(requests(2, stream=True), port, 2)
    assert played.outcome().lost == 2
    assert all("RemoteProtocolError" in reply.error for reply in played.replies)


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, b'{"error": "no capacity"}'), (200, b'{"choices": []}'), (404, b'{"finish_reason": "stop"}')],
)
def test_an_answer_that_is_no_completion_is_lost(status: int, body: bytes) -> None:
    with server(lambda handler: send(handler, status, body)) as port:
        played = run(requests(1), port, 1)
    assert played.outcome().lost == 1
    assert played.replies[0].status == status


def test_nobody_there_is_lost_and_not_an_exception() -> None:
    played = run(requests(1), free_port(), 2)
    assert played.outcome().lost == 2
    assert all(reply.status == 0 and "ConnectError" in reply.error for reply in played.replies)


# ------------------------------------------------------------------------------ when it ends


def test_it_ends_when_there_is_enough_and_waits_for_what_is_in_flight() -> None:
    with StubInstance("champion") as stub:
        stub.token_gap_s = 0.05
        played = run(requests(8, stream=True), stub.port, 100, enough=lambda so_far: so_far.sent >= 6)
        assert len(stub.requests) == 6
    assert (played.sent, len(played.replies), played.outcome().lost) == (6, 6, 0)


def test_no_more_are_in_flight_than_allowed() -> None:
    lock, open_now, most_open = threading.Lock(), 0, 0

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        nonlocal open_now, most_open
        with lock:
            open_now += 1
            most_open = max(most_open, open_now)
        time.sleep(0.05)
        with lock:
            open_now -= 1
        send(handler, 200, b'{"choices": [{"finish_reason": "stop"}]}')

    with server(slow) as port:
        played = run(requests(12), port, 12, max_in_flight=3)
    assert (played.outcome().ok, most_open) == (12, 3)


def test_an_arm_that_hangs_holds_no_more_than_its_share_of_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.traffic.DRAIN_S", 0.1)
    shares = Shares(champion=60, control=20, candidate=20)
    asked, hanging = Counter[str](), threading.Event()

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        role = role_on_ring(handler.headers["x-session-id"], shares)
        asked[role] += 1
        if role == "candidate":
            hanging.wait(20)
        with suppress(OSError):
            send(handler, 200, b'{"choices": [{"finish_reason": "stop"}]}')

    until = time.monotonic() + 1.0
    with server(slow) as port:
        run(
            requests(100),
            port,
            100,
            shares=shares,
            max_in_flight=8,
            tick=lambda so_far: "that was a second" if time.monotonic() > until else None,
        )
        hanging.set()
    assert asked["candidate"] == 2  # 20 % of 8, rounded up
    assert asked["champion"] >= 3  # who answer go on up to the request that has no room


def test_a_reason_to_stop_ends_it_at_the_next_tick() -> None:
    with StubInstance("champion") as stub:
        started = time.monotonic()
        played = run(requests(50, gap_s=0.1), stub.port, 1000, tick=lambda so_far: "NaN logits")
    assert played.stopped == "NaN logits"
    assert 0 < played.sent < 50 and time.monotonic() - started < 5


def test_an_exception_of_a_tick_comes_through_after_the_last_reply() -> None:
    def tick(so_far: Played) -> str | None:
        raise RuntimeError("the lease is lost")

    with StubInstance("champion") as stub:
        with pytest.raises(RuntimeError, match="the lease is lost"):
            run(requests(50, gap_s=0.1), stub.port, 1000, tick=tick)
        seen = len(stub.requests)
        time.sleep(0.3)
        assert len(stub.requests) == seen


def test_arrivals_are_kept_whatever_the_server_does() -> None:
    with StubInstance("champion") as stub:
        run(requests(6, gap_s=0.1), stub.port, 6)
        times = [seen.time for seen in stub.requests]
    assert times[-1] - times[0] == pytest.approx(0.5, abs=0.2)


# ------------------------------------------------------------------------------ who serves whom


def test_every_pass_has_new_sessions_and_keeps_the_turns_of_one_together() -> None:
    played = list(itertools.islice(endless(requests(6, gap_s=1.0, sessions=3)), 18))
    arrivals = [moment for moment, _ in played]
    assert arrivals == pytest.approx([float(second) for second in range(18)])
    passes = [[request.session_id for _, request in played[start : start + 6]] for start in (0, 6, 12)]
    assert all(sessions[:3] == sessions[3:] and len(set(sessions)) == 3 for sessions in passes)
    assert len({name for sessions in passes for name in sessions}) == 9


def test_a_later_start_begins_at_second_zero_too() -> None:
    played = list(itertools.islice(endless(requests(6, gap_s=1.0), start=4), 4))
    assert [moment for moment, _ in played] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [request.custom_id for _, request in played] == ["r4", "r5", "r0", "r1"]


def test_nothing_to_play_is_said() -> None:
    with pytest.raises(ValueError, match="no requests"):
        next(endless([]))


def test_sessions_are_dealt_evenly_over_the_ring() -> None:
    positions = [ring_position(request.session_id) for _, request in itertools.islice(endless(requests(400)), 200)]
    for share in (5, 20, 50):
        assert sum(position < share for position in positions) == pytest.approx(2 * share, abs=4)


def test_the_ring_position_says_which_role_envoy_picks(tmp_path: Path) -> None:
    """Real Envoy: weights are laid out in the order control, champion, candidate."""
    router, shares = EnvoyRouter(tmp_path / "cell"), Shares(champion=50, control=20, candidate=30)
    with StubInstance("champion") as champion, StubInstance("control") as control, StubInstance("candidate") as new:
        router.start(free_port())
        try:
            ports = {"champion": champion.port, "control": control.port, "candidate": new.port}
            for role, port in ports.items():
                router.set_endpoint(role, port, generation=1)  # type: ignore[arg-type]
            router.set_shares(50, 20, 30, generation=1)
            assert router.port is not None
            sent = requests(100)
            played = run(sent, router.port, 100, max_in_flight=8)
        finally:
            router.stop()
    assert played.outcome().lost == 0
    wrong = [
        (stub.name, ring_position(seen.session_id))
        for stub in (champion, control, new)
        for seen in stub.requests
        if stub.name != role_on_ring(seen.session_id, shares)
    ]
    assert wrong == []
    served = Counter(reply.role for reply in played.replies)
    assert all(abs(served[role] - share) <= 3 for role, share in (("champion", 50), ("control", 20), ("candidate", 30)))
    assert played.begun == served


def test_who_should_have_answered_is_told_by_the_ring() -> None:
    """A connection that ends without a word is lost by the role that Envoy picked, not always by the candidate."""
    shares = Shares(champion=60, control=20, candidate=20)
    with server(lambda handler: setattr(handler, "close_connection", True)) as port:
        played = run(requests(50), port, 50, shares=shares, max_in_flight=8)
    by_role = Counter(reply.role for reply in played.replies)
    assert by_role.keys() == {"champion", "control", "candidate"}
    outcome = played.outcome()
    assert outcome.lost == 50
    assert outcome.elsewhere == {"champion": by_role["champion"], "control": by_role["control"]}


def test_a_router_that_is_away_is_nobody_elses_loss() -> None:
    outcome = run(requests(2), free_port(), 2, shares=Shares(champion=0, control=0, candidate=100)).outcome()
    assert (outcome.lost, outcome.elsewhere) == (2, {"router": 2})


def test_requests_that_hang_keep_nobody_waiting_once_there_is_a_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.traffic.DRAIN_S", 0.5)
    hanging = threading.Event()
    try:
        with server(lambda handler: hanging.wait(60)) as port:
            started = time.monotonic()
            played = run(requests(9), port, 9, max_in_flight=2, tick=lambda so_far: "it hangs")
            assert time.monotonic() - started < 5
            hanging.set()
    finally:
        hanging.set()
    assert (played.stopped, played.sent, played.outcome().lost) == ("it hangs", 2, 2)
