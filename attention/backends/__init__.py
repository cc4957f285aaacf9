"""Attention backends, one module each behind the interface of `base`."""

from __future__ import annotations

from attention.backends.base import Backend
from attention.errors import UserError, nearest

#: Every backend that a policy may name here, in the order in which a family name lists its kernels.
NAMES: tuple[str, ...] = (
    "flashinfer:fa3",
    "flashinfer:fa2",
    "flashinfer:cudnn",
    "flashinfer:xqa",
    "flashinfer:trtllm-gen",
    "flash_attn:fa4",
    "flash_attn:fa3",
    "flash_attn:fa2",
    "flex_attention:triton",
    "triton:paged",
    "torch_sdpa:cudnn",
    "torch_sdpa:flash",
    "torch_sdpa:efficient",
    "torch_sdpa:math",
)

#: The document's names. `math` is one kernel; the others are families.
ALIASES: dict[str, str] = {
    "flashattention": "flash_attn",
    "pytorch_sdpa": "torch_sdpa",
    "math": "torch_sdpa:math",
}

#: Families of which this release can call a kernel; the others have matrix cells, all of them a reason.
CALLABLE_FAMILIES = ("torch_sdpa", "triton")


def expand(name: str) -> tuple[str, ...]:
    """Kernels of a backend or family name, in the family's own order. UserError for an unknown name."""
    canonical = ALIASES.get(name, name)
    found = tuple(n for n in NAMES if n == canonical or n.split(":")[0] == canonical)
    if not found:
        known = {*NAMES, *ALIASES, *(n.split(":")[0] for n in NAMES)}
        raise UserError(f"unknown backend {name!r}: {nearest(name, known)}")
    return found


def create(name: str, device: str = "cpu") -> Backend:
    """The backend of that exact name on a device. UserError when this build cannot call it."""
    family, _, kernel = name.partition(":")
    if family == "torch_sdpa":
        from attention.backends.torch_sdpa import TorchSdpa

        return TorchSdpa(kernel, device)
    if name == "triton:paged":
        from attention.backends.triton_paged import TritonPaged

        return TritonPaged(device)
    raise UserError(f"{name}: this version can declare it (matrix) but not call it; use torch_sdpa:* or triton:paged")
