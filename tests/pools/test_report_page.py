"""The HTML report in a real headless Chromium: what a person sees there, with 7,500 hosts and with hostile ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from image_builder.pool.plan.model import Target
from image_builder.pool.run.records import Record
from image_builder.pool.run.state import Progress
from image_builder.pool.show.html import page
from image_builder.pool.show.report import report
from tests.support.arm.fleet import DEFINITION
from tests.support.pools import browser
from tests.support.pools.browser import Tab
from tests.support.pools.simulated.report_runs import HOSTILE, deadline_run, hostile_run, large_run
from tests.support.pools.simulated.rollouts import BAD_DAY, WIDE, make, simulate

CHROMIUM = browser.program()
# `--install-deps test` installs one on Debian; Ubuntu's archive has none, and the page's text is tested without one.
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this host"),
]

# Returns [text, contrast] for every visible text, as defined by https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
CONTRASTS = """(() => {
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const bright = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element);
    const ink = bright(numbers(element.closest("svg") ? style.fill : style.color)), paper = bright(behind(element));
    found.push([walker.currentNode.data.trim(), (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)]);
  }
  return found;
})()"""
SHOWN = """[...document.querySelectorAll("#table tbody tr")]
  .filter((row) => row.offsetHeight).map((row) => row.cells[0].textContent)"""
CHOOSE = """(() => {
  const choice = document.querySelector("#result");
  choice.value = "%s";
  choice.dispatchEvent(new Event("input", {bubbles: true}));
})()"""
TARGET = """(() => {
  const box = document.querySelector(":target").getBoundingClientRect();
  return [box.top, box.bottom, innerHeight];
})()"""
COUNT_OF_MATCHES = "document.querySelector('#found').textContent"
WIDER = "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth)"
SIGNS = (
    "[...new Set([...document.querySelectorAll('%s')].map((e) => getComputedStyle(e, '::before').content))]"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert CHROMIUM is not None
    with browser.tab(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        tab.size(1280, 900)
        yield tab


def _write(folder: Path, run: tuple[Progress, list[Record]]) -> Path:
    progress, records = run
    file = folder / "report.html"
    file.write_text(page(progress, records, report(progress, records)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of 7,500 hosts, of which 108 failed."""
    return _write(tmp_path_factory.mktemp("large"), large_run(failing=70))


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a run with all kinds of failures, a red gate, soaks and late hosts."""
    progress, _, records = simulate(make(600, WIDE), BAD_DAY)
    return _write(tmp_path_factory.mktemp("bad_day"), (progress, records))


def _complaints(tab: Tab) -> list[dict[str, Any]]:
    """Return the browser's complaints about a page: errors in its script, and what its policy blocked."""
    shown = (
        "Log.entryAdded",
        "Runtime.exceptionThrown",
        "Runtime.consoleAPICalled",
        "Page.javascriptDialogOpening",
    )
    return [parameters for method, parameters in tab.events if method in shown]


def _requests(tab: Tab) -> set[str]:
    return {p["request"]["url"] for method, p in tab.events if method == "Network.requestWillBeSent"}


def test_it_loads_nothing_else_and_has_no_errors(chromium: Tab, large: Path) -> None:
    chromium.open(large)
    assert chromium.run("document.readyState") == "complete"
    assert {url for url in _requests(chromium) if not url.startswith("data:")} == {large.as_uri()}
    assert _complaints(chromium) == []
    assert chromium.run("performance.getEntriesByType('resource').length") == 0


def test_7500_hosts_can_be_searched(chromium: Tab, large: Path) -> None:
    chromium.open(large)
    assert chromium.run(COUNT_OF_MATCHES) == "7500 of 7500 hosts, the first 500 are shown"
    assert len(chromium.run(SHOWN)) == 500
    chromium.run("document.querySelector('#words').focus()")
    chromium.send("Input.insertText", text="GPU-07-0007 disk")
    # Of gpu-07-000700 to 000799, every 70th failed.
    assert sorted(chromium.run(SHOWN)) == ["gpu-07-000700", "gpu-07-000770"]
    assert chromium.run(COUNT_OF_MATCHES) == "2 of 7500 hosts"
    chromium.run("document.querySelector('#words').value = ''")
    chromium.run(CHOOSE % "failed disk 31")
    assert len(chromium.run(SHOWN)) == 108
    # After sorting, the matching hosts are still shown, and no others.
    chromium.run("document.querySelector('#table thead button').click()")
    names = chromium.run(SHOWN)
    assert len(names) == 108 and names == sorted(names)
    chromium.run(CHOOSE % "")
    assert chromium.run("document.querySelector('#more').offsetHeight") > 0
    chromium.run("document.querySelector('#more').click()")
    assert len(chromium.run(SHOWN)) == 7500 and chromium.run(COUNT_OF_MATCHES) == "7500 of 7500 hosts"
    assert chromium.run("document.querySelector('#more').offsetHeight") == 0


def test_a_link_to_a_host_shows_it_whatever_is_searched_for(chromium: Tab, large: Path) -> None:
    chromium.open(large)
    chromium.run("document.querySelector('#words').focus()")
    chromium.send("Input.insertText", text="no such host")
    assert chromium.run(SHOWN) == []
    # The last of the slowest hosts hasn't failed, and is far down in the table.
    chromium.run("[...document.querySelectorAll('#slow a')].at(-1).click()")
    chromium.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    top, bottom, height = chromium.run(TARGET)
    assert 0 <= top < bottom <= height
    assert chromium.run("Number(location.hash.slice(2))") > 500


def test_hosts_can_be_sorted_by_time(chromium: Tab, bad_day: Path) -> None:
    chromium.open(bad_day)
    times = "[...document.querySelectorAll('#table tbody tr')].map((row) => Number(row.cells[7].dataset.n))"
    before = chromium.run(times)
    for order in ("ascending", "descending"):
        chromium.run("document.querySelectorAll('#table thead button')[7].click()")
        assert (
            chromium.run("document.querySelectorAll('#table thead th')[7].getAttribute('aria-sort')") == order
        )
        after = chromium.run(times)
        assert after == sorted(before, reverse=order == "descending") != before
    assert chromium.run("document.querySelectorAll('[aria-sort]').length") == 1


def test_without_scripts_it_says_as_much(chromium: Tab, bad_day: Path) -> None:
    chromium.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(bad_day)
        assert len(chromium.run(SHOWN)) == 600
        assert chromium.run("document.querySelector('#filter').offsetHeight") == 0
        assert (
            chromium.run("[...document.querySelectorAll('button')].filter((e) => e.offsetHeight).length") == 0
        )
    finally:
        chromium.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [320, 1280])
def test_a_narrow_window_need_not_be_moved_sideways(chromium: Tab, bad_day: Path, width: int) -> None:
    chromium.size(width, 900)
    try:
        chromium.open(bad_day)
        assert chromium.run("document.documentElement.scrollWidth") <= width
        # Wider content is in parts that can be scrolled, also with the keyboard.
        assert chromium.run(f"{WIDER}.filter((e) => e.tabIndex !== 0).length") == 0
        assert bool(chromium.run(f"{WIDER}.length")) == (width == 320)
    finally:
        chromium.size(1280, 900)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(chromium: Tab, bad_day: Path, scheme: str) -> None:
    chromium.scheme(scheme)
    try:
        chromium.open(bad_day)
        paper = chromium.run("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        contrasts = chromium.run(CONTRASTS)
    finally:
        chromium.scheme("light")
    assert len(contrasts) > 1000
    assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []


def test_states_are_told_by_signs_and_not_by_colour_alone(chromium: Tab, bad_day: Path) -> None:
    chromium.open(bad_day)
    for kind, sign in (("good", "\u2713"), ("bad", "\u2717")):
        signs = chromium.run(SIGNS % f".{kind}")
        assert signs == [f'"{sign} "']
    patterns = chromium.run(
        "[...document.querySelectorAll('figure rect[fill]')].map((e) => getComputedStyle(e).fill)"
    )
    assert {text.partition("#")[2].rstrip('")') for text in patterns} == {"soaks", "holds"}


def test_what_assistive_technology_is_told(chromium: Tab, bad_day: Path) -> None:
    chromium.open(bad_day)
    nodes = chromium.send("Accessibility.getFullAXTree")["nodes"]
    warnings = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in nodes
        if "role" in n and not n["ignored"]
    ]
    headings = [name for role, name in warnings if role == "heading"]
    assert headings[:4] == ["Rollout of gpu", "How 600 hosts ended", "What failed alike", "Waves"]
    assert [name for role, name in warnings if role == "image"] == [
        "The waves along time; the table below says the same"
    ]
    roles = {role for role, _ in warnings}
    assert {
        "banner",
        "main",
        "navigation",
        "search",
        "columnheader",
        "rowheader",
        "searchbox",
        "combobox",
    } <= roles
    unnamed = [
        role
        for role, name in warnings
        if role in ("link", "button", "searchbox", "combobox", "region") and not name
    ]
    assert unnamed == []


def test_a_roll_shows_what_became_of_work(chromium: Tab, tmp_path: Path) -> None:
    """Which pods were evicted, and which hosts deferred or skipped, and why; each links to its host."""
    progress, records = deadline_run()
    target = Target(version=f"{DEFINITION}/versions/1.2.3", build="0123456789ab", before={})
    progress.plan = progress.plan.model_copy(update={"target": target})
    chromium.open(_write(tmp_path, (progress, records)))
    assert _complaints(chromium) == []
    rows = chromium.run(
        "[...document.querySelectorAll('section[aria-labelledby=drains] tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert {event for _, event, _ in rows} == {"deferred", "evicted", "skipped"}
    evicted = report(progress, records)["evicted"]
    assert {host for host, event, _ in rows if event == "evicted"} == evicted.keys()
    facts = chromium.run("document.querySelector('.facts').textContent")
    assert "GPU-hours" in facts and progress.plan.deadline in facts
    assert "worker 1.2.3 (build 0123456789ab)" in facts
    assert chromium.run("document.querySelector('h1').textContent") == "Roll of gpu"
    chromium.run("document.querySelector('section[aria-labelledby=drains] a').click()")
    shown = "document.querySelector(':target').cells[0].textContent"
    assert chromium.run(shown) == rows[0][0]
    assert chromium.run("document.documentElement.scrollWidth") <= 1280
    heads = chromium.run("[...document.querySelectorAll('#slow th[scope=col]')].map((e) => e.textContent)")
    assert [head for head in heads if head in ("Bootstrap", "Drain", "Reimage")] == ["Drain", "Reimage"]


def test_hostile_hosts_are_shown_as_they_are_and_do_nothing(chromium: Tab, tmp_path: Path) -> None:
    chromium.open(_write(tmp_path, hostile_run()))
    assert chromium.run("typeof window.hacked") == "undefined"
    assert _complaints(chromium) == [] and len(_requests(chromium)) <= 2
    assert sorted(chromium.run(SHOWN)) == sorted(HOSTILE)
    chromium.run("document.querySelector('#words').focus()")
    chromium.send("Input.insertText", text="<script>")
    assert len(chromium.run(SHOWN)) == 2
    assert chromium.run("document.images.length + document.scripts.length") == 1


def test_its_policy_lets_nothing_else_act(chromium: Tab, bad_day: Path, tmp_path: Path) -> None:
    """Even if a name were ever written unescaped, the browser would refuse to run it."""
    text = bad_day.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    attack = (
        "<script>window.hacked = 1</script><img src='https://example.invalid/x' onerror='window.hacked = 2'>"
    )
    broken.write_text(text.replace("<main>", f"<main>{attack}"), encoding="utf-8")
    chromium.open(broken)
    assert chromium.run("typeof window.hacked") == "undefined"
    assert len(_complaints(chromium)) >= 2
    assert chromium.run(COUNT_OF_MATCHES) == "600 of 600 hosts, the first 500 are shown"
