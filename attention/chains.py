"""What a policy comes to for one model on one device: a chain by phase, KV length and features.

    for one in chains(policy, specs, declared, max_kv_len=8192): print(one.phase, one.kv_len, one.chain)

KV lengths between which nothing can change are asked about together: shape buckets (powers of two) and the ends of the
policy's overrides bound them, and neighbours with the same answer are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from attention.backends.base import AttentionSpec, Batch, case_of
from attention.cases import AttentionCase, Phase
from attention.policy import Policy, Resolution, resolve
from attention.reasons import Reason

PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
_SHORTEST = 2  # a single key is a prefill
_EXTENSION = 16  # query tokens of the extension that stands for all


class Chain(Resolution):
    """A resolution, and for which KV lengths (both ends belong to it) and features of a layer it holds."""

    kv_len: tuple[int, int]
    features: tuple[str, ...]

    def same_answer(self, other: Chain) -> bool:
        """Whether both have the same chain and leave out the same backends for the same reasons."""
        codes = [{name: [reason.code for reason in why] for name, why in one.excluded.items()} for one in (self, other)]
        return (self.requested, self.chain, codes[0]) == (other.requested, other.chain, codes[1])


def chains(
    policy: Policy,
    specs: Iterable[AttentionSpec],
    declared: Callable[[str, AttentionCase], list[Reason]],
    *,
    max_kv_len: int,
    page_size: int = 16,
) -> list[Chain]:
    """By phase, kind of layer and KV length up to `max_kv_len`, at least 2 keys.

    specs: of a model's layers; equal ones count once. `declared(backend, case)` gives the reasons against a backend.
    """
    found: list[Chain] = []
    for spec in dict.fromkeys(specs):
        for phase in PHASES:
            found += _joined(_parts(policy, phase, spec, declared, max_kv_len, page_size))
    return found


def _parts(
    policy: Policy,
    phase: Phase,
    spec: AttentionSpec,
    declared: Callable[[str, AttentionCase], list[Reason]],
    max_kv_len: int,
    page_size: int,
) -> Iterator[Chain]:
    ends = {_SHORTEST, max_kv_len + 1, *(1 + (1 << n) for n in range(4, max_kv_len.bit_length()))}
    for override in policy.overrides:
        if override.phase == phase:
            ends.update(end for end in override.kv_len if end is not None)
    for low, after in pairwise(sorted(end for end in ends if _SHORTEST <= end <= max_kv_len + 1)):
        q_len = {"prefill": low, "decode": 1, "extend": min(_EXTENSION, low - 1)}[phase]
        pages = tuple(range(-(-low // page_size)))
        case = case_of(Batch((q_len,), (low,), (pages,), page_size), spec).model_copy(update={"phase": phase})
        one = resolve(policy, case, declared)
        yield Chain(**one.model_dump(), kv_len=(low, after - 1), features=case.features)


def _joined(parts: Iterable[Chain]) -> list[Chain]:
    found: list[Chain] = []
    for part in parts:
        if found and found[-1].same_answer(part):
            found[-1] = found[-1].model_copy(update={"kv_len": (found[-1].kv_len[0], part.kv_len[1])})
        else:
            found.append(part)
    return found
