"""The role's effect on the sandbox that it was applied to: none."""

from __future__ import annotations

from testinfra.host import Host


def test_nothing_was_changed(host: Host) -> None:
    since = "/usr/sbin/policy-rc.d"  # the last that was written before the role ran
    assert host.check_output(f"find /etc /opt /usr/bin /usr/sbin /usr/lib /usr/local -newer {since}") == ""
