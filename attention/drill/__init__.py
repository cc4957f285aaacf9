"""Faults of attention kernels on purpose, and sound kernels that differ: what `python -m flows drill` runs.

    emulator        a pseudo-kernel: blocks, orders and splits, with the roundings that flash kernels make
    kernel, faults  where a fault enters it, and what each does
    kinds           every kind that one problem shows, with the check that must catch it
    backends        the same faults around real backends, where they sit in arguments or outputs
    published       what the rules of other projects say of the same outputs
    plan, plans/    which problems are drawn, who computes them, who gets the faults
    run, rows       one problem, all kinds and everything sound: rows for gates/drill.py
    measure         the same on a machine that has the kernels and none of the gates
    whole           faults that only a real model shows, in one layer, its cache or its batches
    recordings      that model recorded, sound and faulty, and the float64 oracle's effect of each fault
    evidence_kinds  what a crash, a lost shard or another kernel leaves in the tables of a release

Free of gates: rows are figures, and who judges them stands above.
"""
