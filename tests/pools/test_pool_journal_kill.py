"""A driver that is killed by SIGKILL at any point, and resumed: no host joins twice, and none is lost.

The child is a real process with a real journal. The fleet is scripted, yet what is done to it is real, too: a host
joins by writing a line to a file, and the kill may come before or after that.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from image_builder.errors import ImageBuilderError
from image_builder.pool.plan.model import OK, Host, Joined, Step, ended
from image_builder.pool.plan.plan import Plan, make_plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.driver import Event, Work, run
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.journal import open_journal, read_journal
from image_builder.pool.run.progress import replay
from image_builder.pool.run.records import Intent, Record
from image_builder.pool.run.resume import take_up
from image_builder.pool.run.state import Progress
from tests.support.pools.simulated.rollouts import make, make_hosts

# Doesn't need root, but starts processes.
pytestmark = pytest.mark.root

POLICY = Policy(
    waves=("8", "20"),
    slice_hosts=5,
    join_rate=1e6,
    max_unavailable="12",
    soak_seconds=(0.0,),
    cadence_seconds=0.0,
)
PLAN: Plan = make(40, POLICY)
POINTS = 30


class Fleet:
    """Hosts in a directory: `joined` has a line for each join. ``point`` is called wherever a kill may occur."""

    def __init__(self, folder: Path, point: Callable[[], None]) -> None:
        self.point = point
        self.joined = os.open(folder / "joined", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.events: list[Event] = []

    def now(self) -> float:
        return time.time()

    def wait(self, until: float) -> Sequence[Event]:
        self.point()
        if not self.events:
            time.sleep(max(0.0, min(0.01, until - time.time())))
        found, self.events = self.events[:3], self.events[3:]
        return found

    def _told(self) -> set[str]:
        return set(os.pread(self.joined, 1 << 20, 0).decode().split())

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        {"probe": self.probe, "bootstrap": self.bootstrap, "verify": self.verify}[step](work)

    def missing(self, _hosts: Sequence[Host]) -> dict[str, str]:
        return {}

    def idle(self, _cells: Sequence[Sequence[Host]], _each: int) -> Collection[str]:
        return ()

    def turn(self) -> str | None:
        raise AssertionError("no scale set was changed")

    def probe(self, work: Sequence[Work]) -> None:
        told = self._told()
        for w in work:
            joined = w.host.name in told
            self.events.append(Event(w.host.name, "probe", w.attempt, OK, "yes" if joined else "no", 0.0))

    def bootstrap(self, work: Sequence[Work]) -> None:
        for w in work:
            self.point()
            os.write(self.joined, f"{w.host.name}\n".encode())
            self.point()
            # Every third host's connection breaks after it has joined.
            outcome = ended("dropped") if int(w.host.name[-2:]) % 3 == 0 else OK
            self.events.append(Event(w.host.name, "bootstrap", w.attempt, outcome, "unknown", 0.0))

    def verify(self, work: Sequence[Work]) -> None:
        self.events += [Event(w.host.name, "verify", w.attempt, OK, "yes", 0.0) for w in work]

    def conclude(self) -> None:
        pass

    def unplanned(self, _hosts: Sequence[Host]) -> dict[str, str]:
        return {}

    def give_up(self, host: str, step: Step, attempt: int) -> Joined:
        raise AssertionError(f"nothing here takes that long: {step} {attempt} of {host}")

    def room(self, step: Step) -> int:
        return 10**6 - sum(event.step == step for event in self.events)

    def gate(self) -> Reading:
        return Reading()


def drive(folder: Path, hosts: Sequence[Host], point: Callable[[], None]) -> None:
    """Resume the run and drive it; call ``point`` at every point where it may be killed."""
    write = os.write

    def torn(fd: int, data: bytes) -> int:
        """Write in two parts, so that a kill can come between them."""
        if len(data) < 2 or not data.startswith(b'{"n":'):
            return write(fd, data)
        point()
        write(fd, data[: len(data) // 2])
        point()
        return len(data) // 2 + write(fd, data[len(data) // 2 :])

    os.write = torn  # type: ignore[assignment]  # in this process, which ends with it
    with open_journal(folder / "journal") as journal:
        progress = take_up(PLAN, journal, hosts, at=time.time())
        run(progress, Fleet(folder, point), journal.append)
        assert progress.finished, progress.stopped


def child(folder: Path, hosts: Sequence[Host], point: Callable[[], None]) -> int:
    """Drive in a separate process; return its PID."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            drive(folder, hosts, point)
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    return pid


def killed_at(folder: Path, hosts: Sequence[Host], number: int) -> bool:
    """Drive until the point with this number, and be killed there; return whether there was one."""
    passed = iter(range(number))

    def point() -> None:
        if next(passed, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    status = os.waitpid(child(folder, hosts, point), 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def finish(folder: Path, hosts: Sequence[Host]) -> None:
    assert os.waitpid(child(folder, hosts, lambda: None), 0)[1] == 0


def joins(folder: Path) -> Counter[str]:
    file = folder / "joined"
    return Counter(file.read_text().split()) if file.exists() else Counter()


def records(folder: Path) -> list[Record]:
    return read_journal(folder / "journal") if (folder / "journal").exists() else []


def assert_consistent(folder: Path) -> Progress:
    """Check the journal after a kill: every join was announced before it was done, and none was done twice."""
    told = records(folder)
    announced = {name for r in told if isinstance(r, Intent) and r.step == "bootstrap" for name in r.hosts}
    done = joins(folder)
    assert set(done) <= announced
    assert not [name for name, count in done.items() if count > 1]
    return replay(PLAN, told)


def points_of_a_whole_run(folder: Path) -> int:
    """Count the points of a run that isn't killed."""
    counter = os.open(folder / "points", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def point() -> None:
        os.write(counter, b".")

    pid = child(folder, PLAN.hosts, point)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(counter)
    assert joins(folder) == Counter({host.name: 1 for host in PLAN.hosts})
    return (folder / "points").stat().st_size


def test_killed_at_different_points_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    count = points_of_a_whole_run(tmp_path / "whole")
    assert count > 4 * POINTS
    for number in sorted(random.Random(1).sample(range(count * 9 // 10), POINTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert killed_at(folder, PLAN.hosts, number)
        assert_consistent(folder)
        finish(folder, PLAN.hosts)
        progress = assert_consistent(folder)
        assert progress.finished
        assert joins(folder) == Counter({host.name: 1 for host in PLAN.hosts})
        assert all(s.outcome == OK for s in progress.hosts.values())


def test_one_run_killed_again_and_again_comes_to_its_end(tmp_path: Path) -> None:
    """The journal stays the same; from the middle on, some hosts are gone and others are new."""
    later = [*make_hosts(46)[4:45]]
    rng, kills = random.Random(2), 0
    for _ in range(400):
        hosts = PLAN.hosts if kills < 12 else later
        if not killed_at(tmp_path, hosts, rng.randrange(2, 30)):
            break
        kills += 1
        assert_consistent(tmp_path)
    else:
        finish(tmp_path, later)
    progress = assert_consistent(tmp_path)
    assert kills >= 25 and progress.finished
    gone = {name for name, status in progress.hosts.items() if status.state == "gone"}
    assert gone == {host.name for host in PLAN.hosts} - {host.name for host in later}
    assert {name for name, s in progress.hosts.items() if s.outcome == OK} == {host.name for host in later}
    assert set(joins(tmp_path)) >= {host.name for host in later}


def test_killed_from_outside_at_any_moment(tmp_path: Path) -> None:
    """20 kills by the clock, wherever the process is at that moment: in a system call, or in the middle of a line."""
    rng, killed = random.Random(3), 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        pid = child(folder, PLAN.hosts, lambda: time.sleep(0.0005))
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert_consistent(folder)
        finish(folder, PLAN.hosts)
        assert assert_consistent(folder).finished
        assert joins(folder) == Counter({host.name: 1 for host in PLAN.hosts})
    assert killed


def test_a_second_driver_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def hold() -> None:
        os.write(writing, b".")
        time.sleep(60)

    pid = child(tmp_path, PLAN.hosts, hold)
    try:
        assert os.read(reading, 1) == b"."
        with (
            pytest.raises(ImageBuilderError, match="another process writes"),
            open_journal(tmp_path / "journal"),
        ):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # The lock ends with the process, so nothing has to be cleaned up.
    finish(tmp_path, PLAN.hosts)


def test_the_journal_of_another_plan_is_refused(tmp_path: Path) -> None:
    finish(tmp_path, PLAN.hosts)
    other = make_plan(PLAN.inventory, PLAN.pools, PLAN.hosts, Policy())
    with (
        open_journal(tmp_path / "journal") as journal,
        pytest.raises(ImageBuilderError, match="is the journal of another plan"),
    ):
        take_up(other, journal, PLAN.hosts, at=0.0)
