"""Root-mean-square norms on a GPU: torch's one kernel in place of the eight that a model's own code launches.

On an H200 a forward of SmolLM2-135M's shape over 16,384 tokens took 18.4 ms of kernels with it and 24.9 without
(torch.profiler). Both sides of a replay and the server run the same; serving engines fuse these norms too.
"""

from __future__ import annotations

import torch


def fuse(model: torch.nn.Module) -> int:
    """Replace the norms that torch.nn.RMSNorm equals up to rounding; returns how many."""
    found = [
        (parent, name, fused)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (fused := _fused(child)) is not None
    ]
    for parent, name, fused in found:
        setattr(parent, name, fused)
    return len(found)


@torch.inference_mode()
def _fused(module: torch.nn.Module) -> torch.nn.RMSNorm | None:
    """The same norm as one kernel, or None for what is none: another formula (1 + weight) shows on random numbers."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    alone = isinstance(weight, torch.nn.Parameter) and len(list(module.parameters())) == 1
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or not alone:
        return None
    assert isinstance(weight, torch.nn.Parameter)
    fused = torch.nn.RMSNorm(len(weight), eps=eps, device=weight.device, dtype=weight.dtype)
    fused.weight = weight
    x = torch.randn(16, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    x[8:] *= 1000  # a norm that clips
    step = 4 * torch.finfo(weight.dtype).eps
    return fused if torch.allclose(fused(x), module(x), rtol=step, atol=step) else None
