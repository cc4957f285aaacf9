"""Half-precision weights: only where nothing is lost, and the product stays a float32 one."""

from __future__ import annotations

import pytest
import torch

from attention import half_weights

pytestmark = pytest.mark.skipif(
    not half_weights.supported("cpu", torch.float32), reason="this build of torch has no FBGEMM"
)


def linear(checkpoint: torch.dtype, bias: bool = False, seed: int = 0) -> torch.nn.Linear:
    """A float32 layer read from a checkpoint of that dtype."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(576, 192, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.to(checkpoint))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@torch.inference_mode()
def test_the_product_is_as_exact_as_float32(rows: int, bias: bool) -> None:
    layer = linear(torch.bfloat16, bias)
    packed = half_weights.HalfLinear(layer)
    x = torch.randn(1, rows, 576)
    truth = torch.nn.functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    # What float32 sums of 576 terms may lose in any order, with high probability (Higham and Mary, 2019); x rounded to
    # float16 would lose more.
    lost = 576**0.5 * 2.0**-24 * torch.nn.functional.linear(x.abs().double(), layer.weight.abs().double())
    assert packed(x).shape == truth.shape
    assert ((packed(x) - truth).abs() <= lost).all()
    assert not ((torch.nn.functional.linear(x.half().float(), layer.weight, layer.bias) - truth).abs() <= lost).all()


@pytest.mark.parametrize("checkpoint", [torch.bfloat16, torch.float16])
def test_layers_of_half_checkpoints_are_packed(checkpoint: torch.dtype) -> None:
    model = torch.nn.Sequential(linear(checkpoint), torch.nn.SiLU(), torch.nn.Sequential(linear(checkpoint)))
    assert half_weights.pack(model) == 2
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())


def test_a_float32_checkpoint_stays_as_it_is() -> None:
    model = torch.nn.Sequential(linear(torch.float32))
    assert half_weights.pack(model) == 0
    assert isinstance(model[0], torch.nn.Linear)


@pytest.mark.parametrize("outlier", [1e5, -7e4, float("inf"), float("nan")])
def test_a_weight_that_float16_cannot_hold_stays(outlier: float) -> None:
    layer = linear(torch.bfloat16)
    with torch.no_grad():
        layer.weight[3, 5] = torch.tensor(outlier).bfloat16().float()
    assert not half_weights.holds(layer.weight)


def test_only_float32_on_the_cpu() -> None:
    assert not half_weights.supported("cuda:0", torch.float32)
    assert not half_weights.supported("cpu", torch.bfloat16)
