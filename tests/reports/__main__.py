"""One line a report: id, backends, reason code, how it runs here. `python -m tests.reports [--markdown]`."""

from __future__ import annotations

import sys

from tests.reports.reports import REPORTS


def main() -> None:
    header = ("report", "backends", "check", "code", "runs as")
    rows = [(r.id, r.backends, r.check, str(r.code), r.how) for r in REPORTS]
    if "--markdown" in sys.argv[1:]:
        print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        for report, row in zip(REPORTS, rows, strict=True):
            print(f"| [{row[0]}]({report.url}) | " + " | ".join(row[1:]) + " |")
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    here = {kind: sum(r.here == kind for r in REPORTS) for kind in ("fails", "kin", "fixed")}
    print(
        f"{len(REPORTS)} reports, each on a mutant; {here['fails']} fail here for real, {here['kin']} in kin, "
        f"{here['fixed']} are fixed here; {sum(bool(r.gpu) for r in REPORTS)} also run on a CUDA machine"
    )


if __name__ == "__main__":
    main()
