"""Tokens a second of a served model beside transformers alone, on the same requests, in turns.

    python -m attention.bench_serving --model data/models/smollm2-135m-instruct --policy data/policies/cpu-flash.yaml
    python -m attention.bench_serving --model MODEL --policy POLICY --gpu nvidia-h200 --requests 64 --concurrency 64

The instance is a process of `python -m attention serve` (governed, confirmed, rows written to a lake), asked over HTTP
by `--concurrency` streaming clients. Beside it, on the CPU: `generate`, one request after the other. On a GPU:
transformers' own continuous batching (`generate_batch`), with flash attention where it is installed. Greedy, answers
of at most `--max-tokens`. A round is A B B A; while one works the other waits. Prints one JSON document: tokens a
second of either, by round, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from attention.errors import UserError, exit_code
from attention.flags import check_count
from attention.lifetime import end_session

READY_S = 600.0
#: Of different lengths, so that requests do not march in step.
_PROMPTS = (
    "Explain in a few sentences how a suspension bridge carries its load.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What is the difference between a virus and a bacterium? Answer for a ten-year-old, and give two examples of each.",
    "List the steps to bake bread.",
    "Why is the sky blue?",
    "A train leaves at nine and goes 80 km an hour; another leaves the same place an hour later and goes 120 km an "
    "hour. When does the second one reach the first? Explain each step.",
    "Summarise the causes of the French Revolution.",
    "Give three arguments for and three against remote work, each in one sentence.",
)


def prompts(num: int) -> list[str]:
    """So many prompts, no two the same."""
    return [f"{i}. {_PROMPTS[i % len(_PROMPTS)]}" for i in range(num)]


class Served:
    """The instance, from its start to its end."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        command = [sys.executable, "-m", "attention", "serve", "--model", str(options.model)]
        command += ["--policy", str(options.policy), "--port", "0", "--release-id", "bench", "--side", "champion"]
        command += ["--instance", "bench", "--lake", str(folder / "lake"), "--gpu", options.gpu]
        command += ["--threads", str(options.threads)]
        self._log = folder / "log"
        self._concurrency: int = options.concurrency
        with self._log.open("w") as sink:
            self.process = subprocess.Popen(command, stderr=sink, start_new_session=True)

    def wait_ready(self) -> None:
        """UserError when it ends or takes too long."""
        deadline = time.monotonic() + READY_S
        while not (events := self._events("ready")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the instance did not start: {self._log.read_text()[-500:]}")
            time.sleep(0.1)
        self._port = int(self._events("listening")[-1]["port"])
        self.about = events[-1]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for line in self._log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [one for one in map(json.loads, lines) if one["event"] == kind]

    def tokens_per_s(self, texts: Sequence[str], max_tokens: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(self._concurrency) as pool:
            counts = list(pool.map(lambda text: self._ask(text, max_tokens), texts))
        return sum(counts) / (time.perf_counter() - began)

    def _ask(self, text: str, max_tokens: int) -> int:
        """Completion tokens of one streamed answer. UserError for any other."""
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=READY_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            data = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
        finally:
            connection.close()
        usage = next((one["usage"] for one in map(json.loads, data) if one.get("usage")), None)
        if response.status != 200 or usage is None:
            raise UserError(f"the instance answered {response.status}: {' '.join(data)[:300]}")
        return int(usage["completion_tokens"])


def alone(model_path: Path, device: str, threads: int) -> Callable[[Sequence[str], int], float]:
    """Tokens a second of transformers without us."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    is_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if is_gpu else torch.float32
    kind = "flash_attention_2" if is_gpu and find_spec("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation=kind).to(device).eval()

    def sequential(texts: Sequence[str], max_tokens: int) -> float:
        began, count = time.perf_counter(), 0
        with torch.inference_mode():
            for text in texts:
                ids = tokenizer(text, return_tensors="pt").to(device)
                out = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
                count += out.shape[1] - ids["input_ids"].shape[1]
        return count / (time.perf_counter() - began)

    def batched(texts: Sequence[str], max_tokens: int) -> float:
        wanted = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        ids = [tokenizer(text)["input_ids"] for text in texts]
        began = time.perf_counter()
        found = model.generate_batch(inputs=ids, generation_config=wanted)
        torch.cuda.synchronize()
        return sum(len(one.generated_tokens) for one in found.values()) / (time.perf_counter() - began)

    return batched if is_gpu else sequential


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both, after one of each that is not counted."""
    texts = prompts(options.requests)
    device = "cpu" if options.gpu == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        served = Served(options, Path(folder))
        try:
            beside = alone(options.model, device, options.threads)
            served.wait_ready()
            served.tokens_per_s(texts, options.max_tokens)
            beside(texts[:2], options.max_tokens)
            rates: dict[str, list[float]] = {"served": [], "alone": []}
            for nth in range(options.rounds):
                for who in ("served", "alone", "alone", "served")[:: 1 if nth % 2 == 0 else -1]:
                    ask = served.tokens_per_s if who == "served" else beside
                    rates[who].append(ask(texts, options.max_tokens))
                    print(f"round {nth + 1}: {who} {rates[who][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
        finally:
            end_session(served.process)
    return {
        "requests": options.requests,
        "concurrency": options.concurrency,
        "max_tokens": options.max_tokens,
        "threads": options.threads,
        "device": device,
        "confirmed": served.about["confirmed"],
        "tokens_per_s": {who: [round(rate, 1) for rate in found] for who, found in rates.items()},
        "ratio": round(median(rates["served"]) / median(rates["alone"]), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attention.bench_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers causal LM")
    parser.add_argument("--policy", type=Path, required=True, help="attention policy (YAML)")
    parser.add_argument("--gpu", default="cpu", help="GPU model as records name it; cpu without one")
    parser.add_argument("--requests", type=int, default=8, help="of a round (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="clients at a time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="A B B A each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of either (default: all cores)")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    for flag in ("requests", "concurrency", "max_tokens", "rounds", "threads"):
        check_count(f"--{flag.replace('_', '-')}", getattr(options, flag))
    print(json.dumps(measure(options), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
