"""The real fleet, in what needs no host: what one host answers, or is called, ends that host alone."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from image_builder.pool.control_plane import Unwatched
from image_builder.pool.driver import Event, Work
from image_builder.pool.fleet import Fleet, Means
from image_builder.pool.hostkeys import CertificateAuthority
from image_builder.pool.model import OK, Host
from image_builder.pool.policy import Deadlines
from image_builder.pool.reach import Access, Answer, Reach


def host(address: str = "192.0.2.1") -> Host:
    return Host(name="host-1", address=address, pool="p", scale_set="s", vm_size="z", image="i")


@pytest.fixture
def means(tmp_path: Path) -> Means:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "ca").write_text(f"@cert-authority * {public}\n")
    access = Access("admin", tmp_path / "key", CertificateAuthority(tmp_path / "ca"))
    return Means(access, Deadlines(), tmp_path / "work", tmp_path / "python", Unwatched())


def only(fleet: Fleet) -> Event:
    """Return the one event that there is soon."""
    found: list[Event] = []
    while not found:
        found += fleet.wait(fleet.now() + 10)
    (event,) = found
    return event


@pytest.mark.parametrize("shown", [b"garbage\n", b"ssh-ed25519 AAAA root@host-1\n", b"\xff \xff \xff\n"])
def test_public_keys_that_are_none_are_that_hosts_failure(
    means: Means, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Future[Answer] = Future()
    answer.set_result(Answer(OK, 0, shown, b"", 0.1))
    monkeypatch.setattr(Reach, "submit", lambda *_, **__: answer)
    with Fleet(means) as fleet:
        fleet.verify([Work(host(), 1)])
        outcome = only(fleet).outcome
    assert (outcome.kind, outcome.phase) == ("failed", "verify")
    assert "its public keys" in outcome.detail


@pytest.mark.parametrize("address", ["gpu..example", "g" * 70])
def test_a_name_that_nothing_can_have_is_not_there(means: Means, address: str) -> None:
    with Fleet(means) as fleet:
        fleet.probe([Work(host(address), 1)])
        assert only(fleet).outcome.kind == "timeout"


def test_a_clock_that_is_set_meanwhile_changes_no_deadline(
    means: Means, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(means) as fleet:
        began, day, real = fleet.now(), 86400.0, time.time
        assert abs(began - real()) < 1
        for off in (day, -day):
            monkeypatch.setattr(time, "time", lambda off=off: real() + off)
            assert 0 <= fleet.now() - began < day / 2
