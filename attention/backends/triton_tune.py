"""Times `triton:paged` over lists of tiles on this GPU: the numbers behind its tables.

    python -m attention.backends.triton_tune --out rows.json [--only decode] [--blocks 15] [--jobs 14] [--budget-s 300]

It needs a GPU. Shapes, checks and clock are those of `attention.bench_kernels`; every tile is checked against the
oracle in a worker process before it is timed, so that one that faults is a row with its error. `triton:paged` alone is
what the tables choose now; rows come best first: tiles that beat it are to be written there.
"""

from __future__ import annotations

import sys
from itertools import product

from attention.backends.triton_paged import Tiles
from attention.bench_contenders import Shape, name_of
from attention.bench_kernels import BASELINES, parser, run
from attention.errors import UserError

DECODE_TILES = (
    *(Tiles(16, n, w, s) for n, w, s in product((32, 64, 128), (2, 4, 8), (2, 3, 4)) if n * s <= 384 and n // w >= 8),
    *(Tiles(16, 64, 4, 3, num_splits) for num_splits in (1, 2, 3, 4, 8)),
    *(Tiles(16, 128, 4, 2, num_splits) for num_splits in (1, 2, 4)),
    Tiles(16, 64, 4, 3, None, 128),
    Tiles(16, 64, 4, 4, None, 128),
)
#: With a bound on registers two or three blocks share a multiprocessor: one computes its softmax while another
#: multiplies.
PREFILL_TILES = (
    *(Tiles(128, 64, 8, s) for s in (2, 3, 4)),
    *(Tiles(128, 128, 8, s) for s in (2, 3)),
    *(Tiles(128, 32, 8, s, None, registers) for s, registers in product((2, 3, 4), (None, 128))),
    Tiles(128, 64, 8, 2, None, 128),
    *(Tiles(128, 64, 4, s) for s in (2, 3)),
    *(Tiles(64, n, 4, s) for n, s in product((64, 128), (2, 3))),
    Tiles(64, 64, 4, 2, None, 168),
)


def contenders(shape: Shape) -> list[str]:
    """The tables' own choice, the tiles to try, and what the figures are divided by."""
    tiles = DECODE_TILES if shape.is_decode else PREFILL_TILES
    return ["triton:paged", *map(name_of, tiles), *BASELINES[shape.case.phase]]


def main() -> int:
    options = parser("attention.backends.triton_tune", __doc__).parse_args()
    try:
        return run(options, contenders)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
