"""A release on purpose: the evidence of one real model, sound and with every fault, before the gates that release.

Tensors, a teacher-forced recording and graded answers of a small model are made once; each fault then changes what it
would change, and `gates.replay.judge` and `gates.probe.judge` say what they say of any release. Limits are those of
the full plan, evidence as much as the drill's plan asks for.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.cases import REPLAY_INPUTS
from attention.drill.evidence_kinds import EVIDENCE_KINDS, Rows, Tables
from attention.drill.plan import DrillPlan, WholePlan
from attention.schemas import write_rows
from data.golden_set import GoldenPrompt, load_golden, sample
from data.paths import model_path, repo_dir
from data.plan import Plan, load_plan
from gates import drill as gate
from gates import probe, replay
from gates.verdict import Verdict
from tasks.grade import grade

if TYPE_CHECKING:
    from attention.drill.recordings import Recorder
    from attention.replay.business import Answer

CHAMPION, CANDIDATE = "cpu-math", "cpu-flash"
MAX_KV_LEN = 64  # of the tensors: the draws of the drill have the long ones
MAX_CHARACTERS = 240  # of a golden prompt: what is drilled is the gate, and the time goes into prompts
SOUND_RELEASE = "sound"


@dataclass(frozen=True)
class Release:
    """Tables of one release, and the probes that it requires."""

    tables: Tables
    required: tuple[tuple[str, str], ...]


def judged(release: Release, plan: Plan) -> tuple[str, ...]:
    """Names (`layer.check`) of what the gates do not let pass."""
    with tempfile.TemporaryDirectory() as folder:
        lake = Path(folder)
        for table, rows in release.tables.items():
            write_rows(lake, table, rows, release_id=SOUND_RELEASE)
        reports = [
            replay.judge(lake, SOUND_RELEASE, plan, num_golden=plan.replay.golden_prompts or 0),
            probe.judge(lake, SOUND_RELEASE, plan, required=release.required),
        ]
    found = [_name(r.stage, check.check) for r in reports for check in r.checks if check.verdict is not Verdict.PASS]
    return tuple(dict.fromkeys(found))


def _name(stage: str, check: str) -> str:
    """Without dtype class, mode and category: `tensor.bfloat16.r_rms` is `tensor.r_rms`, `model.decode.bucket.kl_mean`
    is `model.bucket.kl_mean`, `business.json.mcnemar_p` is `business.category.mcnemar_p`; probes' are `probe.`."""
    parts = check.split(".")
    if stage == "probe" and len(parts) == 1 and check != "measured_rows":
        return f"probe.{check}"
    if len(parts) < 3:
        return check
    layer, _, *rest = parts
    return ".".join([layer, *(["category"] if layer == "business" else []), *rest])


def expected(plan: DrillPlan) -> tuple[gate.Expected, ...]:
    """Every kind of a release, with the check that must catch it."""
    from attention.drill.whole import MIXED, model_kinds

    whole = _whole(plan)
    kinds: list[Any] = [*model_kinds(_specs(whole)), MIXED, *EVIDENCE_KINDS]
    return (*(gate.Expected(k.name, k.check) for k in kinds), gate.Expected(NON_DETERMINISM, "probe.executed"))


NON_DETERMINISM = "non_determinism"


def runs(plan: DrillPlan, seed: int, without: str | None, say: Callable[[str], None]) -> Iterator[gate.Run]:
    """Every kind of a release and the sound ones, judged."""
    from attention.drill.run import one_thread

    with tempfile.TemporaryDirectory() as folder, one_thread():
        session = _Session(plan, seed, Path(folder), say)
        for number, (kind, subject, no_op, release) in enumerate(session.releases(), start=1):
            found = tuple(name for name in judged(release, session.plan) if name != without)
            say(f"release {number}: {kind or subject}: {', '.join(found) or 'pass'}")
            yield gate.Run(kind, subject, "one release", no_op, found, published=None)


class _Session:
    """The model loaded once, and the tables of its sound release."""

    def __init__(self, plan: DrillPlan, seed: int, work: Path, say: Callable[[str], None]) -> None:
        self._drill, self._whole, self._seed = plan, _whole(plan), seed
        short = [prompt for prompt in load_golden().prompts if _length(prompt) <= MAX_CHARACTERS]
        self._golden = sample(short, self._whole.golden_prompts, seed)
        self._recorder, tensor = _recorder(self._whole, self._golden, seed, work)
        say(f"release: {len(tensor)} tensors, and the texts of the champion and of the oracle recorded")
        self._sound_answers = {side: self._recorder.answers(side) for side in ("champion", "candidate")}
        say(f"release: {len(self._golden)} prompts answered by both sides")
        self._floor = [_common("champion") | row for row in self._recorder.floor_rows()]
        tables = {
            "fingerprints": [_common(side) | {"identity_json": "{}"} for side in ("champion", "candidate")],
            "tensor_replay": tensor,
            "model_replay": self._model_rows(self._recorder.candidate_rows()),
            "business_replay": self._graded(self._sound_answers),
            "probes": self._probes(),
        }
        self._sound = Release(tables, tuple((row["backend"], row["probe"]) for row in tables["probes"]))
        self.plan = self._plan()

    def _plan(self) -> Plan:
        """The full plan's limits, over as much evidence as there is when it is whole."""
        full, whole, tables = load_plan("full"), self._whole, self._sound.tables
        positions = sum(row["mode"] == "prefill" and row["side"] == "candidate" for row in tables["model_replay"])
        passes = sum(bool(row["passed"]) for row in tables["business_replay"] if row["side"] == "champion")
        least = {
            "inputs": REPLAY_INPUTS,
            "kv_dtypes": ("auto",),
            "seeds": 1,
            "max_kv_len": MAX_KV_LEN,
            "model_prompts": whole.prompts,
            "model_tokens": whole.tokens,
            "decode_tokens": whole.decode_tokens,
            "golden_prompts": len(self._golden),
            "min_cases": sum(row["side"] == "candidate" for row in tables["tensor_replay"]),
            "min_positions": positions,
            "min_golden_passes": max(1, passes),
            "min_category_passes": max(1, passes),
        }
        return full.model_copy(update={"replay": full.replay.model_copy(update=least)})

    def releases(self) -> Iterator[tuple[str | None, str, bool, Release]]:
        """(kind, subject, no-op, release): the sound ones first."""
        subject = f"{CANDIDATE} over {CHAMPION}"
        yield None, subject, False, self._sound
        for evidence in EVIDENCE_KINDS:
            yield evidence.name, subject, False, Release(evidence.change(self._sound.tables), self._sound.required)
        yield self._race()
        yield from self._model_faults(subject)
        yield self._mixed(subject)

    def _model_faults(self, subject: str) -> Iterator[tuple[str | None, str, bool, Release]]:
        from attention.drill.whole import model_kinds

        for kind in model_kinds(_specs(self._whole)):
            no_op = self._recorder.effect(kind.fault) <= 1.0
            rows = self._model_rows(self._recorder.candidate_rows(kind.fault))
            yield kind.name, subject, no_op, self._with("model_replay", rows)

    def _mixed(self, subject: str) -> tuple[str, str, bool, Release]:
        """A fault that forced texts cannot show, since they never mix phases: answers do."""
        from attention.drill.whole import MIXED

        no_op = not self._recorder.changes_answers(MIXED.fault)
        answers = {**self._sound_answers, "candidate": self._recorder.answers("candidate", MIXED.fault)}
        return MIXED.name, subject, no_op, self._with("business_replay", self._graded(answers))

    def _race(self) -> tuple[str, str, bool, Release]:
        from attention.drill.backends import Emulated
        from attention.drill.kinds import RACE
        from attention.drill.recordings import race_shows, repeat_rows

        rows = [_common("candidate") | row for row in repeat_rows(self._drill, Emulated("emulated", fault=RACE))]
        required = tuple((row["backend"], row["probe"]) for row in rows)
        tables = {**self._sound.tables, "probes": rows}
        return NON_DETERMINISM, "emulated", not race_shows(self._drill, RACE), Release(tables, required)

    def _probes(self) -> Rows:
        """Repeats of every sound variant of the pseudo-kernel."""
        from attention.drill.backends import Emulated
        from attention.drill.recordings import repeat_rows

        kernels = [Emulated(f"emulated:{variant}", variant) for variant in self._drill.variants]
        return [_common("candidate") | row for kernel in kernels for row in repeat_rows(self._drill, kernel)]

    def _with(self, table: str, rows: Rows) -> Release:
        return Release({**self._sound.tables, table: rows}, self._sound.required)

    def _model_rows(self, rows: Rows) -> Rows:
        """A candidate's, and the floor."""
        return [_common("candidate") | row for row in rows] + self._floor

    def _graded(self, answers: dict[str, list[Answer]]) -> Rows:
        return [
            _common(side) | _grade(prompt, answer)
            for side, given in answers.items()
            for prompt, answer in zip(self._golden, given, strict=True)
        ]


def _grade(prompt: GoldenPrompt, answer: Answer) -> dict[str, Any]:
    ran = answer.confirmed_decode or answer.confirmed_prefill
    return {
        "backend": ran,
        "confirmed_backend": ran,
        "prompt_id": prompt.prompt_id,
        "category": "drill",  # so few prompts are judged as one
        "language": prompt.language,
        "passed": grade(prompt, answer.output_text).passed,
        "error": answer.error,
    }


def _recorder(whole: WholePlan, golden: list[GoldenPrompt], seed: int, work: Path) -> tuple[Recorder, Rows]:
    """The recorder, and rows of `tensor_replay` of both sides."""
    from attention.dispatch import Dispatcher
    from attention.drill.recordings import Prompts, Recorder, tensor_rows
    from attention.job import ModelPlan, Setup
    from attention.policy import load_policy

    path, specs = model_path(whole.model), _specs(whole)
    drawn = random.Random(seed).sample(load_golden().prompts, whole.prompts)  # noqa: S311 - repeatable, no secret
    forced = ModelPlan(
        prompts=tuple(_prompt(one, whole.answer_tokens) for one in drawn),
        max_tokens=whole.tokens,
        decode_tokens=whole.decode_tokens,
    )
    dispatchers, tensor = {}, []
    for side, name in (("champion", CHAMPION), ("candidate", CANDIDATE)):
        policy = repo_dir() / "data" / "policies" / f"{name}.yaml"
        dispatchers[side] = Dispatcher(load_policy(policy), specs)
        rows = tensor_rows(Setup(model=path, policy=policy), dispatchers[side], seed, MAX_KV_LEN)
        tensor += [_common(side) | row for row in rows]
    prompts = Prompts(forced, tuple(_prompt(one, whole.answer_tokens) for one in golden))
    return Recorder(path, dispatchers["champion"], dispatchers["candidate"], prompts, work), tensor


def _length(prompt: GoldenPrompt) -> int:
    return sum(len(str(message.for_template().get("content", ""))) for message in prompt.messages)


def _prompt(one: GoldenPrompt, answer_tokens: int) -> Any:
    from attention.job import Prompt

    return Prompt(
        prompt_id=one.prompt_id,
        category=one.category,
        language=one.language,
        messages=tuple(message.for_template() for message in one.messages),
        max_tokens=answer_tokens,
    )


def _specs(whole: WholePlan) -> list[Any]:
    from attention.drill.recordings import SERVED
    from attention.model import specs_of

    return specs_of(model_path(whole.model), SERVED)


def _whole(plan: DrillPlan) -> WholePlan:
    assert plan.whole is not None, "a plan without a whole model has no release to judge"
    return plan.whole


def _common(side: str) -> dict[str, Any]:
    return {
        "side": side,
        "fingerprint_id": f"drill-{side}",
        "node": "drill",
        "gpu": "cpu",
        "model": "drill",
        "time": datetime.now(UTC),
    }
