"""``node-agent preflight``: test, judge, write the verdict, and reboot the node if that may help."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_builder.node import child, files, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.gpu import settings as gpu_settings
from image_builder.node.preflight import checks, hold, model, report, smoke
from image_builder.node.preflight.judge import Attempts, judge, parse_attempts, settle
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Check, Verdict
from image_builder.node.preflight.settings import Settings, parse

_UNTESTED = Check(
    smoke.ID, INCONCLUSIVE, "gpu.untested", "the GPUs were not tested before the node was admitted"
)


@dataclass(frozen=True)
class Places(status.Places):
    """Also what is run. ``attempts`` is on the OS disk: it survives a reboot, and a new machine doesn't have it."""

    attempts: Path = Path("/var/lib/node-agent/preflight.json")
    reboot: Sequence[str] = field(default=("systemctl", "--no-block", "reboot"))
    report: Sequence[str] = field(default=("systemctl", "--no-block", "restart", "preflight-report.service"))
    smoke: Callable[[str], Sequence[str]] = smoke.command
    now: Callable[[], float] = time.time
    uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


def run(places: Places = Places()) -> int:
    """Test this boot; return 0 if it has a verdict, or 1 if it has none or is about to end (nothing is admitted then).

    Never raises an expected error.
    """
    try:
        with files.lock(places.run / "preflight.lock"):
            boot_id = status.boot_id(places.boot_id)
            before = files.read_json(places.run / model.FILE) or files.read_json(places.run / model.BEFORE)
            retest = _retest(before, boot_id)
            _forget(places.run)
            settings, verdict, document = _test(places, boot_id, settings_files.build_id(places.release))
            document |= retest
            model.write_verdict(document, places)
            status.tell(f"preflight: {model.message(document)}")
            if verdict.state != PASSED:
                # Report before a reboot, or the gate would not notice a pool that keeps rebooting; also, a node that
                # has already joined stays admitted until this is reported.
                report.try_now(settings, places.run)
            if verdict.reboot and _start_again(places, boot_id):
                return 1
            model.admit(document, places.run, hard=settings.hard)
    except OSError as error:
        status.tell(f"preflight: FAILED without a verdict: {error}")
        return 1
    return 0


def again(places: Places = Places()) -> int:
    """Repeat the tests that this boot has not settled (``model.is_unsettled``), and report changes; return 0.

    The kubelet and pods may be running by now: no result reboots the node. Raises OSError, and NodeError if this boot
    has no verdict.
    """
    with files.lock(places.run / "preflight.lock"):
        before = model.read_verdict(places)
        if model.is_unsettled(before):
            checks_before = [Check(**check) for check in before["checks"]]
            settings, verdict, document = _test(
                places, str(before["boot_id"]), str(before["image_build"]), checks_before
            )
            document |= _retest(before, str(before["boot_id"]))
            is_news = (verdict.state, verdict.code) != (before["state"], before["code"])
            if not is_news:  # with the same start time it isn't reported again
                document["started"] = before["started"]
            model.write_verdict(document, places)
            model.admit(document, places.run, hard=settings.hard)
            status.tell(f"preflight: again: {model.message(document)}")
            if is_news and settings.kubeconfig:
                child.run(places.report)
    return 0


def _test(
    places: Places, boot_id: str, build: str, before: Sequence[Check] | None = None
) -> tuple[Settings, Verdict, dict[str, Any]]:
    """Test and judge; return also the verdict's document. With ``before``, skip what had passed, and never reboot."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    settings, results = examine(places, boot_id, before)
    verdict = decide(results, places, settings, build=build, boot_id=boot_id, may_reboot=before is None)
    document = model.document(
        verdict,
        results,
        boot_id=boot_id,
        image_build=build,
        started=started,
        seconds=time.monotonic() - began,
    )
    return settings, verdict, document


def _retest(before: Mapping[str, Any], boot_id: str) -> dict[str, Any]:
    """Return what the next verdict of this boot must have of the one ``before``: the number of the gate's re-test.

    Without it, the gate would consider its re-test unanswered, withdraw it, and count it as failed.
    """
    if before.get("boot_id") != boot_id or "retest" not in before:
        return {}
    return {"retest": before["retest"]}


def _forget(directory: Path) -> None:
    """Set the previous verdict aside: while this boot is being tested again, it has none.

    If this test is killed, the next one needs it.
    """
    with suppress(FileNotFoundError):
        (directory / model.FILE).replace(directory / model.BEFORE)
    (directory / model.REPORTED).unlink(missing_ok=True)


def examine(
    places: Places, boot_id: str, before: Sequence[Check] | None = None
) -> tuple[Settings, list[Check]]:
    """Make all checks, or those that had not passed ``before``. Unreadable settings count against the image.

    The sections of the status are read again, which costs nothing. GPUs are not tested again if pods may be using them.
    """
    try:
        settings = parse(settings_files.load("preflight", places.etc))
        expects_gpus = gpu_settings.are_expected(places.etc)
        settings_files.kubelet_taints(places.etc)
    except NodeError as error:
        return Settings(), [Check("settings", INCONCLUSIVE, error.code, error.message, "reimage")]
    sections = status.read(places.run)
    results = checks.prepared(sections, status.wanted_sections(places.etc), places.uptime())
    is_retried = any(check.state == INCONCLUSIVE for check in results)
    passed = [check for check in before or () if check.state == PASSED and check.id not in status.SECTIONS]
    results += passed
    names = {check.id for check in passed}
    for check in checks.reach_all(settings, names):
        # The engine waits for the disk, and the preload for the engine: while they are retried, so is the engine.
        is_late = is_retried and check.state == FAILED
        results.append(replace(check, state=INCONCLUSIVE, action="none") if is_late else check)
    if expects_gpus and smoke.ID not in names:
        tested = next((check for check in before or () if check.id == smoke.ID), _UNTESTED)
        # A GPU that a person has to look at may well give the right answer the next time.
        if before is None or not (tested.action == "inspect" or report.may_have_pods(settings)):
            results.append(smoke.run(places.smoke(settings.gpu_tier), settings.gpu_seconds, boot_id))
        else:
            results.append(tested)
    return settings, results


def decide(
    results: Sequence[Check],
    places: Places,
    settings: Settings,
    *,
    build: str,
    boot_id: str,
    may_reboot: bool,
) -> Verdict:
    """Judge the checks, and keep a record of reboots: a reboot is recorded beforehand, a pass marks them as helpful.

    A section is judged after its unit's retries, when the node no longer reboots itself: that it needs a reboot is
    recorded then, so that the next boot knows whether one has helped.
    """
    attempts, now = _attempts(places.attempts), places.now()
    verdict = settle(
        judge(results),
        results,
        attempts,
        build=build,
        boot_id=boot_id,
        may_reboot=may_reboot and settings.reboot,
        now=now,
    )
    verdict = hold.asked(verdict, settings)
    if verdict.reboot and attempts is not None:
        if problem := _write(places.attempts, attempts.ordered(verdict.code, build, boot_id, now)):
            # Without the record the node might reboot forever.
            return replace(verdict, reason=f"{verdict.reason}; no reboot: {problem}", reboot=False)
    elif not may_reboot and attempts is not None and _is_for_section(verdict, results):
        if not attempts.has(verdict.code, boot_id):
            _keep(places.attempts, attempts.ordered(verdict.code, build, boot_id, now))
    elif verdict.state == PASSED and attempts != Attempts():
        # This replaces a file that can't be read: its contents are no longer needed.
        _keep(places.attempts, (attempts or Attempts()).passed(now))
    return verdict


def _is_for_section(verdict: Verdict, results: Sequence[Check]) -> bool:
    """Return whether a section of the status calls for a reboot."""
    failed = {check.code for check in results if check.id in status.SECTIONS and check.state == FAILED}
    return verdict.action == "reboot" and verdict.code in failed


def _attempts(path: Path) -> Attempts | None:
    """Return the recorded reboots; None if they can't be read."""
    try:
        return parse_attempts(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Attempts()
    except (OSError, ValueError):
        return None


def _keep(path: Path, attempts: Attempts) -> None:
    if problem := _write(path, attempts):
        status.tell(f"preflight: {problem}")


def _write(path: Path, attempts: Attempts) -> str:
    """Write the record; return the problem if that fails, else an empty string."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.write_json(path, attempts.as_json())
    except OSError as error:
        return f"{path} can't be written: {error.strerror}"
    return ""


def _start_again(places: Places, boot_id: str) -> bool:
    status.tell("preflight: rebooting this node")
    try:
        # A disk that is missing in this boot and the next must not count as missing longer because of this reboot.
        status.record_reboot(boot_id, places.attempts.with_name(status.REBOOT.name))
        child.run(places.reboot)
    except (ProgramError, OSError) as error:
        status.tell(f"preflight: the reboot failed: {error}")
        return False
    return True
