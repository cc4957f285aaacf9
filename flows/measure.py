"""The one flow that a work pool of measuring machines runs: one measuring command, in its environment.

A GPU worker holds this flow alone; champion and candidate environments hold no Prefect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import flow
from pydantic import BaseModel

from attention.errors import UserError, nearest
from attention.job import CompareJob, FingerprintJob, ProbeJob, ReplayJob
from data.environment import load_environment
from data.paths import state_dir
from tasks.environment import Job
from tasks.environment import measure as measure_here

KINDS: dict[str, type[BaseModel]] = {
    "fingerprint": FingerprintJob,
    "probe": ProbeJob,
    "replay": ReplayJob,
    "compare": CompareJob,
}


@flow(name="measure", flow_run_name="{kind}-{environment}", log_prints=True)
def measure(kind: str, environment: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job (attention/job.py, by kind) in an environment of data/environments; its result.json.

    Raises UserError for an unknown kind or environment, MeasureError when the command fails.
    """
    if kind not in KINDS:
        raise UserError(f"measure: kind {kind!r} is unknown; {nearest(kind, KINDS)}")
    parsed = KINDS[kind].model_validate_json(json.dumps(job))
    return measure_here(Job(kind, parsed, load_environment(environment)), Path(state_dir()) / "measure")
