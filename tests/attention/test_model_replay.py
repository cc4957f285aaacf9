"""The model layer of the replay: equal sides are at exactly zero, faults are not, mixed-up recordings are refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.dispatch import Dispatcher
from attention.errors import UserError
from attention.job import ModelPlan, Prompt
from attention.model import Chunk, Runner, specs_of
from attention.replay import compare, model
from attention.replay.compare import Columns, Head
from attention.replay.model import Batching
from attention.replay.states import Manifest, States, Writer
from attention.schemas import SCHEMAS
from tests.attention.conftest import llama_config, rewrite, save_model

Make = Callable[..., Runner]


def prompt(prompt_id: str, text: str, **changes: Any) -> Prompt:
    return Prompt(
        prompt_id=prompt_id, category="c", language="en", messages=({"role": "user", "content": text},), **changes
    )


PROMPTS = (
    prompt("p0", "The quick brown fox jumps over the lazy dog."),
    prompt("p1", "Hi"),
    prompt("p2", "A longer text, longer than what is kept of it, " * 3),
)
PLAN = ModelPlan(prompts=PROMPTS, max_tokens=64, decode_tokens=6)


def environment(folder: Path, dtype: str = "float32") -> Manifest:
    told: Any = {"model": folder, "model_id": "m", "head": Head.read(folder).digest, "dtype": dtype}
    return Manifest(fingerprint_id="f", torch="2", python="3", gpu="cpu", distributions={}, **told)


@pytest.fixture(scope="module")
def champion(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> States:
    from attention.dispatch import Dispatcher
    from attention.policy import Policy

    dispatcher = Dispatcher(Policy(preferred=("torch_sdpa:math",)), specs_of(tiny_model, "float32"))
    runner = Runner(tiny_model, dispatcher, num_pages=256)
    return States(model.record(runner, PLAN, environment(tiny_model), tmp_path_factory.mktemp("champion")))


@pytest.fixture
def record(tiny_model: Path, make_runner: Make, tmp_path: Path) -> Callable[..., States]:
    """`record("torch_sdpa:flash", scale_factor=1.05)`: a recording of the plan on one backend."""

    def of(*args: Any, plan: ModelPlan = PLAN, how: Batching | None = None, **kwargs: Any) -> States:
        out = tmp_path / f"recording{len(list(tmp_path.iterdir()))}"
        return States(model.record(make_runner(*args, **kwargs), plan, environment(tiny_model), out, how=how))

    return of


def compared(a: States, b: States) -> Columns:
    return compare.columns(a, b, Head.read(a.manifest.model))


def of_mode(found: Columns, mode: str, figure: str = "kl") -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = found[figure][found["mode"] == mode]
    return values


# Recording.


def test_a_recording_holds_every_token_once_in_each_mode_and_gives_its_pages_back(
    tiny_model: Path, make_runner: Make, tmp_path: Path
) -> None:
    runner = make_runner()
    seen: list[tuple[int, int]] = []
    out = tmp_path / "new"
    told = lambda done, total: seen.append((done, total))  # noqa: E731
    states = States(model.record(runner, PLAN, environment(tiny_model), out, told))
    assert runner.pool.num_free == runner.pool.num_pages
    assert seen[-1] == (3, 3)
    lengths = [p.num_tokens for p in states.manifest.prompts]
    assert lengths == [min(64, len(one.messages[0]["content"]) + len("<user>\n<a>")) for one in PROMPTS]
    assert (states.num_rows("prefill"), states.num_rows("decode")) == (sum(lengths), 18)
    assert states.manifest.confirmed == {"prefill": "torch_sdpa:flash", "decode": "torch_sdpa:flash"}
    assert (out.stat().st_mode & 0o77) == 0, "prompts can be read from it"


@pytest.mark.parametrize("backend", ["torch_sdpa:flash", "torch_sdpa:math"])
def test_packed_prompts_and_decodes_of_any_batch_are_what_each_is_alone(
    record: Callable[..., States], tiny_model: Path, make_runner: Make, backend: str
) -> None:
    """The oracle is the plain way: a prompt a forward, then a token a step through its own cache."""
    runner, states = make_runner(backend), record(backend)
    texts = [model.tokens_of(runner, one, PLAN.max_tokens) for one in PROMPTS]
    scored, decoded = [], []
    for ids in texts:
        table = tuple(runner.pool.alloc(-(-len(ids) // runner.page_size)))
        scored.append(runner.forward([Chunk(tuple(ids), 0, table)], rows="all").clone())
        for at in range(len(ids) - 6, len(ids)):
            decoded.append(runner.forward([Chunk((ids[at],), at, table)]).clone())
        runner.pool.free(table)
    for mode, alone in (("prefill", scored), ("decode", decoded)):
        found = states.rows(mode, 0, states.num_rows(mode))  # type: ignore[arg-type]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=2e-5)
    other = record(backend, how=Batching(tokens=32, keys=100, piece=16, members=2))
    assert max(compared(states, other)["kl"]) < 1e-9


def test_a_forced_token_reads_what_the_tokens_before_it_wrote_not_what_prefill_left(
    tiny_model: Path, make_runner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decode of p0 writes wrong values: the decodes after it must show that, though all are one forward."""
    monkeypatch.setattr(model, "sizes_of", lambda how: iter([18]))
    states = []
    for shift in (0.0, 1.0):
        runner = make_runner()
        write = runner.attend

        def attend(layer: int, slots: Any, q: Any, k: Any, v: Any, write: Any = write, shift: float = shift) -> Any:
            if len(slots) == 18:  # the decodes
                v = torch.where((slots == slots[0])[:, None, None], v + shift, v)
            return write(layer, slots, q, k, v)

        runner.attend = attend  # type: ignore[method-assign]
        states.append(States(model.record(runner, PLAN, environment(tiny_model), tmp_path / str(shift))))
    differs = (states[0].rows("decode", 0, 18) != states[1].rows("decode", 0, 18)).any(-1).tolist()
    assert differs == [True] * 6 + [False] * 12, "the broken token and what follows it; other texts have other pages"


def test_batches_of_decodes_grow_from_one_member_within_their_bounds() -> None:
    def first(how: Batching, count: int) -> list[int]:
        sizes = model.sizes_of(how)
        return [next(sizes) for _ in range(count)]

    assert first(Batching(1, 1), 5) == [1, 2, 4, 8, 16]
    assert first(Batching(1, 1, members=3), 4) == [1, 2, 3, 3]


def test_a_text_of_one_token_has_nothing_to_force(record: Callable[..., States]) -> None:
    states = record(plan=PLAN.model_copy(update={"max_tokens": 1}))
    assert (states.num_rows("prefill"), states.num_rows("decode")) == (3, 0)
    assert len(compared(states, states)["kl"]) == 3


def test_prompts_that_cannot_be_recorded_are_named(make_runner: Make, tiny_model: Path, tmp_path: Path) -> None:
    def refused(message: str, *prompts: Prompt, max_tokens: int = 64) -> None:
        plan = ModelPlan(prompts=prompts, max_tokens=max_tokens, decode_tokens=1)
        with pytest.raises(UserError, match=message):
            model.record(make_runner(), plan, environment(tiny_model), tmp_path / "x")

    refused("prompt p1 is there twice", PROMPTS[1], PROMPTS[1])
    refused("prompt long has 1010 tokens, the context 512", prompt("long", "x" * 1000), max_tokens=4096)


def test_a_recording_that_lost_rows_or_is_none_is_refused(record: Callable[..., States], tmp_path: Path) -> None:
    folder = record().folder
    np.save(folder / "decode.npy", np.zeros((17, 64), dtype=np.float32))
    with pytest.raises(UserError, match=r"'decode': 17} rows for .*'decode': 18} of its prompts; record it again"):
        States(folder)
    (folder / "prefill.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match="not a whole recording of prompts"):
        States(folder)
    with pytest.raises(UserError, match="No such file"):
        States(tmp_path / "nothing")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_of_16_bits_come_back_bit_by_bit(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    from attention.dispatch import Dispatcher
    from attention.policy import Policy

    dispatcher = Dispatcher(Policy(preferred=("torch_sdpa:math",)), specs_of(tiny_model, dtype))
    runner = Runner(tiny_model, dispatcher, dtype=dtype, num_pages=64)
    states = States(model.record(runner, PLAN, environment(tiny_model, dtype), tmp_path / "half"))
    ids = tuple(int(i) for i in states.tokens[: states.manifest.prompts[0].num_tokens])
    table = tuple(runner.pool.alloc(4))
    again = runner.forward([Chunk(ids, 0, table)], rows="all")
    assert states.dtype == getattr(torch, dtype)
    assert torch.equal(states.rows("prefill", 0, len(ids)), again)
    assert compare.describe(compared(states, states))["prefill"]["kl_p999"] == 0


# Comparing.


def test_equal_sides_are_at_exactly_zero(champion: States) -> None:
    found = compared(champion, champion)
    assert set(found["kl"]) == {0.0}
    assert set(found["topk_overlap"]) == {1.0}
    assert found["next_token_equal"].all()
    rows = compare.as_rows(champion, found)
    assert set(rows["flip_margin"]) == {None}
    assert rows["nll_champion"] == rows["nll_candidate"]
    assert set(rows) <= set(SCHEMAS["model_replay"].names)
    where = zip(rows["prompt_id"], rows["mode"], rows["position"], rows["nll_champion"], strict=True)
    p1 = [(mode, position, nll) for name, mode, position, nll in where if name == "p1"]
    assert [position for mode, position, _ in p1 if mode == "decode"] == [6, 7, 8, 9, 10, 11], "those of the whole text"
    assert [position for _, position, nll in p1 if nll is None] == [11, 11], "nothing follows the last token"


def test_figures_are_those_of_float64(champion: States, record: Callable[..., States]) -> None:
    """The oracle is the definition itself, in float64, position by position."""
    other = record("torch_sdpa:math", scale_factor=1.3)
    found = compared(champion, other)
    head = compare.lm_head(champion.manifest.model).double()
    num, tokens = champion.num_rows("prefill"), champion.tokens.tolist()
    a, b = (torch.log_softmax(s.rows("prefill", 0, num).double() @ head.T, -1) for s in (champion, other))
    kl = (a.exp() * (a - b)).sum(-1)
    np.testing.assert_allclose(of_mode(found, "prefill"), kl.numpy(), rtol=1e-3, atol=1e-9)
    ends = set(np.cumsum([p.num_tokens for p in champion.manifest.prompts]) - 1)
    for i in range(num):
        row = {name: of_mode(found, "prefill", name)[i] for name in compare.FIGURES}
        best, choice = int(a[i].argmax()), int(b[i].argmax())
        assert row["next_token_equal"] == (best == choice)
        margin = float(a[i, best] - a[i, choice])
        assert math.isnan(row["flip_margin"]) if best == choice else abs(row["flip_margin"] - margin) < 1e-4
        overlap = len(set(a[i].topk(10).indices.tolist()) & set(b[i].topk(10).indices.tolist())) / 10
        assert row["topk_overlap"] == pytest.approx(overlap)
        if i not in ends:
            assert row["nll_candidate"] == pytest.approx(-float(b[i, tokens[i + 1]]), abs=1e-4)


@pytest.mark.parametrize("vocab", [7, 256, 2559, 2560, 2561, 5000, 49152])
def test_the_largest_logits_are_found_in_order_in_any_vocabulary(vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, -1] = 9.0
    logits[1] = torch.arange(vocab)  # all of the largest in one group, or in the rest
    found = compare._top(logits, 10)
    assert torch.equal(logits.gather(1, found), logits.topk(min(10, vocab)).values)


def test_a_chunk_more_changes_nothing(champion: States, record: Callable[..., States],
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    other = record("torch_sdpa:flash")
    whole = compared(champion, other)
    monkeypatch.setitem(compare._CHUNK_BYTES, "cpu", 1)
    for name, values in compared(champion, other).items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, whole[name], rtol=1e-6, atol=1e-10)
        else:
            np.testing.assert_array_equal(values, whole[name])


def test_two_sound_backends_differ_by_rounding_only(champion: States, record: Callable[..., States]) -> None:
    found = compared(champion, record("torch_sdpa:flash"))
    assert 0 < found["kl"].max() < 1e-8
    assert found["next_token_equal"].all()


def test_a_wrong_scale_diverges_and_flips_tokens_in_both_modes(champion: States, record: Callable[..., States]) -> None:
    found = compared(champion, record("torch_sdpa:math", scale_factor=1.05))
    for mode in ("prefill", "decode"):
        assert of_mode(found, mode).mean() > 1e-3
    flips = ~found["next_token_equal"]
    assert flips.any()
    assert (found["flip_margin"][flips] > 0).all()
    assert np.isnan(found["flip_margin"][~flips]).all()


def test_a_nan_stays_one(champion: States, record: Callable[..., States]) -> None:
    broken = record("torch_sdpa:math")
    rows = np.load(broken.folder / "prefill.npy")
    rows[3] = math.nan
    rewrite(broken.folder, "prefill", rows)
    found = compared(champion, States(broken.folder))
    [at] = np.nonzero(np.isnan(found["kl"]))[0]
    assert (found["mode"][at], found["prompt"][at], found["position"][at]) == ("prefill", 0, 3)
    rows_ = compare.as_rows(champion, found)
    assert math.isnan(rows_["kl"][at])
    assert math.isnan(rows_["nll_candidate"][at]), "not null, which would say that nothing follows"


def test_recordings_of_other_prompts_tokens_or_models_are_refused(
    champion: States, record: Callable[..., States]
) -> None:
    fewer = record(plan=PLAN.model_copy(update={"prompts": PROMPTS[:2]}))
    with pytest.raises(UserError, match=r"recordings differ in prompts: \['p2'\]; record both again"):
        compared(champion, fewer)
    with pytest.raises(UserError, match="differ in the length, order or kind of p0"):
        compared(champion, record(plan=PLAN.model_copy(update={"decode_tokens": 5})))
    other = record(plan=PLAN.model_copy(update={"prompts": (*PROMPTS[:2], prompt("p2", "b" * 200))}))
    with pytest.raises(UserError, match="differ in the tokens of p2; record both again"):
        compared(champion, other)
    with pytest.raises(UserError, match="is of another model, m, than the lm_head"):
        compare.columns(champion, champion, Head(torch.zeros(300, 64)))


def test_a_file_that_was_exchanged_is_refused(champion: States, record: Callable[..., States]) -> None:
    other = record("torch_sdpa:flash").folder
    shutil.copy(champion.folder / "decode.npy", other / "decode.npy")
    with pytest.raises(UserError, match=r"decode\.npy is not as it was recorded; record it again"):
        compared(champion, States(other))
    tokens = np.load(other / "tokens.npy")
    np.save(other / "tokens.npy", tokens[::-1].copy())
    with pytest.raises(UserError, match=r"tokens\.npy is not as it was recorded; record it again"):
        States(other)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", "float99", "not a whole recording"),
        ("dtype", "bfloat16", "its files are not what its manifest says"),
        ("confirmed", {}, "its files are not what its manifest says"),
        ("prompts", [], "holds no prompt"),
        ("head", "0", "of different models"),
    ],
)
def test_a_manifest_that_does_not_fit_is_one_line(
    champion: States, tmp_path: Path, key: str, value: Any, said: str
) -> None:
    folder = Path(shutil.copytree(champion.folder, tmp_path / "edited"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(UserError, match=said):
        compared(champion, States(folder))


def test_one_recording_at_a_time_goes_into_a_folder(tiny_model: Path, make_runner: Make, tmp_path: Path) -> None:
    told = environment(tiny_model)
    first = Writer(tmp_path / "w", told, [[1, 2]], 64)
    with pytest.raises(UserError, match="another process writes there"):
        Writer(tmp_path / "w", told, [[1, 2]], 64)
    del first
    Writer(tmp_path / "w", told, [[1, 2]], 64)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_that_of_the_model_tied_or_not_in_any_number_of_shards(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "m", llama_config(tie_word_embeddings=tied), max_shard_size="2700KB")
    assert tied or len(list(folder.glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(compare.lm_head(folder), loaded.get_output_embeddings().weight)


def test_a_bound_on_the_logits_is_read_from_the_model(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 3.0}))
    (tmp_path / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    states = torch.randn(4, 64)
    plain = Head.read(tiny_model).logits(states)
    torch.testing.assert_close(Head.read(tmp_path).logits(states), 3 * torch.tanh(plain / 3))


def test_a_model_without_a_head_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no lm_head.weight or model.embed_tokens.weight"):
        compare.lm_head(tmp_path)


def test_one_layer_with_another_window_is_seen_where_the_window_hides_keys(
    champion: States, tiny_model: Path, make_runner: Make, tmp_path: Path
) -> None:
    runner = make_runner("torch_sdpa:math")
    first, *others = runner.dispatcher.specs
    runner.dispatcher = Dispatcher(runner.dispatcher.policy, [replace(first, window=(31, 0)), *others])
    found = compared(champion, States(model.record(runner, PLAN, environment(tiny_model), tmp_path / "w")))
    inside = found["position"] < 32
    assert found["kl"][inside].max() < 1e-9
    assert found["kl"][~inside & (found["mode"] == "decode")].min() > 1e-9
