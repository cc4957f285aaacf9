"""The tensor limits hold for sound kernels on seeds that nobody has seen, and no wrong scale slips under them."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from attention.backends.base import AttentionSpec
from attention.job import Setup, TensorPlan
from attention.replay import tensor
from gates.thresholds import load_limits

NUM_SEEDS = 200
FIGURES = ("r_rms", "r_max", "r_row")
SETUP = Setup(model=Path("unused"), policy=Path("unused"))


def worst(dtype: str, seeds: tuple[int, ...], scale_factor: float = 1.0) -> dict[str, tuple[float, float]]:
    """Smallest and largest of each figure over all cases, inputs and seeds."""
    import torch

    torch.set_num_threads(1)
    spec = AttentionSpec(9, 3, 64, 64, getattr(torch, dtype), 64**-0.5)
    resolved = dict.fromkeys(("prefill", "decode", "extend"), "torch_sdpa:flash")
    rows = list(tensor.rows(SETUP, TensorPlan(seeds=seeds, max_kv_len=1024), [spec], (dtype,), resolved, scale_factor))
    assert [row["error"] for row in rows if "error" in row] == []
    by_case: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        by_case.setdefault((row["inputs"], row["seed"]), []).append(row)
    # A fault has to show in the worst case of each (inputs, seed); a sound kernel stays under in every case.
    tops = {f: [max(r[f] for r in group) for group in by_case.values()] for f in FIGURES}
    return {f: (min(values), max(values)) for f, values in tops.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_kernel_passes_on_unseen_seeds_and_a_wrong_scale_on_none(dtype: str) -> None:
    seeds = tuple(secrets.randbelow(1 << 31) for _ in range(NUM_SEEDS))
    limits = load_limits("replay", "demo").of_class(dtype)
    sound, wrong = worst(dtype, seeds), worst(dtype, seeds[:10], scale_factor=1.05)
    for figure in FIGURES:
        limit = limits.value(figure)
        print(
            f"{dtype} {figure}: sound at most {sound[figure][1]:.3g}, limit {limit:g}, wrong >= {wrong[figure][0]:.3g}"
        )
        assert sound[figure][1] <= limit < wrong[figure][0]
