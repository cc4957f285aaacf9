"""Linear layers on the CPU: float32 products whose weights are held in float16.

A decode step reads every weight once, so halving their bytes is worth more than anything else: with FBGEMM's
kernel a step of SmolLM2-135M took 52 ms instead of 126 ms for two sequences and 142 ms instead of 214 ms for
sixteen (one AVX2 core, torch 2.13). Checkpoints are bfloat16 or float16, whose values float16 holds: a weight
for which that is not so (a float32 checkpoint, an outlier above 65504) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

#: Half the step between float16's smallest numbers: what a bfloat16 weight below 2**-17 may lose.
TOLERANCE = 2.0**-25


class HalfLinear(torch.nn.Module):
    """`x @ weight.T + bias` in float32, the weight packed by FBGEMM in float16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


def supported(device: str, dtype: torch.dtype) -> bool:
    """Whether linear layers may be packed here: float32 on a CPU that FBGEMM knows."""
    return device == "cpu" and dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines


def holds(weight: torch.Tensor) -> bool:
    """Whether float16 holds every value, but for what is lost below 2**-17."""
    return bool(((weight.half().float() - weight).abs() <= TOLERANCE).all())


def pack(model: torch.nn.Module) -> int:
    """Replace the linear layers of a float32 model on the CPU; returns how many were packed."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and holds(child.weight)
    ]
    for parent, name, child in found:
        setattr(parent, name, HalfLinear(child))
    return len(found)
