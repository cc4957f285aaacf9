"""Who recorded: what a recording of either layer says of its environment."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from attention.fingerprint import Fingerprint


class Environment(BaseModel):
    """The environment that ran; a manifest adds what it recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint_id: str
    torch: str
    python: str
    gpu: str
    distributions: dict[str, str]  # name -> version and RECORD hash


def fields_of(found: Fingerprint) -> dict[str, Any]:
    """The fields of an `Environment` with this fingerprint."""
    identity = found.identity.model_dump(include=Environment.model_fields.keys() - {"fingerprint_id"})
    return {"fingerprint_id": found.id, **identity}
