from __future__ import annotations

import pytest

from attention.errors import UserError
from data.requests import TrafficRequest
from tasks.shadow import comparable


def request(number: int, **body: object) -> TrafficRequest:
    sent = {"model": "m", "prompt": "a", "max_tokens": 2} | body
    return TrafficRequest.model_validate(
        {
            "custom_id": f"r{number}",
            "url": "/v1/completions",
            "body": sent,
            "t_s": float(number),
            "session_id": "s",
            "category": "chat",
            "language": "en",
        }
    )


def test_a_sampled_request_without_a_seed_is_not_compared() -> None:
    requests = [request(0), request(1, temperature=0.7), request(2, temperature=0.7, seed=1)]
    assert [one.custom_id for one in comparable(requests)] == ["r0", "r2"]


def test_traffic_that_cannot_be_compared_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="all 2 requests are sampled"):
        comparable([request(number, temperature=0.7) for number in range(2)])
