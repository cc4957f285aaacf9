"""A runner without a model: its next token depends on every token before it, read through the pages.

`hidden` of a row is a polynomial hash of the first `kv_len` slots of its block table, so a slot that
is missing, stale or another request's changes the token. Logits are a peak at the hash and a slope,
so that sampling has something to choose from. It costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from attention.cases import Phase, phase_of, shape_bucket
from attention.confirmations import Signature
from attention.dispatch import PHASES, BackendFailedError, FallbackEvent, PhaseRun, StepRecord
from attention.errors import UserError
from attention.model import Chunk, PagePool
from attention.policy import Policy, Resolution
from attention.reasons import Reason

VOCABULARY = 300  # bytes, then specials
EOS = 299
_PRIME = 1_000_003
_MODULUS = 2**31 - 1


class FakeTokenizer:
    """Bytes as tokens: a character outside ASCII takes several, as with a real byte-level tokenizer."""

    chat_template = "messages tools"

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

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
    """Says what a dispatcher says: prefill, extend and decode ran on the oracle of tests.

    `chain` has what may stand in. A backend in `raises` fails when it runs.
    """

    requested: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:flash"))
    resolved: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:math"))
    confirmed: dict[Phase, str] = field(default_factory=lambda: dict.fromkeys(PHASES, "torch_sdpa:math"))
    fallbacks: list[FallbackEvent] = field(default_factory=list)
    record: StepRecord = field(default_factory=StepRecord)
    policy: Policy = field(
        default_factory=lambda: Policy(preferred=("torch_sdpa:flash",), fallback=("torch_sdpa:math",))
    )
    mismatches: dict[Signature, str] = field(default_factory=dict)
    resolutions: dict[Phase, Resolution] = field(default_factory=dict)
    step_fallback: FallbackEvent | None = None
    chain: list[str] = field(default_factory=list)
    raises: set[str] = field(default_factory=set)
    retired: dict[str, list[Reason]] = field(default_factory=dict)

    def _backend(self, phase: Phase, avoid: Mapping[str, Reason]) -> tuple[str, FallbackEvent | None]:
        first = self.resolved[phase]
        reasons = {**self.retired, **{name: [reason] for name, reason in avoid.items()}}
        for name in (first, *self.chain):
            if name not in reasons:
                stands_in = FallbackEvent("request_fallback", phase, first, name, tuple(reasons.get(first, ())), phase)
                return name, stands_in if name != first else self.step_fallback
        raise UserError(f"no backend of the policy can serve {phase}: {', '.join(reasons)}")

    def foresee(
        self, start: int, num_prompt: int, num_cached: int, chunk: int, avoid: Mapping[str, Reason]
    ) -> FallbackEvent | None:
        return self._backend("decode", avoid)[1]

    def retire(self, backend: str, reason: Reason) -> None:
        self.retired.setdefault(backend, []).append(reason)

    def unserved(self) -> dict[Phase, str]:
        return {}

    def plan(self, chunks: Sequence[Chunk]) -> None:
        runs: dict[tuple[Phase, str], PhaseRun] = {}
        members = []
        for chunk in chunks:
            kv_len = chunk.start + len(chunk.token_ids)
            phase = phase_of(len(chunk.token_ids), kv_len)
            name, fallback = self._backend(phase, chunk.avoid)
            run = runs.get((phase, name))
            if run is None:
                run = runs[phase, name] = PhaseRun(
                    phase=phase,
                    bucket=shape_bucket(phase, kv_len),
                    requested=self.requested[phase],
                    resolved=name,
                    confirmed=self.confirmed[phase] if name == self.resolved[phase] else name,
                    num_members=0,
                    fallback=fallback,
                    kernel_seconds=0.002,
                    layers=2,
                )
            run.num_members += 1
            members.append(run)
        self.record = StepRecord(list(runs.values()), members)
        for run in members:
            if run.resolved in self.raises:
                error = RuntimeError("no kernel image")
                raise BackendFailedError(run.resolved, run.phase, error) from error

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
        self.nan_on: set[str] = set()  # backends; empty: on any
        self.num_idle = 0
        self._cache = [-1] * (num_pages * page_size)

    def forward(self, chunks: Sequence[Chunk], *, rows: Literal["last", "all"] = "last") -> torch.Tensor:
        assert rows == "last"
        assert chunks
        self.num_steps += 1
        self.steps.append(list(chunks))
        if self.num_steps in self.fail_steps:
            raise RuntimeError("secret detail of the device: illegal memory access")
        if self.seconds:
            time.sleep(self.seconds)
        self.dispatcher.plan(chunks)
        ran = [run.resolved for run in self.dispatcher.record.members]
        return torch.tensor([[self._run(*each)] for each in zip(chunks, ran, strict=True)], dtype=torch.float64)

    def confirm_idle(self, age_s: float) -> bool:
        self.num_idle += 1
        return False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        peaks = hidden[:, 0]
        logits = torch.linspace(0, 1, VOCABULARY).repeat(len(peaks), 1)
        logits[torch.arange(len(peaks)), peaks.nan_to_num().long() % VOCABULARY] = 3.0
        logits[peaks.isnan()] = torch.nan
        return logits

    def _run(self, chunk: Chunk, backend: str) -> float:
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.block_table) == -(-end // self.page_size), "tables hold what is needed, no more"
        slots = [self._slot(chunk, position) for position in range(end)]
        for token, slot in zip(chunk.token_ids, slots[chunk.start :], strict=True):
            self._cache[slot] = token
        read = [self._cache[slot] for slot in slots]
        is_bad = not self.nan_on or backend in self.nan_on
        if (
            is_bad
            and self.nan_for_prompt is not None
            and tuple(read[: len(self.nan_for_prompt)]) == self.nan_for_prompt
        ):
            return float("nan")
        return float(next_hash(read))

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
