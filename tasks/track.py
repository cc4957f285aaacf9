"""MLflow holds a copy of every release for review: runs, gates as tags and metrics, figures, a registry.

    tracker = Tracker(gpu, family, lake, release_id)
    run_id = tracker.open_release(story)                       # one run a candidate
    tracker.log_stage(run_id, gate_report, figures, seconds)   # one nested run a stage
    tracker.close_release(run_id, story, report_html)
    tracker.promoted(run_id, story, record)                    # a model version, aliases moved
    tracker.rolled_back(run_id, story, record)                 # aliases moved back

Copies decide nothing: the release record is the only truth. So MLflow being down costs a warning event and
nothing else: every method above is guarded once, here, and what was missed is rebuilt by `repair`. Runs are
addressed by id: MLflow's "active run" is per thread and opens stray runs. The store is a SQLite file under
`data/state/mlflow`, or MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from attention.errors import UserError
from attention.private import private_folder
from data.paths import state_dir
from gates.report import table
from gates.verdict import GateReport, Verdict
from tasks.record import Record
from tasks.story import Story, tell

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

P = ParamSpec("P")
T = TypeVar("T")

CHAMPION, PREVIOUS = "champion", "previous"
NOTE_CHARS = 7500  # MLflow cuts a tag at 8000, silently
RETRY_AFTER_S = 30.0  # a store that failed is left alone this long, so that it cannot slow a release
_NOTE, _PARENT = "mlflow.note.content", "mlflow.parentRunId"


def _guarded(
    call: Callable[Concatenate[Tracker, P], T],
) -> Callable[Concatenate[Tracker, P], T | None]:
    """The one place where MLflow may fail: None, a warning event, and no new try for a while."""

    def guarded(self: Tracker, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if time.monotonic() < self.down_until:
            return None
        try:
            return call(self, *args, **kwargs)
        except Exception as error:  # MLflow raises its own, SQLAlchemy's, requests' and OSError
            self.down_until = time.monotonic() + RETRY_AFTER_S
            self.warn(call.__name__, error)
            return None

    functools.update_wrapper(guarded, call)
    return guarded


class Tracker:
    """MLflow's copy of the releases of one cell (GPU, model family), at work for one release."""

    def __init__(self, gpu: str, family: str, lake: Path, release_id: str) -> None:
        self.gpu = gpu
        self.family = family
        self.lake = lake
        self.release_id = release_id  # whose events tell of a failure here
        self.down_until = 0.0
        self.uri, self._artifacts = _store()

    @property
    def where(self) -> str:
        return f"MLflow at {_without_password(self.uri)}"

    @property
    def model_name(self) -> str:
        return f"attention.{self.family}.{self.gpu}"

    # ------------------------------------------------------------------------ during a release

    @_guarded
    def open_release(self, story: Story) -> str:
        """The run of this release; a release that is resumed finds the run it had."""
        run_id = self._find_run(story.release_id)
        if run_id is None:
            tags = {"release_id": story.release_id}
            run = self._client.create_run(self._experiment_id, tags=tags, run_name=story.headline)
            run_id = str(run.info.run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._describe(run_id, story)
        return run_id

    @_guarded
    def log_stage(
        self, run_id: str | None, report: GateReport, figures: Sequence[Path] = (), seconds: float = 0.0
    ) -> str | None:
        """A nested run with the gate's checks as metrics; its verdict as a tag of the release's run."""
        return None if run_id is None else self._log_stage(run_id, report, figures, seconds)

    @_guarded
    def close_release(self, run_id: str | None, story: Story, report_html: Path | None = None) -> None:
        """Verdict into name, tags and description; artifacts; the run ends."""
        if run_id is not None:
            self._close(run_id, story, report_html)

    @_guarded
    def promoted(self, run_id: str | None, story: Story, record: Record) -> str | None:
        """A version of the registered model for a promoted release, aliases as the record says; the version.

        A drill gets neither: whoever deploys by alias must never meet it.
        """
        if run_id is None or story.drill:
            return None
        version = self._version_of(story.release_id) or self._create_version(run_id, story)
        self._copy_aliases(record)
        return version

    @_guarded
    def rolled_back(self, run_id: str | None, story: Story, record: Record) -> None:
        """Aliases as the record says after a rollback; the release's run tells why."""
        if run_id is not None:
            self._close(run_id, story, None)
        self._copy_aliases(record)

    @_guarded
    def run_of(self, release_id: str) -> str | None:
        """The run of a release, for a command that did not open it."""
        return self._find_run(release_id)

    def warn(self, what: str, error: Exception) -> None:
        """An event in the lake; where even that cannot be written, the copy is simply missing."""
        from attention.schemas import write_rows

        event = {
            "kind": "mlflow_failed",
            "severity": "warning",
            "subject": what,
            "message": f"{self.where}: {_what(error)}",
            "gpu": self.gpu,
            "time": datetime.now(UTC),
        }
        with suppress(OSError):
            write_rows(self.lake, "events", [event], release_id=self.release_id)

    def repair(self, record: Record) -> list[str]:
        """See `repair`, below; raises whatever MLflow raises."""
        serving = [one.release_id for one in (record.previous, record.champion) if one is not None]
        ended = [attempt.release_id for attempt in record.attempts]
        ids = list(dict.fromkeys([*ended, *serving, *([record.release_id] if record.release_id else [])]))
        for release_id in ids:
            story = tell(record, self.lake, release_id)
            run_id = self._find_run(release_id)
            if run_id is None:
                tags = {"release_id": release_id}
                run_id = str(self._client.create_run(self._experiment_id, tags=tags).info.run_id)
            logged = self._stages_of(run_id)
            for report in story.gates:
                if report.stage not in logged:
                    self._log_stage(run_id, report, (), 0.0)
            if story.verdict == "OPEN":
                self._describe(run_id, story)
            else:
                self._close(run_id, story, None)
            drill = story.drill or "drill" in self._client.get_run(run_id).data.tags
            if release_id in serving and not drill and story.gates and not self._version_of(release_id):
                self._create_version(run_id, story)
        self._copy_aliases(record)
        return ids

    # ------------------------------------------------------------------------ runs

    @functools.cached_property
    def _client(self) -> MlflowClient:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # Of a server: by default a dead one is retried for minutes at every call.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if self.uri.startswith("sqlite:///"):
            private_folder(Path(self.uri.removeprefix("sqlite:///")).parent)
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @functools.cached_property
    def _experiment_id(self) -> str:
        name = f"attention-release/{self.family}"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_location=self._artifacts))
        except Exception:
            # Two releases may open the first run of a family at once; one of them then finds it.
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _find_run(self, release_id: str) -> str | None:
        found = self._client.search_runs(
            [self._experiment_id], f"tags.release_id = {_quoted(release_id)}", max_results=1
        )
        return str(found[0].info.run_id) if found else None

    def _stages_of(self, run_id: str) -> set[str]:
        children = self._client.search_runs([self._experiment_id], f"tags.`{_PARENT}` = {_quoted(run_id)}")
        return {child.data.tags.get("stage", "") for child in children}

    def _log_stage(self, run_id: str, report: GateReport, figures: Sequence[Path], seconds: float) -> str:
        started_ms = int(1000 * (time.time() - seconds))
        name = f"{report.stage}: {report.verdict.value.upper()}"
        tags = {_PARENT: run_id, "stage": report.stage, f"gate.{report.stage}": report.verdict.value}
        tags[_NOTE] = f"{_line(report.reason, 500)}\n\n{_markdown([report])}"
        client = self._client
        child = client.create_run(self._experiment_id, start_time=started_ms, tags=tags, run_name=name)
        child_id = str(child.info.run_id)
        client.log_batch(child_id, metrics=[*_metrics(report), _metric("seconds", seconds)])
        client.log_batch(run_id, metrics=_metrics(report))
        client.set_tag(run_id, f"gate.{report.stage}", report.verdict.value)
        for target in (run_id, child_id):
            client.log_text(target, report.model_dump_json(indent=2), f"gates/{report.stage}.json")
            for figure in figures:
                client.log_artifact(target, str(figure), "figures")
        client.set_terminated(child_id, "FINISHED" if report.verdict is Verdict.PASS else "FAILED")
        return child_id

    def _describe(self, run_id: str, story: Story) -> None:
        """Name, tags and description; fields that the story does not know are left as they are."""
        tags = {
            "candidate": story.candidate,
            "gpu": story.gpu,
            "state": story.state,
            "champion": story.champion,
            "confirmed_backend": story.confirmed_backend,
            "fingerprint_id": story.fingerprint_id,
            "failed_gate": story.failed_gate,
            "drill": "true" if story.drill else None,
            _NOTE: _note(story),
            **{f"gate.{gate.stage}": gate.verdict.value for gate in story.gates},
        }
        self._client.update_run(run_id, name=story.headline)
        for name, value in tags.items():
            if value:
                self._client.set_tag(run_id, name, value)
        if story.fingerprint_json:
            self._client.log_text(run_id, story.fingerprint_json, "fingerprint.json")
        if story.policy_yaml:
            self._client.log_text(run_id, story.policy_yaml, "policy.yaml")

    def _close(self, run_id: str, story: Story, report_html: Path | None) -> None:
        self._describe(run_id, story)
        if report_html is not None:
            self._client.log_artifact(run_id, str(report_html))
        status = {"PASS": "FINISHED", "OPEN": "KILLED"}.get(story.verdict, "FAILED")
        if self._client.get_run(run_id).info.status == "RUNNING":
            self._client.set_terminated(run_id, status)
        else:
            self._client.update_run(run_id, status=status)  # told again later: its end stays

    # ------------------------------------------------------------------------ registry

    def _versions(self) -> dict[str, str]:
        """Version by release id."""
        found = self._client.search_model_versions(f"name = {_quoted(self.model_name)}")
        return {version.tags.get("release_id", ""): str(version.version) for version in found}

    def _version_of(self, release_id: str) -> str | None:
        return self._versions().get(release_id)

    def _create_version(self, run_id: str, story: Story) -> str:
        """A plain version whose source is the run: an external model would need MLflow's global store."""
        self._require_model()
        tags = {"release_id": story.release_id, "candidate": story.candidate}
        source = self._client.get_run(run_id).info.artifact_uri
        version = self._client.create_model_version(
            self.model_name, source=source, run_id=run_id, tags=tags, description=story.headline
        )
        return str(version.version)

    def _require_model(self) -> None:
        if not self._client.search_registered_models(f"name = {_quoted(self.model_name)}"):
            text = f"Promoted attention backends for {self.family} on {self.gpu}"
            self._client.create_registered_model(self.model_name, description=text)

    def _copy_aliases(self, record: Record) -> None:
        """Point both aliases at what the record says; take one away whose release has no version."""
        versions = self._versions()
        if not versions:
            return
        for alias, deployed in ((CHAMPION, record.champion), (PREVIOUS, record.previous)):
            version = versions.get(deployed.release_id) if deployed is not None else None
            if version is None:
                self._client.delete_registered_model_alias(self.model_name, alias)
            else:
                self._client.set_registered_model_alias(self.model_name, alias, version)


def repair(record: Record, lake: Path) -> list[str]:
    """Rebuild runs, tags, versions and aliases from record and lake; the ids of the releases it told again.

    Raises UserError when MLflow cannot be reached: a person asked, so nothing is passed over here.
    """
    tracker = Tracker(record.gpu, record.family, lake, record.release_id or "none")
    try:
        return tracker.repair(record)
    except Exception as error:
        raise UserError(
            f"{tracker.where} cannot be repaired ({_what(error)}): start it, or set "
            "MLFLOW_TRACKING_URI to one that answers"
        ) from error


def _store() -> tuple[str, str | None]:
    """Tracking URI, and where artifacts go: None leaves it to a server."""
    folder = state_dir() / "mlflow"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    # A SQLite store would otherwise put artifacts into the working directory of whoever comes first.
    return uri, (folder / "artifacts").as_uri() if uri.startswith("sqlite:") else None


def _metrics(report: GateReport) -> list[Metric]:
    """`gate.<stage>.<check>.value` and `.limit`, in the units of the check."""
    found = []
    for check in report.checks:
        name = re.sub(r"[^\w\-. ]", "_", f"gate.{report.stage}.{check.check}")
        for suffix, value in (("value", check.observed), ("limit", check.limit)):
            if value is not None:
                found.append(_metric(f"{name}.{suffix}", value))
    return found


def _metric(name: str, value: float) -> Metric:
    from mlflow.entities import Metric

    return Metric(name, value, int(1000 * time.time()), 0)


def _note(story: Story) -> str:
    """The description of a run: the verdict in its first line, which is all that a folded one shows."""
    line = f"**{story.headline}**" + (f" - {_line(story.reason, 500)}" if story.reason else "")
    return f"{line}\n\n{_markdown(story.gates)}"


def _markdown(gates: Sequence[GateReport]) -> str:
    """A table of all checks, cut at a whole row where it would become too long for a tag."""
    lines = [
        "| gate | check | verdict | observed | limit | smallest visible effect |",
        "|---|---|---|---|---|---|",
    ]
    for gate in gates:
        for row in table(gate):
            cells = (gate.stage, row.check, row.verdict.upper(), row.observed, row.limit, row.detectable)
            lines.append("| " + " | ".join(_line(cell, 120).replace("|", "\\|") for cell in cells) + " |")
    total = 0
    kept: list[str] = []
    for line in lines:
        total += len(line) + 1
        if total > NOTE_CHARS - 600:
            return "\n".join([*kept, "", f"{len(lines) - len(kept)} more rows in report.html"])
        kept.append(line)
    return "\n".join(kept)


def _line(text: str, num_chars: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= num_chars else line[: num_chars - 3] + "..."


def _quoted(text: str) -> str:
    if "'" in text:
        raise ValueError(f"{text!r} has a quote, which MLflow's filters cannot hold")
    return f"'{text}'"


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {_line(_without_password(str(error)), 300)}"


def _without_password(text: str) -> str:
    """Errors of HTTP clients quote the address that they were given, credentials and all."""
    return re.sub(r"//[^/@\s]*@", "//", text)
