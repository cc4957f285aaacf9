from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attention.schemas import write_rows
from tasks import figures, report
from tasks.story import Event, Story, tell
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, failing, fill, passing
from tests.tasks.sample_record import attempt, running

NASTY = "<script>alert('x')</script> & \"quoted\""


class Page(HTMLParser):
    """Tags with their attributes, and whether every one that was opened was closed."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a release that the replay gate stopped, with the pictures of two stages."""
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "lake", "r1")
    record = running("smollm2", "r1", "wrong-scale", "rejected", tags=("drill",))
    record.attempts = [attempt("r1", "wrong-scale", "rejected", "replay")]
    record.reason = "replay: r_rms is 31.5"
    story = tell(record, folder / "lake", "r1", policy_yaml="attention_policy: {mode: auto}\n")
    for stage in ("probe", "baseline"):
        assert figures.save(stage, folder / "lake", "r1", folder)
    return report.write(story, folder).read_text()


def nasty() -> Story:
    gate = failing()
    check = gate.checks[0].model_copy(
        update={"check": NASTY, "message": NASTY, "owner": NASTY, "reason": NASTY, "detectable": NASTY}
    )
    event = Event(time=datetime.now(UTC), kind=NASTY, severity=NASTY, subject=NASTY, message=NASTY)
    return Story(
        release_id=NASTY,
        candidate=NASTY,
        gpu=NASTY,
        family=NASTY,
        state="rejected",
        failed_gate=NASTY,
        reason=NASTY,
        champion=NASTY,
        tags=(NASTY,),
        fingerprint_json=NASTY,
        policy_yaml=NASTY,
        confirmed_backend=NASTY,
        gates=(gate.model_copy(update={"stage": NASTY, "checks": (check,)}),),
        events=(event,),
    )


def test_it_opens_with_the_verdict_and_the_reason(page: str) -> None:
    assert "<title>FAIL wrong-scale: replay</title>" in page
    heading = page.index("<h1>")
    assert page[heading:].startswith('<h1><span class="word FAIL">FAIL</span>wrong-scale: replay</h1>')
    assert page.index("replay: r_rms is 31.5") < page.index("<h2>Gates</h2>")


def test_it_shows_figure_limit_detectable_effect_owner_and_reason_of_each_check(page: str) -> None:
    for part in ("tensor.float32.r_rms", "31.5", "&lt;= 2", "0.1", "numerics", "limit: a sound kernel stays"):
        assert part in page


def test_it_holds_fingerprint_policy_events_and_figures(page: str) -> None:
    assert "fp-1234abcd" in page
    assert "attention_policy: {mode: auto}" in page
    assert "share_changed" in page
    assert page.count('<img alt="probe" src="data:image/png;base64,') == 1


def test_all_pictures_of_a_stage_stand_under_its_name_with_a_caption_each(page: str) -> None:
    section = page.partition("<h2>baseline</h2>")[2].partition("<h2>")[0]
    pictures = re.findall(
        r'<figure><img alt="([\w-]+)" src="data:image/png;base64,[^"]+"><figcaption>(.+?)</fig', section
    )
    names = [name for name, _ in pictures]
    assert names[0] == "baseline"
    assert {"baseline-verdicts", "baseline-latency", "baseline-roofline", "baseline-stress"} < set(names)
    assert len(names) == page.count('<img alt="baseline')


def test_it_is_self_contained(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    sources = [value for _, attrs in parsed.tags for name, value in attrs.items() if name in ("src", "href")]
    assert all(value is not None and value.startswith("data:") for value in sources)
    assert "url(" not in page
    assert not re.search(r"https?://", page)


def test_everything_is_escaped() -> None:
    text = report.render(nasty())
    parsed = Page(text)
    assert parsed.open == []
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert text.count("&lt;script&gt;") >= 12


def test_no_text_or_token_of_a_user_is_in_it(page: str) -> None:
    assert SECRET not in page
    assert str(SECRET_TOKEN) not in page


def test_a_release_without_gates_says_so(tmp_path: Path) -> None:
    story = tell(running("smollm2", "r1", "flash", "registered"), tmp_path / "lake", "r1")
    text = report.render(story)
    assert "<title>OPEN flash: registered</title>" in text
    assert "No gate has judged yet." in text


def test_many_events_are_cut_to_the_last_ones() -> None:
    event = Event(time=None, kind="share_changed", severity="info", subject="router", message="moved")
    story = nasty().model_copy(update={"events": (event,) * (report.MAX_EVENTS + 7)})
    text = report.render(story)
    assert "7 earlier ones are in the lake" in text
    assert text.count("share_changed") == report.MAX_EVENTS


def test_a_resumed_stage_is_told_by_its_latest_report(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    for gate in (failing("shadow"), passing("shadow")):
        gate.write(lake, "r1", gpu="cpu", model="m")
    [gate] = tell(running("smollm2", "r1", "flash", "shadow"), lake, "r1").gates
    assert gate.verdict == "pass"


@pytest.mark.parametrize(
    ("state", "failed_gate", "headline"),
    [
        ("promoted", None, "PASS flash"),
        ("qualified", None, "PASS flash: qualified"),
        ("rejected", "replay", "FAIL flash: replay"),
        ("rolled_back", None, "FAIL flash: rolled back"),
        ("held", "canary", "HOLD flash: canary"),
        ("baselined", None, "OPEN flash: baselined"),
    ],
)
def test_a_headline_is_the_verdict_the_candidate_and_where_it_ended(
    state: str, failed_gate: str | None, headline: str
) -> None:
    story = Story(release_id="r1", candidate="flash", gpu="cpu", family="f", state=state, failed_gate=failed_gate)
    assert story.headline == headline


def test_the_champions_ratios_stand_beside_the_candidates_one_row_a_case(tmp_path: Path) -> None:
    fill(tmp_path / "lake", "r1")
    common = {
        "backend": "torch_sdpa:flash",
        "case_id": "decode-x",
        "inputs": "sink",
        "seed": 1,
        "dtype_class": "bfloat16",
    }
    for side, r_rms in (("candidate", 12.5), ("champion", 0.61)):
        row = {**common, "side": side, "r_rms": r_rms, "r_max": r_rms, "r_row": r_rms, "worst_row_at": "member 7"}
        write_rows(tmp_path / "lake", "tensor_replay", [row], release_id="r1")
    story = tell(running("smollm2", "r1", "c", "rejected"), tmp_path / "lake", "r1")
    text = report.render(story)
    (line,) = [part for part in text.split("<tr>") if "decode-x" in part]
    assert "12.5 | 0.61" in line
    assert "member 7" in line
    assert len(story.tensor) == 30, "the worst; the lake has them all"
    assert text.count("<td>-</td>") == 29, "the sample's other cases have no champion"
    assert SECRET not in text
    Page(text)
