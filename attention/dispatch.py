"""The dispatcher: plans a step, runs every layer on the resolved backends, confirms what ran.

One per process. Each member of a step gets the first backend of its own chain, by phase, KV length and what it is to
avoid; members with the same phase and backend run together, and those that fall back are a part of their own, so that
what they cost the step is seen. What ran is confirmed on the first layer of a step whose signature (phase, shape
bucket, backend) is new or older than `CONFIRMATION_TTL_S`, or, asked by who serves, in an idle moment before that.

A backend that raises ends the step with BackendFailedError. Whoever serves may `retire` it: from then on its requests
go along the chain, as request-level fallbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec, Backend, Batch, Planned, case_of
from attention.cases import Phase, phase_of, shape_bucket
from attention.confirmations import NOTHING_RAN, Confirmations, Signature
from attention.errors import UserError
from attention.fallback import FallbackEvent
from attention.policy import Policy, Resolution, resolve
from attention.reasons import Reason

__all__ = ["PHASES", "BackendFailedError", "Dispatcher", "FallbackEvent", "NoBackendError", "PhaseRun", "StepRecord"]

PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
#: KV length of the batch with which each phase is resolved at start.
_START_KV = 64
_MOST_DECISIONS = 100_000  # lengths whose decision is remembered
_clock = time.perf_counter

#: Backends that a member must not run on, with the reasons.
Avoid = Mapping[str, Reason]
_NONE: Avoid = {}


class NoBackendError(UserError):
    """The policy leaves no backend for a phase, before the first request. The text has every reason."""


class BackendFailedError(RuntimeError):
    """A backend raised while it planned or ran a part of a step: `__cause__` is what it raised."""

    def __init__(self, backend: str, phase: Phase, cause: Exception) -> None:
        super().__init__(f"{backend} failed in {phase}: {type(cause).__name__}: {cause}")
        self.backend = backend
        self.phase = phase


@dataclass
class PhaseRun:
    """What one part of one step ran: members of one phase on one backend."""

    phase: Phase
    bucket: str
    requested: str
    resolved: str
    confirmed: str
    num_members: int
    fallback: FallbackEvent | None = None  # why it is not the backend that was chosen at start
    kernel_seconds: float = 0.0
    layers: int = 0
    first_call_seconds: float | None = None
    graph_hit: bool = False  # a captured graph was replayed


@dataclass
class StepRecord:
    """What the last forward ran, a row a part; `members[i]` is the part that member i ran in."""

    phases: list[PhaseRun] = field(default_factory=list)
    members: list[PhaseRun] = field(default_factory=list)


@dataclass(frozen=True)
class _Decision:
    """What one member runs on."""

    phase: Phase
    backend: str
    requested: str
    fallback: FallbackEvent | None


@dataclass
class _Group:
    run: PhaseRun
    batch: Batch
    rows: torch.Tensor | None  # query rows of this group; None when it is the whole step
    backend: Backend
    plans: list[Planned | None]  # by kind of layer


class Dispatcher:
    """Serves one model on one device under one policy.

    specs: one AttentionSpec a layer. `observed` holds, by backend, the reasons of failed probes. `wrap` stands between
    the dispatcher and its backends in a drill. `on_event` hears of mismatches and of backends that failed; what falls
    back is in the record of its step. Raises UserError when a phase has no backend left, with every reason.
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
        wrap: Callable[[Backend], Backend] = lambda backend: backend,
        on_event: Callable[[FallbackEvent], None] = lambda event: None,
        on_confirmation: Callable[[Phase, float], None] = lambda phase, added_s: None,
    ) -> None:
        self.policy = policy
        self.device = device
        self.page_size = page_size
        # A drill's fault (attention/faults.py) enters here; 1.0 otherwise.
        self.specs = [replace(spec, scale=spec.scale * scale_factor) for spec in specs]
        if not self.specs:
            raise ValueError("a dispatcher needs at least one layer")
        # Layers of one kind share plans. By number: a spec is slow to hash, and this is asked once a layer and step.
        self._kinds = list(dict.fromkeys(self.specs))
        self._kind_of = [self._kinds.index(spec) for spec in self.specs]
        self._observed = {backend: list(reasons) for backend, reasons in (observed or {}).items()}
        self._wrap = wrap
        self._on_event = on_event
        self._on_confirmation = on_confirmation
        self._backends: dict[str, Backend] = {}
        self._resolutions: dict[tuple[object, ...], Resolution] = {}
        self._decisions: dict[tuple[int, int], _Decision] = {}
        self._confirmations = Confirmations()
        self._groups: list[_Group] = []
        self._record = StepRecord()
        # What each wish (the policy's for a phase, or an override's) came to at start; later steps are held to it.
        self._at_start: dict[tuple[Phase, str], str] = {}
        self.fallbacks: list[FallbackEvent] = []
        self.mismatches: dict[Signature, str] = {}  # what ran where another backend was resolved
        self.resolutions: dict[Phase, Resolution] = {p: self._startup(p, _START_KV) for p in PHASES}
        self.requested: dict[Phase, str] = {p: r.requested for p, r in self.resolutions.items()}
        self.resolved: dict[Phase, str] = {p: r.chain[0] for p, r in self.resolutions.items()}
        self.chosen: Mapping[Phase, str] = dict(self.resolved)  # at start; `resolved` changes with what is retired
        self.at_work: str | None = None  # the backend whose call is under way
        self.confirmed: dict[Phase, str] = dict.fromkeys(PHASES, NOTHING_RAN)
        for override in policy.overrides:
            low, high = override.kv_len
            self._startup(override.phase, max(low or 1, min(_START_KV, (high or _START_KV + 1) - 1)))

    # Which backend.

    def _startup(self, phase: Phase, kv_len: int) -> Resolution:
        """Resolve a phase before the first request; a backend left out already here is a start-up fallback."""
        q_len = {"prefill": kv_len, "decode": 1, "extend": min(16, max(1, kv_len - 1))}[phase]
        found = self._resolution(phase, q_len, kv_len)
        if not found.chain:
            raise NoBackendError(f"no backend of the policy can serve {phase}: {found.explain()}")
        wish = (phase, found.requested)
        if wish not in self._at_start:
            self._at_start[wish] = found.chain[0]
            if found.fell_back:
                reasons = found.excluded[found.requested]
                event = FallbackEvent("startup_fallback", phase, found.requested, found.chain[0], reasons)
                self.fallbacks.append(event)
        return found

    def _resolution(self, phase: Phase, q_len: int, kv_len: int) -> Resolution:
        """The chain of members like this one. No rule is about a batch as a whole: it runs where all its members do."""
        # An override's range may begin inside a bucket, and a single key is a case of its own.
        covered = tuple(override.covers(phase, kv_len) for override in self.policy.overrides)
        key = (phase, shape_bucket(phase, kv_len), covered, min(q_len, 2), min(kv_len, 2), q_len > kv_len)
        found = self._resolutions.get(key)
        if found is None:
            pages = tuple(range(-(-kv_len // self.page_size)))
            found = self._resolutions[key] = self._resolve(Batch((q_len,), (kv_len,), (pages,), self.page_size))
        return found

    def _resolve(self, batch: Batch) -> Resolution:
        # Layers may differ (sliding window or not): a backend must serve every distinct one.
        first, *others = (
            resolve(self.policy, case_of(batch, spec), self._declared, self._observed) for spec in self._kinds
        )
        for one in others:
            chain = tuple(name for name in first.chain if name in one.chain)
            first = first.model_copy(update={"chain": chain, "excluded": {**one.excluded, **first.excluded}})
        return first

    def _declared(self, backend: str, case: object) -> list[Reason]:
        from attention.matrix import declared_reasons

        return declared_reasons(backend, case, device=self.device)  # type: ignore[arg-type]

    def _decide(self, q_len: int, kv_len: int, avoid: Avoid = _NONE) -> _Decision:
        if not avoid and (known := self._decisions.get((q_len, kv_len))) is not None:
            return known
        phase = phase_of(q_len, kv_len)
        found = self._resolution(phase, q_len, kv_len)
        excluded = {**found.excluded, **{name: (reason,) for name, reason in avoid.items() if name in found.chain}}
        chain = [name for name in found.chain if name not in avoid]
        bucket = shape_bucket(phase, kv_len)
        told = found.model_copy(update={"excluded": excluded}) if avoid else found
        if not chain:
            raise UserError(f"no backend of the policy can serve {bucket}: {told.explain()}")
        # Another backend than at start, since that one cannot serve this request: a fallback of the request.
        expected = self._at_start.get((phase, found.requested), found.requested)
        fallback = None
        if expected in excluded:
            fallback = FallbackEvent("request_fallback", phase, expected, chain[0], excluded[expected], bucket)
            if not self.policy.allow_runtime_fallback:
                raise UserError(f"the policy forbids request-level fallback for {bucket}: {told.explain()}")
        decision = _Decision(phase, chain[0], found.requested, fallback)
        if not avoid:
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            self._decisions[q_len, kv_len] = decision
        return decision

    def foresee(
        self, start: int, num_prompt: int, num_cached: int, chunk: int, avoid: Avoid = _NONE
    ) -> FallbackEvent | None:
        """The first fallback that a request will meet on its way from `start` to `num_cached` tokens in the cache, its
        prompt in pieces of `chunk` tokens at most; None for one that meets none. Any thread may ask.

        Raises UserError, with every reason, where no backend could serve it or the policy forbids the fallback.
        """
        first = min(chunk, num_prompt)
        ways = [(first, first)] if start == 0 else []
        extends = self._stops("extend", max(start, first) + 1, num_prompt)
        ways += [(min(chunk, kv - first), kv) for kv in extends]
        ways += [(1, kv) for kv in self._stops("decode", max(start, num_prompt) + 1, num_cached)]
        found = (self._decide(q_len, kv_len, avoid).fallback for q_len, kv_len in ways)
        return next((event for event in list(found) if event is not None), None)

    def _stops(self, phase: Phase, low: int, high: int) -> list[int]:
        """KV lengths from low to high between which no decision can change."""
        if high < low:
            return []
        ends = {low, high, *((1 << n) + by for n in range(4, high.bit_length()) for by in (0, 1))}
        for override in self.policy.overrides:
            if override.phase == phase:
                ends.update(end + by for end in override.kv_len if end is not None for by in (-1, 0))
        return sorted(end for end in ends if low <= end <= high)

    def retire(self, backend: str, reason: Reason) -> None:
        """Use a backend no more: its requests go along the chain. For a backend that failed while it served."""
        self._observed.setdefault(backend, []).append(reason)
        self._resolutions.clear()
        self._decisions.clear()
        self._confirmations.forget(backend)
        for phase in PHASES:
            found = self._resolution(phase, {"prefill": _START_KV, "decode": 1, "extend": 16}[phase], _START_KV)
            if self.resolved[phase] == backend:
                may_give_way = found.chain and self.policy.allow_runtime_fallback
                to = found.chain[0] if may_give_way else "none"
                self.resolved[phase] = found.chain[0] if may_give_way else backend
                self._on_event(FallbackEvent("backend_failed", phase, backend, to, (reason,)))
            self.resolutions[phase] = found

    @property
    def retired(self) -> dict[str, list[Reason]]:
        """By backend, why it may not run here: failed probes, and what failed while it served."""
        return {backend: list(reasons) for backend, reasons in self._observed.items()}

    def unserved(self) -> dict[Phase, str]:
        """Phases that no backend may serve any more, each with every reason."""
        forbids = not self.policy.allow_runtime_fallback
        return {
            phase: found.explain() + (" | the policy forbids request-level fallback" if found.chain else "")
            for phase, found in self.resolutions.items()
            if not found.chain or (forbids and self.chosen[phase] in found.excluded)
        }

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = self._wrap(create(name, self.device))
        return self._backends[name]

    # A step.

    def plan(self, batch: Batch, avoid: Sequence[Avoid] | None = None) -> None:
        """Plan one step. `avoid[i]`: what member i must not run on. Raises UserError as `foresee` does."""
        decisions = [
            self._decide(q_len, kv_len, _NONE if avoid is None else avoid[i])
            for i, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True))
        ]
        members: dict[tuple[Phase, str, bool], list[int]] = {}
        for i, one in enumerate(decisions):
            members.setdefault((one.phase, one.backend, one.fallback is not None), []).append(i)
        starts = [0]
        for q_len in batch.q_lens:
            starts.append(starts[-1] + q_len)
        groups: list[_Group] = []
        parts: list[PhaseRun | None] = [None] * len(decisions)
        for chosen in members.values():
            if len(members) == 1:
                part, rows = batch, None
            else:
                part = Batch(
                    tuple(batch.q_lens[i] for i in chosen),
                    tuple(batch.kv_lens[i] for i in chosen),
                    tuple(batch.block_tables[i] for i in chosen),
                    batch.page_size,
                )
                index = [row for i in chosen for row in range(starts[i], starts[i + 1])]
                rows = torch.tensor(index, dtype=torch.long, device=self.device)
            group = self._group(decisions[chosen[0]], part, rows)
            groups.append(group)
            for i in chosen:
                parts[i] = group.run
        self._groups = groups
        self._record = StepRecord([group.run for group in groups], [part for part in parts if part is not None])

    def _group(self, decision: _Decision, batch: Batch, rows: torch.Tensor | None) -> _Group:
        bucket = shape_bucket(decision.phase, max(batch.kv_lens))
        confirmed = self._confirmations.of(Signature(decision.phase, bucket, decision.backend))
        run = PhaseRun(
            phase=decision.phase,
            bucket=bucket,
            requested=decision.requested,
            resolved=decision.backend,
            confirmed=confirmed,
            num_members=len(batch.q_lens),
            fallback=decision.fallback,
        )
        return _Group(run, batch, rows, self._backend(decision.backend), [None] * len(self._kinds))

    def run(self, layer: int, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> torch.Tensor:
        """Attention of one layer of the planned step: [T, H, D_vo]. Raises BackendFailedError."""
        kind = self._kind_of[layer]
        if len(self._groups) == 1:
            return self._run_group(self._groups[0], kind, q_THD, k_NPGD, v_NPGD)
        spec = self._kinds[kind]
        out_THD = q_THD.new_empty(q_THD.shape[0], spec.heads_q, spec.head_dim_vo)
        for group in self._groups:
            if group.rows is None:
                raise RuntimeError("a step of several parts was planned without row indices")
            part = self._run_group(group, kind, q_THD.index_select(0, group.rows), k_NPGD, v_NPGD)
            out_THD.index_copy_(0, group.rows, part)
        return out_THD

    def _run_group(
        self,
        group: _Group,
        kind: int,
        q_THD: torch.Tensor,
        k_NPGD: torch.Tensor,
        v_NPGD: torch.Tensor,
    ) -> torch.Tensor:
        run = group.run
        started = _clock()
        self.at_work = run.resolved
        try:
            planned = group.plans[kind]
            if planned is None:
                # Nobody reads the LSE here; for it some backends launch a kernel more.
                planned = group.plans[kind] = group.backend.plan(group.batch, self._kinds[kind], lse=False)
            if run.layers == 0 and self._is_due(run):
                out_THD = self._confirm(group, planned, q_THD, k_NPGD, v_NPGD)
            else:
                out_THD, _ = planned.run(q_THD, k_NPGD, v_NPGD)
                run.kernel_seconds += _clock() - started
        except torch.OutOfMemoryError:  # the load's fault, not the backend's
            raise
        except Exception as error:
            raise BackendFailedError(run.resolved, run.phase, error) from error
        finally:
            self.at_work = None
        run.layers += 1
        return out_THD

    # What ran.

    def _is_due(self, run: PhaseRun) -> bool:
        return self._confirmations.is_due(Signature(run.phase, run.bucket, run.resolved))

    def _confirm(
        self, group: _Group, planned: Planned, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> torch.Tensor:
        run = group.run
        signature = Signature(run.phase, run.bucket, run.resolved)
        started = time.perf_counter()
        (out_THD, inner_s), confirmed = confirm.watch(
            lambda: _timed(planned, q_THD, k_NPGD, v_NPGD), device=self.device
        )
        seconds = time.perf_counter() - started
        if self._confirmations.is_new(signature):
            run.first_call_seconds = seconds
        run.confirmed = confirmed
        longest = max(range(run.num_members), key=lambda i: group.batch.kv_lens[i])
        self._note(signature, confirmed, group.batch.q_lens[longest], group.batch.kv_lens[longest], seconds - inner_s)
        return out_THD

    def _note(self, signature: Signature, confirmed: str, q_len: int, kv_len: int, added_s: float) -> None:
        self._confirmations.note(signature, confirmed, q_len, kv_len)
        self.confirmed[signature.phase] = confirmed
        self._on_confirmation(signature.phase, added_s)
        if confirmed == signature.backend:
            self.mismatches.pop(signature, None)
            return
        self.mismatches[signature] = confirmed
        self._on_event(FallbackEvent("backend_mismatch", signature.phase, signature.backend, confirmed, ()))

    def confirm_idle(self, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor, age_s: float) -> bool:
        """Ask again for the signature that was confirmed longest ago, at least `age_s`; False where none is so old.

        On random queries over the cache of the first layer, which is only read. For a moment in which nobody waits.
        Raises BackendFailedError.
        """
        found = self._confirmations.oldest(age_s)
        if found is None:
            return False
        signature, q_len, kv_len = found
        num_pages = -(-kv_len // self.page_size)
        table = tuple(page % len(k_NPGD) for page in range(num_pages))
        spec = self.specs[0]
        q_THD = torch.randn(q_len, spec.heads_q, spec.head_dim_qk, device=self.device).to(spec.dtype)
        started = time.perf_counter()
        try:
            batch = Batch((q_len,), (kv_len,), (table,), self.page_size)
            planned = self._backend(signature.backend).plan(batch, spec, lse=False)
            _, confirmed = confirm.watch(lambda: planned.run(q_THD, k_NPGD, v_NPGD), device=self.device)
        except Exception as error:
            raise BackendFailedError(signature.backend, signature.phase, error) from error
        self._note(signature, confirmed, q_len, kv_len, time.perf_counter() - started)
        return True

    # Steps that a graph replays.

    def decode_alone(self, kv_lens: Sequence[int]) -> str | None:
        """The backend of a step in which members of these lengths decode, where it is one for all and nobody falls
        back; None for any other step. Raises UserError as `foresee` does."""
        decisions = {self._decide(1, kv_len) for kv_len in kv_lens}
        first = next(iter(decisions))
        alike = all(one.backend == first.backend and one.fallback is None for one in decisions)
        return first.backend if alike else None

    def plans_for_graph(self, backend: str, batch: Batch) -> list[Planned]:
        """A plan a kind of layer whose runs may be captured. Raises UserError for a backend that cannot be."""
        return [self._backend(backend).plan(batch, spec, graph=True, lse=False) for spec in self._kinds]

    def kind_of(self, layer: int) -> int:
        """Which of the kinds of layers, in the order of `plans_for_graph`, a layer is."""
        return self._kind_of[layer]

    def note_replay(self, backend: str, kv_lens: Sequence[int], confirmed: str) -> None:
        """A graph ran this step. `confirmed`: what its kernels were at capture. How long they took nobody measured."""
        bucket = shape_bucket("decode", max(kv_lens))
        signature = Signature("decode", bucket, backend)
        if self._confirmations.is_due(signature) or self._confirmations.of(signature) != confirmed:
            self._note(signature, confirmed, 1, max(kv_lens), 0.0)
        requested = self._resolution("decode", 1, max(kv_lens)).requested
        run = PhaseRun("decode", bucket, requested, backend, confirmed, len(kv_lens), graph_hit=True)
        run.layers = len(self.specs)
        self._groups = []
        self._record = StepRecord([run], [run] * len(kv_lens))

    def last_step(self) -> StepRecord:
        """What the last planned step ran; complete after its last layer."""
        return self._record


def _timed(
    planned: Planned, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The output, and seconds of the call itself inside of what watches it."""
    started = time.perf_counter()
    out_THD, _ = planned.run(q_THD, k_NPGD, v_NPGD)
    return out_THD, time.perf_counter() - started
