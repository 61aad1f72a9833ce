"""The verification suite on the hosts of a pool: one run for each host, as many at once as there are cores.

A run is that of ``image-builder verify ssh://…``. It gets a known_hosts file with the keys of its host alone, as the
probe found them to be right: the suite's paramiko checks no certificates.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from image_builder.errors import ImageBuilderError
from image_builder.pool.hostkeys import known_as, parse
from image_builder.pool.model import OK, Host, Outcome, failed
from image_builder.pool.reach import Access
from image_builder.report.verification import SuiteResult
from image_builder.stages.verify import SUITE, observe_suite
from image_builder.store import remove_tree
from image_builder.target.ssh import SshAddress

# What failed in `verify`.
CHECKS, NO_RESULT = 1, 2
_NAMED = 5
# Where sshd keeps the public halves of its keys, in images of ours as in Debian.
READ_KEYS = ("sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub")


@dataclass(frozen=True)
class Suite:
    """What hosts are held to. ``facts`` are facts.json by image, ``reports`` gets a directory for each host."""

    facts: Mapping[str, Path]
    reports: Path
    python: Path
    folder: Path = SUITE

    def run(self, host: Host, access: Access, keys: str, seconds: float) -> Outcome:
        """Run it on one host, whose public keys are ``keys`` (lines of known_hosts); ``seconds`` is for all of it."""
        reports = self.reports / host.name
        try:
            reports.mkdir(parents=True, exist_ok=True)
            known = reports / "known_hosts"
            known.write_text(keys, encoding="ascii")
            address = SshAddress(access.user, host.address, host.port, access.key, known)
            result = observe_suite(
                address.url,
                self.facts[host.image],
                reports,
                marker="booted",
                python=self.python,
                log=reports / "suite.log",
                suite=self.folder,
                timeout=seconds,
            )
        except (ImageBuilderError, OSError) as error:
            return failed("verify", NO_RESULT, str(error))
        if not result.not_passed:
            remove_tree(reports)  # of thousands that are fine nobody reads a report
        return judge(result)


def judge(result: SuiteResult) -> Outcome:
    """Return the outcome of a run: `failed` names the checks."""
    names = [check.name for check in result.not_passed]
    if not names and result.checks:
        return OK
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return failed("verify", CHECKS, f"{', '.join(names[:_NAMED])}{more}" if names else "no check ran")


def known_lines(host: Host, text: str) -> str:
    """Return a host's own lines of a known_hosts file, under the address that it is connected to."""
    name = known_as(host)
    where = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
    return "".join(
        f"{where} {entry.kind} {base64.b64encode(entry.blob).decode()}\n"
        for entry in parse(text, "known_hosts")
        if not entry.marker and name in entry.names
    )


def own_lines(host: Host, shown: str) -> str:
    """Return the same from what a host showed over a connection that was proven: its public key files."""
    lines = [
        f"{known_as(host)} {' '.join(line.split()[:2])}\n" for line in shown.splitlines() if line.strip()
    ]
    return known_lines(host, "".join(lines))
