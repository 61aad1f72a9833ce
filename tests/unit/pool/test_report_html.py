"""The HTML report: complete and self-contained, and nothing that a host says becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.model import CLASSES, failed
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.journal import journal_of, open_journal
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Gated, Opened, Record
from image_builder.pool.run.state import Progress
from image_builder.pool.show.html import MEANINGS, page
from image_builder.pool.show.report import report
from image_builder.pool.show.timeline import LABELS, WIDTH, Timeline, axis, timeline
from tests.support.pools.simulated.report_runs import HOSTILE, deadline_run, hostile_run, large_run
from tests.support.pools.simulated.rollouts import BAD_DAY, WIDE, Faults, World, make, simulate

_VOID = {"meta", "link", "input"}


class _Page(HTMLParser):
    """The elements of a page, each with its attributes and the text inside; all are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in _VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open[-1]][0] == tag
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for number in self._open:
            self.texts[number] += data

    def all(self, tag: str, **attributes: str) -> list[str]:
        """Return the texts of the elements that have these attributes."""
        return [
            " ".join(text.split())
            for (name, has), text in zip(self.elements, self.texts, strict=True)
            if name == tag and attributes.items() <= has.items()
        ]


def _page(progress: Progress, records: list[Record], *, running: bool = False) -> str:
    return page(progress, records, report(progress, records, running=running))


@pytest.fixture(scope="module")
def bad_day() -> tuple[Progress, list[Record]]:
    """Return a run of 1,500 hosts: 2 % fail and 0.5 % hang, tokens expire, and the control plane is throttled."""
    progress, _, records = simulate(make(1500, WIDE), BAD_DAY)
    return progress, records


@pytest.fixture(scope="module")
def parsed(bad_day: tuple[Progress, list[Record]]) -> _Page:
    return _Page(_page(*bad_day))


def test_7500_hosts_are_less_than_5_mb_and_each_is_there_once() -> None:
    progress, records = large_run(failing=10)
    text = _page(progress, records)
    assert len(text.encode()) < 5_000_000
    names = re.findall(r'<tr id="h[0-9]+"><th scope="row">([^<]+)</th>', text)
    assert len(names) == 7500 and set(names) == progress.hosts.keys()


def test_failed_hosts_come_first(bad_day: tuple[Progress, list[Record]], parsed: _Page) -> None:
    progress = bad_day[0]
    rows = [
        text
        for (tag, has), text in zip(parsed.elements, parsed.texts, strict=True)
        if "id" in has and tag == "tr"
    ]
    bad = {name for name, status in progress.hosts.items() if status.outcome and not status.outcome.ok}
    assert all(any(name in row for name in bad) for row in rows[: len(bad)])
    assert min(bad) in rows[0] and len(bad) == progress.failed


def test_its_figures_are_those_of_the_report(bad_day: tuple[Progress, list[Record]], parsed: _Page) -> None:
    document = report(*bad_day)
    cells = parsed.all("td")
    for kind, count in document["counts"].items():
        assert (kind in parsed.all("th", scope="row")) == bool(count)
        if count:
            assert str(count) in cells and (kind not in MEANINGS or MEANINGS[kind] in cells)
    groups = [text.split(" \u00d7 ") for text in parsed.all("summary")]
    assert groups == [[str(alike["count"]), alike["signature"]] for alike in document["failures"]]
    assert [
        name for name in parsed.all("th", scope="row") if name in {w["name"] for w in document["waves"]}
    ] == [wave["name"] for wave in document["waves"]]
    assert f"{bad_day[0].failed} of 75 allowed" in parsed.all("dd")
    assert len(document["slowest"]) == 20 and {slow["host"] for slow in document["slowest"]} <= set(
        parsed.all("a")
    )


def test_every_class_has_a_meaning() -> None:
    assert tuple(MEANINGS) == CLASSES


def test_nothing_is_loaded_and_only_its_own_style_and_script_may_act(parsed: _Page) -> None:
    attributes = [(tag, name, value) for tag, has in parsed.elements for name, value in has.items()]
    loaded = [
        (tag, name, value)
        for tag, name, value in attributes
        if name in ("src", "href", "srcset", "data", "action")
    ]
    assert {value for tag, _, value in loaded if tag == "link"} == {"data:,"}
    assert all((value or "").startswith("#") for tag, _, value in loaded if tag != "link")
    assert not [name for _, name, _ in attributes if name.startswith("on") or name == "style"]
    assert {value for _, name, value in attributes if name == "fill"} <= {"url(#soaks)", "url(#holds)"}
    texts = dict(zip((tag for tag, _ in parsed.elements), parsed.texts, strict=True))
    assert "url(" not in texts["style"] and "@import" not in texts["style"] and "http" not in texts["script"]
    (policy,) = (
        has["content"] for _, has in parsed.elements if has.get("http-equiv") == "Content-Security-Policy"
    )
    for kind in ("style", "script"):
        assert [tag for tag, _ in parsed.elements].count(kind) == 1
        digest = base64.b64encode(hashlib.sha256(texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'; ")


def test_hostile_names_and_details_are_text_and_nothing_else() -> None:
    hostile = _Page(_page(*hostile_run()))
    assert [tag for tag, _ in hostile.elements].count("script") == 1
    cells = set(hostile.all("td"))
    for name in HOSTILE:
        shown = " ".join(name.split())
        assert shown in hostile.all("th", scope="row")
        assert {f"detail {shown}", f"set {shown}", f"zone {shown}", f"size {shown}"} <= cells
        assert f"1 \u00d7 failed phase {shown} 61" in hostile.all("summary")
        assert f"detail {shown}" in hostile.all("code")
    harmless = _Page(_page(*hostile_run(tuple(f"host-{n}" for n in range(len(HOSTILE))))))
    # The elements are the same whatever the hosts are called; only their order may depend on the names.
    assert sorted(tag for tag, _ in hostile.elements) == sorted(tag for tag, _ in harmless.elements)
    assert {n for _, has in hostile.elements for n in has} == {n for _, has in harmless.elements for n in has}


def test_ids_are_unique_links_lead_somewhere_and_tables_have_headers(parsed: _Page) -> None:
    ids = [has["id"] for _, has in parsed.elements if "id" in has]
    assert len(ids) == len(set(ids))
    links = {(has["href"] or "")[1:] for tag, has in parsed.elements if tag == "a"}
    labels = {has["aria-labelledby"] for _, has in parsed.elements if "aria-labelledby" in has}
    assert links and links | labels <= set(ids)
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(has.get("scope") in ("row", "col") for tag, has in parsed.elements if tag == "th")
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("table") == tags.count("thead") >= 5
    assert dict(parsed.elements)["html"] == {"lang": "en"}


def _channel(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def _contrast(first: str, other: str) -> float:
    """Return the contrast of two colors as https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio defines it."""
    bright = []
    for colour in (first, other):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        red, green, blue = (_channel(int(digits[n : n + 2], 16)) for n in (0, 2, 4))
        bright.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(bright) + 0.05) / (min(bright) + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_on_both_backgrounds(scheme: int, repo_root: Path) -> None:
    style = (repo_root / "image_builder/pool/show/templates/report.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]+);", block))
    for text in ("ink", "soft", "good", "bad", "open", "link"):
        assert all(_contrast(colours[text], colours[paper]) >= 4.5 for paper in ("paper", "band")), text
    for drawn in ("work", "stop", "go", "hatch"):
        assert _contrast(colours[drawn], colours["paper"]) >= 3.0, drawn


def _drawing(progress: Progress, records: list[Record]) -> Timeline:
    soaks = [wave.wave.soak_seconds for wave in progress.waves]
    drawn = timeline(report(progress, records), soaks, records)
    assert drawn is not None
    return drawn


def test_the_timeline_has_each_wave_where_it_was_in_time(bad_day: tuple[Progress, list[Record]]) -> None:
    progress, records = bad_day
    drawn = _drawing(progress, records)
    on = axis(records)
    assert (on.x(records[0].at), on.x(records[-1].at)) == (LABELS, WIDTH - 12)
    assert [row.name for row in drawn.rows] == [wave.wave.name for wave in progress.waves]
    for row, wave in zip(drawn.rows, progress.waves, strict=True):
        assert wave.began is not None and wave.passed is not None
        work, *rest = row.bars
        assert (work.kind, work.x) == ("work", on.x(wave.began))
        assert abs(work.x + work.width - on.x(wave.passed)) <= 1
        assert [bar.kind for bar in rest] == sorted((bar.kind for bar in rest), reverse=True)
        for soak in (bar for bar in rest if bar.kind == "soak"):
            assert abs(soak.width - wave.wave.soak_seconds * on.scale) < 0.2
        assert row.note.startswith(f"{wave.failed} failed") or not wave.failed
    assert [bar.kind for bar in drawn.gate] == ["go", "hold", "go"]
    assert "429" in drawn.gate[1].label and 3 <= len(drawn.ticks) <= 11 and drawn.cuts == ()
    assert all(bar.x >= LABELS and bar.x + bar.width <= WIDTH for row in drawn.rows for bar in row.bars)


def _taken_up_later(pause: float) -> tuple[Progress, list[Record]]:
    """Return a run that was killed in its second wave, and resumed after ``pause`` seconds."""
    plan = make(400, WIDE)
    whole = simulate(plan, Faults())[2]
    first = whole[: next(n for n, r in enumerate(whole) if r.kind == "began" and r.wave == 1) + 30]
    progress = replay(plan, first)
    world = World(plan, Faults(), time=first[-1].at + pause)
    records: list[Record] = [*first, Opened(at=world.time, plan=plan.digest)]
    apply(progress, records[-1])
    for seconds in (5.0, 35.0):
        records.append(Gated(at=world.time + seconds, reading=world.gate(), verdict="go"))
        apply(progress, records[-1])
    return progress, records


def test_time_in_which_nobody_drove_the_run_is_cut_out() -> None:
    progress, records = _taken_up_later(pause=36_000.0)
    drawn = _drawing(progress, records)
    (cut,) = drawn.cuts
    assert "not driven from 14:0" in cut.text and LABELS < cut.x < WIDTH
    first = drawn.rows[0].bars[0]
    # Ten hours next to some twenty minutes would leave nothing of the first wave.
    assert first.width > 20 and drawn.gate[-1].x > cut.x > drawn.gate[-2].x
    assert "Resumed" in _page(progress, records)


def test_a_short_restart_is_not_cut_and_no_verdict_reaches_across_it() -> None:
    progress, records = _taken_up_later(pause=60.0)
    drawn = _drawing(progress, records)
    assert drawn.cuts == ()
    before, after = drawn.gate
    assert before.x + before.width < after.x


def test_a_verdict_that_stopped_the_run_is_drawn() -> None:
    progress, records = _taken_up_later(pause=60.0)
    world = World(progress.plan, Faults(), time=records[-1].at + 30)
    records.append(Gated(at=world.time, reading=world.gate(), verdict="stop", reasons=("80 more nodes",)))
    last = _drawing(progress, records).gate[-1]
    assert last.kind == "stop" and last.width >= 4 and "80 more nodes" in last.label


def test_a_clock_that_was_set_back_draws_nothing_outside() -> None:
    progress, records = _taken_up_later(pause=-900.0)
    drawn = _drawing(progress, records)
    assert all(bar.x >= LABELS and bar.width >= 0 for row in drawn.rows for bar in row.bars)
    assert all(bar.x >= LABELS and bar.width >= 0 for bar in drawn.gate)


def test_a_run_that_has_not_begun_has_a_page() -> None:
    progress = begin(make(60))
    text = _page(progress, [])
    parsed = _Page(text)
    assert (
        "not started" in parsed.all("p", **{"class": "state not-started"})[0] and "<svg viewBox" not in text
    )
    assert parsed.all("th", scope="row")[0] == "not started"


def test_a_stopped_run_says_why() -> None:
    plan = make(60)
    first = plan.waves[0].hosts[0]
    progress, _, records = simulate(plan, Faults(fates={first: failed("gpu", 61, "no device")}))
    parsed = _Page(_page(progress, records))
    assert parsed.all("p", **{"class": "state stopped"}) == [
        "✗ stopped: 1 host of canaries failed, its budget is 0"
    ]
    assert parsed.all("code") == ["no device"]


def test_the_command_writes_both_files_and_still_tells_the_report(tmp_path: Path) -> None:
    plan = make(60)
    path, html, junit = (tmp_path / name for name in ("p.json", "r.html", "r.xml"))
    plans.save(plan, path)
    with open_journal(journal_of(path)) as journal:
        for record in simulate(plan, Faults())[2]:
            journal.append(record)
    html.write_text("what it held before")
    argv = ["pool", "report", str(path), "--html", str(html), "--junit", str(junit), "--json"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0 and json.loads(done.stdout)["state"] == "finished"
    assert html.read_text().startswith("<!DOCTYPE html>") and "what it held" not in html.read_text()
    assert ElementTree.parse(junit).getroot().get("tests") == "61"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "p.json",
        "p.json.journal.jsonl",
        "r.html",
        "r.xml",
    ]
    lost = CliRunner().invoke(app, ["pool", "report", str(path), "--html", str(tmp_path / "no" / "r.html")])
    assert lost.exit_code == errors.UsageError.exit_code and "can't write" in lost.stderr


def test_of_a_roll_it_says_what_became_of_work() -> None:
    progress, records = deadline_run()
    document = report(progress, records)
    text = page(progress, records, document)
    assert document["idle_hours"]["gpus"] == pytest.approx(8 * document["idle_hours"]["hosts"], abs=0.01)
    # At least one boot for each host that was emptied.
    assert document["idle_hours"]["hosts"] > 58 * 840 / 3600
    assert f"{document['idle_hours']['gpus']:.1f} GPU-hours" in text
    assert f"{progress.plan.deadline}: {len(document['evicted'])} pods evicted" in text
    assert text.count("<td>evicted</td>") == len(document["evicted"]) and "<td>deferred</td>" in text
    assert "<td>cordoned by somebody else</td>" in text
    assert "probe/await/drain/reimage/verify/free/restore" in text


@pytest.mark.parametrize(("bad", "kind", "sign"), [(0, "finished", "✓"), (1, "incomplete", "!")])
def test_a_run_with_failed_hosts_is_not_green(bad: int, kind: str, sign: str) -> None:
    plan = make(300, Policy(wave_budget="100%", budget="100%"))
    faults = Faults(fates=dict.fromkeys(plan.waves[-1].hosts[:bad], failed("gpu", 61)))
    progress, _, records = simulate(plan, faults)
    document = report(progress, records)
    assert document["state"] == "finished"
    text = page(progress, records, document)
    assert f'<p class="state {kind}"><strong><span aria-hidden="true">{sign}</span> finished' in text
    assert ("1 of 300 hosts are not up" in text) == bool(bad)
