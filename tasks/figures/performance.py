"""The pictures of a performance baseline beside its main figure: of a release, or of a survey of many backends.

Lake rows are their only input: perf_backends, perf_cells, perf_ceilings, perf_startup and perf_stress of one release
id. Prefill, decode and extend never share a panel in which they would be averaged or compared.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tasks.figures import heat, kernels, offline, service
from tasks.figures.canvas import Evidence, Picture
from tasks.figures.measured import FAMILIES, is_survey

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ratios(evidence: Evidence) -> Figure | None:
    """The forest of intervals; None for a survey, which compares nobody."""
    return None if is_survey(evidence) else offline.baseline(evidence)


PICTURES = (
    Picture(
        "baseline",
        "Time of the candidate over time of the champion, with its interval; left of 1 the candidate is faster.",
        ratios,
    ),
    Picture(
        "baseline-verdicts",
        "The same cell by cell, with its verdict: SAME within the margin, FAST, SLOW, or AMBG where the interval "
        "crosses it. What one side lost says how.",
        heat.verdicts,
    ),
    *(
        Picture(
            f"baseline-best-{family}",
            f"{family.capitalize()}: each backend's P50 over the best backend's on the same case, a panel a service.",
            partial(heat.best, family=family),
        )
        for family in FAMILIES
    ),
    Picture(
        "baseline-latency",
        "Kernel time against KV length, P50 with a whisker to P95; dashed: the limit by the ceilings of the same run. "
        "Of each family the service and batch that most was measured of.",
        kernels.latency,
    ),
    Picture(
        "baseline-roofline",
        "FLOPs a second against FLOPs a byte. The roofs are medians measured between the cells; grey: their range.",
        kernels.roofline,
    ),
    Picture(
        "baseline-first-call",
        "Fresh processes: cold with empty caches of compiled kernels, warm with what the cold one left there.",
        service.first_call,
    ),
    Picture(
        "baseline-stress",
        "Goodput within both objectives and the tails of TTFT and TPOT at each offered rate.",
        service.stress,
    ),
)
