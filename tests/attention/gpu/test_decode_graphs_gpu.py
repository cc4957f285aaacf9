"""Decode steps replayed from CUDA graphs: the same answers, confirmed at capture.

python -m pytest -q -m gpu tests/attention/gpu/test_decode_graphs_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention.decode_graphs import DecodeGraphs
from attention.dispatch import Dispatcher
from attention.limits import Limits
from attention.model import Runner, specs_of
from attention.policy import Policy
from attention.sampling import SamplingParams
from attention.scheduler import Generation, Scheduler
from tests.attention.conftest import llama_config, save_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpu-llama"
    return save_model(folder, llama_config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2))


def served(runner: Runner) -> list[list[int]]:
    scheduler = Scheduler(runner, Limits(prefix_reuse=False))
    prompts = [[11 + i, *range(20, 22 + 9 * i)] for i in range(5)]
    asked = [
        Generation(str(i), tuple(prompt), SamplingParams(max_tokens=20 + i, temperature=0))
        for i, prompt in enumerate(prompts)
    ]
    for one in asked:
        scheduler.submit(one)
    with torch.inference_mode():
        while scheduler.has_work:
            scheduler.step()
    return [one.output_ids for one in asked]


@pytest.mark.parametrize("backend", ["triton:paged", "flash_attn:fa2", "flashinfer:fa2"])
def test_answers_with_graphs_are_those_without(backend: str, model: Path) -> None:
    dispatcher = Dispatcher(Policy(mode="pinned", preferred=(backend,)), specs_of(model, "bfloat16"), device="cuda",
                            page_size=256 if backend == "flash_attn:fa2" else 16)  # fmt: skip
    runner = Runner(model, dispatcher, device="cuda", page_size=dispatcher.page_size, num_pages=64)
    runner.eos_token_ids = frozenset()
    without = served(runner)
    runner.graphs = DecodeGraphs(runner)
    with_graphs = served(runner)
    # Another batch size is another tile order in the products beside attention: a tie may fall the other way.
    same = sum(a == b for a, b in zip(without, with_graphs, strict=True))
    assert same >= 4
    assert runner.graphs.num_replayed >= 20
    (run,) = runner.dispatcher.last_step().phases
    assert (run.confirmed, run.graph_hit) == (backend, True)
