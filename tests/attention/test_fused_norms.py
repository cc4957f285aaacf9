"""Fused norms: the same function up to rounding, and only where it is the same."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attention import fused_norms


def norm(dtype: torch.dtype, width: int = 576) -> LlamaRMSNorm:
    found = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.normal_(found.weight, generator=torch.Generator().manual_seed(1))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_fused_norm_is_as_exact_as_the_models_own(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(norm(dtype))
    x = 30 * torch.randn(1, 50, 576, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = model(x)
    wide = x.double()
    truth = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * model[0].weight.double()
    assert fused_norms.fuse(model) == 1
    after = model(x)
    assert after.dtype == before.dtype
    assert (after - truth).norm() <= 1.05 * (before - truth).norm()


def test_another_formula_or_another_layer_stays() -> None:
    class WithBias(LlamaRMSNorm):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(8)
            self.bias = torch.nn.Parameter(torch.zeros(8))

    class HalfNorm(LlamaRMSNorm):  # type: ignore[misc]
        pass

    class ScaledRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.05 * super().forward(x)

    model = torch.nn.Sequential(Gemma2RMSNorm(8), torch.nn.LayerNorm(8), WithBias(), HalfNorm(8), ScaledRMSNorm(8))
    assert fused_norms.fuse(model) == 0
