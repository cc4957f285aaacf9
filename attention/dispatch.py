"""The dispatcher: plans a step by phase, runs every layer on the resolved backend, confirms what ran.

One per process. A step's members are split by phase (decode apart from prefill and extend), because
a policy may prefer another backend for each. What ran is confirmed on the first layer of a step
whose signature (phase, shape bucket, backend) is new or older than `CONFIRMATION_TTL_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec, Backend, Batch, Planned, case_of
from attention.cases import Phase, phase_of, shape_bucket
from attention.errors import UserError
from attention.policy import Policy, Resolution, resolve
from attention.reasons import Reason

CONFIRMATION_TTL_S = 900.0
PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
#: KV length of the batch with which each phase is resolved at start.
_START_KV = 64


@dataclass(frozen=True)
class FallbackEvent:
    """A backend gave way to another: at start, or for the requests of one step."""

    kind: str  # startup_fallback | request_fallback | backend_mismatch
    phase: str
    from_backend: str
    to_backend: str
    reasons: tuple[Reason, ...]

    @property
    def reason(self) -> str:
        """The first reason's code: a bounded label for metrics."""
        return str(self.reasons[0].code) if self.reasons else "UNCONFIRMED"


@dataclass
class PhaseRun:
    """What one phase of one step ran."""

    phase: Phase
    bucket: str
    requested: str
    resolved: str
    confirmed: str
    num_members: int
    fallback: FallbackEvent | None = None
    kernel_seconds: float = 0.0
    layers: int = 0
    first_call_seconds: float | None = None


@dataclass
class StepRecord:
    """What the last forward ran, a row a phase."""

    phases: list[PhaseRun] = field(default_factory=list)


@dataclass
class _Group:
    run: PhaseRun
    batch: Batch
    rows: torch.Tensor | None  # query rows of this group; None when it is the whole step
    backend: Backend
    plans: dict[AttentionSpec, Planned] = field(default_factory=dict)


class Dispatcher:
    """Serves one model on one device under one policy.

    specs: one AttentionSpec a layer. `observed` holds, by backend, the reasons of failed probes.
    Raises UserError when a phase has no backend left, with every reason.
    """

    def __init__(
        self,
        policy: Policy,
        specs: list[AttentionSpec],
        *,
        device: str = "cpu",
        page_size: int = 16,
        observed: dict[str, list[Reason]] | None = None,
        scale_factor: float = 1.0,
        on_event: Callable[[FallbackEvent], None] = lambda event: None,
    ) -> None:
        self.policy = policy
        self.device = device
        self.page_size = page_size
        # A drill's fault (attention/faults.py) enters here; 1.0 otherwise.
        self.specs = [replace(spec, scale=spec.scale * scale_factor) for spec in specs]
        self._observed = observed or {}
        self._on_event = on_event
        self._backends: dict[str, Backend] = {}
        self._decisions: dict[tuple[str, str, tuple[bool, ...]], Resolution] = {}
        self._confirmed: dict[tuple[str, str, str], tuple[str, float]] = {}
        self._groups: list[_Group] = []
        self._record = StepRecord()
        # What each wish (the policy's for a phase, or an override's) came to at start; later steps are held to it.
        self._at_start: dict[tuple[Phase, str], str] = {}
        self.fallbacks: list[FallbackEvent] = []
        self.resolutions: dict[Phase, Resolution] = {p: self._startup(p, _START_KV) for p in PHASES}
        self.requested: dict[Phase, str] = {p: r.requested for p, r in self.resolutions.items()}
        self.resolved: dict[Phase, str] = {p: r.chain[0] for p, r in self.resolutions.items()}
        self.confirmed: dict[Phase, str] = dict.fromkeys(PHASES, "unconfirmed(nothing ran)")
        for override in policy.overrides:
            low, high = override.kv_len
            self._startup(override.phase, max(low or 1, min(_START_KV, (high or _START_KV + 1) - 1)))

    def _startup(self, phase: Phase, kv_len: int) -> Resolution:
        """Resolve a phase before the first request; a backend left out already here is a start-up fallback."""
        q_len = {"prefill": kv_len, "decode": 1, "extend": min(16, max(1, kv_len - 1))}[phase]
        found = self._resolve(self._probe_batch(q_len, kv_len))
        if not found.chain:
            raise UserError(f"no backend of the policy can serve {phase}: {found.explain()}")
        wish = (phase, found.requested)
        if wish not in self._at_start:
            self._at_start[wish] = found.chain[0]
            if found.fell_back:
                reasons = found.excluded[found.requested]
                event = FallbackEvent("startup_fallback", phase, found.requested, found.chain[0], reasons)
                self.fallbacks.append(event)
        return found

    def _probe_batch(self, q_len: int, kv_len: int) -> Batch:
        pages = tuple(range(-(-kv_len // self.page_size)))
        return Batch((q_len,), (kv_len,), (pages,), self.page_size)

    def _resolve(self, batch: Batch) -> Resolution:
        # Layers may differ (sliding window or not): a backend must serve every distinct one.
        found: Resolution | None = None
        for spec in dict.fromkeys(self.specs):
            one = resolve(self.policy, case_of(batch, spec), self._declared, self._observed)
            if found is None:
                found = one
            else:
                chain = tuple(name for name in found.chain if name in one.chain)
                found = found.model_copy(update={"chain": chain, "excluded": {**one.excluded, **found.excluded}})
        if found is None:
            raise ValueError("a dispatcher needs at least one layer")
        return found

    def _declared(self, backend: str, case: object) -> list[Reason]:
        from attention.matrix import declared_reasons

        return declared_reasons(backend, case, device=self.device)  # type: ignore[arg-type]

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = create(name, self.device)
        return self._backends[name]

    def plan(self, batch: Batch) -> None:
        """Plan one step: split by phase, choose a backend for each part."""
        members: dict[Phase, list[int]] = {}
        for i, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            members.setdefault(phase_of(q_len, kv_len), []).append(i)
        starts = [0]
        for q_len in batch.q_lens:
            starts.append(starts[-1] + q_len)
        self._groups = []
        for phase, chosen in members.items():
            part = Batch(
                tuple(batch.q_lens[i] for i in chosen),
                tuple(batch.kv_lens[i] for i in chosen),
                tuple(batch.block_tables[i] for i in chosen),
                batch.page_size,
            )
            rows = None
            if len(members) > 1:
                index = [row for i in chosen for row in range(starts[i], starts[i + 1])]
                rows = torch.tensor(index, dtype=torch.long, device=self.device)
            self._groups.append(self._group(phase, part, rows))
        self._record = StepRecord([group.run for group in self._groups])

    def _group(self, phase: Phase, batch: Batch, rows: torch.Tensor | None) -> _Group:
        longest = max(batch.kv_lens)
        bucket = shape_bucket(phase, longest)
        # An override's range may begin inside a bucket, so the bucket alone decides nothing.
        key = (phase, bucket, tuple(override.covers(phase, longest) for override in self.policy.overrides))
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = self._resolve(batch)
        if not decision.chain:
            raise UserError(f"no backend of the policy can serve {bucket}: {decision.explain()}")
        name = decision.chain[0]
        fallback = None
        # Another backend than at start, since that one cannot serve this request: a fallback of the request.
        expected = self._at_start.get((phase, decision.requested), decision.requested)
        if expected in decision.excluded:
            reasons = decision.excluded[expected]
            fallback = FallbackEvent("request_fallback", phase, expected, name, reasons)
            if not self.policy.allow_runtime_fallback:
                raise UserError(f"the policy forbids request-level fallback for {bucket}: {decision.explain()}")
            self._on_event(fallback)
        confirmed, _ = self._confirmed.get((phase, bucket, name), ("unconfirmed(nothing ran)", 0.0))
        run = PhaseRun(phase, bucket, decision.requested, name, confirmed, len(batch.q_lens), fallback)
        return _Group(run, batch, rows, self._backend(name))

    def run(self, layer: int, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> torch.Tensor:
        """Attention of one layer of the planned step: [T, H, D_vo]."""
        spec = self.specs[layer]
        if len(self._groups) == 1:
            return self._run_group(self._groups[0], spec, q_THD, k_NPGD, v_NPGD)
        out_THD = q_THD.new_empty(q_THD.shape[0], spec.heads_q, spec.head_dim_vo)
        for group in self._groups:
            if group.rows is None:
                raise RuntimeError("a step of several phases was planned without row indices")
            part = self._run_group(group, spec, q_THD.index_select(0, group.rows), k_NPGD, v_NPGD)
            out_THD.index_copy_(0, group.rows, part)
        return out_THD

    def _run_group(
        self,
        group: _Group,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_NPGD: torch.Tensor,
        v_NPGD: torch.Tensor,
    ) -> torch.Tensor:
        planned = group.plans.get(spec)
        if planned is None:
            planned = group.plans[spec] = group.backend.plan(group.batch, spec)
        started = time.perf_counter()
        if group.run.layers == 0 and self._is_due(group.run):
            out_THD = self._confirm(group.run, planned, q_THD, k_NPGD, v_NPGD)
        else:
            out_THD, _ = planned.run(q_THD, k_NPGD, v_NPGD)
            group.run.kernel_seconds += time.perf_counter() - started
        group.run.layers += 1
        return out_THD

    def _is_due(self, run: PhaseRun) -> bool:
        key = (run.phase, run.bucket, run.resolved)
        _, at = self._confirmed.get(key, ("", float("-inf")))
        return time.monotonic() - at > CONFIRMATION_TTL_S

    def _confirm(
        self, run: PhaseRun, planned: Planned, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> torch.Tensor:
        key = (run.phase, run.bucket, run.resolved)
        started = time.perf_counter()
        (out_THD, _), confirmed = confirm.watch(lambda: planned.run(q_THD, k_NPGD, v_NPGD), device=self.device)
        if key not in self._confirmed:
            run.first_call_seconds = time.perf_counter() - started
        self._confirmed[key] = (confirmed, time.monotonic())
        run.confirmed = self.confirmed[run.phase] = confirmed
        if confirmed != run.resolved:
            self._on_event(FallbackEvent("backend_mismatch", run.phase, run.resolved, confirmed, ()))
        return out_THD

    def last_step(self) -> StepRecord:
        """What the last planned step ran; complete after its last layer."""
        return self._record
