"""Faults of attention kernels on purpose, and sound kernels that differ: what `python -m flows drill` runs.

    emulator   a pseudo-kernel: blocks, orders and splits, with the roundings that flash kernels make
    kinds      every kind of fault, with the layer and the check that must catch it
    published  what the rules of other projects say of the same outputs
    plan       which problems are drawn
    run        one problem, all kinds and all sound variants: rows for gates/drill.py

Free of gates: rows are figures, and who judges them stands above.
"""
