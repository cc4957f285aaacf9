"""Plans of a draw or two for tests, made of the small one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from attention.drill.plan import DrillPlan, load_plan

SMALL = load_plan("small")

#: One draw in which every kind can show.
ONE_DRAW: dict[str, Any] = {
    "dtypes": ("bfloat16",),
    "layouts": ("paged_nhd",),
    "shapes": ({"phase": "extend", "batch": "q16s144_q5s90"},),
}


def small_plan(**changes: Any) -> DrillPlan:
    return DrillPlan.model_validate({**SMALL.model_dump(), **changes})


def plan_file(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(small_plan(**changes).model_dump(mode="json")))
    return path
