"""Tests that the HTML and Markdown reports are complete and inert, and escape every name."""

import base64
import dataclasses
import hashlib
import html.parser
import itertools
import pathlib
import re

import msgspec
import pytest

from paceline.course import report as build
from paceline.course.answers import Answer
from paceline.course.questions import QUESTIONS
from paceline.course.report import build_report, write_report
from paceline.records import Record
from paceline.reports.document import Report, render_html, render_report
from paceline.reports.record_sets import RecordSet
from tests.unit.course.report_cases import changed, committed_records, make_record

ATTACKS = ("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "a|b`c$d_e*^$")


class Page(html.parser.HTMLParser):
    """Collects elements, attributes and text, and checks that elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def _attempt(name: str, deliverables: str, outcome: str, num_measured: float) -> Record:
    case = {"name": name, "deliverables": deliverables, "command": name}
    attempt = make_record("attempt", {"num_measured": num_measured}, **case)
    reason = None if outcome == "ok" else "a reason"
    return msgspec.structs.replace(attempt, outcome=outcome, reason=reason)


def _hostile_records() -> list[Record]:
    """Returns steps and an attempt whose names and environments try to inject markup."""
    trained = RecordSet.of(committed_records()).find("step", phase="train")
    steps = [record for record in trained if record.metrics][:2]
    records = []
    for attack, record in itertools.product(ATTACKS, steps):
        names = {"processor": attack, "platform": attack, "packages": {attack: attack}}
        environment = msgspec.structs.replace(record.environment, **names)
        hostile = changed(record, 1.0, model=attack, hardware=attack)
        records.append(msgspec.structs.replace(hostile, environment=environment))
    failed = _attempt(ATTACKS[1], "naive_ddp", "failed", 0)
    return [*records, msgspec.structs.replace(failed, reason=ATTACKS[0])]


@pytest.fixture(scope="module")
def hostile() -> Report:
    return build_report(_hostile_records())


def test_names_appear_as_text(hostile: Report) -> None:
    page = Page(render_html(hostile))
    assert not page.open
    assert not {tag for tag, _ in page.elements} & {"script", "iframe", "object", "link", "base"}
    for attack in ATTACKS:
        assert page.text.count(attack) > 3, attack
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"style", "srcset"})
    outside_code = re.sub(r"```.*?```", "", render_report(hostile), flags=re.DOTALL)
    for text in ("<script", "<img", "`c$d_e*"):
        assert text not in outside_code
    for text in ("&lt;script&gt;alert(1)&lt;/script&gt;", r"\`c$d\_e\*"):
        assert text in outside_code
    (section,) = [each for each in hostile.sections if each.name == "naive_ddp"]
    assert section.failures == (f"{ATTACKS[1]}: failed: {ATTACKS[0]}",)
    assert not section.is_complete


def test_page_and_pictures_load_nothing_and_the_policy_forbids_it(hostile: Report) -> None:
    text = render_html(hostile)
    page = Page(text)
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert images
    for image in images:
        assert str(image["src"]).startswith("data:image/svg+xml;base64,")
        assert image["alt"]
    for tag, attributes in page.elements:
        assert set(attributes) & {"src"} == ({"src"} if tag == "img" else set())
        assert (attributes.get("href") or "#").startswith("#")
    metas = [attributes for tag, attributes in page.elements if tag == "meta"]
    (policy,) = [str(each["content"]) for each in metas if "Policy" in str(each.get("http-equiv"))]
    assert policy.startswith("default-src 'none'; img-src data:;")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert "url(" not in style
    assert "@import" not in style
    blocks = [
        each for section in hostile.sections for part in section.parts for each in part.blocks
    ]
    pictures = [picture for block in blocks for picture in block.pictures]
    assert len({picture.name for picture in pictures}) == len(pictures)
    for drawn in (picture.svg.decode() for picture in pictures):
        assert "<script" not in drawn
        references = re.findall(r'(?:href|src)="([^"]*)"', drawn)
        assert all(reference.startswith(("#", "data:")) for reference in references)


def test_the_last_run_of_a_case_counts_and_partial_ones_are_told_apart() -> None:
    runs = (("a", "failed", 0), ("a", "ok", 0), ("b", "ok", 2), ("b", "failed", 0))
    runs += (("c", "timeout", 2),)
    report = build_report([_attempt(name, "x; naive_ddp", *told) for name, *told in runs])
    (section,) = [each for each in report.sections if each.name == "naive_ddp"]
    assert section.failures == ("b: failed: a reason",)
    assert section.incomplete == ("c: timeout: a reason",)
    for text in (render_report(report), Page(render_html(report)).text):
        assert text.index("b: failed") < text.index("Incomplete runs:") < text.index("c: timeout")


def test_an_answer_that_cannot_be_made_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(_evidence: RecordSet) -> list[Answer]:
        raise KeyError("time_s")

    broken = dataclasses.replace(QUESTIONS[0], finds=odd)
    monkeypatch.setattr(build, "QUESTIONS", (broken, *QUESTIONS[3:4]))
    report = build_report([])
    assert report.sections[0].failures == (
        "By model: the records could not be evaluated: KeyError('time_s')",
    )
    assert report.sections[2].is_complete


def test_the_same_records_give_the_same_bytes(tmp_path: pathlib.Path) -> None:
    records = _hostile_records()[:2]
    pages = [write_report(records, tmp_path / name) for name in ("first", "second")]
    for first, second in zip(*pages, strict=True):
        assert first.read_bytes() == second.read_bytes()
    referred = re.findall(r"\]\((figures/[^)]+)\)", pages[0][1].read_text(encoding="utf-8"))
    assert referred
    assert all((tmp_path / "first" / path).stat().st_size > 1000 for path in referred)


def test_the_page_begins_with_key_findings_of_what_was_measured() -> None:
    kinds = ("optimizer", "prediction")
    report = build_report([each for each in committed_records() if each.kind in kinds])
    assert [(section.name, each.name) for section, each in report.key_findings] == [
        ("optimizer_state_sharding", "sharded_memory")
    ]
    assert (
        "torch_zero_view instead of torch_ddp"
        in Page(render_html(report)).text.split("Contents")[0]
    )
    assert "Key findings:\n\n- **Sharding" in render_report(report)
    assert build_report([]).key_findings == ()
