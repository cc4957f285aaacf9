"""Continuous batching over a paged KV cache: which requests run in the next step, on which pages.

A step is one forward pass: every running request that decodes, plus pieces of prompts as far as the
step's token budget goes. Two decisions shape it:

- *Pages are reserved at admission* for the prompt and all tokens that the request may generate, and
  taken one by one as the cache grows. A running request never lacks a page, so nothing is preempted
  and computed twice, and what a user gets does not depend on who else is being served.
- *Prompts are cut at fixed places*, multiples of `prefill_chunk`, and the budget decides only how many
  pieces a step takes. The same prompt goes through the same kernels alone or in a crowd. Pieces that another prompt
  began with are reused (attention/prefix_cache.py), with the same numbers in them.

A backend that raises is retired, and its part of the step runs again on the next of the chain. A request whose logits
hold NaN or Inf gives its pages back and is prefilled once more, on other backends; if those give numbers, the first
backend is retired too. Both count as fallbacks (attention/request_fallback.py).

The scheduler is driven by one thread (`step`, `cancel`, `submit` must not run at the same time) and
knows nothing of HTTP: `attention.serve.engine` bridges the two.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from attention.cases import Phase, phase_of
from attention.dispatch import BackendFailedError, PhaseRun, StepRecord
from attention.errors import UserError
from attention.fallback import FallbackEvent, FallbackRefusedError
from attention.faults import SLOW_DECODE, slow_decode_pause_s
from attention.limits import Limits
from attention.logprobs import Scored, score, score_drawn
from attention.model import Chunk, Runner
from attention.prefix_cache import Piece, PrefixCache
from attention.reasons import Reason
from attention.request_fallback import RequestFallback, not_finite
from attention.sampling import Sampler, SamplingParams, sample

FinishReason = Literal["stop", "length", "error", "cancelled"]


class QueueFullError(Exception):
    """The waiting queue is full: the caller should try again later (HTTP 429)."""


@dataclass(eq=False)
class Generation:
    """One request under way. Times are `time.perf_counter` seconds; the scheduler alone changes it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    shadow: bool = False
    submitted: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    prefill_ids: tuple[int, ...] = ()  # the prompt; of a request that began again, what it had generated too
    num_cached: int = 0  # tokens whose keys and values are in the cache
    num_reused: int = 0  # of the prompt's tokens: found in the cache when it was admitted
    block_table: tuple[int, ...] = ()
    pieces: list[Piece] = field(default_factory=list)  # of the prefix cache; theirs are the first pages of the table
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_nonfinite: int = 0
    num_decode_steps: int = 0
    num_graph_steps: int = 0  # of those steps: replayed from a captured graph
    num_decode_peers: int = 0  # sequences in those steps, summed
    resolved: dict[Phase, str] = field(default_factory=dict)
    confirmed: dict[Phase, str] = field(default_factory=dict)
    fallback_reasons: list[str] = field(default_factory=list)
    falls: bool = False  # counted in the fallback budget
    refused: bool = False  # ended because it would have fallen back and might not
    avoid: Mapping[str, Reason] = field(default_factory=dict)  # backends that it runs on no more
    # Only of a request that asks (`params.logprobs`, `params.prompt_logprobs`): one entry an output token, and one a
    # prompt token, None for the first, which nothing precedes.
    output_logprobs: list[Scored] = field(default_factory=list)
    prompt_logprobs: list[Scored | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params, self.request_id)
        self.prefill_ids = self.prompt_ids

    @property
    def num_prefill(self) -> int:
        return len(self.prefill_ids)

    @property
    def decoding(self) -> bool:
        return self.num_cached >= len(self.prefill_ids)

    @property
    def max_cached(self) -> int:
        """Tokens in the cache at the end: the last token generated is never fed back."""
        return len(self.prompt_ids) + max(self.params.max_tokens, 1) - 1

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.submitted

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between output tokens; None below two of them."""
        if self.first_token is None or self.last_token is None or len(self.output_ids) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.output_ids) - 1)

    @property
    def batch_size_mean(self) -> float | None:
        return self.num_decode_peers / self.num_decode_steps if self.num_decode_steps else None


@dataclass(frozen=True)
class _Work:
    """One request's part of a step."""

    generation: Generation
    chunk: Chunk
    phase: Phase
    samples: bool  # False for a piece of a prompt that is not the last

    @property
    def scores_prompt(self) -> bool:
        return self.generation.params.prompt_logprobs is not None and not self.generation.decoding


@dataclass
class StepResult:
    """What a step did, for those who deliver tokens and count."""

    tokens: list[tuple[Generation, int]] = field(default_factory=list)
    finished: list[Generation] = field(default_factory=list)
    fallbacks: list[FallbackEvent] = field(default_factory=list)  # one a request and phase, in its first such step
    refusals: list[FallbackRefusedError] = field(default_factory=list)
    backend_failures: list[BackendFailedError] = field(default_factory=list)
    record: StepRecord | None = None  # None when no forward pass succeeded
    failure: Exception | None = None


class Scheduler:
    """Decides, runs and books each step on one `Runner`."""

    def __init__(
        self, runner: Runner, limits: Limits, *, fault: str | None = None, fallback: RequestFallback | None = None
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._fallback = fallback or RequestFallback(runner.dispatcher, limits.prefill_chunk)
        self._slow_decode = fault == SLOW_DECODE
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._num_pages = runner.pool.num_free
        self._prefixes = None
        if limits.prefix_reuse and limits.prefill_chunk % runner.page_size == 0:
            self._prefixes = PrefixCache(runner.pool, piece=limits.prefill_chunk, page_size=runner.page_size)

    @property
    def num_free_pages(self) -> int:
        """Pages that a request could have now: free ones, and those of prefixes that nobody uses."""
        return self._runner.pool.num_free + (self._prefixes.num_idle_pages if self._prefixes else 0)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises UserError, with figures, for a request that could never run here."""
        context = self._runner.max_context
        if num_prompt_tokens < 1:
            raise UserError("the prompt has no tokens; send at least one")
        if num_prompt_tokens >= context:
            raise UserError(
                f"the prompt has {num_prompt_tokens} tokens, the context {context}, one of them for the "
                f"answer; shorten the prompt by {num_prompt_tokens - context + 1}"
            )
        bound = self._limits.max_prompt_tokens
        if num_prompt_tokens > bound:
            raise UserError(f"the prompt has {num_prompt_tokens} tokens, above this server's bound of {bound}")
        if max_tokens > self._limits.max_output_tokens:
            raise UserError(f"max_tokens={max_tokens} is above this server's bound of {self._limits.max_output_tokens}")
        if num_prompt_tokens + max_tokens > context:
            raise UserError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens={max_tokens} exceed the context of "
                f"{context}; max_tokens may be at most {context - num_prompt_tokens}"
            )
        pages = self._pages_for(num_prompt_tokens + max(max_tokens, 1) - 1)
        if pages > self._num_pages:
            raise UserError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens={max_tokens} need {pages} pages "
                f"of {self._runner.page_size} tokens, the cache has {self._num_pages}"
            )

    def largest_answer(self, num_prompt_tokens: int) -> int:
        """The most tokens that an answer to such a prompt may have here."""
        cache = self._num_pages * self._runner.page_size
        return min(
            self._limits.max_output_tokens,
            self._runner.max_context - num_prompt_tokens,
            cache - num_prompt_tokens + 1,
        )

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises QueueFullError, or UserError as `check` does."""
        self.check(len(generation.prompt_ids), generation.params.max_tokens)
        if len(self._waiting) >= self._limits.max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests wait already")
        self._waiting.append(generation)

    def cancel(self, generation: Generation, reason: FinishReason, error: str | None = None) -> None:
        """End a request between steps and free its pages; nothing for one that has already ended."""
        if generation.finish_reason is not None:
            return
        if generation in self._running:
            self._running.remove(generation)
        elif generation in self._waiting:
            self._waiting.remove(generation)
        self._end(generation, reason, error)

    def cancel_all(self, reason: FinishReason, error: str) -> list[Generation]:
        """End everything, waiting or running; returns what was ended."""
        ended = [*self._running, *self._waiting]
        for generation in ended:
            self.cancel(generation, reason, error)
        return ended

    def step(self) -> StepResult:
        """Run one forward pass and book its tokens.

        An exception of the model ends the requests of this step with an error and is handed back as
        `failure`: the others go on.
        """
        started = time.perf_counter()
        result = StepResult()
        self._admit(started, result)
        try:
            work = self._plan()
        except Exception as error:
            # Reservation rules this out unless someone else takes pages of this pool.
            self._fail(self._running, error, result)
            return result
        if not work:
            self._refuse_head(result)
            return result
        tokens = None
        while tokens is None and work:
            try:
                tokens = self._forward(work)
            except BackendFailedError as error:
                result.backend_failures.append(error)
                self._fallback.retire(error)
                self._ask_again(result)
                work = [item for item in work if item.generation.finish_reason is None]
            except Exception as error:
                self._fail([item.generation for item in work], error, result)
                return result
        if tokens is None:
            return result
        if self._slow_decode and any(w.generation.decoding and not w.generation.shadow for w in work):
            time.sleep(slow_decode_pause_s(time.perf_counter() - started))
        result.record = self._runner.dispatcher.last_step()
        self._book(work, tokens, result)
        return result

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._runner.page_size)

    def _admit(self, now: float, result: StepResult) -> None:
        """First come, first served: a large request at the head waits for its pages and is not overtaken."""
        promised = sum(self._pages_for(g.max_cached) - len(g.block_table) for g in self._running)
        while self._waiting and len(self._running) < self._limits.max_running:
            generation = self._waiting[0]
            self._reuse(generation)
            need = self._pages_for(generation.max_cached) - len(generation.block_table)
            if need > self.num_free_pages - promised:
                self._give_back(generation)
                generation.num_cached = 0
                break
            self._waiting.popleft()
            if not self._may_run(generation, result):
                continue
            promised += need
            generation.admitted = now
            self._running.append(generation)

    def _reuse(self, generation: Generation) -> None:
        """Take the pieces of its prompt that are in the cache, unless each of its tokens is to be scored."""
        if self._prefixes is None or generation.params.prompt_logprobs is not None:
            return
        generation.pieces = self._prefixes.match(generation.prompt_ids)
        generation.block_table = tuple(page for piece in generation.pieces for page in piece.pages)
        generation.num_cached = generation.num_reused = len(generation.block_table) * self._runner.page_size

    def _share(self, generation: Generation) -> None:
        """Let others reuse the pieces of its prompt that it has computed."""
        piece = self._limits.prefill_chunk
        if self._prefixes is None or generation.avoid:
            return
        while (len(generation.pieces) + 1) * piece <= min(generation.num_cached, len(generation.prompt_ids)):
            longer = self._prefixes.extend(generation.pieces, generation.prompt_ids, generation.block_table)
            if longer is generation.pieces:
                break
            generation.pieces = longer

    def _give_back(self, generation: Generation) -> None:
        """All pages of a request, its own and those that it shared."""
        shared = sum(len(piece.pages) for piece in generation.pieces)
        self._runner.pool.free(generation.block_table[shared:])
        if self._prefixes is not None:
            self._prefixes.release(generation.pieces)
        generation.pieces, generation.block_table = [], ()

    def _may_run(self, generation: Generation, result: StepResult) -> bool:
        """Whether it needs no fallback, or there is room for it; who finds none has ended."""
        try:
            self._fallback.ask_again(generation)
        except FallbackRefusedError as error:
            result.refusals.append(error)
            generation.refused = True
            self.cancel(generation, "error", str(error))
            result.finished.append(generation)
            return False
        return True

    def _ask_again(self, result: StepResult) -> None:
        """A backend was retired: who runs goes on where another may stand in."""
        for generation in list(self._running):
            self._may_run(generation, result)

    def _refuse_head(self, result: StepResult) -> None:
        """Nothing runs and the head still lacks pages: someone else holds them, waiting would never end."""
        if self._waiting:
            head = self._waiting[0]
            need, free = self._pages_for(head.max_cached), self.num_free_pages
            self.cancel(head, "error", f"{need} cache pages are needed and only {free} can ever be free")
            result.finished.append(head)

    def _plan(self) -> list[_Work]:
        """Every decode, then prompt pieces in order of arrival while the budget lasts."""
        decodes = [g for g in self._running if g.decoding]
        work = [self._work(g, (g.output_ids[-1],)) for g in decodes]
        budget = self._limits.max_step_tokens - len(decodes)
        for generation in self._running:
            if generation.decoding:
                continue
            start = generation.num_cached
            piece = generation.prefill_ids[start : start + self._limits.prefill_chunk]
            if len(piece) > budget:
                break
            budget -= len(piece)
            work.append(self._work(generation, piece))
        return work

    def _work(self, generation: Generation, token_ids: tuple[int, ...]) -> _Work:
        end = generation.num_cached + len(token_ids)
        missing = self._pages_for(end) - len(generation.block_table)
        if missing > 0:
            if self._prefixes is not None:
                self._prefixes.evict(missing - self._runner.pool.num_free)
            generation.block_table += tuple(self._runner.pool.alloc(missing))
        chunk = Chunk(token_ids, generation.num_cached, generation.block_table, generation.avoid)
        samples = end >= len(generation.prefill_ids)
        return _Work(generation, chunk, phase_of(len(token_ids), end), samples)

    def _forward(self, work: Sequence[_Work]) -> list[int | None]:
        """Next token of every request that samples in this step, in order."""
        chunks = [item.chunk for item in work]
        if any(item.scores_prompt for item in work):
            hidden = self._score_prompts(work, self._runner.forward(chunks, rows="all"))
        else:
            hidden = self._runner.forward(chunks, rows="last")
        sampling = [row for row, item in enumerate(work) if item.samples]
        if not sampling:
            return []
        if len(sampling) < len(work):
            hidden = hidden[torch.tensor(sampling, device=hidden.device)]
        logits = self._runner.logits(hidden)
        generations = [work[row].generation for row in sampling]
        tokens = sample(logits, [generation.sampler for generation in generations])
        told = score_drawn(logits, tokens, [generation.params.logprobs for generation in generations])
        for generation, scored in zip(generations, told, strict=True):
            if scored is not None:
                # By its place, not appended: a step that is run once more tells the same token again.
                generation.output_logprobs[len(generation.output_ids) :] = [scored]
        return tokens

    def _score_prompts(self, work: Sequence[_Work], hidden_TD: torch.Tensor) -> torch.Tensor:
        """Note the log-probabilities of the prompts that ask; hidden states of each chunk's last token.

        Chunk by chunk, so that logits of at most `prefill_chunk` rows exist at once.
        """
        start = 0
        ends = []
        for item in work:
            generation, chunk = item.generation, item.chunk
            # The row of a token tells of the next one; the prompt's last row tells of the answer.
            next_ids = generation.prompt_ids[chunk.start + 1 : chunk.start + len(chunk.token_ids) + 1]
            if item.scores_prompt and next_ids:
                logits = self._runner.logits(hidden_TD[start : start + len(next_ids)])
                scored = score(logits, next_ids, generation.params.prompt_logprobs or 0)
                generation.prompt_logprobs[chunk.start + 1 :] = scored
            start += len(chunk.token_ids)
            ends.append(start - 1)
        return hidden_TD[torch.tensor(ends, device=hidden_TD.device)]

    def _book(self, work: Sequence[_Work], tokens: Sequence[int | None], result: StepResult) -> None:
        now = time.perf_counter()
        record = result.record or StepRecord()
        for run in record.phases:
            self._fallback.note(run)
        drawn = iter(tokens)
        for item, run in zip(work, record.members, strict=True):
            generation = item.generation
            decoded = generation.decoding
            generation.num_cached += len(item.chunk.token_ids)
            result.fallbacks += _noted(generation, run)
            if decoded:
                generation.num_decode_steps += 1
                generation.num_decode_peers += len(work)
            else:
                self._share(generation)
            if item.samples:
                self._accept(generation, next(drawn), run, now, result)
        self._running = [g for g in self._running if g.finish_reason is None]
        self._blame([item.generation for item in work], result)

    def _blame(self, generations: Sequence[Generation], result: StepResult) -> None:
        """Retire backends whose logits held no numbers where others, on the same tokens, gave some."""
        blamed = {
            name
            for generation in generations
            if generation.avoid and generation.decoding and generation.num_nonfinite == 1
            for name in generation.avoid
        }
        for name in sorted(blamed - self._runner.dispatcher.retired.keys()):
            self._fallback.retire_for_numbers(name)
            if self._prefixes is not None:
                self._prefixes.clear()  # they may hold what that backend gave
            self._ask_again(result)

    def _accept(self, generation: Generation, token: int | None, run: PhaseRun, now: float, result: StepResult) -> None:
        if token is None:
            generation.num_nonfinite += 1
            if not self._begin_again(generation, run, result):
                position = len(generation.output_ids)
                also = f", on {run.resolved} as on {', '.join(generation.avoid)}" if generation.avoid else ""
                self._end(generation, "error", f"the logits of output token {position} hold NaN or Inf{also}")
                result.finished.append(generation)
            return
        if generation.params.max_tokens == 0:
            self._end(generation, "length")
            result.finished.append(generation)
            return
        generation.output_ids.append(token)
        generation.first_token = generation.first_token or now
        generation.last_token = now
        result.tokens.append((generation, token))
        if token in self._runner.eos_token_ids:
            self._end(generation, "stop")
        elif len(generation.output_ids) >= generation.params.max_tokens:
            self._end(generation, "length")
        if generation.finish_reason is not None:
            result.finished.append(generation)

    def _begin_again(self, generation: Generation, run: PhaseRun, result: StepResult) -> bool:
        """Free the pages of a request without numbers and have it prefilled again, on other backends; False for one
        that did so before, or may not fall back."""
        if generation.avoid:
            return False
        generation.avoid = {run.resolved: not_finite()}
        cached, generation.num_cached = generation.num_cached, 0
        try:
            self._fallback.ask_again(generation)
        except FallbackRefusedError as error:
            result.refusals.append(error)
            generation.avoid, generation.num_cached = {}, cached
            return False
        self._give_back(generation)
        generation.prefill_ids = (*generation.prompt_ids, *generation.output_ids)
        return True

    def _fail(self, generations: Sequence[Generation], error: Exception, result: StepResult) -> None:
        result.failure = error
        for generation in list(generations):
            self.cancel(generation, "error", f"the model step failed: {type(error).__name__}")
            result.finished.append(generation)

    def _end(self, generation: Generation, reason: FinishReason, error: str | None = None) -> None:
        generation.finish_reason, generation.error = reason, error
        generation.finished = time.perf_counter()
        self._give_back(generation)


def _noted(generation: Generation, run: PhaseRun) -> list[FallbackEvent]:
    """Book what the execution layer says about this request's part of the step; the fallback, if it is a new one."""
    is_new = run.fallback is not None and generation.resolved.get(run.phase) != run.resolved
    generation.num_graph_steps += run.graph_hit
    generation.resolved[run.phase] = run.resolved
    generation.confirmed[run.phase] = run.confirmed
    if run.fallback is None:
        return []
    if run.fallback.reason not in generation.fallback_reasons:
        generation.fallback_reasons.append(run.fallback.reason)
    return [run.fallback] if is_new else []
