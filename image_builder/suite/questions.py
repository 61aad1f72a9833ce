"""Queries that several checks share: a target answers each one once, and all of a kind together."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from answers import files, once, output_once, succeeded
from suite import assignments, output
from testinfra.host import Host

# Configurations that checks ask systemd to merge. One that isn't listed here takes a query of its own.
CONFIGURATIONS = (
    "systemd/journald.conf",
    "systemd/network/90-dhcp.network",
    "systemd/networkd.conf",
    "systemd/resolved.conf",
    "systemd/system/azure-pod-guard.service",
    "systemd/system/containerd.service",
    "systemd/system/cri-docker.service",
    "systemd/system/docker.service",
    "systemd/system/docker.socket",
    "systemd/system/kubelet.service",
    "systemd/system/network-accounting.service",
    "systemd/system/ssh-host-keys.service",
)
# Units whose enablement is queried together with any others.
UNITS = (
    "apt-daily.service",
    "apt-daily.timer",
    "apt-daily-upgrade.service",
    "apt-daily-upgrade.timer",
    "swap.target",
    "unattended-upgrades.service",
)
# Programs that are looked up together with any others.
PROGRAMS = (
    "cc",
    "clang",
    "dpkg-buildpackage",
    "g++",
    "gcc",
    "go",
    "growpart",
    "ld",
    "make",
    "resize2fs",
    "rustc",
)
# Lists the rules of the kernel's mangle table, with each rule's packet counters.
RULES = "iptables --wait --table mangle --list-rules --verbose"
# The line before a file's text, which names the file or one of its drop-ins.
_PART = re.compile(r"# (?:/etc|/run|/usr/local/lib|/usr/lib|/lib)/((systemd/\S+?)(?:\.d/[^/\s]+)?)")
_UNMERGED = ("bin", "sbin", "lib", "lib32", "lib64")


class Package(NamedTuple):
    """A package; ``state`` is dpkg's abbreviation: the desired state (h: hold), then the actual one (i: installed)."""

    state: str
    version: str
    depends: str

    @property
    def installed(self) -> bool:
        return self.state[1:] == "i"

    @property
    def held(self) -> bool:
        return self.state[:1] == "h"


def packages(host: Host) -> dict[str, Package]:
    """Return dpkg's view of every package it knows, by name."""
    return once(host, packages, lambda: _packages(host))


def _packages(host: Host) -> dict[str, Package]:
    form = r"'${Package}\t${db:Status-Abbrev}\t${Version}\t${Depends}\n'"
    return _table(output(host, f"dpkg-query --show --showformat={form}"))


def _table(printed: str) -> dict[str, Package]:
    lines = (line.split("\t") for line in printed.splitlines())
    return {name: Package(state.strip(), version, depends) for name, state, version, depends in lines}


def owned_files(host: Host) -> frozenset[str]:
    """Return every path that a package owns, as it is on a system with merged /usr."""
    return once(host, owned_files, lambda: _owned_files(host))


def _owned_files(host: Host) -> frozenset[str]:
    # Whether each package has its list is left to dpkg's audit.
    command = "cat /var/lib/dpkg/info/*.list"
    listed = succeeded(command, host.run(command)).stdout_bytes
    return frozenset(with_merged_usr(os.fsdecode(listed)).splitlines())


def with_merged_usr(paths: str) -> str:
    """Return paths, one per line, as they are on a system with merged /usr."""
    lines = f"\n{paths}"
    for folder in _UNMERGED:
        lines = lines.replace(f"\n/{folder}/", f"\n/usr/{folder}/")
    return lines[1:]


def diversions(host: Host) -> list[tuple[str, str, str]]:
    """Return each path that dpkg diverts, its new place and the diverting package; ``:`` means diverted by hand."""
    lines = files(host).get("/var/lib/dpkg/diversions", "").splitlines()
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


def mounted(host: Host, path: str) -> dict[str, Any]:
    """Return findmnt's entry for what is mounted at a path; fail the check if nothing is."""
    return once(host, (mounted, path), lambda: _mounted(host, path))


def _mounted(host: Host, path: str) -> dict[str, Any]:
    # Only of this path: another mount's size may be that of a server that no longer answers.
    columns = "TARGET,SOURCE,FSTYPE,OPTIONS,SIZE,PARTUUID"
    done = host.run(f"findmnt --json --list --bytes --output {columns} --mountpoint %s", path)
    assert done.rc == 0, f"nothing is mounted at {path} {done.stderr.strip()}".rstrip()
    # The last mount at a path hides the earlier ones.
    entry: dict[str, Any] = json.loads(done.stdout)["filesystems"][-1]
    return entry


def services(host: Host) -> dict[str, dict[str, str]]:
    """Return some properties of each service that the running systemd has loaded, by name."""
    command = "systemctl show --property=Id,Type,ActiveState,MainPID,NRestarts '*.service'"
    blocks = map(assignments, output_once(host, command).split("\n\n"))
    return {block["Id"]: block for block in blocks if block}


def unit_states(host: Host, units: Collection[str]) -> dict[str, str]:
    """Return each unit's state as ``systemctl is-enabled`` prints it, empty if systemd doesn't know the unit."""
    states = once(host, unit_states, dict[str, str])
    if not states.keys() >= set(units):
        new = [unit for unit in {**dict.fromkeys(units), **dict.fromkeys(UNITS)} if unit not in states]
        lines = host.run(f"systemctl is-enabled {' '.join(new)}").stdout.splitlines()
        if len(lines) != len(new):
            # Older versions of systemd print nothing more once they meet a unit that doesn't exist.
            lines = [host.run("systemctl is-enabled %s", unit).stdout.strip() for unit in new]
        states.update(zip(new, lines, strict=True))
    return {unit: states[unit] for unit in units}


def programs(host: Host, names: Collection[str]) -> set[str]:
    """Return those of the names under which root's shell finds a program."""
    installed = once(host, programs, dict[str, bool])
    if not installed.keys() >= set(names):
        new = {*names, *PROGRAMS} - installed.keys()
        script = f"for p in {' '.join(sorted(new))}; do command -v $p >/dev/null && echo $p; done; true"
        printed = output(host, script).split()
        installed.update({name: name in printed for name in new})
    return {name for name in names if installed[name]}


def apt_settings(host: Host) -> list[str]:
    """Return all of apt's settings, one line each."""
    return output_once(host, "apt-config dump").splitlines()


def boot_sysctls(host: Host) -> dict[str, str]:
    """Return the kernel settings that systemd applies at boot, by dotted name; the last one of a name wins."""
    return _sysctls(output_once(host, "/usr/lib/systemd/systemd-sysctl --cat-config"))


def live_sysctls(host: Host, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the running kernel's values of the declared settings."""
    names = [*variables["__system_sysctl"], *variables.get("hardening_sysctl", ())]
    lines = once(host, live_sysctls, lambda: host.run(f"sysctl --ignore {' '.join(names)}").stdout)
    return _sysctls(lines)


def _sysctls(lines: str) -> dict[str, str]:
    settings = assignments(lines).items()
    return {name.lstrip("-").replace("/", "."): " ".join(value.split()) for name, value in settings}


def merged(host: Host, name: str) -> str:
    """Return a systemd configuration with its drop-ins, merged by systemd; empty if there is none."""
    names = CONFIGURATIONS if name in CONFIGURATIONS else (name,)
    printed = output_once(host, f"systemd-analyze cat-config {' '.join(names)}")
    return once(host, names, lambda: texts_of(printed, names))[name]


def texts_of(printed: str, names: Iterable[str]) -> dict[str, str]:
    """Split the output of ``systemd-analyze cat-config`` for several names into the text of each."""
    texts: dict[str, list[str]] = {name: [] for name in names}
    current: list[str] = []
    for line in printed.splitlines():
        part = _PART.fullmatch(line)
        for path in part.groups() if part else ():
            current = texts.get(path, current)
        current.append(line)
    return {name: "\n".join(lines) for name, lines in texts.items()}
