"""The runner: a paged batch of anything equals transformers' own forward, and no page is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.model import Chunk, OutOfPages, PagePool, Runner, specs_of
from attention.model_config import read_config, resolve_dtype
from attention.policy import Policy
from tests.attention.conftest import llama_config, save_model

PAGE = 16


class Reference:
    """transformers' eager forward of whole sequences, without cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    @torch.inference_mode()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        hidden: torch.Tensor = self._model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(0, 10_240, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def table(runner: Runner, length: int) -> tuple[int, ...]:
    return tuple(runner.pool.alloc(-(-length // PAGE)))


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "torch_sdpa:math"])
def test_a_prefill_equals_the_models_own_forward(
    make_runner: Callable[..., Runner], reference: Reference, backend: str
) -> None:
    runner = make_runner(backend)
    for length in (1, 15, 16, 17, 90):
        ids = tokens(length, length)
        hidden = runner.forward([Chunk(tuple(ids), 0, table(runner, length))], rows="all")
        close(hidden, reference.hidden(ids))
        close(runner.logits(hidden), reference.logits(ids))


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "torch_sdpa:math"])
def test_any_mix_of_prefill_extend_and_decode_equals_the_models_own_forward(
    make_runner: Callable[..., Runner], reference: Reference, backend: str
) -> None:
    runner = make_runner(backend)
    runner.pool.free(runner.pool.alloc(7)[::-1])  # pages come in another order than they lie
    texts = [tokens(i, n) for i, n in enumerate((40, 70, 33, 50, 20))]
    tables = [table(runner, len(ids)) for ids in texts]
    cached = [39, 30, 32, 0, 0]  # decode, extend, decode, prefill, prefill
    for ids, pages, start in zip(texts, tables, cached, strict=True):
        if start:
            runner.forward([Chunk(tuple(ids[:start]), 0, pages)])
    chunks = [Chunk(tuple(ids[start:]), start, pages) for ids, pages, start in zip(texts, tables, cached, strict=True)]
    last = runner.forward(chunks)
    assert {run.phase for run in runner.dispatcher.last_step().phases} == {"prefill", "extend", "decode"}
    close(last, torch.stack([reference.hidden(ids)[-1] for ids in texts]))
    every = runner.forward(chunks, rows="all")
    parts = [reference.hidden(ids)[start:] for ids, start in zip(texts, cached, strict=True)]
    close(every, torch.cat(parts))


def test_a_text_fed_token_by_token_among_others_ends_where_one_prefill_does(
    make_runner: Callable[..., Runner], reference: Reference
) -> None:
    runner = make_runner()
    one, other = tokens(1, 40), tokens(2, 40)
    tables = [table(runner, 40) for _ in range(2)]
    runner.forward([Chunk(tuple(one[:5]), 0, tables[0]), Chunk(tuple(other[:20]), 0, tables[1])])
    for step in range(20):
        at, beside = 5 + step, 20 + step
        hidden = runner.forward([Chunk((one[at],), at, tables[0]), Chunk((other[beside],), beside, tables[1])])
    close(hidden, torch.stack([reference.hidden(one[:25])[-1], reference.hidden(other)[-1]]))


def test_every_layer_confirms_one_backend_a_phase(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner("torch_sdpa:math")
    runner.forward([Chunk(tuple(tokens(1, 20)), 0, table(runner, 20))])
    (ran,) = runner.dispatcher.last_step().phases
    assert (ran.confirmed, ran.layers) == ("torch_sdpa:math", 2)


def test_a_sliding_window_is_that_of_the_model(tmp_path: Path) -> None:
    from transformers import MistralConfig

    fields = {k: v for k, v in llama_config().to_dict().items() if k not in ("model_type", "architectures")}  # type: ignore[attr-defined]
    folder = save_model(
        tmp_path / "mistral", MistralConfig(**{**fields, "sliding_window": 8, "num_key_value_heads": 1})
    )
    specs = specs_of(folder, "float32")
    assert [(s.window, s.heads_kv) for s in specs] == [((7, 0), 1)] * 2
    runner = Runner(folder, Dispatcher(Policy(preferred=("torch_sdpa:flash",)), specs), num_pages=32)
    ids = tokens(3, 60)
    pages = table(runner, 60)
    reference = Reference(folder).hidden(ids)
    close(runner.forward([Chunk(tuple(ids), 0, pages)], rows="all"), reference)
    close(runner.forward([Chunk(tuple(ids[40:]), 40, pages)], rows="all"), reference[40:])
    close(runner.forward([Chunk((ids[59],), 59, pages), Chunk((ids[30],), 30, pages[:2])]), reference[[59, 30]])


def test_what_the_runner_says_of_the_model(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner()
    assert (runner.name, runner.dtype, runner.max_context) == ("tiny-llama", torch.float32, 512)
    assert runner.eos_token_ids == {0}
    assert runner.tokenizer.decode(runner.tokenizer.encode("héllo wörld")) == "héllo wörld"


def test_a_pool_gives_each_page_once_and_all_or_nothing() -> None:
    pool = PagePool(5)
    first, second = pool.alloc(2), pool.alloc(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.free(first)
    with pytest.raises(OutOfPages, match="3 KV pages wanted, 2 of 5 free"):
        pool.alloc(3)
    assert pool.num_free == 2, "a refusal takes nothing"
    assert pool.alloc(2) == first, "the last pages freed are the first given"


def test_a_page_is_freed_once() -> None:
    pool = PagePool(4)
    first, second = pool.alloc(2)
    pool.free([first])
    for wrong in ([first], [second, first], [3]):
        with pytest.raises(ValueError, match="not taken"):
            pool.free(wrong)
    assert pool.num_free == 3


def test_layers_are_read_from_the_config_without_weights(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 144,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_of(tmp_path, "bfloat16")
    assert [s.window for s in specs] == [(127, 0), (None, None), (127, 0)]
    assert {(s.heads_q, s.heads_kv, s.head_dim_qk, s.head_dim_vo) for s in specs} == {(8, 2, 64, 64)}
    assert {(s.scale, s.softcap, s.dtype) for s in specs} == {(1 / 12, 50.0, torch.bfloat16)}


def test_a_window_that_the_config_switches_off_is_off(tmp_path: Path) -> None:
    config = {"num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 64, "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    (spec,) = specs_of(tmp_path, "float32")
    assert (spec.window, spec.heads_kv, spec.scale) == ((None, None), 4, 1 / 4)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json there; name a folder"):
        read_config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "hidden_size": 8}')
    with pytest.raises(UserError, match=r"config\.json has no 'num_attention_heads'"):
        specs_of(tmp_path, "float32")


def test_auto_is_float32_on_the_cpu_and_bfloat16_elsewhere() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda:1") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"
    with pytest.raises(UserError, match="dtype 'fp8': known are auto, float32"):
        resolve_dtype("fp8", "cpu")
