"""Log-probabilities of tokens under the model's own distribution: log_softmax of the raw float32 logits.

Before temperature and top-p, as OpenAI and vLLM give them: what the model said, not how it was sampled.
Only the log of the normaliser, the chosen logits and a top-k leave the vocabulary, so that the extra memory is
one reduction beside the logits.

Shape legend: R rows (one a token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Most alternatives a token that a request may ask for.
MAX_TOP = 20


@dataclass(frozen=True)
class Candidate:
    """A token, its natural log-probability, and its place among all tokens: 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class Scored:
    """The token that stands at a place, and the likeliest ones there, likeliest first."""

    token: Candidate
    top: tuple[Candidate, ...]


def score(logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Scored]:
    """One `Scored` a row of float32 logits, for the token at that row. NaN in a row gives NaN."""
    if not token_ids:
        return []
    ids_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    norm_R1 = torch.logsumexp(logits_RV, -1, keepdim=True)
    chosen_R1 = logits_RV.gather(-1, ids_R1)
    ranks = ((logits_RV > chosen_R1).sum(-1) + 1).tolist()
    logprobs = (chosen_R1 - norm_R1)[:, 0].tolist()
    tops: list[tuple[Candidate, ...]] = [()] * len(token_ids)
    if num_top:
        best_RK, best_ids_RK = torch.topk(logits_RV, min(num_top, logits_RV.shape[-1]))
        rows = zip(best_ids_RK.tolist(), (best_RK - norm_R1).tolist(), strict=True)
        tops = [tuple(map(Candidate, ids, values, range(1, len(ids) + 1))) for ids, values in rows]
    tokens = map(Candidate, token_ids, logprobs, ranks)
    return [Scored(token, top) for token, top in zip(tokens, tops, strict=True)]


def score_drawn(
    logits_RV: torch.Tensor, token_ids: Sequence[int | None], num_tops: Sequence[int | None]
) -> list[Scored | None]:
    """The same for the tokens just drawn; None where a row has no token or asks for nothing (`num_tops`)."""
    asks = [row for row, top in enumerate(num_tops) if top is not None and token_ids[row] is not None]
    found: list[Scored | None] = [None] * len(token_ids)
    if not asks:
        return found
    drawn = [token for row in asks if (token := token_ids[row]) is not None]
    chosen = logits_RV if len(asks) == len(token_ids) else logits_RV[torch.tensor(asks, device=logits_RV.device)]
    for row, scored in zip(asks, score(chosen, drawn, max(num_tops[row] or 0 for row in asks)), strict=True):
        found[row] = Scored(scored.token, scored.top[: num_tops[row]])
    return found
