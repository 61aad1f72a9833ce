"""Faults in the middle of a rollout, on hosts that were sound until then.

told       the network vanishes while the host is being told to join
joining    it vanishes once the host has been told
verified   it vanishes while the host is being verified
sudo       sudo answered the probe, and hangs from then on
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Literal

from tests.support.pools.fleet import Fleet
from tests.support.pools.rollouts import Rollout, wait

Moment = Literal["told", "joining", "verified", "sudo"]
# The file that exists on a host once its moment has come.
_MARKS: dict[Moment, str] = {
    "told": "/run/being-told",
    "joining": "/var/joins",
    "verified": "/run/being-verified",
}
# What makes the moment last.
_SETSID = "/usr/local/sbin/setsid"
_PREPARED: dict[Moment, str] = {
    "told": f"""printf '#!/bin/sh
: >/run/being-told; sleep 4; exec /usr/bin/setsid "$@"
' >{_SETSID}; chmod 755 {_SETSID}""",
    "joining": "echo seconds=4 >/etc/stand-in",
    "verified": ": >/etc/held",
}


def prepare(pool: Fleet, moments: Mapping[int, Moment]) -> None:
    """Prepare hosts for their moments, once a rollout over them is planned."""
    for number, moment in moments.items():
        if moment == "sudo":
            pool.hang_sudo(number, answers=True)
        else:
            pool.run(number, "sh", "-ec", f"rm -f {_MARKS[moment]}; {_PREPARED[moment]}")


def cut(rollout: Rollout, moments: Mapping[int, Moment], child: subprocess.Popen[str]) -> None:
    """Cut hosts off when their moments have come."""
    marks = {number: _MARKS[moment] for number, moment in moments.items() if moment != "sudo"}

    def cut_what_is_due() -> bool:
        assert child.poll() is None, "it ended too soon"
        for number, mark in list(marks.items()):
            if rollout.pool.run(number, "sh", "-c", 'test ! -e "$0" || echo there', mark):
                rollout.pool.cut(number)
                del marks[number]
        return not marks

    wait(cut_what_is_due)


def undo(pool: Fleet, moments: Mapping[int, Moment]) -> None:
    """Make hosts sound again; commands that wait for sudo get their answer."""
    for number, moment in moments.items():
        if moment == "sudo":
            pool.free_sudo(number)
        else:
            pool.mend(number)
            pool.run(number, "rm", "-f", _SETSID, "/etc/held")
