"""Why rows of FlashInfer's table fail on a GPU: one line a row, grouped by cause, within a budget of seconds.

    python -m tests.attention.gpu.fi_triage --kernels fa2,fa3,cudnn,xqa --budget-s 200

Every module is compiled once, several beside each other; a row runs as soon as its module is there. Rows run one
after the other in a child of their own, which is replaced when it hangs or loses the device. Where an output holds
NaN, the row runs again with zeros instead of NaN in the unused slots of K, of V and of both: that tells a kernel
that reads them (PAD_POISON) from one that computes NaN.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from attention.backends.flashinfer import FlashInfer
from attention.backends.flashinfer_jit import warm
from attention.confirm import watch
from attention.replay.figures import compare
from attention.replay.problems import Problem
from tests.attention.flashinfer_problems import MLA, case
from tests.attention.gpu.test_flashinfer_gpu import (
    GRAPHS,
    TABLE,
    judge,
    name,
    problem_for,
    test_a_captured_run_serves_a_shorter_batch_after_replan,
)

Row = tuple[str, str, dict[str, Any]]
Work = tuple[str, Row, str]  # what to do, on which row, with which inputs
Answer = tuple[str, str]  # cause ("ok", "skipped", or what the row is grouped by), and the rest of its line
INPUTS = ("normal", "needle", "large_logit")
ROW_SECONDS = 60.0  # a row computes for less than a second, but a wrapper may load its module
NO_MODULE = ("cudnn", "trtllm-gen")  # nothing that nvcc compiles


def module_key(row: Row) -> tuple[Any, ...]:
    """What the name of a row's module depends on (get_batch_prefill_uri, gen_xqa_module): rows with the same key
    share one. Masks, layouts and page sizes are no part of it, but for xqa."""
    kernel, _, changes = row
    if kernel in NO_MODULE:
        return (kernel,)
    one = case(row[1], **changes)
    windowed = one.window[0] is not None and not one.custom_mask  # a mask holds its window itself
    sizes = (one.head_dim_qk, one.head_dim_vo, one.dtype, one.kv_dtype, windowed)
    if kernel == "xqa":
        return (kernel, *sizes, one.page_size, one.heads_q // one.heads_kv)
    return (kernel, *sizes, one.softcap is not None, one.alibi, one.sinks, MLA.items() <= changes.items())


def compiled(row: Row) -> Answer:
    """Build the modules of a row: seconds by module."""
    one = case(row[1], **row[2])
    if reasons := FlashInfer(row[0], "cuda").check(one):
        return "skipped", "; ".join(map(str, reasons))
    seconds = warm(f"flashinfer:{row[0]}", [one])
    return "ok", ", ".join(f"{module} {took:.1f} s" for module, took in seconds.items()) or "loaded already"


def ran(row: Row, inputs: str) -> Answer:
    """Run one row eagerly; the figures are there also where they are over the limits."""
    line, problem = problem_for(*row, inputs)  # type: ignore[arg-type]
    planned = FlashInfer(row[0], "cuda").plan(problem.batch, problem.spec)
    with torch.inference_mode():
        (out, lse), confirmed = watch(lambda: planned.run(problem.q_THD, problem.k, problem.v), device="cuda")
    figures = compare(out, lse, problem.truth, problem.spec.dtype)
    if not figures.finite_mask_equal:
        return "NaN", f"first in row {figures.worst_row_index}; {'; '.join(without_poison(planned, problem))}"
    shown = f"R_rms {figures.r_rms:.3g} R_max {figures.r_max:.3g} R_row {figures.r_row:.3g} LSE {figures.lse_max_abs}"
    try:
        judge(line, problem, out, lse)
    except AssertionError as error:
        over = re.findall(r"'(\w+)': \(", str(error)) or ["LSE of rows without keys"]
        return f"over the limit: {', '.join(over)}", shown
    return ("ok", shown) if confirmed == planned.backend else (f"confirmed as {confirmed}", shown)


def without_poison(planned: Any, problem: Problem) -> Iterator[str]:
    """Whether the output is still not finite with zeros in unused slots of K, of V, of both."""
    clean_k = torch.nan_to_num(problem.k.float(), nan=0.0).to(problem.k.dtype)
    clean_v = torch.nan_to_num(problem.v.float(), nan=0.0).to(problem.v.dtype)
    if problem.v.data_ptr() == problem.k.data_ptr():  # MLA: V lies in K
        clean_v = clean_k[..., : problem.v.shape[-1]]
    for zeroed, k, v in (("K", clean_k, problem.v), ("V", problem.k, clean_v), ("both", clean_k, clean_v)):
        one = replace(problem, k=k, v=v)
        if zeroed != "both" and problem.v.data_ptr() == problem.k.data_ptr():
            continue
        with torch.inference_mode():
            out, lse = planned.run(one.q_THD, one.k, one.v)
        figures = compare(out, lse, problem.truth, problem.spec.dtype)
        yield f"zeros in {zeroed}: {f'R_rms {figures.r_rms:.3g}' if figures.finite_mask_equal else 'NaN'}"


def answer(work: Work) -> Answer:
    what, row, inputs = work
    try:
        if what == "compile":
            return compiled(row)
        if what == "graph":
            test_a_captured_run_serves_a_shorter_batch_after_replan(row, inputs == "lse")
            return "ok", ""
        found = ran(row, inputs)
        torch.cuda.synchronize()
        return found
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also pytest's Skipped, which is no Exception
        kind = type(error).__name__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A failed build begins with every command that ran; what matters are the compiler's errors.
        errors = [line for line in lines if "error" in line.lower() and len(line) < 400]
        chosen = (errors if "Ninja" in str(error) else lines[:1]) or lines[:1] or ["no message"]
        return "skipped" if kind == "Skipped" else f"{kind}: {plain(chosen[0])}", " | ".join(chosen[:3])


def plain(text: str) -> str:
    """A message without its numbers and its case, so that alike causes are one."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", re.sub(r"^flashinfer:\S+ \S+ .*?: ", "", text))[:160]


def serve(pipe: Connection, jobs: int) -> None:
    """The child: answers work until it is ended, in a process group of its own, so that compilers end with it."""
    os.setsid()
    os.environ["MAX_JOBS"] = str(jobs)  # what ninja may run at once
    while True:
        pipe.send(answer(pipe.recv()))


class Child:
    """A process that answers one piece of work at a time."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.since = jobs, 0.0
        self.work: Work | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.jobs), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, work: Work) -> None:
        self.work, self.since = work, time.monotonic()
        self.pipe.send(work)

    def take(self) -> tuple[Work, Answer, float]:
        """The work, its answer and its seconds. A child that died, or that lost the device, is replaced."""
        assert self.work is not None
        try:
            found: Answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            found = (f"the process ended with {self.process.exitcode}", "")
        if "CUDA error" in " ".join(found) or "process ended" in found[0]:
            self.end()
            self._start()
        work, self.work = self.work, None
        return work, found, time.monotonic() - self.since

    def hung(self) -> tuple[Work, Answer, float]:
        assert self.work is not None
        work, self.work = self.work, None
        self.end()
        self._start()
        return work, (f"hung for {ROW_SECONDS:.0f} s", ""), ROW_SECONDS

    def end(self) -> None:
        """End the process and what it started."""
        try:
            if os.getpgid(self.process.pid or 0) == self.process.pid:
                os.killpg(self.process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        self.process.kill()


def triage(kernels: list[str], budget_s: float, *, graphs: bool, cores: int, jobs: int) -> dict[str, list[str]]:
    """Run what the budget allows; the lines of the rows by `kernel: cause`."""
    end = time.monotonic() + budget_s
    rows = sorted((row for row in TABLE if row[0] in kernels), key=lambda row: kernels.index(row[0]))
    todo: dict[tuple[Any, ...], list[Work]] = defaultdict(list)
    for row in rows:
        todo[module_key(row)] += [("row", row, i) for i in INPUTS if not ("s0" in row[1] and i == "needle")]
    for row in GRAPHS if graphs else ():
        if row[0] in kernels:
            todo[module_key(row)] += [("graph", row, "lse"), ("graph", row, "no lse")]
    ready: list[Work] = []  # whose module is there
    building: list[Work] = []
    for key, work in todo.items():
        if key[0] in NO_MODULE:
            ready += work
        else:
            building.append(("compile", work[0][1], ""))
    num_modules, by_cause = len(building), defaultdict(list)
    print(f"{sum(map(len, todo.values()))} rows, {num_modules} modules to compile", flush=True)
    runner = Child(jobs)
    builders = [Child(jobs) for _ in range(min(max(1, cores // jobs), num_modules))]
    children = [*builders, runner]
    try:
        while time.monotonic() < end:
            for builder in builders:
                if builder.work is None and building:
                    builder.give(building.pop(0))
            if runner.work is None and ready:
                runner.give(ready.pop(0))
            busy = [child for child in children if child.work is not None]
            if not busy:
                break
            done = wait([child.pipe for child in busy], timeout=max(0.0, min(1.0, end - time.monotonic())))
            finished = [child.take() for child in busy if child.pipe in done]
            if runner.work is not None and time.monotonic() - runner.since > ROW_SECONDS:
                finished.append(runner.hung())
            for (what, row, inputs), (cause, rest), took in finished:
                if what == "compile":
                    print(f"compile, {took:.1f} s: {row[0]} {module_key(row)[1:]}: {cause} | {rest}", flush=True)
                    if cause == "ok":
                        ready += todo[module_key(row)]
                        continue
                line = f"{what} {name(row)} {inputs}: {cause} | {rest}"
                by_cause[f"{row[0]}: {cause}"].append(line)
                if what != "compile":
                    print(line, flush=True)
        left = len(ready) + len(building) + sum(child.work is not None for child in children)
        print(f"left over by the budget of {budget_s:.0f} s: {left} pieces of work" if left else "all done", flush=True)
    finally:
        for child in children:
            child.end()
    return by_cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="cudnn,xqa,fa2,fa3", help="in the order in which they are taken")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--graphs", action="store_true", help="the CUDA graph tests, too")
    parser.add_argument("--jobs", type=int, default=4, help="compilers a module; modules at once: cores / jobs")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    kernels = options.kernels.split(",")
    by_cause = triage(kernels, options.budget_s, graphs=options.graphs, cores=cores, jobs=options.jobs)
    print("\nby cause")
    for cause, lines in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        print(
            f"{len(lines):4}  {cause}",
            *(f"        {line}" for line in lines[:3] if not cause.endswith(": ok")),
            sep="\n",
        )


if __name__ == "__main__":
    main()
