"""The real fleet, as far as no host is needed: a host's answer, or its name, ends only that host."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from image_builder.pool.plan.model import Host
from image_builder.pool.plan.policy import Deadlines
from image_builder.pool.reach.hostkeys import CertificateAuthority
from image_builder.pool.reach.reach import Access
from image_builder.pool.run.driver import Event, Work
from image_builder.pool.run.records import RECORD, Opened
from image_builder.pool.steps.control_plane import Unwatched
from image_builder.pool.steps.fleet import Fleet, Setup
from image_builder.pool.steps.suite import Suite


def host(address: str = "192.0.2.1") -> Host:
    return Host(name="host-1", address=address, pool="p", scale_set="s", vm_size="z", image="i")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "ca").write_text(f"@cert-authority * {public}\n")
    access = Access(CertificateAuthority(tmp_path / "ca"), "admin", tmp_path / "key")
    suite = Suite({"i": tmp_path / "facts.json"}, tmp_path / "reports", tmp_path / "python")
    return Setup(access, Deadlines(), tmp_path / "python", Unwatched(), suite)


def only(fleet: Fleet) -> Event:
    """Return the one event that comes within a short time."""
    events: list[Event] = []
    while not events:
        events += fleet.wait(fleet.now() + 10)
    (event,) = events
    return event


@pytest.mark.parametrize("step", ["probe", "verify"])
@pytest.mark.parametrize("address", ["gpu..example", "g" * 70])
def test_a_name_that_nothing_can_have_is_not_there(
    setup: Setup, tmp_path: Path, address: str, step: str
) -> None:
    """An exception that isn't turned into its host's outcome would end the whole rollout."""
    with Fleet(setup, tmp_path / "work") as fleet:
        getattr(fleet, step)([Work(host(address), 1)])
        assert only(fleet).outcome.kind == "timeout"


def test_a_clock_that_is_set_meanwhile_changes_no_deadline(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(setup, tmp_path / "work") as fleet:
        began, day, real = fleet.now(), 86400.0, time.time
        assert abs(began - real()) < 1
        for off in (day, -day):
            monkeypatch.setattr(time, "time", lambda off=off: real() + off)
            assert 0 <= fleet.now() - began < day / 2


def test_a_suite_knows_the_build_that_hosts_of_an_image_must_be_of(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"image": "i", "build_id": "ab12"}')
    assert setup.suite and setup.suite.builds == {"i": "ab12"}
    opened = Opened(at=1.0, plan="p", builds=setup.suite.builds)
    assert RECORD.validate_json(opened.model_dump_json()) == opened
    assert RECORD.validate_json('{"kind": "opened", "at": 1.0, "plan": "p"}') == Opened(at=1.0, plan="p")
