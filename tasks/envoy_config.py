"""What Envoy is told: one bootstrap, one route file, one endpoint file a cluster.

The bootstrap is fixed for the life of Envoy: a listener on loopback, four clusters (one a role, and
`shadow` for the mirror) and an admin socket that only this user can reach. What a release changes
lies in files that are replaced by rename and watched by Envoy:

- `rds.json`: shares of the three roles and the mirrored fraction, in one file, so that both change at
  once. A hash of `x-session-id` decides, so a session stays where it is; control and candidate sit at
  the two ends of the hash range, so that both sets of sessions only grow while their shares grow.
- `eds-<cluster>.json`: the port behind a cluster.

A version is `<generation>.<serial>`: the generation of the release record, and a count of writes
that tells Envoy's answer about this write from the one before. No route, no mirror and no retry ever
leads from one role to another: a failover would hide a dead candidate behind the champion.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attention.errors import UserError
from tasks.record import Shares

Role = Literal["champion", "control", "candidate"]
Cluster = Literal["champion", "control", "candidate", "shadow"]
CLUSTERS: tuple[Cluster, ...] = ("champion", "control", "candidate", "shadow")

MAX_SOCKET_PATH = 107  # sun_path holds 108 bytes with its end
MILLION = 1_000_000
SHADOW_CONCURRENCY = 8  # shadows beyond it are dropped, so a hanging candidate holds no more than this
SHADOW_MAX_S = 120  # a hanging shadow gives its place back after this
# Below the 5 s after which an HTTP server (uvicorn) closes an idle connection: reuse would race it.
UPSTREAM_IDLE_S = 3
STREAM_IDLE_S = 300  # no byte either way for this long ends a stream; a token gap is far below

_ROUTE = "attention"
_HOST = "attention"  # of every request upstream; Envoy appends `-shadow` to it for the copy that it mirrors
_TYPE = "type.googleapis.com/"
# What JSON of another shape raises where it is read: a number for a text, a list for a mapping, Infinity.
_NOT_OURS = (KeyError, IndexError, TypeError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Version:
    """Generation of the release record, and the count of writes to this file."""

    generation: int
    serial: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.serial}"

    @classmethod
    def parse(cls, text: str) -> Version:
        generation, _, serial = text.partition(".")
        return cls(int(generation), int(serial))


@dataclass(frozen=True)
class Routes:
    """Content of the route file."""

    version: Version
    shares: Shares
    mirror: float  # fraction of live requests that is copied to `shadow`


def admin_socket(cell: Path) -> Path:
    """Path of the admin socket, in a folder that only this user can enter.

    A cell's own folder may be too deep for a socket, so it is named by a hash of it under the
    temporary folder. Raises UserError if somebody else owns that folder or the path is too long.
    """
    digest = hashlib.sha256(str(cell.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"attention-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{folder}: belongs to somebody else: remove it or set TMPDIR to another folder")
    folder.chmod(0o700)
    path = folder / "admin"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise UserError(f"{path}: longer than the {MAX_SOCKET_PATH} bytes of a socket: set a shorter TMPDIR")
    return path


def render_bootstrap(cell: Path, port: int, socket: Path) -> str:
    """Listener on 127.0.0.1:`port`, four clusters, admin on `socket` (mode 0600)."""
    listener = {
        "name": "ingress",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        # Two Envoys must not share a port unseen.
        "enable_reuse_port": False,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": _connection_manager(cell)}]}],
    }
    return _dump(
        {
            "node": {"id": "attention-release", "cluster": "attention-release"},
            "admin": {"address": {"pipe": {"path": str(socket), "mode": 0o600}}},
            "static_resources": {
                "listeners": [listener],
                "clusters": [_cluster(cell, cluster) for cluster in CLUSTERS],
            },
        }
    )


def render_routes(routes: Routes) -> str:
    """The route file: shares and mirror in one."""
    shares = routes.shares
    weighted = [
        _weighted("control", shares.control),
        _weighted("champion", shares.champion),
        _weighted("candidate", shares.candidate),
    ]
    action: dict[str, Any] = {
        "weighted_clusters": {"clusters": weighted, "use_hash_policy": True},
        "hash_policy": [{"header": {"header_name": "x-session-id"}}],
        # A client that calls itself `evil-shadow` would be taken for a copy, which no gate counts.
        "host_rewrite_literal": _HOST,
        "timeout": "0s",  # a stream of tokens has no natural end
        "retry_policy": {"retry_on": "connect-failure", "num_retries": 2},
    }
    if routes.mirror > 0:
        fraction = {"numerator": round(routes.mirror * MILLION), "denominator": "MILLION"}
        action["request_mirror_policies"] = [{"cluster": "shadow", "runtime_fraction": {"default_value": fraction}}]
    resource = {
        "@type": f"{_TYPE}envoy.config.route.v3.RouteConfiguration",
        "name": _ROUTE,
        # Envoy reports a new version only where the resource itself differs.
        "metadata": {"filter_metadata": {"attention": {"version": str(routes.version)}}},
        "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": action}]}],
    }
    return _dump({"version_info": str(routes.version), "resources": [resource]})


def parse_routes(document: str) -> Routes:
    """The inverse of `render_routes`. Raises ValueError for anything else."""
    try:
        content = json.loads(document)
        resource = content["resources"][0]
        return Routes(Version.parse(content["version_info"]), *parse_route_config(resource))
    except _NOT_OURS as error:
        raise ValueError(f"not a route file: {error!r}") from error


def parse_route_config(resource: dict[str, Any]) -> tuple[Shares, float]:
    """Shares and mirrored fraction of a RouteConfiguration, ours or as Envoy's admin prints it."""
    action = resource["virtual_hosts"][0]["routes"][0]["route"]
    weights = {c["name"]: c.get("weight", 0) for c in action["weighted_clusters"]["clusters"]}
    mirror = 0.0
    for policy in action.get("request_mirror_policies", []):
        mirror = policy["runtime_fraction"]["default_value"]["numerator"] / MILLION
    return Shares(**weights), mirror


def render_endpoint(cluster: Cluster, port: int | None, version: Version) -> str:
    """The endpoint file of a cluster; None: nothing stands behind it, requests get a 503."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    endpoints = [] if port is None else [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    resource = {
        "@type": f"{_TYPE}envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": endpoints,
    }
    return _dump({"version_info": str(version), "resources": [resource]})


def parse_endpoint(document: str) -> tuple[Version, int | None]:
    """The inverse of `render_endpoint`. Raises ValueError for anything else."""
    try:
        content = json.loads(document)
        version = Version.parse(content["version_info"])
        for locality in content["resources"][0]["endpoints"]:
            address = locality["lb_endpoints"][0]["endpoint"]["address"]
            return version, int(address["socket_address"]["port_value"])
        return version, None
    except _NOT_OURS as error:
        raise ValueError(f"not an endpoint file: {error!r}") from error


def routes_file(cell: Path) -> Path:
    return cell / "rds.json"


def endpoint_file(cell: Path, cluster: Cluster) -> Path:
    return cell / f"eds-{cluster}.json"


def bootstrap_file(cell: Path) -> Path:
    return cell / "envoy.json"


def _connection_manager(cell: Path) -> dict[str, Any]:
    return {
        "@type": f"{_TYPE}envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "stream_idle_timeout": f"{STREAM_IDLE_S}s",
        # The id pairs a shadow with its primary: the client's own is kept as it is, to the bit.
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": f"{_TYPE}envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            }
        },
        "rds": {"route_config_name": _ROUTE, "config_source": _watched(routes_file(cell))},
        "http_filters": [
            {
                "name": "router",
                "typed_config": {
                    "@type": f"{_TYPE}envoy.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            }
        ],
    }


def _cluster(cell: Path, cluster: Cluster) -> dict[str, Any]:
    common: dict[str, Any] = {"idle_timeout": f"{UPSTREAM_IDLE_S}s"}
    rendered: dict[str, Any] = {
        "name": cluster,
        "type": "EDS",
        "connect_timeout": "1s",
        "eds_cluster_config": {"eds_config": _watched(endpoint_file(cell, cluster))},
    }
    if cluster == "shadow":
        common["max_stream_duration"] = f"{SHADOW_MAX_S}s"
        limits = ("max_connections", "max_pending_requests", "max_requests")
        rendered["circuit_breakers"] = {"thresholds": [dict.fromkeys(limits, SHADOW_CONCURRENCY)]}
    rendered["typed_extension_protocol_options"] = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "common_http_protocol_options": common,
            "explicit_http_config": {"http_protocol_options": {}},
        }
    }
    return rendered


def _watched(path: Path) -> dict[str, Any]:
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}


def _weighted(role: Role, weight: int) -> dict[str, Any]:
    says = {
        "header": {"key": "x-attention-role", "value": role},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",  # whatever a client or an instance claims
    }
    return {
        "name": role,
        "weight": weight,
        "request_headers_to_add": [says],
        "response_headers_to_add": [says],
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
