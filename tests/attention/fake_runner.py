"""A runner without a model: its next token depends on every token before it, read through the pages.

`hidden` of a row is a polynomial hash of the first `kv_len` slots of its block table, so a slot that
is missing, stale or another request's changes the token. Logits are a peak at the hash and a slope,
so that sampling has something to choose from. It costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from attention.cases import Phase, phase_of, shape_bucket
from attention.dispatch import PHASES, FallbackEvent, PhaseRun, StepRecord
from attention.model import Chunk, PagePool
from attention.policy import Policy, Resolution
from attention.reasons import Code, Reason
from attention.serve.detokenize import bytes_by_letter

VOCABULARY = 300  # bytes, then specials
EOS = 299
_PRIME = 1_000_003
_MODULUS = 2**31 - 1
_LETTER_OF = {byte: letter for letter, byte in bytes_by_letter().items()}


class FakeTokenizer:
    """Bytes as tokens: a character outside ASCII takes several, as with a real byte-level tokenizer."""

    chat_template = "messages tools"

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i < 256]
        parts = [bytes([i]) if i < 256 else f"<special {i}>".encode() for i in ids]
        return b"".join(parts).decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        if token_id < 256:
            return _LETTER_OF[token_id]
        return f"<special {token_id}>" if token_id < VOCABULARY else None

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


@dataclass
class FakeDispatcher:
    """Says what a dispatcher says: prefill, extend and decode ran on the oracle of tests."""

    requested: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:flash"))
    resolved: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:math"))
    confirmed: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:math"))
    fallbacks: list[FallbackEvent] = field(default_factory=list)
    record: StepRecord = field(default_factory=StepRecord)
    step_fallback: FallbackEvent | None = None
    policy: Policy = field(default_factory=lambda: Policy(preferred=("torch_sdpa:flash",), fallback=("math",)))

    @property
    def resolutions(self) -> dict[Phase, Resolution]:
        why = Reason(
            code=Code.MASK_UNSUPPORTED, dimension="mask", observed="x", allowed="y", source="probe", message="no mask"
        )
        excluded = {"torch_sdpa:flash": (why,)}
        chain = ("torch_sdpa:math",)
        return {
            phase: Resolution(phase=phase, requested="torch_sdpa:flash", chain=chain, excluded=excluded)
            for phase in PHASES
        }

    def plan(self, chunks: Sequence[Chunk]) -> None:
        runs: dict[Phase, PhaseRun] = {}
        for chunk in chunks:
            kv_len = chunk.start + len(chunk.token_ids)
            phase = phase_of(len(chunk.token_ids), kv_len)
            run = runs.get(phase)
            if run is None:
                run = runs[phase] = PhaseRun(
                    phase=phase,
                    bucket=shape_bucket(phase, kv_len),
                    requested=self.requested[phase],
                    resolved=self.resolved[phase],
                    confirmed=self.confirmed[phase],
                    num_members=0,
                    fallback=self.step_fallback,
                    kernel_seconds=0.002,
                    layers=2,
                )
            run.num_members += 1
        self.record = StepRecord(list(runs.values()))

    def last_step(self) -> StepRecord:
        return self.record


class FakeRunner:
    """The interface of `attention.model.Runner`; `seconds` is what a forward costs."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_context: int = 128,
        seconds: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset({EOS}),
    ) -> None:
        self.name = "fake-1m"
        self.dtype = torch.float32
        self.device = "cpu"
        self.tokenizer = FakeTokenizer()
        self.eos_token_ids = eos_token_ids
        self.max_context = max_context
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.dispatcher = FakeDispatcher()
        self.seconds = seconds
        self.num_steps = 0
        self.steps: list[list[Chunk]] = []
        self.fail_steps: set[int] = set()
        self.nan_for_prompt: tuple[int, ...] | None = None
        self._cache = [-1] * (num_pages * page_size)

    def forward(self, chunks: Sequence[Chunk], *, rows: Literal["last", "all"] = "last") -> torch.Tensor:
        assert chunks
        self.num_steps += 1
        self.steps.append(list(chunks))
        if self.num_steps in self.fail_steps:
            raise RuntimeError("secret detail of the device: illegal memory access")
        if self.seconds:
            time.sleep(self.seconds)
        self.dispatcher.plan(chunks)
        found = [value for chunk in chunks for value in self._run(chunk)[0 if rows == "all" else -1 :]]
        return torch.tensor(found, dtype=torch.float64)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        peaks = hidden[:, 0]
        logits = torch.linspace(0, 1, VOCABULARY).repeat(len(peaks), 1)
        logits[torch.arange(len(peaks)), peaks.nan_to_num().long() % VOCABULARY] = 3.0
        logits[peaks.isnan()] = torch.nan
        return logits

    def _run(self, chunk: Chunk) -> list[float]:
        """A value for each token of the chunk."""
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.block_table) == -(-end // self.page_size), "tables hold what is needed, no more"
        slots = [self._slot(chunk, position) for position in range(end)]
        for token, slot in zip(chunk.token_ids, slots[chunk.start :], strict=True):
            self._cache[slot] = token
        read = [self._cache[slot] for slot in slots]
        if self.nan_for_prompt is not None and tuple(read[: len(self.nan_for_prompt)]) == self.nan_for_prompt:
            return [float("nan")] * len(chunk.token_ids)
        return [float(next_hash(read[: position + 1])) for position in range(chunk.start, end)]

    def _slot(self, chunk: Chunk, position: int) -> int:
        return chunk.block_table[position // self.page_size] * self.page_size + position % self.page_size


def next_hash(tokens: Sequence[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * _PRIME + token + 1) % _MODULUS
    return value


def expected_tokens(prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset({EOS})) -> list[int]:
    """What greedy decoding must give: the model's arithmetic without pages or batches."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_hash(tokens) % VOCABULARY)
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
