"""`torch.ops.attention.governed`: attention of a planned step as one operator of PyTorch.

    handles = custom_op.handles(dispatcher, num_layers)   # once: one whole number a layer
    dispatcher.plan(batch)                                # once a step
    out = torch.ops.attention.governed(q, k, v, handles[layer])

torch.compile takes it into its graph without a break and never looks inside, and a CUDA graph captures what it
launches. A handle stands for a layer of a dispatcher, not for a plan: whatever is planned when the operator runs is
what runs. So another step compiles nothing anew; a captured graph replays the plan that was captured.

Confirmation starts a profiler, which a capture does not bear: run a step once before it is captured, as warm-up.

Defined through torch.library.Library, not torch.library.custom_op: the latter's wrapper, for gradients that there are
none of here, took half as much host time again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Protocol

import torch

from attention.errors import UserError

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_CALLS: dict[int, Call] = {}
_NEXT = count()
_LIBRARY = torch.library.Library("attention", "DEF")
_LIBRARY.define("governed(Tensor q_THD, Tensor k, Tensor v, int handle) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


class Runs(Protocol):
    """What runs a layer of a planned step: a Dispatcher."""

    def run(self, layer: int, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> torch.Tensor: ...


def handles(runs: Runs, num_layers: int) -> tuple[int, ...]:
    """A handle a layer, for the life of the process or until `release`."""
    return tuple(handle_of(partial(runs.run, layer)) for layer in range(num_layers))


def handle_of(call: Call) -> int:
    """A handle of one call (q_THD, k, v) -> [T, H, D_vo]."""
    handle = next(_NEXT)
    _CALLS[handle] = call
    return handle


def release(*released: int) -> None:
    """Forget handles; the operator then refuses them."""
    for handle in released:
        _CALLS.pop(handle, None)


def _governed(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int) -> torch.Tensor:
    try:
        call = _CALLS[handle]
    except KeyError:
        raise UserError(f"attention::governed: no layer has the handle {handle}: ask custom_op.handles") from None
    # Graphs count on the strides that the fake below promises.
    return call(q_THD, k, v).contiguous()


def _fake(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int) -> torch.Tensor:
    return q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v.shape[-1])


_LIBRARY.impl("governed", _governed, "CompositeExplicitAutograd")
torch.library.register_fake("attention::governed", _fake, lib=_LIBRARY)
