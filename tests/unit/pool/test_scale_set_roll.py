"""An instance is brought to an exact version, whatever Azure answers and whichever answer is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from image_builder.errors import FetchError, PoolError
from image_builder.pool.scale_set.client import HOLD_TAG
from image_builder.pool.scale_set.records import (
    Accepted,
    Record,
    Replacement,
    Settled,
    open_journal,
    read_journal,
    suspended,
)
from image_builder.pool.scale_set.roll import SERVICES, driving, roll_instance, send
from image_builder.pool.scale_set.upgrades import Ending, Member, Upgrades
from image_builder.pool.scale_set.verdict import Node
from image_builder.text import stamp
from tests.support.arm.fleet import BUILDS, NEW, OLD
from tests.support.arm.model import Answer, Fault, Request, error
from tests.support.arm.rolling import PATIENCE, Rolling


@pytest.fixture(params=[False, True], ids=["upgrade keeps the disk", "upgrade replaces the disk"])
def rolling(request: pytest.FixtureRequest, tmp_path: Path) -> Rolling:
    return Rolling(tmp_path, upgrade_replaces=request.param)


def once(part: str, effect: Answer | Literal["drop", "lose"], count: int = 1) -> Fault:
    """Return a fault of the first POST requests of a kind."""
    numbers = itertools.count()

    def fault(request: Request) -> Answer | Literal["drop", "lose"] | None:
        hit = request.method == "POST" and request.path.endswith(part) and next(numbers) < count
        return effect if hit else None

    return fault


def test_an_instance_is_brought_to_the_version_and_no_other_is_touched(rolling: Rolling) -> None:
    assert rolling() == Ending("ok")
    machines = rolling.fleet.group.machines
    assert [m.disk for m in machines.values()] == [OLD, NEW, OLD]
    assert [m.reimages for m in machines.values()] == [0, 1, 0]
    assert rolling.fleet.group.image == NEW
    rolling.require_clean()


def test_an_instance_that_runs_the_version_is_left_alone(rolling: Rolling) -> None:
    rolling()
    assert rolling() == Ending("ok")
    assert rolling.fleet.machine("1").reimages == 1
    rolling.require_clean()


@pytest.mark.parametrize("effect", ["lose", error(500, "InternalServerError", "later")])
@pytest.mark.parametrize("part", ["/manualupgrade", "/reimage"])
def test_a_lost_answer_is_never_answered_by_sending_again(
    rolling: Rolling, part: str, effect: Literal["lose"] | Answer
) -> None:
    accepted = once(part, "lose")
    rolling.fleet.arm.faults = [accepted]
    if effect != "lose":
        rolling.fleet.arm.faults = [once(part, effect)]
    assert rolling() == Ending("ok")
    assert rolling.fleet.machine("1").reimages == 1
    if effect == "lose":
        assert len(rolling.replacements()) == len(set(rolling.replacements()))
    rolling.require_clean()


def test_a_request_that_never_arrived_is_sent_again_after_two_looks_a_minute_apart(
    rolling: Rolling,
) -> None:
    rolling.fleet.arm.faults = [once("/manualupgrade", "drop", 2)]
    began = rolling.clock()
    assert rolling() == Ending("ok")
    assert rolling.replacements().count("upgrade") == 3
    assert rolling.clock() - began >= 120
    rolling.require_clean()


def test_a_request_that_never_arrives_is_repeated_twice_at_most(rolling: Rolling) -> None:
    rolling.fleet.arm.faults = [once("/manualupgrade", "drop", 99)]
    assert rolling() == Ending("failed", "upgrade: never accepted")
    assert rolling.replacements() == ["upgrade"] * 3
    rolling.require_clean()


@pytest.mark.parametrize(
    "answer",
    [
        error(429, "TooManyRequests", "wait", Retry_After="30"),
        error(409, "Conflict", "another operation is in progress"),
    ],
)
def test_a_refusal_that_passes_is_waited_for(rolling: Rolling, answer: Answer) -> None:
    rolling.fleet.arm.faults = [once("/manualupgrade", answer, 3), once("/reimage", answer, 3)]
    assert rolling() == Ending("ok")
    assert rolling.fleet.machine("1").reimages == 1


def test_a_refusal_that_never_passes_ends(rolling: Rolling) -> None:
    rolling.fleet.arm.faults = [once("/manualupgrade", error(409, "Conflict", "busy"), 10**6)]
    ending = rolling()
    assert ending.kind == "failed" and "Conflict" in ending.reason
    rolling.require_clean()


@pytest.mark.parametrize("code", ["OSProvisioningTimedOut", "AllocationFailed"])
def test_an_operation_that_fails_is_the_signature_of_the_failure(rolling: Rolling, code: str) -> None:
    rolling.fleet.scale_sets.failures["1"] = [code]
    assert rolling() == Ending("failed", f"upgrade: {code}")
    # Neither a repeat of the command nor anything else sends it another request.
    assert rolling() == Ending("failed", f"upgrade: {code}")
    assert rolling.replacements() == ["upgrade"]
    rolling.require_clean()


def test_a_request_for_the_version_in_another_case_counts(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.failures["1"] = ["AllocationFailed"]
    rolling()
    rolling.journal.write_text(rolling.journal.read_text().replace(NEW, NEW.upper()))
    assert rolling() == Ending("failed", "upgrade: AllocationFailed")
    assert rolling.replacements() == ["upgrade"]


def test_a_failure_whose_answer_was_lost_is_seen_at_the_instance(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.failures["1"] = ["OSProvisioningTimedOut"]
    rolling.fleet.arm.faults = [once("/manualupgrade", "lose")]
    assert rolling() == Ending("failed", "upgrade: OSProvisioningTimedOut")


def test_a_node_that_comes_back_with_the_old_build_is_repeated_once(rolling: Rolling) -> None:
    rolling.fleet.boots[NEW] = "0" * 12
    assert rolling() == Ending("failed", "old build")
    assert rolling.replacements() == ["upgrade", "reimage", "reimage"]
    rolling.require_clean()


def test_a_node_that_never_comes_back_ends(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.reimaged = lambda _, machine: rolling.fleet.silent.add(machine.id)
    assert rolling() == Ending("failed", "timeout: the node doesn't come back")
    rolling.require_clean()


def test_a_node_that_did_not_answer_before_is_repaired(rolling: Rolling) -> None:
    rolling.fleet.silent.add("1")
    rolling.fleet.scale_sets.reimaged = lambda _, machine: rolling.fleet.silent.discard(machine.id)
    assert rolling() == Ending("ok")
    rolling.require_clean()


def test_a_node_that_does_not_answer_and_whose_request_was_lost_is_unknown(rolling: Rolling) -> None:
    rolling.fleet.silent.add("1")
    rolling.fleet.arm.faults = [once("/manualupgrade", "drop")]
    assert rolling() == Ending("unknown")
    assert rolling.replacements() == ["upgrade"]
    # It answers now, is read twice unchanged, and only then gets the request again.
    rolling.fleet.silent.clear()
    assert rolling() == Ending("ok")
    rolling.require_clean()


def test_an_instance_that_is_deleted_or_replaced_meanwhile_is_gone(rolling: Rolling) -> None:
    def replaced(request: Request) -> None:
        if request.path.endswith("/manualupgrade"):
            rolling.fleet.scale_sets.remove(rolling.fleet.path, "1")

    rolling.fleet.arm.faults = [once("/manualupgrade", "drop")]
    rolling.fleet.arm.faults.append(replaced)
    rolling.fleet.arm.faults.reverse()
    assert rolling().kind == "gone"
    rolling.require_clean()


def test_an_id_that_another_machine_has_is_not_touched(rolling: Rolling) -> None:
    assert rolling(vm_id="8d10da13-8125-4ba9-a717-bf7490507b3d").kind == "gone"
    assert rolling.replacements() == []
    rolling.require_clean()


def test_an_operation_that_another_preempts_is_settled_by_reading(rolling: Rolling) -> None:
    def scale_out(request: Request) -> None:
        if request.path.endswith("/virtualMachines") and not grown:
            grown.append(True)
            rolling.fleet.scale_sets.scale(rolling.fleet.path, 4)

    grown: list[bool] = []
    rolling.fleet.scale_sets.seconds["upgrade"] = 30.0
    rolling.fleet.arm.faults = [_in_upgrade(rolling, scale_out)]
    assert rolling() == Ending("ok")
    assert rolling.fleet.machine("1").disk == NEW
    # The instance created meanwhile has the model's image.
    assert rolling.fleet.machine("3").disk == NEW
    rolling.require_clean()


def test_one_list_is_for_all_instances_of_a_set(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.page = 1000
    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run-1", journal, patience=PATIENCE) as drive,
    ):
        before = rolling.fleet.arm.reads
        assert all(drive.instance(number) for number in ("0", "1", "2"))
        assert rolling.fleet.arm.reads == before + 1
        rolling.clock.wait(PATIENCE.look)
        assert drive.instance("0", looks=10) and rolling.fleet.arm.reads == before + 1
        assert drive.instance("0") and rolling.fleet.arm.reads == before + 2


def upgraded_together(rolling: Rolling, *numbers: str) -> None:
    """Send one upgrade for several instances, like a driver that is killed right then."""
    path, client = rolling.fleet.path, rolling.client
    client.set_image(client.scale_set(path), NEW)
    with open_journal(rolling.journal) as journal:
        for number in numbers:
            node = rolling.fleet.node(number)()
            assert node is not None
            journal.append(
                Replacement(
                    at=rolling.clock(),
                    verb="upgrade",
                    vm_id=rolling.fleet.machine(number).vm_id,
                    boot_id=node.boot_id,
                    version=NEW,
                    build=BUILDS[NEW],
                    scale_set=path,
                    instance=number,
                )
            )
        operation = client.upgrade(path, numbers).operation
        for number in numbers:
            journal.append(Accepted(at=rolling.clock(), scale_set=path, instance=number, operation=operation))


def test_one_that_fails_in_an_upgrade_of_several_fails_alone(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.failures["2"] = ["OSProvisioningTimedOut"]
    upgraded_together(rolling, "1", "2")
    assert rolling("1") == Ending("ok")
    assert rolling("2") == Ending("failed", "upgrade: OSProvisioningTimedOut")
    assert [body["instanceIds"] for body in rolling.fleet.posts("/manualupgrade")] == [["1", "2"]]


def test_no_upgrade_is_sent_beside_one_of_a_driver_that_was_killed(rolling: Rolling) -> None:
    # Longer than upgrades wait for one another anyway.
    rolling.fleet.scale_sets.seconds["upgrade"] = 1000.0
    upgraded_together(rolling, "2")
    began = rolling.clock()
    assert rolling("1") == Ending("ok")
    sent = [r.at for r in read_journal(rolling.journal) if isinstance(r, Replacement) and r.instance == "1"]
    assert sent[0] - began >= rolling.fleet.scale_sets.seconds["upgrade"]
    assert rolling("2") == Ending("ok")


def test_of_an_upgrade_that_is_refused_for_several_each_is_sent_by_itself(rolling: Rolling) -> None:
    """If one instance is the reason, the others don't fail with it."""
    rolling.fleet.arm.faults = [once("/manualupgrade", error(400, "InvalidParameter", "no active VM"))]
    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run-1", journal, patience=PATIENCE) as drive,
    ):
        client, path = rolling.client, rolling.fleet.path
        drive.set_image(client.scale_set(path), NEW)
        version = client.version(NEW)
        instances = [drive.instance(number) for number in ("1", "2")]
        assert version is not None and all(instances)
        members = [Member(each, version, None, lambda: "") for each in instances if each]
        send(drive, "upgrade", members)
        assert [r.outcome for r in drive.records if isinstance(r, Settled)] == ["refused", "refused"]
        for number in ("1", "2"):
            machine, node = rolling.fleet.machine(number), rolling.fleet.node(number)
            assert roll_instance(drive, number, machine.vm_id, version, node) == Ending("ok")
    named = [body["instanceIds"] for body in rolling.fleet.posts("/manualupgrade")]
    assert named == [["1", "2"], ["1"], ["2"]]


@pytest.mark.parametrize(("seconds", "sent"), [(1.0, 1), (1.25, 0)])
def test_nothing_is_sent_long_after_the_last_look(rolling: Rolling, seconds: float, sent: int) -> None:
    def look() -> str:
        rolling.clock.wait(seconds)
        return ""

    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run-1", journal, patience=PATIENCE) as drive,
    ):
        drive.set_image(rolling.client.scale_set(rolling.fleet.path), NEW)
        version, instance = rolling.client.version(NEW), drive.instance("1")
        assert version is not None and instance is not None
        send(drive, "upgrade", [Member(instance, version, None, look)])
        assert len(rolling.fleet.posts("/manualupgrade")) == sent == len(drive.requests("1"))


@pytest.mark.parametrize("verb", ["upgrade", "reimage"])
@pytest.mark.parametrize(("slow", "sent"), [(4, True), (5, False), (99, False)])
def test_last_looks_that_are_late_again_and_again_end_with_their_reason(
    rolling: Rolling, verb: str, slow: int, *, sent: bool
) -> None:
    if rolling.fleet.scale_sets.upgrade_replaces:
        verb = "upgrade"  # the only request
    looks: list[float] = []
    shown: list[str] = []

    def busy() -> str:
        is_due = verb == "upgrade" or bool(rolling.fleet.posts("/manualupgrade"))
        looks.extend([rolling.clock()] * is_due)
        rolling.clock.wait(1.8 if is_due and len(looks) <= slow else 0.1)
        return ""

    ending = queued(rolling, Queue(), busy, tell=shown.append)
    assert ending.kind == ("ok" if sent else "busy") and len(shown) == min(slow, 5)
    assert all("1.8 s" in line and "1.2 s" in line for line in (*shown, ending.reason or shown[0]))
    assert (verb in rolling.replacements()) is sent
    if not sent:
        assert len(looks) == 5 and looks[-1] - looks[0] < 1800
    rolling.require_clean()


def test_those_that_are_late_only_together_are_sent_one_by_one(rolling: Rolling) -> None:
    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run-1", journal, patience=PATIENCE) as drive,
    ):
        drive.set_image(rolling.client.scale_set(rolling.fleet.path), NEW)
        version = rolling.client.version(NEW)
        instances = [drive.instance(number) for number in ("1", "2")]
        assert version is not None
        seconds = iter([0.4, 1.0])

        def busy() -> str:
            rolling.clock.wait(next(seconds))
            return ""

        members = [Member(each, version, None, busy) for each in instances if each]
        send(drive, "upgrade", members)
        assert rolling.fleet.posts("/manualupgrade") == [] and drive.singles == {"1", "2"}
        assert not any(member.late or member.ending for member in members)


def test_one_that_was_given_up_keeps_no_other_from_being_sent(rolling: Rolling) -> None:
    with open_journal(rolling.journal) as journal:

        class Closed:
            """As a run's journal refuses what is no longer wanted."""

            records = journal.records

            def append(self, record: Record) -> None:
                if isinstance(record, Replacement) and record.instance == "2":
                    raise FetchError("it was given up", hint="")
                journal.append(record)

        with driving(rolling.client, rolling.fleet.path, "run-1", Closed(), patience=PATIENCE) as drive:
            drive.set_image(rolling.client.scale_set(rolling.fleet.path), NEW)
            version = rolling.client.version(NEW)
            instances = [drive.instance(number) for number in ("2", "1")]
            assert version is not None
            members = [Member(each, version, None, lambda: "") for each in instances if each]
            send(drive, "upgrade", members)
            assert [str(member.error or "") for member in members] == ["it was given up", ""]
            assert len(rolling.fleet.posts("/manualupgrade")) == 1
            assert (len(drive.requests("1")), drive.requests("2")) == (1, [])


@pytest.mark.parametrize("boots_after", [60.0, 900.0, 1400.0])
def test_a_disk_that_a_driver_was_replacing_whose_journal_is_lost_is_replaced_once(
    rolling: Rolling, boots_after: float
) -> None:
    """Its node is silent while the disk is replaced, and boots late."""
    client, path, machine = rolling.client, rolling.fleet.path, rolling.fleet.machine("1")
    client.set_image(client.scale_set(path), NEW)
    client.upgrade(path, ["1"])
    rolling.clock.wait(60)
    if not rolling.fleet.scale_sets.upgrade_replaces:
        client.reimage(path, "1", force_ephemeral=False)
    rolling.clock.wait(5)
    began = rolling.clock()
    node = rolling.fleet.node("1")

    def late() -> Node | None:
        return node() if rolling.clock() - began > 240 + boots_after else None

    assert queued(rolling, Queue(), lambda: "", node=late) == Ending("ok")
    assert machine.reimages == 1 and rolling.replacements() == []


def test_an_instance_that_something_keeps_in_work_gets_no_request(rolling: Rolling) -> None:
    rolling.fleet.scale_sets.seconds["upgrade"] = 1e6
    rolling.client.upgrade(rolling.fleet.path, ["1"])
    assert queued(rolling, Queue(), lambda: "").kind == "unknown" and rolling.replacements() == []


def test_a_node_that_never_answers_is_repaired_after_the_time_of_a_boot(rolling: Rolling) -> None:
    """Its instance had the version before: nobody knows why the node is silent."""
    machine = rolling.fleet.machine("1")
    machine.version = machine.disk = NEW
    rolling.fleet.silent.add("1")
    rolling.fleet.scale_sets.reimaged = lambda _, machine: rolling.fleet.silent.discard(machine.id)
    began = rolling.clock()
    assert rolling() == Ending("ok") and rolling.replacements() == ["reimage"]
    assert read_journal(rolling.journal)[-1].at - began > PATIENCE.boot


def test_a_process_that_another_of_its_run_took_over_from_leaves_everything_to_it(
    rolling: Rolling, tmp_path: Path
) -> None:
    """Services stay suspended, and the set stays marked."""
    client, path = rolling.client, rolling.fleet.path
    with ExitStack() as second, open_journal(rolling.journal) as journal:
        with driving(client, path, "run-1@a.1.1", journal, patience=PATIENCE) as first:
            copied = second.enter_context(open_journal(tmp_path / "copy.jsonl"))
            for record in journal.records:
                copied.append(record)
            second.enter_context(driving(client, path, "run-1@b.1.1", copied, patience=PATIENCE))
            rolling.clock.wait(0.6 * PATIENCE.hold)
            with pytest.raises(PoolError, match="is driven by run-1@b"):
                first.renew()
            with pytest.raises(PoolError, match="is driven by run-1@b"):
                client.require_free(client.scale_set(path), "run-2@c.1.1")
        assert set(rolling.fleet.group.services.values()) == {"Suspended"}
        assert rolling.fleet.group.content["tags"][HOLD_TAG].startswith("run-1@b.1.1 until")
    rolling.require_clean()


def test_a_hold_is_renewed_after_half_of_its_time(rolling: Rolling) -> None:
    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run-1", journal, patience=PATIENCE) as drive,
    ):
        until = drive.held_until
        for share, is_renewed in ((0.45, False), (0.1, True)):
            rolling.clock.wait(share * PATIENCE.hold)
            drive.renew()
            assert drive.held_until == (rolling.clock() + PATIENCE.hold if is_renewed else until)
        assert rolling.fleet.group.content["tags"][HOLD_TAG].endswith(stamp(drive.held_until))


class Queue(Upgrades):
    """The wait for the other upgrades of a set, in which ``meanwhile`` happens."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.is_over, self._meanwhile = False, meanwhile

    @contextmanager
    def joined(self, member: Member, send: Callable[[Sequence[Member]], None]) -> Iterator[None]:
        self._meanwhile()
        self.is_over = True
        with super().joined(member, send):
            yield


def queued(
    rolling: Rolling,
    queue: Queue,
    busy: Callable[[], str],
    works: Callable[[], str] = lambda: "",
    *,
    node: Callable[[], Node | None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Ending:
    """Bring an instance to the new version, after other instances of its set."""
    path, client = rolling.fleet.path, rolling.client
    with (
        open_journal(rolling.journal) as journal,
        driving(client, path, "run-1", journal, patience=PATIENCE, tell=tell) as drive,
    ):
        drive.upgrades = queue
        drive.set_image(client.scale_set(path), NEW)
        version = client.version(NEW)
        assert version is not None
        vm_id = rolling.fleet.machine("1").vm_id
        return roll_instance(drive, "1", vm_id, version, node or rolling.fleet.node("1"), busy, works)


def test_the_last_look_comes_after_the_wait_for_others_upgrades(rolling: Rolling) -> None:
    queue = Queue()
    assert queued(rolling, queue, lambda: "a pod came meanwhile" if queue.is_over else "").kind == "busy"
    assert rolling.replacements() == []


def test_a_node_is_asked_itself_after_that_wait_and_before_the_last_look(rolling: Rolling) -> None:
    """Nothing is sent for a node that is at work, whatever the cluster says; the cluster isn't even queried then."""
    queue, looked = Queue(), list[str]()

    def busy() -> str:
        looked.append("cluster")
        return ""

    ending = queued(rolling, queue, busy, lambda: "a lease" if queue.is_over else "")
    assert ending == Ending("busy", "a lease")
    assert rolling.replacements() == [] and looked == []


def test_a_machine_that_is_replaced_while_others_are_upgraded_is_gone(rolling: Rolling) -> None:
    def replaced() -> None:
        rolling.clock.wait(10 * PATIENCE.look)
        machine = rolling.fleet.machine("1")
        machine.vm_id = "8d10da13-8125-4ba9-a717-bf7490507b3d"

    assert queued(rolling, Queue(replaced), lambda: "").kind == "gone"
    assert rolling.replacements() == []


def _in_upgrade(rolling: Rolling, act: Callable[[Request], None]) -> Fault:
    def fault(request: Request) -> None:
        if any(machine.state == "Updating" for machine in rolling.fleet.group.machines.values()):
            act(request)

    return fault


def test_a_model_that_another_changed_is_not_rolled(rolling: Rolling) -> None:
    def changed(request: Request) -> None:
        if request.path.endswith(f"{rolling.fleet.path}") and rolling.fleet.group.image == NEW:
            rolling.fleet.group.profile["storageProfile"]["imageReference"]["id"] = f"{OLD}9"

    rolling.fleet.arm.faults = [changed]
    with pytest.raises(PoolError):
        rolling()
    assert rolling.fleet.posts("/manualupgrade") == []
    rolling.require_clean()


def test_services_that_others_suspended_stay_suspended(rolling: Rolling) -> None:
    rolling.fleet.group.services["AutomaticRepairs"] = "Suspended"
    rolling()
    assert rolling.fleet.group.services == {
        "AutomaticRepairs": "Suspended",
        "AutomaticZoneRebalancing": "Running",
    }


def test_services_that_a_driver_suspended_whose_journal_is_lost_are_resumed(rolling: Rolling) -> None:
    """R22: its mark on the scale set says whose they are."""
    rolling.client.hold(rolling.fleet.path, "run-1", rolling.clock() + 60)
    rolling.client.set_services(rolling.fleet.path, SERVICES, "Suspend")
    assert rolling() == Ending("ok")
    rolling.require_clean()


@pytest.mark.parametrize("state", ["NotRunning", None])
def test_a_service_that_another_disabled_meanwhile_keeps_no_scale_set_held(
    rolling: Rolling, state: str | None
) -> None:
    services = rolling.fleet.group.services

    def disabled(_request: Request) -> None:
        if services.pop("AutomaticRepairs", "") and state:
            services["AutomaticRepairs"] = state

    rolling.fleet.arm.faults = [_in_upgrade(rolling, disabled)]
    assert rolling() == Ending("ok")
    assert (services.get("AutomaticRepairs"), services["AutomaticZoneRebalancing"]) == (state, "Running")
    assert HOLD_TAG not in rolling.fleet.group.content["tags"]
    assert suspended(read_journal(rolling.journal), rolling.fleet.path) == set()


class Killed(BaseException):
    """What a driver that is killed never sees: from then on, nothing that it sends arrives."""


@pytest.mark.parametrize("is_done", [False, True], ids=["before the request", "after it"])
def test_killed_at_any_request_another_driver_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    """Whatever the point: one disk is replaced, once; services run, and nobody holds the scale set."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    point, was_killed = 0, True
    while was_killed:
        point, was_killed = point + 1, False
        (tmp_path / str(point)).mkdir()
        rolling = Rolling(tmp_path / str(point))
        left = itertools.count(1)

        def kill(
            _request: Request, _: object = None, *, left: Iterator[int] = left, last: int = point
        ) -> None:
            if next(left) >= last:
                raise Killed

        arm = rolling.fleet.arm
        arm.faults, arm.observers = ([], [kill]) if is_done else ([kill], [])
        try:
            rolling()
        except Killed:
            was_killed = True
        arm.faults, arm.observers = [], []
        assert rolling() == Ending("ok"), point
        assert [m.reimages for m in rolling.fleet.group.machines.values()] == [0, 1, 0], point
        rolling.require_clean()
    assert point > 15


def test_a_driver_that_is_lost_with_its_journal_while_a_disk_is_replaced(rolling: Rolling) -> None:
    """R22: Azure refuses a second request until the first is done; the node then has the new image."""
    part = "/manualupgrade" if rolling.fleet.scale_sets.upgrade_replaces else "/reimage"

    def kill(request: Request, _: object) -> None:
        if request.method == "POST" and request.path.endswith(part):
            raise Killed

    rolling.fleet.arm.observers = [kill]
    with pytest.raises(Killed):
        rolling()
    assert (rolling.fleet.machine("1").state, rolling.fleet.machine("1").reimages) == ("Updating", 0)
    rolling.fleet.arm.observers = []
    rolling.journal.unlink()
    assert rolling() == Ending("ok")
    assert [m.reimages for m in rolling.fleet.group.machines.values()] == [0, 1, 0]
    assert rolling.fleet.group.services == dict.fromkeys(SERVICES, "Running")


def test_a_scale_set_has_one_driver(rolling: Rolling) -> None:
    rolling.client.hold(rolling.fleet.path, "run-2", rolling.clock() + 60)
    with pytest.raises(PoolError, match="driven by run-2"):
        rolling()
    assert rolling.fleet.posts("/") == []
    rolling.clock.at += 61
    assert rolling() == Ending("ok")
    rolling.require_clean()
