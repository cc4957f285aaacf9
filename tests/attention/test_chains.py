"""What a policy comes to, by phase, length and features."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase
from attention.chains import chains
from attention.policy import Policy
from attention.reasons import Code, Reason

FLASH, MATH = "torch_sdpa:flash", "torch_sdpa:math"
SPEC = AttentionSpec(4, 2, 32, 32, torch.float32, 32**-0.5)


def refused(backend: str, case: AttentionCase) -> list[Reason]:
    """Flash takes no window, and no more than 1,000 keys."""
    too_long = max(member.kv_len for member in case.members) > 1000
    if backend != FLASH or not (too_long or case.windowed):
        return []
    code = Code.INDEX_RANGE if too_long else Code.SWA_UNSUPPORTED
    return [Reason(code=code, dimension="d", observed="o", allowed="a", source="s", message="m")]


def test_a_chain_holds_between_lengths_at_which_something_changes() -> None:
    override = {"phase": "decode", "kv_len": [100, 200], "preferred": [MATH]}
    policy = Policy.model_validate({"preferred": [FLASH], "fallback": [MATH], "overrides": [override]})
    found = chains(policy, [SPEC, SPEC], refused, max_kv_len=3000)
    assert [(one.phase, one.kv_len, one.requested, one.chain) for one in found] == [
        ("prefill", (2, 1024), FLASH, (FLASH, MATH)),
        ("prefill", (1025, 3000), FLASH, (MATH,)),
        ("decode", (2, 99), FLASH, (FLASH, MATH)),
        ("decode", (100, 199), MATH, (MATH, FLASH)),
        ("decode", (200, 1024), FLASH, (FLASH, MATH)),
        ("decode", (1025, 3000), FLASH, (MATH,)),
        ("extend", (2, 1024), FLASH, (FLASH, MATH)),
        ("extend", (1025, 3000), FLASH, (MATH,)),
    ]
    assert found[1].excluded[FLASH][0].code == Code.INDEX_RANGE


def test_layers_of_another_kind_have_chains_of_their_own() -> None:
    policy = Policy(preferred=(FLASH,), fallback=(MATH,), fail_closed_features=("sliding_window",))
    found = chains(policy, [SPEC, replace(SPEC, window=(7, 0))], refused, max_kv_len=64)
    told = {(one.features, one.phase, one.kv_len): one.chain for one in found}
    assert told[("causal",), "decode", (2, 64)] == (FLASH, MATH)
    assert told[("causal", "sliding_window"), "decode", (17, 64)] == (), "a fail-closed feature has no stand-in"
