"""The JUnit document of a run: parsed back, it says the same about each host as the state."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from image_builder.pool.plan.model import failed
from image_builder.pool.run.progress import replay
from image_builder.pool.run.records import Opened, Record, Stopped
from image_builder.pool.run.state import Progress
from image_builder.pool.show.junit import junit
from image_builder.pool.show.report import report
from tests.support.pools.simulated import rolls
from tests.support.pools.simulated.report_runs import deadline_run
from tests.support.pools.simulated.rollouts import BAD_DAY, START, WIDE, Faults, make, simulate


def _document(progress: Progress, records: list[Record], *, running: bool = False) -> Element:
    return ElementTree.fromstring(junit(progress, report(progress, records, running=running)))


def _cases(root: Element) -> list[Element]:
    return [case for suite in root.findall("testsuite")[1:] for case in suite]


def test_each_wave_is_a_suite_and_each_host_a_case() -> None:
    plan = make(400, WIDE)
    progress, _, records = simulate(plan, BAD_DAY)
    root = _document(progress, records)
    assert root.tag == "testsuites"
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["run", *(wave.name for wave in plan.waves)]
    for suite, wave in zip(suites[1:], plan.waves, strict=True):
        assert [case.get("name") for case in suite] == sorted(wave.hosts)
    types = Counter(case[0].get("type") for case in _cases(root) if len(case))
    assert types == progress.signatures and progress.failed > 5


def test_totals_are_those_of_the_cases() -> None:
    progress, _, records = simulate(make(400, WIDE), BAD_DAY)
    root = _document(progress, records)
    assert (root.get("tests"), root.get("failures")) == ("401", str(progress.failed))
    for suite in root.findall("testsuite"):
        assert suite.get("tests") == str(len(suite))
        assert suite.get("failures") == str(len(suite.findall("testcase/failure")))
        assert suite.get("skipped") == "0" == suite.get("errors")
        seconds = sum(float(case.get("time", "")) for case in suite)
        assert abs(float(suite.get("time", "")) - seconds) < 0.01
    began = datetime.fromisoformat(root[1].get("timestamp", "")).replace(tzinfo=UTC)
    assert began.timestamp() == int(START)


def test_a_host_that_was_never_started_is_skipped_and_the_run_red() -> None:
    plan = make(60)
    first = plan.waves[0].hosts[0]
    progress, _, records = simulate(plan, Faults(fates={first: failed("gpu", 61, "no device")}))
    root = _document(progress, records)
    (run,) = root[0]
    assert run[0].tag == "failure" and "canaries failed" in run[0].get("message", "")
    by_name = {case.get("name"): case for case in _cases(root)}
    assert (
        by_name[first][0].get("type") == "failed gpu 61" and by_name[first][0].get("message") == "no device"
    )
    later = by_name[plan.waves[-1].hosts[0]]
    assert later[0].tag == "skipped" and later[0].get("message") == "not started"
    assert root.get("skipped") == str(sum(len(wave.hosts) for wave in plan.waves[1:]))


def test_a_run_stopped_without_a_failed_host_is_red() -> None:
    plan = make(60)
    records: list[Record] = [
        Opened(at=START, plan=plan.digest),
        Stopped(at=START, reason="a stop was requested"),
    ]
    root = _document(replay(plan, records), records)
    assert root.get("failures") == "1" and root[0][0][0].get("message") == "a stop was requested"
    assert root[0][0][0].get("type") == "stopped"


def test_an_interrupted_run_is_red_and_a_running_one_is_not() -> None:
    plan = make(60)
    records = simulate(plan, Faults())[2][:20]
    progress = replay(plan, records)
    assert _document(progress, records).get("failures") == "1"
    root = _document(progress, records, running=True)
    assert root.get("failures") == "0" and root[0][0][0].tag == "skipped"


def test_what_xml_cannot_hold_is_replaced_and_the_rest_is_as_it_was() -> None:
    plan = make(60)
    first = plan.waves[0].hosts[0]
    detail = "<b a='1'>&amp; ]]> \x1b[31m \x00 \ufffe \U0001f4a5 é"
    progress, _, records = simulate(plan, Faults(fates={first: failed("gpu", 61, detail)}))
    (failure,) = (case[0] for case in _cases(_document(progress, records)) if case.get("name") == first)
    expected = "<b a='1'>&amp; ]]> \ufffd[31m \ufffd \ufffd \U0001f4a5 é"
    assert failure.get("message") == expected
    assert failure.text is not None and failure.text.splitlines()[:2] == ["failed gpu 61", expected]


def test_of_a_roll_it_says_what_became_of_work() -> None:
    progress, records = deadline_run()
    root = _document(progress, records)
    outputs = {case.get("name"): case.findtext("system-out") or "" for case in _cases(root)}
    evicted = report(progress, records)["evicted"]
    assert evicted and all(
        (f"evicted: {rolls.BUSY}" in text) == (name in evicted) for name, text in outputs.items()
    )
    assert all("drain: " in text for text in outputs.values())
    assert "GPU-hours" in (root[0][0].findtext("system-out") or "")
    skipped = {case.get("name"): case[0].get("message") for case in _cases(root) if case[0].tag == "skipped"}
    assert set(skipped.values()) == {"cordoned by somebody else", rolls.BUSY}
