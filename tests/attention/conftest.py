"""A random two-layer Llama with a byte-level tokenizer: small enough to run everywhere, real enough to load.

Its weights are wide, so that attention is far from uniform and a wrong scale shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.dispatch import Dispatcher
from attention.job import Setup
from attention.model import Runner, specs_of
from attention.policy import Policy
from attention.replay.digest import Running

torch.set_num_threads(1)  # tests share two cores with others

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def save_model(folder: Path, config: object, *, max_shard_size: str = "1GB") -> Path:
    """A random causal LM of that config with a byte-level tokenizer, as a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate(alphabet, start=1)}}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def llama_config(**changes: object) -> object:
    from transformers import LlamaConfig

    fields = {
        "vocab_size": 10_240,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    return LlamaConfig(**{**fields, **changes})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", llama_config())


@pytest.fixture(scope="session")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "flash.yaml"
    path.write_text(
        "attention_policy:\n  preferred: [torch_sdpa:flash]\n  fallback: [math]\n  allow_runtime_fallback: true\n"
    )
    return path


@pytest.fixture
def setup(tiny_model: Path, policy_file: Path) -> Setup:
    return Setup(model=tiny_model, policy=policy_file, num_pages=256)


@pytest.fixture
def make_runner(tiny_model: Path) -> Callable[..., Runner]:
    """`make_runner("torch_sdpa:math", scale_factor=1.05)`: a runner of the tiny model on one backend."""

    def make(backend: str = "torch_sdpa:flash", *, scale_factor: float = 1.0, model: Path = tiny_model) -> Runner:
        policy = Policy(mode="pinned", preferred=(backend,))
        dispatcher = Dispatcher(policy, specs_of(model, "float32"), scale_factor=scale_factor)
        return Runner(model, dispatcher, num_pages=256)

    return make


def rewrite(folder: Path, mode: str, rows: np.ndarray[Any, Any]) -> None:
    """Put other rows into a recording of prompts, as if they had been recorded: what a faulty kernel would leave."""
    np.save(folder / f"{mode}.npy", rows)
    seen = Running()
    seen.add(torch.from_numpy(rows))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["digests"][mode] = seen.hex()
    (folder / "manifest.json").write_text(json.dumps(manifest))
