"""``node-agent preflight``: test, judge, write the verdict, and start the node again where that may help."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from image_builder.node import durable, lock, programs, status
from image_builder.node import settings as files
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.gpu import settings as gpu_settings
from image_builder.node.preflight import checks, model, report, smoke
from image_builder.node.preflight.judge import Attempts, judge, parse_attempts, settle
from image_builder.node.preflight.model import INCONCLUSIVE, PASSED, Check, Verdict
from image_builder.node.preflight.settings import Settings, parse


@dataclass(frozen=True)
class Places:
    """Where everything is. ``attempts`` is on the OS disk: it outlives a reboot, and no new machine has it."""

    run: Path = status.DIRECTORY
    etc: Path = files.DIRECTORY
    release: Path = files.RELEASE
    boot_id: Path = status.BOOT_ID
    attempts: Path = Path("/var/lib/node-agent/preflight.json")
    reboot: Sequence[str] = field(default=("systemctl", "--no-block", "reboot"))
    smoke: Callable[[str], Sequence[str]] = smoke.command


def run(places: Places = Places()) -> int:
    """Return 0 when this boot has a verdict, with ``hard`` only when it passed. Raises no error that is expected.

    Not 0 means that the kubelet doesn't start: also where the verdict can't be written, since nobody could tell then
    what this boot was found to be.
    """
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with lock.held(places.run / "preflight.lock"):
            boot_id = status.boot_id(places.boot_id)
            build = files.build_id(places.release)
            _forget(places.run)
            settings, found = _test(places, boot_id)
            verdict = settle(
                judge(found), found, _attempts(places.attempts), build=build, may_reboot=settings.reboot
            )
            if verdict.reboot:
                verdict = _count(places.attempts, verdict, Attempts(build, 1, boot_id))
            told = model.document(
                verdict,
                found,
                boot_id=boot_id,
                image_build=build,
                started=started,
                seconds=time.monotonic() - began,
            )
            durable.write_json(places.run / model.FILE, told)
            status.update("preflight", model.section(told), directory=places.run, settings=places.etc)
    except OSError as error:
        status.tell(f"preflight: FAILED, there is no verdict: {error}")
        return 1
    status.tell(f"preflight: {model.message(told)}")
    if verdict.reboot and _start_again(places.reboot):
        return 1
    if verdict.state != PASSED:
        # A node that is known already keeps what it was allowed before until somebody hears of this.
        report.try_now(settings, places.run)
    return 0 if verdict.state == PASSED or not settings.hard else 1


def _forget(directory: Path) -> None:
    """Take away what was said before: while it is being tested again, this boot has no verdict."""
    for name in (model.FILE, model.REPORTED):
        (directory / name).unlink(missing_ok=True)


def _test(places: Places, boot_id: str) -> tuple[Settings, list[Check]]:
    """Make all checks. Settings that can't be read pass nothing: they are a finding of the image."""
    try:
        settings = parse(files.load("preflight", places.etc))
        expects_gpus = gpu_settings.are_expected(places.etc)
        files.kubelet_taints(places.etc)
    except NodeError as error:
        return Settings(), [Check("settings", INCONCLUSIVE, error.code, error.message, "reimage")]
    found = checks.prepared(status.read(places.run), status.wanted_sections(places.etc))
    found += checks.reach(settings)
    if expects_gpus:
        found.append(smoke.run(places.smoke(settings.gpu_tier), settings.gpu_seconds, boot_id))
    return settings, found


def _attempts(path: Path) -> Attempts | None:
    """Return the count of reboots; None where it can't be read."""
    try:
        return parse_attempts(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Attempts()
    except (OSError, ValueError, AttributeError):
        return None


def _count(path: Path, verdict: Verdict, attempts: Attempts) -> Verdict:
    """Write the count down before the reboot; where that fails there is none, or there would be no end of them."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        durable.write_json(path, attempts.__dict__)
    except OSError as error:
        reason = f"{verdict.reason}; no reboot: {path} can't be written: {error.strerror}"
        return Verdict(verdict.state, verdict.code, reason, verdict.action)
    return verdict


def _start_again(argv: Sequence[str]) -> bool:
    status.tell("preflight: this node is started again, once")
    try:
        programs.run(argv)
    except ProgramError as error:
        status.tell(f"preflight: it can't be: {error.message}")
        return False
    return True
