"""Real hosts that are only reachable through a real bastion: all guarantees of a direct connection hold behind it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from image_builder.definition.connection import Hop
from image_builder.pool.reach.provision import JoinStatus
from image_builder.pool.reach.reach import Answer, Reach
from image_builder.pool.run.driver import Work
from image_builder.pool.steps.ansible import Process, Slice
from image_builder.settings import Settings
from tests.bench.measures import be_quick
from tests.pools.conftest import lent, not_quick, with_fault
from tests.support.images.builds import REPO, Workplace
from tests.support.pools.fleet import USER, Fleet
from tests.support.pools.rollouts import POLICY, Rollout, make, signature, wait, write_plan
from tests.support.pools.traces import here

pytestmark = [pytest.mark.root, pytest.mark.hosts]

# Two bastions; the others are behind them. OTHER has a different user from the rest.
OUTER, INNER, OTHER, LAST = 0, 1, 4, 5
BEHIND = (2, 3, OTHER)
DEAD, REFUSED = with_fault("dead"), with_fault("refused")
ACCEPTED = "Accepted publickey for"
_KEY = "/etc/ssh/ssh_host_ed25519_key"
_LONG = 300.0


@pytest.fixture(scope="module")
def pool(hosts: Fleet) -> Iterator[Fleet]:
    _rename(hosts, USER, "other")
    parted = [*range(INNER, LAST + 1), REFUSED]
    for number in parted:
        hosts.part(number)
    pinned = hosts.pinned.path.read_text()
    with hosts.pinned.path.open("a") as keys:
        for number in (OUTER, INNER):
            keys.write(f"{hosts.hosts[number].address} {(hosts.folder / f'host-{number}.pub').read_text()}")
    with lent(hosts):
        yield hosts
    hosts.pinned.path.write_text(pinned)
    for number in parted:
        hosts.unite(number)
    _rename(hosts, "other", USER)
    not_quick(hosts, (LAST,))


def _rename(pool: Fleet, name: str, new: str) -> None:
    """Rename the user of the host that has a different one."""
    pool.run(OTHER, "sed", "-i", f"s/^{name}:/{new}:/", "/etc/passwd", "/etc/shadow")
    pool.run(OTHER, "sed", "-i", f"s/^{name} /{new} /", "/etc/sudoers.d/fleet")


def hop(pool: Fleet, number: int, **more: Any) -> Hop:
    return Hop(address=pool.hosts[number].address, **more)


def ask(pool: Fleet, *numbers: int, hops: tuple[Hop, ...], **more: Any) -> list[Answer]:
    """Ask these hosts at the same time for root's user name; return their answers."""
    hosts = [pool.hosts[n].model_copy(update={"hops": hops, **more}) for n in numbers]
    with Reach(pool.access(connect_seconds=10.0)) as reach:
        futures = [reach.submit(host, ["id", "-un"], root=True, seconds=_LONG) for host in hosts]
        return [future.result() for future in futures]


def kinds(answers: list[Answer]) -> list[str]:
    return [answer.outcome.kind for answer in answers]


def test_hosts_behind_a_bastion_are_reached_over_one_connection_to_it(pool: Fleet) -> None:
    before = pool.log(OUTER).count(ACCEPTED)
    answers = ask(pool, 2, 3, hops=(hop(pool, OUTER),))
    assert [answer.stdout for answer in answers] == [b"root\n"] * 2, answers
    assert pool.log(OUTER).count(ACCEPTED) == before + 1
    assert kinds(ask(pool, 2, hops=())) == ["timeout"]


def test_a_second_bastion_is_reached_through_the_first(pool: Fleet) -> None:
    before = pool.log(INNER).count(ACCEPTED)
    answers = ask(pool, 2, 3, hops=(hop(pool, OUTER), hop(pool, INNER)))
    assert [answer.stdout for answer in answers] == [b"root\n"] * 2, answers
    assert pool.log(INNER).count(ACCEPTED) == before + 1


def test_hosts_behind_a_bastion_end_in_their_own_classes(pool: Fleet) -> None:
    way = (hop(pool, OUTER),)
    assert kinds(ask(pool, 2, REFUSED, hops=way)) == ["ok", "refused"]
    assert kinds(ask(pool, 2, hops=way, port=2222)) == ["refused"]
    assert kinds(ask(pool, OTHER, hops=way)) == ["auth"]
    (dead,) = ask(pool, DEAD, hops=way)
    assert dead.outcome.kind in ("timeout", "refused")  # depends on when the bastion gives up


@pytest.mark.parametrize("number", [2, OUTER])
def test_changed_key_behind_or_of_a_bastion_stops_before_it_knows_who_we_are(
    pool: Fleet, number: int
) -> None:
    kept = pool.run(number, "cat", _KEY)
    pool.change_key(number)
    before = pool.log(number)
    try:
        answers = ask(pool, 2, 3, hops=(hop(pool, OUTER),))
    finally:
        logged = pool.log(number).removeprefix(before)
        pool.restore_key(number, kept)
    assert kinds(answers) == (["bastion"] * 2 if number == OUTER else ["host key", "ok"])
    assert "SHA256:" in answers[0].outcome.detail
    assert "Connection from" in logged and "userauth-request" not in logged
    assert kinds(ask(pool, 2, 3, hops=(hop(pool, OUTER),))) == ["ok"] * 2


def test_a_bastion_that_is_wrong_is_not_its_hosts_fault(pool: Fleet) -> None:
    for wrong in ({"port": 2222}, {"user": "nobody"}):
        answers = ask(pool, 2, 3, hops=(hop(pool, OUTER, **wrong),))
        assert kinds(answers) == ["bastion"] * 2
        assert pool.hosts[OUTER].address in answers[0].outcome.detail
    unpinned = Hop(address="198.19.0.9")
    assert "no key is pinned" in ask(pool, 2, hops=(unpinned,))[0].outcome.detail


def test_a_bastion_that_forwards_nothing_is_the_fault(pool: Fleet) -> None:
    pool.configure(OUTER, "AllowTcpForwarding no")
    try:
        assert kinds(ask(pool, 2, hops=(hop(pool, OUTER),))) == ["bastion"]
    finally:
        pool.configure(OUTER)


def test_connections_break_with_their_bastion_and_a_new_one_is_made(pool: Fleet) -> None:
    host = pool.hosts[2].model_copy(update={"hops": (hop(pool, OUTER),)})
    with Reach(pool.access()) as reach:
        future = reach.submit(host, ["sh", "-c", "touch /tmp/begun; sleep 600"], seconds=_LONG)
        wait(lambda: "begun" in pool.run(2, "ls", "/tmp"))
        pool.run(OUTER, "pkill", "-f", "^sshd-session: ")
        assert future.result().outcome.kind == "bastion", future.result()
        assert reach.submit(host, ["true"], seconds=_LONG).result().outcome.ok


def test_a_slice_tells_a_bastions_fault_from_a_hosts(pool: Fleet, tmp_path: Path) -> None:
    """OpenSSH's messages decide; a host behind a faulty bastion was certainly not told to join."""

    def ends(number: int, words: str, **bastion: Any) -> tuple[str, str]:
        host = pool.hosts[number].model_copy(update={"hops": (hop(pool, OUTER, **bastion),)})
        slice_ = Slice((Work(host, 1, 0.0),), pool.access(), 60.0)
        statuses: list[JoinStatus] = []
        process = Process(slice_, tmp_path / "slice", Settings().python)
        process.run(lambda _, status: statuses.append(status))
        (status,) = statuses
        assert words in status.outcome.detail
        return status.outcome.kind, status.joined

    assert ends(2, "Permission denied", user="nobody") == ("bastion", "no")
    assert ends(2, "Connection refused", port=2222) == ("bastion", "no")
    assert ends(REFUSED, "Connection closed") == ("refused", "no")
    key = pool.run(OUTER, "cat", _KEY)
    pool.change_key(OUTER)
    before = pool.log(OUTER)
    try:
        assert ends(2, "Host key verification failed") == ("bastion", "no")
        assert "userauth-request" not in pool.log(OUTER).removeprefix(before)
    finally:
        pool.restore_key(OUTER, key)


def test_one_machine_is_verified_through_bastions(minimal: Workplace, pool: Fleet, tmp_path: Path) -> None:
    """Use ``image-builder verify`` as the inventory says; its known-hosts file lists each machine under its address."""
    be_quick(pool, (LAST,))
    known, before = tmp_path / "known_hosts", pool.log(OUTER).count(ACCEPTED)
    numbers = (OUTER, INNER, LAST)
    lines = (f"{pool.hosts[n].address} {(pool.folder / f'host-{n}.pub').read_text()}" for n in numbers)
    known.write_text("".join(lines))
    jump = f"-J {pool.hosts[OUTER].address},{USER}@{pool.hosts[INNER].address}"
    login = {"ansible_user": USER, "ansible_private_key_file": str(pool.key), "ansible_ssh_common_args": jump}
    write_plan(pool, tmp_path, (LAST,), POLICY, {LAST: login})
    url = f"ssh://host-{LAST}?known_hosts={known}"
    paths = ("-i", tmp_path / "hosts.json", "--facts", minimal.artefact / "facts.json", "-o", tmp_path)
    argv = [sys.executable, "-m", "image_builder.cli", "verify", url, *map(str, paths), "--json"]
    done = subprocess.run(argv, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    passed = {check["name"] for check in json.loads(done.stdout)["checks"] if check["outcome"] == "passed"}
    assert len(passed) > 80, done.stdout
    assert pool.log(OUTER).count(ACCEPTED) == before + 1


def through(pool: Fleet) -> dict[int, dict[str, Any]]:
    """Return the hosts' variables, as in an inventory: the login user, the key, and the route."""
    address = pool.hosts[OUTER].address
    command = f"ssh -W %h:%p -q -i {shlex.quote(str(pool.key))} {USER}@{address}"
    return {
        2: {"ansible_ssh_common_args": f"-J {USER}@{address}"},
        3: {"ansible_ssh_extra_args": f"-o ProxyJump={USER}@{address}"},
        OTHER: {
            "ansible_ssh_common_args": f"-o ProxyCommand={shlex.quote(command)}",
            "ansible_user": "other",
        },
    }


def plan(pool: Fleet, folder: Path, **policy: Any) -> Rollout:
    """Plan a rollout of the hosts behind the bastion, reset to a fresh state."""
    login = {"ansible_user": USER, "ansible_become": True, "ansible_ssh_private_key_file": str(pool.key)}
    # Each has a size of its own, so all are canaries: one wave, and one slice.
    variables = {n: {"pool_vm_size": f"D{n}", **login, **way} for n, way in through(pool).items()}
    return make(pool, folder, BEHIND, policy=policy, sound=BEHIND, variables=variables)


_INVENTORY: dict[str, Any] = {"user": "", "key": ""}  # from the command line


def test_a_rollout_goes_through_the_bastion_as_the_inventory_says(pool: Fleet, tmp_path: Path) -> None:
    """As two users, with sudo: probed and verified over one connection to the bastion, told over one of the slice's."""
    run = plan(pool, tmp_path, verify="100%")
    before = [pool.log(number).count(ACCEPTED) for number in (OUTER, INNER)]
    report = run.finish(**_INVENTORY)
    assert outcomes(report) == dict.fromkeys(BEHIND, "ok"), report["results"]
    assert run.joins() == dict.fromkeys(BEHIND, 1)
    assert [pool.log(n).count(ACCEPTED) - b for n, b in zip((OUTER, INNER), before, strict=True)] == [2, 0]
    assert f"{ACCEPTED} other" in pool.log(OTHER)
    assert here(pool) == [] and run.left() == []
    verified = run.finish(**_INVENTORY, verify=True)
    assert outcomes(verified) == dict.fromkeys(BEHIND, "ok")
    # The command line overrides the inventory.
    verified = run.finish(**(_INVENTORY | {"user": USER}), verify=True)
    assert outcomes(verified) == {2: "ok", 3: "ok", OTHER: "auth"}


def outcomes(report: Mapping[str, Any]) -> dict[int, str]:
    named = report["results"].items()
    return {int(name.rpartition("-")[2]): signature(result["outcome"]) for name, result in named}
