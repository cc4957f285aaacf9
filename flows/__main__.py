"""`python -m flows`: releases, rollbacks and what there is to know about them.

Exit: 0 it did what was asked; 1 a gate failed, or the candidate was rolled back or refused; 2 bad input
or set-up; 3 inconclusive, errored or held; 130 Ctrl-C or SIGTERM. Every command imports only what it needs: a
rollback must work where Prefect, MLflow and torch do not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attention.errors import UserError, piped, readable
from attention.private import private_folder
from flows.telemetry import silence

if TYPE_CHECKING:
    from tasks.lifecycle import ReleaseResult

silence()

app = typer.Typer(
    help="Release governance for attention backends.\n\nExample: python -m flows release "
    "data/candidates/torch-flash-cpu.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]


def _cell_part(option: typer.CallbackParam, name: str | None) -> str | None:
    from data.paths import check_part

    return None if name is None else check_part(f"--{option.name}", name)


def _text(text: str | None) -> str | None:
    """Free text goes into records and reports, which are UTF-8: a rollback must not fail for an umlaut."""
    return None if text is None else readable(text)


Gpu = Annotated[str, typer.Option("--gpu", help="GPU model of the cell, `cpu` without one", callback=_cell_part)]
Family = Annotated[
    str, typer.Option("--family", help="model family of the cell, for example smollm2", callback=_cell_part)
]


@app.command()
def release(
    candidate: Annotated[Path, typer.Argument(help="candidate file, for example data/candidates/torch-flash-cpu.yaml")],
    champion: Annotated[
        str | None, typer.Option(help="incumbent of a cell without a release yet", callback=_text)
    ] = None,
    stop_after: Annotated[str | None, typer.Option(help="end after this stage passed", callback=_text)] = None,
    retry: Annotated[bool, typer.Option("--retry", help="try a candidate again that was refused before")] = False,
    as_json: Json = False,
) -> None:
    """Take a candidate through all phases and shift traffic to it."""
    from data.candidate import load_candidate
    from flows.early import check_set_up, serving
    from flows.terminal import progress, show_release
    from tasks.lifecycle import OFFLINE, STAGES, settled

    if stop_after is not None and stop_after not in STAGES:
        raise UserError(f"--stop-after {stop_after}: stages are {', '.join(STAGES)}")
    loaded = load_candidate(candidate)
    results = settled(loaded, retry=retry)
    if results is None:
        with_traffic = stop_after not in OFFLINE
        check_set_up(loaded, champion, with_traffic=with_traffic)
        say = progress(to_stderr=as_json)
        say(f"starting Prefect{' and the champion' if with_traffic else ''} (half a minute)")
        with serving(loaded, champion) if with_traffic else nullcontext():
            results = _run_flow(str(candidate), champion, stop_after, retry, say)
    if as_json:
        documents = [result.model_dump(mode="json") for result in results]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    else:
        show_release(results)
    raise typer.Exit(max(result.exit_code for result in results))


def _run_flow(
    candidate: str, champion: str | None, stop_after: str | None, retry: bool, say: Any
) -> list[ReleaseResult]:
    """The flow as Prefect runs it; without a server Prefect starts one for the length of the command."""
    from data.paths import state_dir

    os.environ.setdefault("PREFECT_HOME", str(state_dir() / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    # Prefect makes the folder itself, but not its parents.
    private_folder(Path(os.environ["PREFECT_HOME"]))
    from flows import prefect_server
    from flows import release as module
    from tasks.lifecycle import ReleaseResult

    prefect_server.start()
    try:
        with module.speaking(say):
            found: Any = module.release(candidate, champion=champion, stop_after=stop_after, retry=retry)
    except module.ReleaseRefusedError as refused:
        return refused.results
    return [ReleaseResult.model_validate(one) for one in found]


@app.command()
def up(
    gpu: Gpu = "cpu",
    family: Family = "smollm2",
    champion: Annotated[
        str | None, typer.Option(help="incumbent of a cell without a release yet", callback=_text)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run Envoy, champion and watchdog under one supervisor."""
    from dataclasses import asdict

    from data.paths import cell_dir
    from flows import up as module
    from tasks.lifecycle import incumbent
    from tasks.record import RecordStore

    serving = None
    if RecordStore(cell_dir(gpu, family) / "record.json").load().champion is None:
        serving = incumbent(gpu, family, champion)
    running = module.up(gpu, family, champion=serving)
    if as_json:
        print(json.dumps({**asdict(running), "champion": running.champion.model_dump()}, indent=1))
    else:
        print(f"{running.url} is served by {running.release_id}; `python -m flows down` stops it")


@app.command()
def down(
    gpu: Annotated[
        str | None, typer.Option(help="only this GPU model; default: every cell", callback=_cell_part)
    ] = None,
    family: Annotated[str | None, typer.Option(help="only this model family", callback=_cell_part)] = None,
    as_json: Json = False,
) -> None:
    """Traffic to the champion, then stop every process of the cells."""
    from data.paths import cells
    from flows import down as module
    from flows import prefect_server

    stopped = [f"prefect-server {pid}" for pid in prefect_server.stop_orphans()]
    for one_gpu, one_family in cells():
        if gpu in (None, one_gpu) and family in (None, one_family):
            stopped += [process.name for process in module.down(one_gpu, one_family)]
    print(json.dumps(stopped) if as_json else f"stopped {', '.join(stopped) or 'nothing: nothing was running'}")


@app.command()
def rollback(
    gpu: Gpu,
    family: Family,
    reason: Annotated[str, typer.Option(help="why, for the record", callback=_text)],
    to: Annotated[
        str | None, typer.Option(help="release id to go back to; default: the previous champion", callback=_text)
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a release back at once: share 0, confirmed by the router."""
    from dataclasses import asdict

    from flows import rollback as module

    done = module.rollback(gpu, family, to=to, reason=reason)
    if as_json:
        print(json.dumps(asdict(done), indent=1))
    else:
        if done.confirmed:
            how = f"share 0, confirmed by the router after {done.share_zero_s:.2f} s; {done.serves} serves"
        else:
            how = f"nothing runs, so nobody is served; `python -m flows up` serves {done.serves}"
        print(f"rolled back {done.release_id}: {how}")


@app.command()
def approve(
    release_id: Annotated[
        str, typer.Argument(metavar="RELEASE", help="release id, as `status` shows it", callback=_text)
    ],
    note: Annotated[str, typer.Option(help="why, for the record", callback=_text)] = "",
    as_json: Json = False,
) -> None:
    """Let a held release go on."""
    from flows import approve as module

    record = module.approve(release_id, note)
    if as_json:
        print(json.dumps({"release_id": release_id, "state": record.state}, indent=1))
    else:
        print(f"approved {release_id} for {record.gpu} {record.family}")


@app.command()
def status(
    as_json: Json = False,
    repair: Annotated[bool, typer.Option("--repair", help="rebuild MLflow's copies from record and lake")] = False,
) -> None:
    """What every cell does: state, champion, shares, lease.

    Example: python -m flows status
    """
    from flows import status as module

    found = module.status(repair=repair)
    _show(found, module.render, as_json)


@app.command()
def why(
    release_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RELEASE", help="id, as `status` or `qualify` shows it; default: the newest", callback=_text
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Why a release or a qualification passed or failed, down to the rows behind it.

    Example: python -m flows why
    """
    from flows import why as module

    _show(module.why(module.newest() if release_id is None else release_id), module.render, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine and say what to mend."""
    from flows import doctor as module

    found = module.doctor()
    _show(found, module.render, as_json)
    raise typer.Exit(0 if found.ok else 2)


@app.command()
def qualify(
    candidate: Annotated[Path, typer.Argument(help="candidate file")],
    champion: Annotated[
        str | None, typer.Option(help="incumbent of a cell without a release yet", callback=_text)
    ] = None,
    as_json: Json = False,
) -> None:
    """The four offline phases only; no traffic moves.

    Example: python -m flows qualify data/candidates/torch-flash-cpu.yaml
    """
    from flows import qualify as module
    from flows.terminal import progress, show_qualified

    found = module.run(candidate, champion=champion, say=progress(to_stderr=as_json))
    if as_json:
        documents = [one.model_dump(mode="json") for one in found]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    else:
        show_qualified(found)
    raise typer.Exit(max(one.exit_code for one in found))


@app.command()
def nightly(as_json: Json = False) -> None:
    """Qualify anew what is in production, as the schedule does."""
    from flows import nightly as module
    from flows.terminal import progress, show_qualified

    found = module.run(say=progress(to_stderr=as_json))
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=1))
    else:
        show_qualified(found)
    raise typer.Exit(max((one.exit_code for one in found), default=0))


@app.command()
def baseline(
    matrix: Annotated[
        str, typer.Option(help="what to measure: a name in data/baselines, or a file", callback=_text)
    ] = "cpu",
    mix: Annotated[
        str,
        typer.Option(help="traffic that weighs the cells: a name in data/mixes, a file, or own", callback=_text),
    ] = "chat",
    traffic: Annotated[Path | None, typer.Option(help="traffic log of --mix own")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model; default: the matrix's first", callback=_cell_part)] = None,
    backends: Annotated[
        str | None, typer.Option(help="comma-separated backends or families; default: the matrix's", callback=_text)
    ] = None,
    blocks: Annotated[int, typer.Option(min=6, help="interleaved blocks a cell")] = 6,
    startup: Annotated[bool, typer.Option("--startup", help="first calls of fresh processes too")] = False,
    budget_s: Annotated[float | None, typer.Option(min=1, help="leave out cells past so many seconds")] = None,
    propose: Annotated[Path | None, typer.Option(help="write the selection as a policy file")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for rows and figures; default: the lake")] = None,
    as_json: Json = False,
) -> None:
    """Which backend is best here for a traffic mix? No traffic moves.

    Example: python -m flows baseline --matrix cpu --mix chat
    """
    from flows import baseline as module
    from flows.terminal import progress

    asked = module.Asked(
        matrix=matrix,
        mix=mix,
        gpu=gpu,
        traffic=traffic,
        backends=backends,
        blocks=blocks,
        startup=startup,
        budget_s=budget_s,
        propose=propose,
        out=out,
    )
    found = module.run(asked, say=progress(to_stderr=as_json))
    _show(found, module.render, as_json)
    raise typer.Exit(found.exit_code)


@app.command()
def watch(gpu: Gpu = "cpu", family: Family = "smollm2") -> None:
    """Take traffic back when a release lets its lease run out."""
    from flows import watch as module

    module.watch(gpu, family)


@app.command()
def drill(
    small: Annotated[bool, typer.Option("--small", help="the part that `make test` runs")] = False,
    rows: Annotated[
        Path | None, typer.Option(metavar="DIR", help="judge what python -m attention.drill.measure measured")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="repeat a run; default: a fresh seed")] = None,
    without: Annotated[
        str | None, typer.Option(help="leave a check out, to see that faults escape then", callback=_text)
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject faults into kernels: are all caught, and nothing sound?

    Example: python -m flows drill --small
    """
    from flows import drill as module
    from flows.terminal import progress
    from tasks import drill as task

    say = progress(to_stderr=as_json)
    if rows is not None:
        if small or seed is not None:
            raise UserError("--rows has a plan and a seed of its own: leave --small and --seed out")
        found = task.judge_rows(rows, without=without, say=say)
    else:
        found = task.drill("small" if small else "full", seed=seed, without=without, say=say)
    _show(found, module.render, as_json)
    raise typer.Exit(found.exit_code)


def _show(model: Any, render: Any, as_json: bool) -> None:
    if as_json:
        print(model.model_dump_json(indent=1))
        return
    from flows.tables import console_of_width

    console_of_width().print(render(model))


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupted)  # a service manager's stop is a Ctrl-C: nothing is left behind
    try:
        # Without its standalone mode the library returns the code of a typer.Exit.
        return piped(lambda: int(app(standalone_mode=False) or 0))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except TimeoutError as error:
        print(f"error: {error}: another command holds it; try again", file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full or read only, a name that is too long
        print(f"error: {UserError.of_system(error)}", file=sys.stderr)
        return 2
    except Exception as error:  # click's usage errors, by their own text
        if hasattr(error, "format_message"):
            print(f"error: {error.format_message()}", file=sys.stderr)
            return 2
        if type(error).__name__ in ("RouterError", "StaleGenerationError", "ProcessError", "MeasureError"):
            print(f"error: {error}", file=sys.stderr)
            return 3
        raise


if __name__ == "__main__":
    raise SystemExit(main())
