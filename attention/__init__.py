"""The runtime that serving and measuring processes import: cases, backends, matrix, fingerprint,
probes, replay recording, measurement, policy, dispatch and confirmation.

Nothing here imports Prefect, MLflow, Great Expectations or DuckDB; only models (the runner, its
recorder, `governed`; extra `model`) and `attention.serve` (extra `serve`) import transformers, FastAPI and
prometheus-client.
"""

import time

from attention.errors import UserError

#: When this process began, by `time.monotonic`: a budget counts what importing torch takes.
STARTED = time.monotonic()

__all__ = ["STARTED", "UserError"]
