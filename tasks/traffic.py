"""Users, played: recorded requests sent through the router as clients would send them.

Arrivals are open-loop at the plan's rate (a slow server does not slow its users down), with a bound
on requests in flight, so that a demo on two cores cannot drown itself. Each arm has its share of that
bound: one bound for all was seen to leave ten requests on one of two equal arms and one on the other,
which then compare by their load. Each request carries an `x-request-id`, which pairs it with its shadow,
and an `x-session-id`, which keeps a conversation on one arm; sessions are new in every pass over the file.

A streamed reply counts as whole only with its `[DONE]`: a backend that dies mid-stream leaves status
200 and a torso.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import httpx
import xxhash

from data.requests import TrafficRequest
from gates.served import ClientOutcome
from tasks.record import Shares

TIMEOUT_S = 120.0
TICK_S = 0.5
RETRIES = 2  # of a connection that was refused before a byte was sent
DRAIN_S = 10.0  # that requests in flight get when a play is cut short
OTHERS = ("champion", "control", "router")  # whose losses say nothing about a candidate


@dataclass(frozen=True)
class Reply:
    """What the client saw of one request."""

    request_id: str
    status: int  # 0: no HTTP answer
    complete: bool  # answered to its end
    role: str  # x-attention-role, who served; of no answer at all, whom the ring gave it to, or `router` if it was away
    release: str  # x-attention-release, as the instance says
    seconds: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.complete


@dataclass
class Played:
    """Replies so far, and why the play was cut short, if it was."""

    replies: list[Reply] = field(default_factory=list)
    sent: int = 0
    begun: Counter[str] = field(default_factory=Counter)  # replies whose headers came, by role: whole or not yet
    stopped: str | None = None

    def of(self, role: str) -> int:
        """Complete replies that this role served."""
        return sum(reply.ok and reply.role == role for reply in self.replies)

    def outcome(self) -> ClientOutcome:
        ok = sum(reply.ok for reply in self.replies)
        beside = Counter(reply.role for reply in self.replies if not reply.ok and reply.role in OTHERS)
        return ClientOutcome(sent=self.sent, ok=ok, lost=self.sent - ok, elsewhere=dict(beside))


def endless(requests: Sequence[TrafficRequest], start: int = 0) -> Iterator[tuple[float, TrafficRequest]]:
    """(arrival second, request) from the `start`-th on, over and over, with new sessions in each pass.

    Session ids are dealt evenly over the router's hash ring, so that a few hundred users give every arm its
    share, and equal arms an equal load: with ids left to chance, 57 % and 43 % of the load on two equal arms were
    seen, and their latencies told of that instead of the candidate.
    """
    if not requests:
        raise ValueError("no requests to play")
    deal, sessions = _dealt(), dict[tuple[str, int], str]()
    span = requests[-1].t_s - requests[0].t_s + (requests[-1].t_s / max(1, len(requests) - 1))
    base = requests[start % len(requests)].t_s
    for index in itertools.count(start):
        turn, place = divmod(index, len(requests))
        request = requests[place]
        arrival = request.t_s + turn * span - base - (start // len(requests)) * span
        key = (request.session_id, turn)
        if key not in sessions:
            sessions[key] = next(deal)
        yield arrival, request.model_copy(update={"session_id": sessions[key]})


def ring_position(session_id: str) -> int:
    """Percent at which Envoy's weighted clusters place a session: xxHash64 of the header, modulo the weights' sum."""
    return xxhash.xxh64_intdigest(session_id.encode()) % 100


def role_on_ring(session_id: str, shares: Shares) -> str:
    """The role that Envoy sends a session to; the order of its weighted clusters stands in tasks/envoy_config.py."""
    position = ring_position(session_id)
    if position < shares.control:
        return "control"
    return "champion" if position < shares.control + shares.champion else "candidate"


def _dealt() -> Iterator[str]:
    """Session ids whose ring positions fill 0..99 evenly, in the order of a van der Corput sequence."""
    tag = uuid.uuid4().hex[:8]
    for number in itertools.count():
        wanted = int(_van_der_corput(number) * 100)
        yield next(name for name in (f"{tag}-{number}-{i}" for i in itertools.count()) if ring_position(name) == wanted)


def _van_der_corput(number: int) -> float:
    """The bits of `number` mirrored at the binary point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    return sum((number >> bit & 1) / (2 << bit) for bit in range(number.bit_length()))


def play(
    arrivals: Iterator[tuple[float, TrafficRequest]],
    url: str,
    *,
    max_in_flight: int,
    enough: Callable[[Played], bool],
    most: int,
    tick: Callable[[Played], str | None] = lambda played: None,
    model: str | None = None,
    shares: Shares | None = None,
) -> Played:
    """Send requests until `enough`, or `most` were sent, or `tick` (every 0.5 s) gives a reason to stop.

    What was sent is counted: requests in flight are waited for, `DRAIN_S` where there was a reason to stop, and
    what is not answered by then is lost. Exceptions of `tick` pass through after that. `shares`, the router's, split
    `max_in_flight` between the arms, and tell who lost a request that nobody answered.
    """
    return asyncio.run(_play(arrivals, url, max_in_flight, enough, most, tick, model, shares))


async def _play(
    arrivals: Iterator[tuple[float, TrafficRequest]],
    url: str,
    max_in_flight: int,
    enough: Callable[[Played], bool],
    most: int,
    tick: Callable[[Played], str | None],
    model: str | None,
    shares: Shares | None,
) -> Played:
    played, tasks = Played(), set[asyncio.Task[None]]()
    rooms = {role: asyncio.Semaphore(num) for role, num in _most_of_each(max_in_flight, shares).items()}
    limits = httpx.Limits(max_connections=max_in_flight + 4)
    failure: list[BaseException] = []

    async def one(client: httpx.AsyncClient, request: TrafficRequest, role: str) -> None:
        try:
            reply = await _send(client, request, model, played.begun)
        except asyncio.CancelledError:
            reply = Reply("", 0, False, "", "", 0.0, "not answered when the play was cut short")
        try:
            played.replies.append(reply if reply.role else replace(reply, role=role))
        finally:
            rooms[role].release()

    async def ticking() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                played.stopped = played.stopped or await asyncio.to_thread(tick, played)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                failure.append(error)
                played.stopped = played.stopped or f"{type(error).__name__}: {error}"
                return

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        ticker = asyncio.create_task(ticking())
        started = time.monotonic()

        def over() -> bool:
            return played.stopped is not None or enough(played)

        try:
            while played.sent < most and not over():
                arrival, request = next(arrivals)
                await _until(started + arrival, over)
                role = role_on_ring(request.session_id, shares) if shares is not None else ""
                if not await _acquired(rooms[role], over):
                    break
                played.sent += 1
                task = asyncio.create_task(one(client, request, role))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks and played.stopped is None:
                await asyncio.wait(tasks, timeout=0.1)
            if tasks:
                await asyncio.wait(tasks, timeout=DRAIN_S)
        finally:  # also of a Ctrl-C, which waits for nobody
            ticker.cancel()
            for late in tasks:
                late.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
    if failure:
        raise failure[0]
    return played


def _most_of_each(max_in_flight: int, shares: Shares | None) -> dict[str, int]:
    """Requests that each arm may hold at once: its share of them all, rounded up. One nameless arm without shares."""
    if shares is None:
        return {"": max_in_flight}
    return {role: math.ceil(max_in_flight * share / 100) for role, share in shares.model_dump().items()}


async def _acquired(room: asyncio.Semaphore, stop: Callable[[], bool]) -> bool:
    """Whether there was room before it was time to stop: requests that hang would keep all of it."""
    while not stop():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await room.acquire()
            return True
    return False


async def _until(moment: float, stop: Callable[[], bool]) -> None:
    while (left := moment - time.monotonic()) > 0 and not stop():
        await asyncio.sleep(min(left, 0.1))


async def _send(client: httpx.AsyncClient, request: TrafficRequest, model: str | None, begun: Counter[str]) -> Reply:
    request_id = str(uuid.uuid4())
    headers = {"x-request-id": request_id, "x-session-id": request.session_id}
    payload = request.payload()
    if model is not None:
        payload["model"] = model
    started = time.perf_counter()
    for attempt in itertools.count():
        try:
            async with client.stream("POST", request.endpoint, json=payload, headers=headers) as response:
                role = response.headers.get("x-attention-role", "")
                begun[role] += response.status_code == 200
                complete = await _read(response, bool(payload.get("stream")))
                return Reply(
                    request_id=request_id,
                    status=response.status_code,
                    complete=complete,
                    role=role,
                    release=response.headers.get("x-attention-release", ""),
                    seconds=time.perf_counter() - started,
                )
        except httpx.ConnectError as error:
            if attempt < RETRIES:
                await asyncio.sleep(0.05)
                continue
            return _lost(request_id, started, error, role="router")
        except httpx.HTTPError as error:
            return _lost(request_id, started, error)
    raise AssertionError("unreachable: every attempt returns or retries")


def _lost(request_id: str, started: float, error: httpx.HTTPError, role: str = "") -> Reply:
    what = f"{type(error).__name__}: {error}"
    return Reply(request_id, 0, False, role, "", time.perf_counter() - started, what)


async def _read(response: httpx.Response, stream: bool) -> bool:
    """Read the body; whether it came to its end."""
    if not stream or response.status_code != 200:
        body = await response.aread()
        return response.status_code == 200 and b"finish_reason" in body
    done = False
    async for line in response.aiter_lines():
        done = done or line.strip() == "data: [DONE]"
    return done
