"""Every kind of fault that one attention problem shows: what goes wrong, on which cases, and which check must catch it.

The layer is the tensor layer; check names are those of gates/suites/replay_{tensor,beside,lse}.yaml. What shows only in
a whole model, in repeats or in the evidence itself: `attention.drill.whole` and tasks/drill_release.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.drill import faults
from attention.drill.emulator import Defects, Variant
from attention.drill.kernel import Fault

#: Features of the cases that kinds and sound variants run on: changes to a case of plain causal GQA.
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window": (20, 0)},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": True},
    "fp8_kv": {"kv_dtype": "float8_e4m3fn"},
    "sinks": {"sinks": True},
    "custom_mask": {"custom_mask": True},
}


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `check` must trip for every run in which the fault changes the oracle."""

    name: str
    what: str
    fault: Fault
    check: str
    feature: str = "plain"


_SPLIT = Variant(block=64, splits=4)

KINDS: tuple[Kind, ...] = (
    Kind(
        "first_key_dropped",
        "no query sees the first key",
        Fault(reader=faults.key_dropped(lambda kv_len, tile: 0)),
        "r_row",
    ),
    Kind(
        "last_key_dropped",
        "no query sees the last key",
        Fault(reader=faults.key_dropped(lambda kv_len, tile: kv_len - 1)),
        "r_row",
    ),
    Kind(
        "page_key_dropped",
        "no query sees the first key of the second page",
        Fault(reader=faults.key_dropped(lambda kv_len, tile: tile)),
        "r_row",
    ),
    Kind("stale_page", "a page holds what was there before", Fault(reader=faults.stale_page), "r_row"),
    Kind(
        "split_dropped",
        "one of four splits never reaches the merge",
        Fault(defects=Defects(lost_split=1), variant=_SPLIT),
        "r_row",
    ),
    Kind(
        "merge_base2",
        "splits are merged as if their natural LSEs were base-2 ones",
        Fault(defects=Defects(merge_base2=True), variant=_SPLIT),
        "lse",
    ),
    Kind(
        "lse_base2",
        "the output is right, the LSE is a base-2 one",
        Fault(writer=faults.lse_in_base2),
        "lse",
    ),
    Kind("scale_1", "softmax scale 1 % off", Fault(misread=faults.scaled(1.01)), "times_champion"),
    Kind("scale_5", "softmax scale 5 % off", Fault(misread=faults.scaled(1.05)), "r_rms"),
    Kind("causal_off_by_one", "a query sees the key after its own", Fault(misread=faults.diagonal_moved), "r_row"),
    Kind("top_left_causal", "the causal mask starts top left", Fault(reader=faults.top_left_causal), "r_rms"),
    Kind("window_off_by_one", "one key more than the window", Fault(misread=faults.window_moved), "r_rms", "window"),
    Kind(
        "window_ignored",
        "every key is in the window",
        Fault(misread=faults.without(window=(None, None))),
        "r_rms",
        "window",
    ),
    Kind("softcap_ignored", "scores are not capped", Fault(misread=faults.without(softcap=None)), "r_rms", "softcap"),
    Kind("alibi_ignored", "no bias by distance", Fault(misread=faults.without(alibi_slopes=None)), "r_rms", "alibi"),
    Kind("sinks_ignored", "no sink in the sum", Fault(misread=faults.without(sinks=None)), "lse", "sinks"),
    Kind("mask_ignored", "the custom mask hides nothing", Fault(reader=faults.mask_ignored), "r_rms", "custom_mask"),
    Kind("gqa_map_wrong", "query heads read another KV head", Fault(reader=faults.heads_interleaved), "r_rms"),
    Kind(
        "kv_scale_ignored",
        "fp8 keys and values without their scales",
        Fault(misread=faults.without(k_scale=1.0, v_scale=1.0)),
        "r_rms",
        "fp8_kv",
    ),
    Kind(
        "bf16_accumulation",
        "the accumulator is bfloat16, rounded every 4 keys",
        Fault(defects=Defects(accumulate=torch.bfloat16), variant=Variant(block=4)),
        "pooled_times_champion",
    ),
    Kind("padding_leak", "the slot after the last key is read", Fault(reader=faults.slot_leaks), "r_row"),
    Kind("nan_in_one_row", "one row of the output is NaN", Fault(writer=faults.row_of_nan), "finite"),
    Kind("zeros", "the last tile of queries is never written: zeros", Fault(writer=faults.rows_of_zeros), "r_row"),
    Kind(
        "stale_output",
        "the last tile of queries holds the step before",
        Fault(writer=faults.rows_of_before),
        "r_row",
    ),
    Kind("element_off", "one element, the largest, is off", Fault(writer=faults.one_element_off), "r_max"),
    Kind("wrong_row", "one row in a thousand is another head's", Fault(writer=faults.wrong_rows), "r_row"),
)

#: Runs on every call with the same inputs; what a repeat shows is the probe `repeatability` (attention.drill.whole).
RACE = Fault(race=True, variant=Variant(block=16))
