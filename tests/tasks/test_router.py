"""The router against a real Envoy: what users see while a release moves their traffic."""

from __future__ import annotations

import collections
import http.client
import json
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from attention.errors import UserError
from tasks import envoy_config as config
from tasks.processes import free_port, list_processes
from tasks.record import Shares
from tasks.router import EnvoyRouter, RouterError, StaleGenerationError
from tests.stub_instance import StubInstance


@dataclass(frozen=True)
class Site:
    """Envoy with an instance behind every role."""

    router: EnvoyRouter
    port: int
    champion: StubInstance
    control: StubInstance
    candidate: StubInstance

    def stubs(self) -> dict[str, StubInstance]:
        return {"champion": self.champion, "control": self.control, "candidate": self.candidate}


@dataclass(frozen=True)
class Answer:
    status: int
    role: str
    instance: str
    request_id: str
    complete: bool
    seconds: float


class Client:
    """One keep-alive connection, as an application holds it."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ask(
        self, *, session: str = "", request_id: str = "", stream: bool = False, tokens: int = 4, **more: str
    ) -> Answer:
        headers = {"content-type": "application/json", "x-attention-role": "a client may not choose", **more}
        if session:
            headers["x-session-id"] = session
        if request_id:
            headers["x-request-id"] = request_id
        body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": stream})
        started = time.monotonic()
        self.connection.request("POST", "/v1/completions", body, headers)
        response = self.connection.getresponse()
        text = response.read().decode()
        return Answer(
            status=response.status,
            role=response.getheader("x-attention-role", ""),
            instance=response.getheader("x-attention-instance", ""),
            request_id=response.getheader("x-request-id", ""),
            complete=text.endswith("data: [DONE]\n\n") if stream else "finish_reason" in text,
            seconds=time.monotonic() - started,
        )

    def close(self) -> None:
        self.connection.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cell = tmp_path_factory.mktemp("state") / "cpu--stub"
    router, port = EnvoyRouter(cell), free_port()
    with ExitStack() as stack:
        champion, control, candidate = (
            stack.enter_context(StubInstance(role)) for role in ("champion", "control", "candidate")
        )
        router.start(port, generation=1)
        stack.callback(router.stop)
        router.set_endpoint("champion", champion.port, generation=1)
        router.set_endpoint("control", control.port, generation=1)
        router.set_endpoint("candidate", candidate.port, generation=1)
        yield Site(router, port, champion, control, candidate)


@pytest.fixture
def site(running: Site) -> Site:
    running.router.revert(running.router.observe().generation)
    for stub in running.stubs().values():
        stub.requests.clear()
        stub.hang.clear()
        stub.token_gap_s = 0.0
    return running


def generation(site: Site) -> int:
    return site.router.observe().generation


def ask_many(site: Site, num: int, **kwargs: object) -> collections.Counter[str]:
    client = Client(site.port)
    try:
        return collections.Counter(client.ask(session=os.urandom(8).hex()).role for _ in range(num))
    finally:
        client.close()


def test_envoy_starts_with_all_traffic_on_the_champion_and_no_mirror(site: Site) -> None:
    seen = site.router.observe()
    assert (seen.shares, seen.mirror, seen.exposed()) == (Shares(), 0.0, False)
    assert seen.endpoints == {
        "champion": site.champion.port,
        "control": site.control.port,
        "candidate": site.candidate.port,
        "shadow": None,
    }


def test_shares_follow_the_weights(site: Site) -> None:
    site.router.set_shares(60, 20, 20, generation(site))
    served = ask_many(site, 1000)
    # Binomial(1000, 0.2): 5 standard deviations are 63.
    assert abs(served["candidate"] - 200) < 63 and abs(served["control"] - 200) < 63
    assert sum(served.values()) == 1000
    counted = {role: len(stub.live()) for role, stub in site.stubs().items()}
    assert counted == served


def test_a_share_of_zero_gets_exactly_nothing(site: Site) -> None:
    before = site.router.observe().requests
    assert ask_many(site, 500) == {"champion": 500}
    after = site.router.observe().requests
    assert after["champion"] - before["champion"] == 500
    assert (after["candidate"], after["control"]) == (before["candidate"], before["control"])
    assert site.candidate.requests == site.control.requests == []


def test_a_session_stays_where_it_is_while_shares_grow(site: Site) -> None:
    sessions = [os.urandom(8).hex() for _ in range(60)]
    client = Client(site.port)
    on_candidate: list[set[str]] = []
    for share in (5, 20, 50):
        site.router.set_shares(100 - 2 * share, share, share, generation(site))
        served = {session: {client.ask(session=session).role for _ in range(3)} for session in sessions}
        assert all(len(roles) == 1 for roles in served.values()), "a session was served by two roles"
        on_candidate.append({session for session, roles in served.items() if roles == {"candidate"}})
    client.close()
    assert on_candidate[0] <= on_candidate[1] <= on_candidate[2]


def test_the_instance_and_the_client_are_told_the_role_whatever_the_client_claims(site: Site) -> None:
    site.router.set_shares(0, 0, 100, generation(site))
    client = Client(site.port)
    answer = client.ask()
    client.close()
    assert (answer.role, answer.instance) == ("candidate", "candidate")
    assert [seen.role for seen in site.candidate.requests] == ["candidate"]


def test_a_request_id_of_the_client_is_kept_and_a_missing_one_is_made(site: Site) -> None:
    client = Client(site.port)
    kept, uuid = "order 4711/a", "7b1e4a0c-0000-4000-8000-000000000001"
    answers = [client.ask(request_id=kept), client.ask(request_id=uuid), client.ask()]
    client.close()
    assert [seen.request_id for seen in site.champion.requests] == [a.request_id for a in answers]
    assert answers[0].request_id == kept and answers[1].request_id == uuid and answers[2].request_id


def test_the_mirror_copies_requests_under_their_own_id_and_counts_apart(site: Site) -> None:
    before = site.router.observe().requests
    site.router.set_mirror(1.0, "candidate", generation=generation(site))
    client = Client(site.port)
    sent = [f"pair-{index}" for index in range(20)]
    for index, name in enumerate(sent):
        assert client.ask(request_id=name, stream=index % 2 == 0).role == "champion"
    client.close()
    wait_until(lambda: len(site.candidate.shadows()) == 20)
    assert sorted(seen.request_id for seen in site.candidate.shadows()) == sorted(sent)
    assert site.candidate.live() == [] and site.champion.shadows() == []
    after = site.router.observe().requests
    assert (after["shadow"] - before["shadow"], after["candidate"] - before["candidate"]) == (20, 0)


@pytest.mark.parametrize("host", ["evil-shadow", "evil-shadow:80", "evil:80-shadow", "shadow"])
def test_a_client_cannot_pass_for_a_copy_and_a_copy_is_known_nonetheless(site: Site, host: str) -> None:
    site.router.set_shares(0, 0, 100, generation(site))
    site.router.set_mirror(1.0, "control", generation=generation(site))
    client = Client(site.port)
    assert client.ask(request_id="hidden", host=host, **{"x-attention-role": "shadow"}).role == "candidate"
    client.close()
    wait_until(lambda: len(site.control.requests) == 1)
    assert [(seen.request_id, seen.shadow) for seen in site.candidate.requests] == [("hidden", False)]
    assert [(seen.request_id, seen.shadow) for seen in site.control.requests] == [("hidden", True)]


def test_a_mirror_fraction_copies_that_part(site: Site) -> None:
    site.router.set_mirror(0.3, "candidate", generation=generation(site))
    assert site.router.observe().mirror == pytest.approx(0.3)
    client = Client(site.port)
    for _ in range(400):
        client.ask()
    client.close()
    time.sleep(0.2)
    copied = len(site.candidate.shadows())
    assert 120 - 5 * 9.2 < copied < 120 + 5 * 9.2


def test_a_hanging_mirror_target_does_not_hurt_users(site: Site) -> None:
    site.router.set_mirror(1.0, "candidate", generation=generation(site))
    site.candidate.hang.set()
    client = Client(site.port)
    answers = [client.ask() for _ in range(200)]
    client.close()
    assert {answer.status for answer in answers} == {200}
    assert sorted(answer.seconds for answer in answers)[100] < 0.05
    assert len(site.candidate.requests) <= config.SHADOW_CONCURRENCY
    assert site.router.observe().counts["shadow"].overflow > 0


def test_a_mirror_to_nobody_is_refused(site: Site, tmp_path: Path) -> None:
    site.router.set_endpoint("control", None, generation=generation(site))
    with pytest.raises(RouterError, match="no instance stands behind control"):
        site.router.set_mirror(1.0, "control", generation=generation(site))
    site.router.set_endpoint("control", site.control.port, generation=generation(site))


def test_changing_shares_and_endpoints_under_load_loses_nothing(site: Site) -> None:
    for stub in site.stubs().values():
        stub.token_gap_s = 0.003
    answers: list[Answer] = []
    failures: list[str] = []
    done = threading.Event()

    def user() -> None:
        client = Client(site.port)
        chooser = random.Random(threading.get_ident())
        while not done.is_set():
            try:
                answer = client.ask(session=os.urandom(8).hex(), stream=chooser.random() < 0.5, tokens=8)
            except (OSError, http.client.HTTPException) as error:
                failures.append(repr(error))
                client = Client(site.port)
                time.sleep(0.1)
                continue
            answers.append(answer)
            time.sleep(0.02)
        client.close()

    users = [threading.Thread(target=user, daemon=True) for _ in range(4)]
    for thread in users:
        thread.start()
    with StubInstance("champion again") as second:
        confirmations = []
        for share in (5, 20, 50, 20, 0):
            time.sleep(0.55)
            started = time.monotonic()
            site.router.set_shares(100 - 2 * share, share, share, generation(site))
            confirmations.append(time.monotonic() - started)
        after_rollback = time.time()
        time.sleep(0.3)
        site.router.set_endpoint("champion", second.port, generation=generation(site))
        time.sleep(0.5)
        site.router.set_endpoint("champion", site.champion.port, generation=generation(site))
        time.sleep(0.3)
        done.set()
        for thread in users:
            thread.join()
        assert second.requests, "the new endpoint served nothing"
    assert failures == []
    assert len(answers) > 200
    assert all(answer.status == 200 and answer.complete for answer in answers)
    late = [seen for seen in site.candidate.requests if seen.time > after_rollback + 0.02]
    assert late == [], "the candidate was asked after its share was confirmed 0"
    print(f"{len(answers)} requests; shares confirmed within {max(confirmations) * 1000:.0f} ms")
    assert max(confirmations) < 0.5


def test_a_broken_route_file_keeps_the_old_shares(site: Site) -> None:
    site.router.set_shares(60, 20, 20, generation(site))
    good = config.routes_file(site.router.cell).read_text()
    broken = config.routes_file(site.router.cell).with_name("broken")
    broken.write_text(good.replace('"weight": 60', '"weight": "many"'))
    broken.rename(config.routes_file(site.router.cell))
    time.sleep(0.2)
    assert site.router.observe().shares == Shares(champion=60, control=20, candidate=20)
    assert ask_many(site, 200)["candidate"] > 0
    # The next order mends it.
    site.router.revert(generation(site))
    assert site.router.observe().shares == Shares()


def test_an_order_that_envoy_refuses_is_an_error_not_a_success(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.router.CONFIRM_S", 0.3)
    render = config.render_routes
    monkeypatch.setattr(config, "render_routes", lambda routes: render(routes).replace('"prefix"', '"prefx"'))
    with pytest.raises(RouterError, match="did not confirm"):
        site.router.set_shares(60, 20, 20, generation(site))
    assert site.router.observe().shares == Shares()


def test_an_order_of_an_older_generation_is_refused(site: Site) -> None:
    newest = generation(site) + 5
    site.router.revert(newest)
    with pytest.raises(StaleGenerationError, match=f"generation {newest}"):
        site.router.set_shares(60, 20, 20, newest - 1)
    with pytest.raises(StaleGenerationError):
        site.router.set_endpoint("champion", site.candidate.port, generation=0)
    assert site.router.observe().shares == Shares()
    site.router.set_shares(60, 20, 20, newest)  # the same generation may be given again


def test_the_admin_is_a_private_socket_with_a_short_path(site: Site) -> None:
    bootstrap = json.loads(config.bootstrap_file(site.router.cell).read_text())
    path = Path(bootstrap["admin"]["address"]["pipe"]["path"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(path)) <= config.MAX_SOCKET_PATH


def test_a_port_in_use_is_named_with_its_owner(site: Site, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^port {site.port} is in use \(pid \d+ .*envoy.*ATTENTION_RELEASE_PORT$"):
        EnvoyRouter(tmp_path / "cpu--other").start(site.port)


def test_a_dead_champion_is_not_hidden_behind_another_role(site: Site) -> None:
    site.router.set_endpoint("champion", free_port(), generation=generation(site))
    client = Client(site.port)
    answer = client.ask()
    client.close()
    site.router.set_endpoint("champion", site.champion.port, generation=generation(site))
    assert (answer.status, answer.role) == (503, "champion")
    assert site.candidate.requests == site.control.requests == []


def test_envoy_restarts_where_it_was_for_a_living_release_and_safe_otherwise(tmp_path: Path) -> None:
    router, port = EnvoyRouter(tmp_path / "cpu--again"), free_port()
    try:
        router.start(port, generation=1)
        router.set_endpoint("champion", 1234, generation=3)
        router.set_shares(60, 20, 20, generation=3)
        router.stop()
        assert router.process() is None and list_processes(router.cell) == []
        with pytest.raises(RouterError, match="is it up"):
            router.observe()
        router.start(port, keep_traffic=True)
        seen = router.observe()
        assert (seen.shares.candidate, seen.generation, seen.endpoints["champion"]) == (20, 3, 1234)
        router.stop()
        router.start(port, generation=4)
        seen = router.observe()
        assert (seen.shares, seen.generation, seen.endpoints["champion"]) == (Shares(), 4, None)
    finally:
        router.stop()


def wait_until(condition: object, timeout_s: float = 3.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
