"""Faults that no single attention problem shows: a real model with one layer, its cache or its batches wrong.

    runner = FaultyRunner(model_path, dispatcher)
    runner.begin(kind.fault)
    attention.replay.model.record(runner, plan, told, out)    # as the replay stage records a candidate

A fault sits around a layer's call of the dispatcher, so the kernels are those that would serve. `OracleDispatcher`
attends in float64: with it the same fault goes into the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from attention.backends.base import AttentionSpec
from attention.model import Chunk, Runner


@dataclass(frozen=True)
class LayerCall:
    """One layer of one step, before K and V are written: slots_T their places in the cache, q_lens of the members.

    `number` counts the calls of this layer since the recording began.
    """

    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    slots_T: torch.Tensor
    q_lens: tuple[int, ...]
    number: int

    @property
    def decodes(self) -> bool:
        """Whether every member decodes one token."""
        return max(self.q_lens) == 1


@dataclass(frozen=True)
class ModelFault:
    """One fault; as it stands, none. `layer` None: in every layer."""

    layer: int | None = None
    before: Callable[[LayerCall], LayerCall] | None = None
    after: Callable[[torch.Tensor, LayerCall], torch.Tensor] | None = None
    rotary_shift: int = 0  # added to the position of every token that is decoded


SOUND = ModelFault()


class FaultyRunner(Runner):
    """A runner whose layers carry a fault; sound until `begin` gives it one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._q_lens: tuple[int, ...] = ()
        self._model.base_model.register_forward_pre_hook(self._shift, with_kwargs=True)
        self.begin(SOUND)

    def begin(self, fault: ModelFault) -> None:
        """Start anew with a fault, on an empty cache: nothing that an earlier recording left is read."""
        self._fault = fault
        self._numbers = [0] * len(self.dispatcher.specs)
        for cache in (*self._k, *self._v):
            cache.zero_()

    def forward(self, chunks: Sequence[Chunk], *, rows: Literal["last", "all"] = "last") -> torch.Tensor:
        self._q_lens = tuple(len(chunk.token_ids) for chunk in chunks)
        return super().forward(chunks, rows=rows)

    def attend(
        self, layer: int, slots: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor
    ) -> torch.Tensor:
        fault = self._fault
        call = LayerCall(q_THD, k_TGD, v_TGD, slots, self._q_lens, self._numbers[layer])
        self._numbers[layer] += 1
        is_here = fault.layer in (None, layer)
        if is_here and fault.before is not None:
            call = fault.before(call)
        out_THD = super().attend(layer, call.slots_T, call.q_THD, call.k_TGD, call.v_TGD)
        return fault.after(out_THD, call) if is_here and fault.after is not None else out_THD

    def _shift(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._fault.rotary_shift and max(self._q_lens) == 1:
            kwargs["position_ids"] = kwargs["position_ids"] + self._fault.rotary_shift
        return args, kwargs


@dataclass(frozen=True)
class ModelKind:
    """A kind of fault of a whole model. `check` is the replay gate's, without the mode: either may catch it."""

    name: str
    what: str
    fault: ModelFault
    check: str


def heads_interleaved(heads_q: int, heads_kv: int, layer: int) -> ModelFault:
    """Query head h reads KV head h % G: the heads are dealt to the groups in that order, and put back."""
    dealt = sorted(range(heads_q), key=lambda head: (head % heads_kv, head))
    back = sorted(range(heads_q), key=lambda place: dealt[place])
    return ModelFault(
        layer=layer,
        before=lambda call: replace(call, q_THD=call.q_THD[:, dealt]),
        after=lambda out_THD, call: out_THD[:, back],
    )


def _unscaled(call: LayerCall) -> LayerCall:
    """Keys and values as float8 would store them with scales of 1/4 and 1/2, read without the scales."""
    return replace(call, k_TGD=call.k_TGD * 4, v_TGD=call.v_TGD * 2)


def _to_neighbour(call: LayerCall) -> LayerCall:
    """A step of decodes writes each member's key and value into the next member's page."""
    return replace(call, slots_T=call.slots_T.roll(1)) if call.decodes else call


def _raced(call: LayerCall) -> LayerCall:
    """Every third call reads before the last tile of 16 of each member's new keys has arrived."""
    if call.number % 3:
        return call
    late = torch.cat([torch.arange(num) >= (num - 1) // 16 * 16 for num in call.q_lens])
    k, v = (tensor.masked_fill(late[:, None, None], 0.0) for tensor in (call.k_TGD, call.v_TGD))
    return replace(call, k_TGD=k, v_TGD=v)


def _row_of_nan(out_THD: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """One row of a prefill is NaN."""
    out = out_THD.clone()
    if not call.decodes:
        out[len(out) // 2, 0] = torch.nan
    return out


def _first_key_zero(call: LayerCall) -> LayerCall:
    """The first key and value of every prefill never arrive; prompts are packed, so a call has many."""
    k, v = call.k_TGD.clone(), call.v_TGD.clone()
    firsts = [sum(call.q_lens[:i]) for i, num in enumerate(call.q_lens) if num > 1]
    k[firsts], v[firsts] = 0, 0
    return replace(call, k_TGD=k, v_TGD=v)


def _scaled(call: LayerCall) -> LayerCall:
    """The softmax scale is 1 % too large."""
    return replace(call, q_THD=call.q_THD * 1.01)


def _row_before(out_THD: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """Where prefills and decodes meet in a step, a decode is given the row before its own."""
    if call.decodes or min(call.q_lens) > 1:
        return out_THD
    out, row = out_THD.clone(), 0
    for q_len in call.q_lens:
        if q_len == 1:
            out[row] = out_THD[row - 1]
        row += q_len
    return out


def model_kinds(specs: Sequence[AttentionSpec]) -> tuple[ModelKind, ...]:
    """Kinds that the model layer must catch, for a model of those layers; `one layer` is a third of the way up."""
    layer = len(specs) // 3
    return (
        ModelKind(
            "gqa_map_wrong_in_one_layer",
            "one layer's query heads read another KV head",
            heads_interleaved(specs[layer].heads_q, specs[layer].heads_kv, layer),
            "model.flip_rate",
        ),
        ModelKind(
            "kv_scale_ignored_in_one_layer",
            "one layer reads fp8 keys and values without their scales",
            ModelFault(layer=layer, before=_unscaled),
            "model.flip_margin",
        ),
        ModelKind(
            "nan_in_one_layer",
            "one row of one layer is NaN",
            ModelFault(layer=layer, after=_row_of_nan),
            "model.kl_mean",
        ),
        ModelKind(
            "sink_lost",
            "the first key of every prompt never arrives",
            ModelFault(before=_first_key_zero),
            "model.kl_p999",
        ),
        ModelKind(
            "race",
            "every third step reads before its last tile of keys has arrived",
            ModelFault(before=_raced),
            "model.kl_p999",
        ),
        ModelKind(
            "cache_write_lost",
            "decoded keys are written into another member's page",
            ModelFault(before=_to_neighbour),
            "model.nll_difference",
        ),
        ModelKind(
            "position_off_by_one",
            "rotary positions of decoded tokens are one too high",
            ModelFault(rotary_shift=1),
            "model.kl_mean",
        ),
        ModelKind(
            "scale_1_percent_in_float32",
            "a softmax scale 1 % too large: a mean KL below the fixed limit and far beyond the floor",
            ModelFault(before=_scaled),
            "model.kl_mean_times",
        ),
    )


MIXED = ModelKind(
    "mixed_batch_misread",
    "a decode that meets a prefill in a step is given the row before its own",
    ModelFault(after=_row_before),
    "business.mcnemar_p",
)
