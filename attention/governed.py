"""The governed dispatcher inside transformers: `attn_implementation="governed"`, for a service of one's own.

    from attention import governed

    governed.enable(policy, "path/of/a/model", device="cuda")
    model = AutoModelForCausalLM.from_pretrained("path/of/a/model", attn_implementation="governed").to("cuda")
    model.generate(...)
    print(governed.report())

Any causal LM that goes through transformers' attention interface, its own caches and `generate`. What the interface
says (padding, windows, softcap, scaling, sinks, masks) becomes an AttentionSpec and a Batch; each kind of layer has a
dispatcher, planned once a forward. What cannot be said so is a UserError, never another kernel unnoticed.

Needs transformers (extra `model`). For inference: the kernels give no gradients.
"""

from __future__ import annotations

import inspect
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from attention.backends.base import AttentionSpec
from attention.cases import Layout, Phase, window_of_hf
from attention.checks.common import raised
from attention.dense import DenseDispatcher, Rows, all_rows, attend, masked_rows, packed_rows
from attention.dispatch import PHASES, BackendFailedError, FallbackEvent
from attention.errors import UserError
from attention.model_config import layer_kinds, resolve_dtype
from attention.policy import Policy, load_policy
from attention.reasons import Reason

NAME = "governed"
#: Arguments of the interface that change nothing about one call's attention.
_HARMLESS = frozenset({
    "position_ids", "cache_position", "position_embeddings", "use_cache", "output_hidden_states", "return_dict",
    "output_router_logits", "num_items_in_batch", "logits_to_keep", "deterministic",
})  # fmt: skip
_MOST_EVENTS = 1000


@dataclass(frozen=True)
class PhaseReport:
    """What one kind of layer ran in one phase; `steps` is how many forwards had such members."""

    layers: str
    layout: str
    phase: Phase
    requested: str
    resolved: str
    confirmed: str
    steps: int


@dataclass(frozen=True)
class Report:
    """What ran: a row a kind of layer and phase; each fallback with the steps in which it happened (0 for those of
    start-up, which hold for all); the last events in order, mismatches and failures too."""

    phases: tuple[PhaseReport, ...]
    fallbacks: tuple[tuple[FallbackEvent, int], ...]
    events: tuple[FallbackEvent, ...]

    def document(self) -> dict[str, Any]:
        """As JSON for machines."""
        return {
            "phases": [asdict(row) for row in self.phases],
            "fallbacks": [{**_told(event), "steps": steps} for event, steps in self.fallbacks],
            "events": [_told(event) for event in self.events],
        }


def _told(event: FallbackEvent) -> dict[str, Any]:
    return {**asdict(replace(event, reasons=())), "reasons": [str(reason) for reason in event.reasons]}


@dataclass
class _Kind:
    """Layers that differ in scale and in their sinks' values only, in one layout: one dispatcher."""

    dispatcher: DenseDispatcher
    index: dict[AttentionSpec, int]
    planned: Rows | None = None
    last_layer: int = -1
    steps: Counter[Phase] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Mask:
    """What one of our masks says: the rows, and the window that the layers ask for too."""

    shape: tuple[int, int, int]  # sequences, queries and keys of each
    rows: Rows | None  # None: everything is padding
    window: int | None
    causal: bool


class Governed:
    """The dispatchers of one policy on one device. Any thread may run a model; one layer at a time runs."""

    def __init__(
        self,
        policy: Policy,
        *,
        device: str,
        observed: dict[str, list[Reason]] | None,
        on_event: Callable[[FallbackEvent], None],
    ) -> None:
        self.policy = policy
        self.device = device
        self._observed = observed
        self._hear = on_event
        self._kinds: dict[tuple[AttentionSpec, Layout, bool], _Kind] = {}
        self._fallbacks: Counter[FallbackEvent] = Counter()
        self._events: deque[FallbackEvent] = deque(maxlen=_MOST_EVENTS)
        self._lock = threading.RLock()  # who hears of an event may ask for the report

    def kind(self, spec: AttentionSpec, layout: Layout = "contiguous", *, masked: bool = False) -> _Kind:
        """The dispatcher of such layers, made where it is new. UserError when the policy has no backend for them."""
        sinks = None if spec.sinks is None else (0.0,) * spec.heads_q
        key = (replace(spec, scale=1.0, sinks=sinks), layout, masked)
        found = self._kinds.get(key)
        if found is None:
            options = {"device": self.device, "observed": self._observed, "on_event": self._heard}
            dispatcher = DenseDispatcher(self.policy, [spec], layout=layout, masked=masked, **options)
            for event in dispatcher.fallbacks:
                self._fell(event, steps=0)
            found = self._kinds[key] = _Kind(dispatcher, {spec: 0})
        return found

    def attend(
        self, layer: int | None, spec: AttentionSpec, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """[B, Q, H, D_vo]. Plans where a new step begins: other rows, or a layer that does not follow the last one."""
        with self._lock:
            kind = self.kind(spec, rows.batch.layout, masked=rows.batch.masks is not None)
            at = kind.index.get(spec)
            if at is None:
                at = kind.index[spec] = kind.dispatcher.add_layer(spec)
            if rows is not kind.planned or layer is None or layer <= kind.last_layer:
                self._plan(kind, rows)
            kind.last_layer = -1 if layer is None else layer
            while True:
                try:
                    return attend(kind.dispatcher, at, rows, q, k, v)
                except BackendFailedError as error:
                    if not self.policy.allow_runtime_fallback or not isinstance(error.__cause__, Exception):
                        raise
                    kind.dispatcher.retire(error.backend, raised("run", error.__cause__))
                    self._plan(kind, rows)

    def _plan(self, kind: _Kind, rows: Rows) -> None:
        kind.planned = None
        kind.dispatcher.plan(rows.batch)
        kind.planned = rows
        for run in kind.dispatcher.last_step().phases:
            kind.steps[run.phase] += 1
            if run.fallback is not None:
                self._fell(run.fallback, steps=1)

    def _fell(self, event: FallbackEvent, *, steps: int) -> None:
        """Told when it first happens, counted ever after."""
        if event not in self._fallbacks:
            self._heard(event)
        self._fallbacks[event] += steps

    def _heard(self, event: FallbackEvent) -> None:
        self._events.append(event)
        self._hear(event)

    def report(self) -> Report:
        """What was requested, resolved and confirmed. `unconfirmed(nothing ran)` where nothing has run yet."""
        with self._lock:
            rows = [
                PhaseReport(
                    _named(spec),
                    f"{layout}, custom mask" if masked else layout,
                    phase,
                    kind.dispatcher.requested[phase],
                    kind.dispatcher.resolved[phase],
                    kind.dispatcher.confirmed[phase],
                    kind.steps[phase],
                )
                for (spec, layout, masked), kind in self._kinds.items()
                for phase in PHASES
            ]
            return Report(tuple(rows), tuple(self._fallbacks.items()), tuple(self._events))


def _named(spec: AttentionSpec) -> str:
    """`h32/8 d128 bfloat16 sliding_window`: what a kind of layer is."""
    features = {"sliding_window": spec.window != (None, None), "softcap": spec.softcap, "sinks": spec.sinks}
    heads = f"h{spec.heads_q}/{spec.heads_kv} d{spec.head_dim_qk} {str(spec.dtype).removeprefix('torch.')}"
    return " ".join([heads, *(name for name, on in features.items() if on)])


_ENABLED: dict[str, Governed] = {}
#: Our masks by identity: what the mask function knew when it made them. Forgotten with the mask.
_MASKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def enable(
    policy: Policy | Path | str,
    model: Any = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    name: str = NAME,
    observed: dict[str, list[Reason]] | None = None,
    on_event: Callable[[FallbackEvent], None] = lambda event: None,
) -> Governed:
    """Make `attn_implementation=name` run under a policy in this process; again under a name replaces what it had.

    policy: a Policy or its YAML file. model: folder or transformers config; with it the backends of its layers are
    resolved now, in `dtype`, so that a policy that cannot serve it is an error before the first request (and start-up
    fallbacks are told). observed: by backend, the reasons of failed probes (attention.probe.failed_reasons).
    `on_event` hears of every fallback, failure and mismatch. Raises UserError.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from attention.matrix import check_device

    check_device(device)
    if name not in _ENABLED and (name == "eager" or name in AttentionInterface()):
        raise UserError(f"attention {name!r} is another's in transformers: choose another name")
    found = Governed(
        policy if isinstance(policy, Policy) else load_policy(Path(policy)),
        device=device,
        observed=observed,
        on_event=on_event,
    )
    for spec in _specs(model, getattr(torch, resolve_dtype(dtype, device))):
        found.kind(spec)
    _ENABLED[name] = found
    AttentionInterface.register(name, torch.compiler.disable(partial(_attention, name), reason=_NO_TRACE))
    AttentionMaskInterface.register(name, torch.compiler.disable(_mask, reason=_NO_TRACE))
    return found


_NO_TRACE = "a governed step is planned on the host: compile your own modules round torch.ops.attention.governed"


def report(name: str = NAME) -> Report:
    """What ran under that name. UserError when nothing was enabled."""
    return _enabled(name).report()


def _enabled(name: str) -> Governed:
    found = _ENABLED.get(name)
    if found is None:
        raise UserError(f"attention {name!r} is not enabled here: call attention.governed.enable first")
    return found


def _specs(model: Any, dtype: torch.dtype) -> list[AttentionSpec]:
    """One spec a kind of layer, of a model's folder or its transformers config; none without a model."""
    if model is None:
        return []
    if not isinstance(model, str | Path):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return _specs(folder, dtype)
    return [
        AttentionSpec(
            heads_q=kind.heads_q,
            heads_kv=kind.heads_kv,
            head_dim_qk=kind.head_dim_qk,
            head_dim_vo=kind.head_dim_vo,
            dtype=dtype,
            scale=kind.scale,
            window=kind.window,
            softcap=kind.softcap,
            sinks=(0.0,) * kind.heads_q if kind.sinks else None,
        )
        for kind in dict.fromkeys(layer_kinds(Path(model)))
    ]


# What a model asks for: the two functions of transformers' interface.


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """transformers' mask interface. The tensor is a name for what `_MASKS` holds of it, and right by itself too.

    Padding alone: boolean [B, L], True at real keys. Anything else: boolean [B, 1, Q, L], True where a query may look.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None and attention_mask in _MASKS:
        return attention_mask  # `generate` made it ahead of the forward, for this step
    mask: torch.Tensor
    plain, window = _plain(mask_function)
    num_keys = int(q_offset) + q_length - kv_offset  # a static cache has room for more
    shape = (batch_size, q_length, num_keys)
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + num_keys]
    if plain and (real is None or real.shape[1] == num_keys):
        if real is None or bool(real.all()):
            mask = torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
            _MASKS[mask] = _Mask(shape, all_rows(*shape), window, causal=True)
            return mask
        real_BL = real.cpu().numpy()
        # A window counts places, also those of padding between: only at either end may it be left out.
        gaps = (real_BL[:, 1:] & ~real_BL[:, :-1]).sum(1) + real_BL[:, 0] > 1
        if window is None or not gaps.any():
            mask = real.clone()
            _MASKS[mask] = _Mask(shape, packed_rows(real_BL, q_length, mask.device), window, causal=True)
            return mask
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    _MASKS[mask] = _exactly(mask, batch_size)
    return mask


def _plain(mask_function: Any) -> tuple[bool, int | None]:
    """Whether a mask function is transformers' own causal one and no more, and the window that it has."""
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay

    if mask_function is causal_mask_function:
        return True, None
    both = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if len(both) == 2 and both[1] is causal_mask_function and both[0].__code__ is sliding_window_overlay(1).__code__:
        return True, int(inspect.getclosurevars(both[0]).nonlocals["sliding_window"])
    return False, None


def _exactly(mask: torch.Tensor, num_sequences: int) -> _Mask:
    """A mask [B or 1, 1, Q, L], boolean or added to the scores, as custom masks."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise UserError(f"attention_mask of shape {tuple(mask.shape)}: governed serves [B, 1, Q, L], one for all heads")
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise UserError("attention_mask adds to scores: governed serves masks of 0 and -inf only, no biases")
        mask = ~hidden
    if len(mask) == 1:
        mask = mask.expand(num_sequences, -1, -1, -1)
    # A copy: views would keep the mask that they are filed under, and so themselves, for ever.
    rows = masked_rows(mask[:, 0].clone())
    return _Mask((len(mask), mask.shape[2], mask.shape[3]), rows, None, causal=False)


def _attention(
    name: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q, k, v as [B, heads, tokens, D]; returns [B, Q, H, D_vo] and no weights."""
    governed = _enabled(name)
    asked = sorted(k for k, value in others.items() if k not in _HARMLESS and value is not None and value is not False)
    if asked:
        raise UserError(f"{type(module).__name__}: governed attention cannot serve {', '.join(asked)}")
    if dropout:
        raise UserError(
            f"{type(module).__name__}: dropout {dropout}: governed attention is for inference, model.eval()"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise UserError(f"{type(module).__name__}: governed attention gives no gradients: use torch.inference_mode()")
    if query.device.type != torch.device(governed.device).type:
        raise UserError(f"{name} was enabled for device {governed.device}, the model is on {query.device}")
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(f"q, K and V of {query.dtype}, {key.dtype}, {value.dtype}: governed wants one dtype")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    said = _said(attention_mask, query, key, sliding_window, causal)
    spec = _spec(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.dtype,
        float(query.shape[3] ** -0.5 if scaling is None else scaling),
        said.causal,
        None if said.window is None else window_of_hf(said.window),
        None if softcap is None else float(softcap),
        None if s_aux is None else _values(s_aux),
    )
    if said.rows is None:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    return governed.attend(getattr(module, "layer_idx", None), spec, said.rows, query, key, value), None


def _said(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, sliding_window: int | None, causal: bool
) -> _Mask:
    """Rows, window and causality of one layer's call."""
    shape = sequences, num_queries, num_keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        if causal and 1 < num_queries < num_keys:
            raise UserError(f"{num_queries} queries over {num_keys} keys without a mask: which keys are whose?")
        window = sliding_window if causal else None
        return _Mask(shape, all_rows(*shape), window, causal)
    known: _Mask | None = _MASKS.get(mask)
    if known is None and mask.ndim == 2:
        raise UserError(f"attention_mask of shape {tuple(mask.shape)} was changed between the model and its layers")
    found = known or _exactly(mask, sequences)
    # A static cache has room for more keys than there are; a mask of single pairs names that room too.
    fits = found.shape[2] <= num_keys if found.causal else found.shape[2] == num_keys
    if found.shape[:2] != shape[:2] or not fits:
        raise UserError(f"attention_mask is for {found.shape} sequences, queries and keys; there are {shape}")
    # The mask is what the model means; a layer that asks for a window in addition would silently get none.
    hides = sliding_window is not None and found.causal and sliding_window < num_keys
    if hides and found.window != sliding_window:
        raise UserError(f"the layer asks for a window of {sliding_window}, its mask has {found.window}")
    return found


@lru_cache(maxsize=1024)
def _spec(
    heads_q: int,
    heads_kv: int,
    head_dim_qk: int,
    head_dim_vo: int,
    dtype: torch.dtype,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: tuple[float, ...] | None,
) -> AttentionSpec:
    """The same object for the same layer; ValueError becomes what it is, the model's."""
    try:
        return AttentionSpec(
            heads_q, heads_kv, head_dim_qk, head_dim_vo, dtype, scale, causal, window or (None, None), softcap,
            sinks=sinks,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"governed attention cannot serve this layer: {error}") from error


_SINKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _values(sinks: torch.Tensor) -> tuple[float, ...]:
    """Sinks as numbers, read from the device once for each parameter and change of it."""
    version = sinks._version if not sinks.is_inference() else None
    known = _SINKS.get(sinks)
    if known is None or version is None or known[0] != version:
        known = _SINKS[sinks] = (version, tuple(sinks.detach().float().flatten().tolist()))
    values: tuple[float, ...] = known[1]
    return values
