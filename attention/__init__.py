"""The runtime that serving and measuring processes import: cases, backends, matrix, fingerprint,
probes, replay recording, measurement, policy, dispatch and confirmation.

Nothing here imports Prefect, MLflow, Great Expectations or DuckDB; only the model recorder and
`attention.serve` (extra `serve`) import transformers, FastAPI and prometheus-client.
"""

from attention.errors import UserError

__all__ = ["UserError"]
