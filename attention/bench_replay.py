"""How fast the model layer of the replay is, beside the model alone, in one process.

    python -m attention.bench_replay --model data/models/smollm2-135m-instruct --out replay.json     # needs a GPU
    python -m attention.bench_replay --model data/models/smollm2-135m-instruct --device cpu --prompts 2 --tokens 64 \\
        --decode 8                                                                                   # runs anywhere
    python -m attention.bench_replay --model FOLDER --random-weights    # config.json and tokenizer are enough

Raw seconds of every round go to the file. In each round, one after the other:

    forward       model(ids) of transformers with SDPA, logits and all, in batches of as many tokens
    record_a, _b  every prompt scored in prefill on either backend, states on the disk
    compare       both recordings through the lm_head: KL, Top-K, margins
    graph_decode  the last tokens of all prompts, a step each: static cache, SDPA, on a GPU one CUDA graph
    forced_decode the same tokens as the recorder decodes them, states on the device

`replay` is (record_a + record_b + compare) over the tokens of both recordings: one plain forward does one side's.
Prompts are random tokens of equal length, since the static cache knows no other; weights and cache hold no zeros.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attention import half_weights
from attention.dispatch import Dispatcher
from attention.errors import UserError, exit_code
from attention.flags import check_count, check_out
from attention.job import ModelPlan, Prompt
from attention.model import Runner, specs_of
from attention.model_config import layer_kinds, resolve_dtype
from attention.policy import Policy
from attention.progress import now_and_then
from attention.replaced import put_json
from attention.replay import compare, model
from attention.replay.model import batching
from attention.replay.states import Manifest, Sink, States
from attention.validated import validated

_DEFAULTS = {"cuda": "triton:paged", "cpu": "torch_sdpa:flash"}


@dataclass(frozen=True)
class Size:
    prompts: int
    tokens: int  # a prompt
    decode: int  # of these, decoded one by one
    rounds: int


class _Memory(Sink):
    """Rows that stay where they are: what decoding takes, without the disk."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def append(self, states_RD: torch.Tensor) -> None:
        self.states.append(states_RD)


class StaticDecode:
    """Greedy serving as transformers does it best: a step of B sequences in one CUDA graph over a static cache.

    Shapes: B sequences, L slots, H query heads, G KV heads, D head dim. On the CPU the same without a graph.
    """

    def __init__(self, plain: Any, ids_BL: torch.Tensor) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("static_cache", self._attend)
        self._model, self._ids_BL = plain, ids_BL
        config = plain.config
        batch, length = ids_BL.shape
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, length, dim)
        self._k, self._v = (torch.randn(shape, dtype=plain.dtype, device=ids_BL.device) for _ in range(2))
        self._pos_1 = torch.zeros(1, dtype=torch.long, device=ids_BL.device)
        self._token_B1 = ids_BL[:, :1].clone()
        self._slots_L = torch.arange(length, device=ids_BL.device)
        self._logits: torch.Tensor = torch.empty(0)
        self._graph: Any = None

    def _attend(
        self, module: Any, q_BHQD: torch.Tensor, k_BGQD: torch.Tensor, v_BGQD: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        k_BGLD, v_BGLD = self._k[module.layer_idx], self._v[module.layer_idx]
        k_BGLD.index_copy_(2, self._pos_1, k_BGQD)
        v_BGLD.index_copy_(2, self._pos_1, v_BGQD)
        each = q_BHQD.shape[1] // k_BGLD.shape[1]
        visible = (self._slots_L <= self._pos_1)[None, None, None].expand(len(q_BHQD), 1, 1, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_BHQD,
            k_BGLD.repeat_interleave(each, 1),
            v_BGLD.repeat_interleave(each, 1),
            attn_mask=visible,
            scale=kwargs["scaling"],
        )
        return out.transpose(1, 2), None

    def _step(self) -> None:
        # Positions of one token a sequence: with no cache of its own the model would take them for 0.
        places_B1 = self._pos_1.expand(len(self._token_B1), 1)
        self._logits = self._model(input_ids=self._token_B1, position_ids=places_B1, use_cache=False).logits

    def prepare(self) -> None:
        """Capture the step. The implementation of attention is the model's again afterwards."""
        if not self._token_B1.is_cuda:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def run(self, start: int) -> list[torch.Tensor]:
        """Decode the tokens from `start` on; logits [B, 1, vocab] of the last step, for who wants to look."""
        for at in range(start, self._ids_BL.shape[1]):
            self._pos_1.fill_(at)
            self._token_B1.copy_(self._ids_BL[:, at : at + 1])
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return [self._logits]


def measure(
    folder: Path, device: str, backends: tuple[str, str], size: Size, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Raw seconds by what was timed, and the figures that follow from their medians."""
    dtype = resolve_dtype("auto", device)
    pages = 2 * -(-size.tokens // 16) * size.prompts  # forced decode keeps its own for all rounds
    dispatchers = [_dispatcher(folder, name, dtype, device) for name in backends]
    runner = Runner(folder, dispatchers[0], dtype=dtype, device=device, num_pages=pages)
    texts = _texts(runner, size)
    say(f"{runner.name}: loading the plain model; then a round to warm up and {size.rounds} that count")
    ids_NL = torch.tensor(texts, device=device)
    head = compare.Head.read(folder, device)
    scoring = ModelPlan(prompts=_prompts(size), max_tokens=size.tokens, decode_tokens=0)
    environment = Manifest(
        fingerprint_id="bench",
        torch=torch.__version__,
        python=sys.version.split()[0],
        gpu=torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        distributions={},
        model=folder,
        model_id=runner.name,
        head=head.digest,
        dtype=dtype,
    )
    plain = _plain(folder, dtype, device, "sdpa")
    static = StaticDecode(_plain(folder, dtype, device, "sdpa"), ids_NL)
    static._model.set_attn_implementation("static_cache")
    static.prepare()
    say("loaded")
    with tempfile.TemporaryDirectory() as scratch:
        sides = [Path(scratch) / name for name in ("a", "b")]

        def fresh() -> None:  # to write over a recording is to wait until the old one is gone
            for folder in sides:
                shutil.rmtree(folder, ignore_errors=True)

        def record(side: int) -> None:
            runner.dispatcher = dispatchers[side]
            model.record_texts(runner, scoring, texts, environment, sides[side], now_and_then("record, prompts"))

        work: dict[str, Callable[[], Any]] = {
            "forward": lambda: _forward(plain, ids_NL, batching(device).tokens),
            "record_a": lambda: record(0),
            "record_b": lambda: record(1),
            "compare": lambda: compare.columns(
                States(sides[0]), States(sides[1]), head, progress=now_and_then("compare, positions")
            ),
            "graph_decode": lambda: static.run(size.tokens - size.decode),
            "forced_decode": _forced(runner, dispatchers[0], texts, size),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(size.rounds + 1):  # the first one compiles and warms up
            fresh()
            for name, run in work.items():
                took = _timed(run, device)
                if turn:
                    seconds[name].append(took)
                say(f"round {turn} of {size.rounds}: {name} {took:.3f} s")
    return {
        "device": environment.gpu,
        "torch": torch.__version__,
        "dtype": dtype,
        "model": runner.name,
        "backends": list(backends),
        "confirmed": {side: dict(one.confirmed) for side, one in zip("ab", dispatchers, strict=True)},
        "size": asdict(size),
        "seconds": seconds,
        **figures(seconds, size),
    }


def with_random_weights(folder: Path, into: Path) -> Path:
    """The model of a folder's config.json and tokenizer in `into`, its weights drawn: speed does not depend on them.

    UserError for a folder without a config.json that names a causal LM.
    """
    layer_kinds(folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "*.gguf"))
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    drawn.to(torch.bfloat16).save_pretrained(into)
    return into


def figures(seconds: dict[str, list[float]], size: Size) -> dict[str, float]:
    """Tokens a second and ratios from the median seconds."""
    mid = {name: statistics.median(values) for name, values in seconds.items()}
    scored, decoded = size.prompts * size.tokens, size.prompts * size.decode
    replay_s = mid["record_a"] + mid["record_b"] + mid["compare"]
    found = {
        "forward_tokens_per_s": scored / mid["forward"],
        "record_tokens_per_s": 2 * scored / (mid["record_a"] + mid["record_b"]),
        "compare_positions_per_s": scored / mid["compare"],
        "replay_tokens_per_s": 2 * scored / replay_s,
        "graph_decode_tokens_per_s": decoded / mid["graph_decode"],
        "forced_decode_tokens_per_s": decoded / mid["forced_decode"],
    }
    found["replay_over_forward"] = found["replay_tokens_per_s"] / found["forward_tokens_per_s"]
    found["forced_over_graph"] = found["forced_decode_tokens_per_s"] / found["graph_decode_tokens_per_s"]
    return found


def _dispatcher(folder: Path, backend: str, dtype: str, device: str) -> Dispatcher:
    policy = validated(Policy, {"mode": "pinned", "preferred": (backend,)}, "--backends")
    return Dispatcher(policy, specs_of(folder, dtype), device=device)


def _plain(folder: Path, dtype: str, device: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    loaded.to(device).eval()
    if half_weights.supported(device, getattr(torch, dtype)):
        half_weights.pack(loaded)  # as the runner does
    return loaded


def _texts(runner: Runner, size: Size) -> list[list[int]]:
    if size.tokens > runner.max_context:
        raise UserError(f"--tokens {size.tokens}: {runner.name} has a context of {runner.max_context}")
    vocab = int(runner._model.config.vocab_size)
    draw = torch.randint(vocab, (size.prompts, size.tokens), generator=torch.Generator().manual_seed(0))
    return [[int(token) for token in row] for row in draw.tolist()]


def _prompts(size: Size) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=f"p{i}", category="bench", language="und", messages=()) for i in range(size.prompts))


def _forward(plain: Any, ids_NL: torch.Tensor, budget: int) -> None:
    each = max(1, budget // ids_NL.shape[1])
    for at in range(0, len(ids_NL), each):
        plain(input_ids=ids_NL[at : at + each], use_cache=False)


def _forced(runner: Runner, dispatcher: Dispatcher, texts: list[list[int]], size: Size) -> Callable[[], torch.Tensor]:
    """The recorder's forced decode of all prompts, their keys and values in the cache already."""
    runner.dispatcher = dispatcher
    how = batching(runner.device)
    tables = [tuple(runner.pool.alloc(-(-len(ids) // runner.page_size))) for ids in texts]
    for at in range(0, len(texts), max(1, how.tokens // size.tokens)):
        part = slice(at, at + max(1, how.tokens // size.tokens))
        model.score(runner, texts[part], tables[part], how, _Memory())
    starts = [size.tokens - size.decode] * len(texts)

    def run() -> torch.Tensor:
        runner.dispatcher = dispatcher
        kept = _Memory()
        model.decode(runner, texts, starts, tables, model.sizes_of(how), how, kept)
        return kept.states[0]

    return run


def _timed(run: Callable[[], Any], device: str) -> float:
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    """0 measured; 2 for bad flags."""
    parser = argparse.ArgumentParser(
        prog="python -m attention.bench_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers causal LM")
    parser.add_argument("--random-weights", action="store_true", help="draw the weights; those of --model are not read")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--backends", nargs=2, metavar=("A", "B"), help=f"of both sides (default: {_DEFAULTS})")
    parser.add_argument("--prompts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=1024, help="a prompt (default: %(default)s)")
    parser.add_argument(
        "--decode", type=int, default=128, help="tokens of each that are decoded (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="that count (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file; default: stdout")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.matrix import check_device

    check_device(options.device)
    for flag in ("prompts", "tokens", "decode", "rounds"):
        check_count(f"--{flag}", getattr(options, flag))
    check_out(options.out)
    if options.decode >= options.tokens:
        raise UserError(f"--decode {options.decode}: use fewer than --tokens {options.tokens}")
    size = Size(options.prompts, options.tokens, options.decode, options.rounds)
    default = _DEFAULTS[options.device.split(":")[0]]
    first, second = options.backends or (default, default)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if options.random_weights:
            folder = with_random_weights(folder, Path(scratch) / folder.resolve().name)
        found = measure(folder, options.device, (first, second), size, say)
    put_json({"weights": "random" if options.random_weights else "of the model", **found}, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
