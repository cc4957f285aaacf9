"""Start-up of a process that serves or measures: probe, resolve the chain, load, fingerprint.

The order is the document's: before Ready, every backend of the policy is probed; one that fails gives
way to the next validated one, with an event and its reasons. So does one that a basic replay of the model, where it is
asked for, finds less exact than plain math. With none left, `prepare` raises with the whole explanation and the
instance stays unready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from attention import basic_replay
from attention.backends.base import Backend
from attention.basic_replay import Replayed
from attention.cases import Phase
from attention.decode_graphs import DecodeGraphs
from attention.dispatch import Dispatcher, FallbackEvent
from attention.faults import PROBE_CRASH, WRONG_SCALE, check_fault, faulty
from attention.fingerprint import Fingerprint, fingerprint
from attention.job import Setup
from attention.model import specs_of
from attention.model_config import resolve_dtype
from attention.policy import Policy, load_policy
from attention.probe import ProbeResult, ProbeSet, failed_reasons, probes_of
from attention.probe_workers import probe_all
from attention.reasons import Reason

if TYPE_CHECKING:
    from attention.model import Runner

WRONG_SCALE_FACTOR = 1.05

#: Backends that failed while an earlier process of this instance served.
Retired = Mapping[str, Reason]
_NONE: Retired = {}


@dataclass(frozen=True)
class Started:
    """A process that is ready: its model, its decisions, and the evidence for them."""

    runner: Runner
    dispatcher: Dispatcher
    fingerprint: Fingerprint
    probes: list[ProbeResult]
    policy: Policy
    seconds: float
    replayed: Replayed | None = None  # of the basic replay, where it was asked for

    def tolerated(self) -> dict[str, list[str]]:
        """By backend of the chains, what its probes and the replay showed that the policy does not reject."""
        served = {name for found in self.dispatcher.resolutions.values() for name in found.chain}
        shown = {name: list(reasons) for name, reasons in failed_reasons(self.probes).items() if name in served}
        if self.replayed is not None and (reason := self.replayed.reason()) is not None:
            for name in set(self.dispatcher.resolved.values()):
                shown.setdefault(name, []).append(reason)
        return {name: [str(reason) for reason in reasons] for name, reasons in shown.items()}


def scale_factor(fault: str | None) -> float:
    """What a drill multiplies the softmax scale with; 1.0 without one."""
    return WRONG_SCALE_FACTOR if check_fault(fault) == WRONG_SCALE else 1.0


def probe(
    setup: Setup,
    timeout_s: float = 120.0,
    *,
    level: ProbeSet = "startup",
    backends: tuple[str, ...] | None = None,
    jobs: int = 2,
    try_declared: bool = False,
    crash: str | None = None,
) -> list[ProbeResult]:
    """Probe every backend that the policy names (or those given), for every kind of layer of the model. In a drill the
    process that probes `crash` dies."""
    policy, dtype = load_policy(setup.policy), resolve_dtype(setup.dtype, setup.device)
    kinds = list(dict.fromkeys(specs_of(setup.model, dtype)))
    probes = [
        p for spec in kinds for p in probes_of(spec, dtype, setup.page_size, level=level, num_pages=setup.num_pages)
    ]
    # A drill's fault sits in the dispatcher, above the kernels: the gate that it is for must find it, not a probe.
    return probe_all(
        backends or policy.backends(),
        probes,
        device=setup.device,
        timeout_s=timeout_s,
        jobs=jobs,
        try_declared=try_declared,
        crash=crash,
    )


def decide(
    setup: Setup,
    probes: list[ProbeResult],
    on_event: Callable[[FallbackEvent], None] = lambda event: None,
    *,
    retired: Retired = _NONE,
    on_confirmation: Callable[[Phase, float], None] = lambda phase, added_s: None,
) -> Dispatcher:
    """The dispatcher that those probes allow, without what was retired in an earlier life of this instance. Raises
    UserError when a phase has no backend left."""
    dtype = resolve_dtype(setup.dtype, setup.device)
    policy = load_policy(setup.policy)
    failed = failed_reasons(probes).items()
    observed = {name: [reason for reason in reasons if policy.rejects(reason)] for name, reasons in failed}
    for name, reason in retired.items():
        observed.setdefault(name, []).append(reason)

    def wrap(backend: Backend) -> Backend:
        # A drill's fault stays with its backend when that one has been retired.
        return faulty(backend, setup.fault, next(iter(retired), dispatcher.chosen["decode"]))

    dispatcher = Dispatcher(
        policy,
        specs_of(setup.model, dtype),
        device=setup.device,
        page_size=setup.page_size,
        observed=observed,
        scale_factor=scale_factor(setup.fault),
        wrap=wrap,
        on_event=on_event,
        on_confirmation=on_confirmation,
    )
    return dispatcher


def identify(setup: Setup, dispatcher: Dispatcher | None = None) -> Fingerprint:
    """The fingerprint of a process with this set-up; the same for every verb."""
    import torch

    torch.set_num_threads(setup.num_threads)
    attestation = {}
    if dispatcher is not None:
        attestation = {
            "requested": dispatcher.requested,
            "resolved": dispatcher.resolved,
            "confirmed": dispatcher.confirmed,
        }
    return fingerprint(
        setup.model,
        load_policy(setup.policy),
        dtype=resolve_dtype(setup.dtype, setup.device),
        device=setup.device,
        page_size=setup.page_size,
        engine_limits={"num_pages": setup.num_pages, **asdict(setup.limits)},
        fault=setup.fault,
        attestation=attestation,
    )


def load(setup: Setup, dispatcher: Dispatcher) -> Runner:
    """The model of a set-up, its attention on that dispatcher."""
    import torch

    from attention.model import Runner

    torch.set_num_threads(setup.num_threads)
    return Runner(
        setup.model,
        dispatcher,
        dtype=setup.dtype,
        device=setup.device,
        page_size=setup.page_size,
        num_pages=setup.num_pages,
    )


def prepare(
    setup: Setup,
    on_event: Callable[[FallbackEvent], None] = lambda event: None,
    *,
    retired: Retired = _NONE,
    with_replay: bool = False,
    on_confirmation: Callable[[Phase, float], None] = lambda phase, added_s: None,
) -> Started:
    """Probe, resolve, load, replay. Raises UserError when no backend is left, a model or a policy is wrong."""
    started = time.perf_counter()
    declared = decide(setup, [], retired=retired)
    crash = declared.chosen["decode"] if setup.fault == PROBE_CRASH else None
    backends = tuple(name for name in declared.policy.backends() if name not in retired)
    # The probes run in workers; the weights are read meanwhile, under the chain that the matrix alone allows.
    with ThreadPoolExecutor(max_workers=1) as pool:
        probing = pool.submit(probe, setup, backends=backends, crash=crash)
        runner = load(setup, declared)
        probes = probing.result()
    replayed = None
    while True:
        dispatcher = runner.dispatcher = decide(
            setup, probes, on_event, retired=retired, on_confirmation=on_confirmation
        )
        if not with_replay:
            break
        replayed = basic_replay.replay(runner, specs_of(setup.model, resolve_dtype(setup.dtype, setup.device)))
        if (reason := replayed.reason()) is None or not dispatcher.policy.rejects(reason):
            break
        retired = {**retired, **dict.fromkeys(dispatcher.resolved.values(), reason)}
    if setup.limits.cuda_graphs:
        runner.graphs = DecodeGraphs(runner)
    return Started(
        runner=runner,
        dispatcher=dispatcher,
        fingerprint=identify(setup, dispatcher),
        probes=probes,
        policy=dispatcher.policy,
        seconds=time.perf_counter() - started,
        replayed=replayed,
    )
