"""A whole model with a fault: sound it is the oracle, and every fault shows where it must and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.dispatch import Dispatcher
from attention.drill.whole import MIXED, SOUND, FaultyRunner, ModelFault, model_kinds
from attention.model import Chunk, specs_of
from attention.oracle_dispatcher import OracleDispatcher
from attention.policy import Policy

States = dict[str, torch.Tensor]
Record = Callable[[ModelFault], States]

TEXTS = (tuple(range(3, 43)), tuple(range(50, 71)))


@pytest.fixture
def runner(tiny_model: Path) -> FaultyRunner:
    policy = Policy(mode="pinned", preferred=("torch_sdpa:math",))
    return FaultyRunner(tiny_model, Dispatcher(policy, specs_of(tiny_model, "float32")), num_pages=16)


@pytest.fixture
def record(runner: FaultyRunner) -> Record:
    def states(fault: ModelFault) -> States:
        """Two prompts scored, then a step in which both decode, then one in which a decode meets a prefill."""
        runner.begin(fault)
        tables = [tuple(runner.pool.alloc(4)) for _ in range(3)]
        found = {}
        try:
            for name, text, table in zip("ab", TEXTS, tables, strict=False):
                found[f"prefill {name}"] = runner.forward([Chunk(text, 0, table)], rows="all").clone()
            ends = [Chunk((7,), len(text), table) for text, table in zip(TEXTS, tables, strict=False)]
            found["decode"] = runner.forward(ends).clone()
            mixed = [Chunk(TEXTS[1], 0, tables[2]), Chunk((9,), len(TEXTS[0]) + 1, tables[0])]
            found["mixed"] = runner.forward(mixed).clone()
        finally:
            for table in tables:
                runner.pool.free(table)
        return found

    return states


def changed(one: States, other: States) -> set[str]:
    return {name for name in one if not torch.allclose(one[name], other[name], rtol=0, atol=1e-4)}


def test_sound_it_is_the_oracle(runner: FaultyRunner, record: Record) -> None:
    served = record(SOUND)
    runner.dispatcher = OracleDispatcher(runner.dispatcher.specs)  # type: ignore[assignment]
    assert changed(served, record(SOUND)) == set()


#: Steps that a fault changes; what follows a changed cache is changed with it.
WHERE = {
    "gqa_map_wrong_in_one_layer": {"prefill a", "prefill b", "decode", "mixed"},
    "kv_scale_ignored_in_one_layer": {"prefill a", "prefill b", "decode", "mixed"},
    "nan_in_one_layer": {"prefill a", "prefill b", "decode", "mixed"},
    "sink_lost": {"prefill a", "prefill b", "decode", "mixed"},
    "race": {"prefill a", "mixed"},
    "cache_write_lost": {"decode", "mixed"},
    "position_off_by_one": {"decode", "mixed"},
    "scale_1_percent_in_float32": {"prefill a", "prefill b", "decode", "mixed"},
}


@pytest.mark.parametrize("name", WHERE)
def test_a_fault_changes_the_steps_that_it_is_about_in_the_oracle_too(
    name: str, runner: FaultyRunner, record: Record
) -> None:
    (kind,) = (kind for kind in model_kinds(runner.dispatcher.specs) if kind.name == name)
    served, dispatcher = record(SOUND), runner.dispatcher
    assert changed(served, record(kind.fault)) >= WHERE[name] - {"mixed"}
    runner.dispatcher = OracleDispatcher(dispatcher.specs)  # type: ignore[assignment]
    exact = record(SOUND)
    steps = changed(exact, record(kind.fault))
    assert steps >= WHERE[name] - {"mixed"}
    untouched = {"prefill a", "prefill b"} - WHERE[name]
    assert not steps & untouched - ({"prefill b"} if name == "race" else set())


@pytest.mark.parametrize("name", ["sink_lost", "race"])
def test_every_prompt_that_is_packed_into_one_prefill_has_the_fault(name: str, runner: FaultyRunner) -> None:
    (kind,) = (kind for kind in model_kinds(runner.dispatcher.specs) if kind.name == name)

    def packed(fault: ModelFault) -> States:
        runner.begin(fault)
        tables = [tuple(runner.pool.alloc(4)) for _ in TEXTS]
        try:
            chunks = [Chunk(text, 0, table) for text, table in zip(TEXTS, tables, strict=True)]
            states_TD = runner.forward(chunks, rows="all").clone()
        finally:
            for table in tables:
                runner.pool.free(table)
        return dict(zip("ab", states_TD.split([len(text) for text in TEXTS]), strict=True))

    assert changed(packed(SOUND), packed(kind.fault)) == {"a", "b"}


def test_every_kind_is_looked_at(runner: FaultyRunner) -> None:
    assert {kind.name for kind in model_kinds(runner.dispatcher.specs)} == set(WHERE)


def test_a_mixed_step_alone_shows_what_is_wrong_in_it(record: Record) -> None:
    assert changed(record(SOUND), record(MIXED.fault)) == {"mixed"}


def test_what_an_earlier_fault_left_is_gone(runner: FaultyRunner, record: Record) -> None:
    before = record(SOUND)
    record(model_kinds(runner.dispatcher.specs)[2].fault)  # NaN
    after = record(SOUND)
    assert all(torch.equal(before[name], after[name]) for name in before)
