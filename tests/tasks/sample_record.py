"""Release records for the tests of what is told about a release."""

from __future__ import annotations

from tasks.record import Attempt, Deployed, Instance, Record, State


def deployed(release_id: str, candidate: str, instance: Instance | None = None) -> Deployed:
    return Deployed(
        release_id=release_id,
        candidate=candidate,
        candidate_file=f"data/candidates/{candidate}.yaml",
        identity=f"identity-of-{candidate}",
        fingerprint_id="fp-0000ffff",
        backends={"prefill": "torch_sdpa:math", "decode": "torch_sdpa:math"},
        model_path="data/models/smollm2-135m-instruct",
        policy="data/policies/cpu-math.yaml",
        environment="current",
        command=["python", "-m", "attention", "serve"],
        instance=instance,
        promoted_at=1.0,
    )


def attempt(release_id: str, candidate: str, state: State, failed_gate: str | None = None) -> Attempt:
    return Attempt(
        release_id=release_id,
        candidate=candidate,
        identity=f"identity-of-{candidate}",
        state=state,
        failed_gate=failed_gate,
        reason=f"{failed_gate}: too far off" if failed_gate else "",
        time=1.0,
    )


def running(family: str, release_id: str, candidate: str, state: State, *, tags: tuple[str, ...] = ()) -> Record:
    """A record whose champion is `torch-math`, while `candidate` is released."""
    return Record(
        gpu="cpu",
        family=family,
        state=state,
        release_id=release_id,
        candidate=candidate,
        tags=list(tags),
        champion=deployed("r0", "torch-math"),
    )
