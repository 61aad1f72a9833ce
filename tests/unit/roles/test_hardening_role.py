"""The role hardening: what it makes of sshd's settings, and how they are checked before sshd reads them."""

from __future__ import annotations

import pytest

from tests.support.roles import templates


def test_unquoted_words_are_sshds() -> None:
    """YAML reads an unquoted `no` as a boolean, and sshd refuses to start with `False`."""
    settings = {"AllowTcpForwarding": False, "PermitTTY": True, "Port": 22, "UseDNS": "no"}
    text = templates.render("hardening", "sshd.conf.j2", hardening_sshd={}, hardening_sshd_extra=settings)
    assert text.splitlines()[1:] == ["AllowTcpForwarding no", "PermitTTY yes", "Port 22", "UseDNS no"]


@pytest.mark.parametrize(
    ("suite", "booted", "command"),
    [
        ("bookworm", False, ""),  # an image has no host keys, without which this sshd checks nothing
        ("bookworm", True, "/usr/sbin/sshd -t -f %s"),
        ("trixie", False, "/usr/sbin/sshd -G -f %s"),
        ("trixie", True, "/usr/sbin/sshd -G -f %s"),
    ],
)
def test_settings_are_checked(suite: str, booted: bool, command: str) -> None:
    target = {"target_suite": suite, "target_booted": booted}
    assert templates.value("hardening", "__hardening_sshd_validate", **target) == command
