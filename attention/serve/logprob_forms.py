"""Log-probabilities as the API writes them: OpenAI's chat form, the older one of completions, vLLM's of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attention.logprobs import Candidate, Scored
from attention.scheduler import Generation
from attention.serve.detokenize import Detokenizer, Vocabulary


def chat_form(vocabulary: Vocabulary, scored: Iterable[Scored]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: each token with its bytes and its alternatives."""

    def entry(one: Candidate) -> dict[str, Any]:
        token = vocabulary[one.token_id]
        raw = None if token.raw is None else list(token.raw)
        return {"token": token.text, "logprob": one.logprob, "bytes": raw}

    content = [{**entry(one.token), "top_logprobs": [entry(other) for other in one.top]} for one in scored]
    return {"content": content, "refusal": None}


def legacy_form(vocabulary: Vocabulary, scored: Iterable[tuple[Scored, int]]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: parallel lists over (token, characters before it).

    As OpenAI's, `top_logprobs` holds the token itself too, beside the likeliest.
    """
    pairs = list(scored)
    return {
        "tokens": [vocabulary[one.token.token_id].text for one, _ in pairs],
        "token_logprobs": [one.token.logprob for one, _ in pairs],
        "top_logprobs": [_by_text(vocabulary, one) for one, _ in pairs],
        "text_offset": [offset for _, offset in pairs],
    }


def _by_text(vocabulary: Vocabulary, scored: Scored) -> dict[str, float] | None:
    """None where no alternatives were asked for. Of two tokens with one text the likelier counts."""
    if not scored.top:
        return None
    found: dict[str, float] = {}
    for one in (*scored.top, scored.token):
        found.setdefault(vocabulary[one.token_id].text, one.logprob)
    return found


def legacy_prompt_form(
    vocabulary: Vocabulary, tokenizer: Any, prompt_ids: Sequence[int], scored: Sequence[Scored | None]
) -> dict[str, Any]:
    """The older form of an echoed prompt. The first token has neither logprob nor alternatives."""
    places = Detokenizer(tokenizer)
    for token_id in prompt_ids:
        places.push(token_id)
    rest = [(one, offset) for one, offset in zip(scored, places.offsets, strict=True) if one is not None]
    form = legacy_form(vocabulary, rest)
    first = {"tokens": vocabulary[prompt_ids[0]].text, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [first[name], *values] for name, values in form.items()}


def prompt_form(vocabulary: Vocabulary, scored: Iterable[Scored | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's token and the likeliest ones; None for the first."""

    def entry(one: Candidate) -> dict[str, Any]:
        return {"logprob": one.logprob, "rank": one.rank, "decoded_token": vocabulary[one.token_id].text}

    return [None if one is None else {str(c.token_id): entry(c) for c in (one.token, *one.top)} for one in scored]


@dataclass
class LogprobWriter:
    """Writes what one answer tells of log-probabilities, as far as its request asks for any.

    `echo_top` and `prompt_top` are the alternatives to tell for each token of the prompt, in the older form of an
    echoed prompt and in vLLM's; None tells nothing.
    """

    generation: Generation
    places: Detokenizer
    vocabulary: Vocabulary
    tokenizer: Any
    chat: bool
    echo_top: int | None = None
    prompt_top: int | None = None
    shift: int = 0  # characters before the answer: those of an echoed prompt
    num_told: int = 0

    @property
    def wanted(self) -> bool:
        params = self.generation.params
        return params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def broken(self) -> bool:
        """A row of the prompt held NaN or Inf: there is no honest figure to tell."""
        scored = self.generation.prompt_logprobs
        return any(one is not None and not math.isfinite(one.token.logprob) for one in scored)

    def until(self, num_tokens: int) -> dict[str, Any] | None:
        """Those of the answer's tokens up to `num_tokens` that were not told yet; None when none are wanted."""
        if self.generation.params.logprobs is None:
            return None
        chosen = slice(self.num_told, num_tokens)
        self.num_told = max(self.num_told, num_tokens)
        scored = self.generation.output_logprobs[chosen]
        if self.chat:
            return chat_form(self.vocabulary, scored)
        offsets = [self.shift + offset for offset in self.places.offsets[chosen]]
        return legacy_form(self.vocabulary, zip(scored, offsets, strict=True))

    def echoed(self) -> dict[str, Any] | None:
        """Those of the echoed prompt."""
        if self.echo_top is None:
            return None
        scored = _trimmed(self.generation.prompt_logprobs, self.echo_top)
        return legacy_prompt_form(self.vocabulary, self.tokenizer, self.generation.prompt_ids, scored)

    def whole(self) -> dict[str, Any] | None:
        """Those of a whole answer, the echoed prompt's first."""
        echoed, told = self.echoed(), self.until(self.places.num_told(last=True))
        if echoed is None or told is None:
            return echoed or told
        return {name: [*values, *told[name]] for name, values in echoed.items()}

    def prompt(self) -> list[dict[str, Any] | None] | None:
        """vLLM's `prompt_logprobs`."""
        if self.prompt_top is None:
            return None
        return prompt_form(self.vocabulary, _trimmed(self.generation.prompt_logprobs, self.prompt_top))


def _trimmed(scored: Iterable[Scored | None], num_top: int) -> list[Scored | None]:
    return [one and Scored(one.token, one.top[:num_top]) for one in scored]
