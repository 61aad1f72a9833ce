"""Questions that more than one check has: a target answers them once, and all of a kind at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from alike import alike
from kept import files, once, output_once
from suite import assignments, output
from testinfra.host import Host

# What checks ask systemd to merge. One that is not here is a question of its own.
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
# Units of which it is asked whether they may start, beside others.
UNITS = (
    "apt-daily.service",
    "apt-daily.timer",
    "apt-daily-upgrade.service",
    "apt-daily-upgrade.timer",
    "swap.target",
    "unattended-upgrades.service",
)
# Programs of which it is asked whether they are there, beside others.
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
# Where systemd looks for configuration.
_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib")
# What dpkg and apt know of the packages that are there, and which files dpkg has of each, and how large: a changed list
# of files that is as long as it was is not seen. Some of it need not be there.
PACKAGES = (
    "{ cd /var/lib/dpkg && cat status arch updates/* triggers/*; "
    "stat --format='%n %s' info/* updates/*; } 2>/dev/null"
)
# The rules of a table of the kernel's, with how often each was met.
RULES = "iptables --wait --table mangle --list-rules --verbose"
# The line before a file's text, and what it names: the file, or one of its drop-ins.
_PART = re.compile(r"# (?:/etc|/run|/usr/local/lib|/usr/lib|/lib)/((systemd/\S+?)(?:\.d/[^/\s]+)?)")
_UNMERGED = ("bin", "sbin", "lib", "lib32", "lib64")


class Package(NamedTuple):
    """``state`` as dpkg abbreviates it: what is wanted (h: to be held), and what is (i: installed)."""

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
    """Return dpkg's view of each package that it knows, by name."""
    return once(host, packages, lambda: _packages(host))


def _packages(host: Host) -> dict[str, Package]:
    form = r"'${Package}\t${db:Status-Abbrev}\t${Version}\t${Depends}\n'"
    return alike(host, f"dpkg-query --show --showformat={form}", _table, PACKAGES)


def _table(printed: bytes) -> dict[str, Package]:
    lines = (line.split("\t") for line in printed.decode().splitlines())
    return {name: Package(state.strip(), version, depends) for name, state, version, depends in lines}


def owned_files(host: Host) -> frozenset[str]:
    """Return each path of a package, as it is on a system with merged /usr."""
    # That each package has its list is dpkg's audit to say.
    return once(host, owned_files, lambda: alike(host, "cat /var/lib/dpkg/info/*.list", _paths, PACKAGES))


def _paths(listed: bytes) -> frozenset[str]:
    return frozenset(with_merged_usr(os.fsdecode(listed)).splitlines())


def with_merged_usr(paths: str) -> str:
    """Return paths, each on a line, as they are on a system with merged /usr."""
    lines = f"\n{paths}"
    for folder in _UNMERGED:
        lines = lines.replace(f"\n/{folder}/", f"\n/usr/{folder}/")
    return lines[1:]


def diversions(host: Host) -> list[tuple[str, str, str]]:
    """Return each path that dpkg diverts, where to, and for which package; ``:`` is by hand."""
    lines = files(host).get("/var/lib/dpkg/diversions", "").splitlines()
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


def mounted(host: Host, path: str) -> dict[str, Any]:
    """Return what is mounted at a path, as findmnt has it; a check fails where nothing is."""
    columns = "TARGET,SOURCE,FSTYPE,OPTIONS,SIZE,PARTUUID"
    table = json.loads(output_once(host, f"findmnt --json --list --bytes --output {columns}"))
    # The last mount at a place hides those before.
    found: dict[str, Any] = {mount["target"]: mount for mount in table["filesystems"]}
    assert path in found, f"nothing is mounted at {path}"
    entry: dict[str, Any] = found[path]
    return entry


def services(host: Host) -> dict[str, dict[str, str]]:
    """Return some properties of each service that a running systemd has loaded, by its name."""
    command = "systemctl show --property=Id,ActiveState,MainPID,NRestarts '*.service'"
    blocks = map(assignments, output_once(host, command).split("\n\n"))
    return {block["Id"]: block for block in blocks if block}


def unit_states(host: Host, units: Collection[str]) -> dict[str, str]:
    """Return how each unit is enabled, as ``systemctl is-enabled`` has it; nothing for one that it doesn't know."""
    known = once(host, unit_states, dict[str, str])
    if not known.keys() >= set(units):
        new = [unit for unit in {**dict.fromkeys(units), **dict.fromkeys(UNITS)} if unit not in known]
        words = host.run(f"systemctl is-enabled {' '.join(new)}").stdout.splitlines()
        if len(words) != len(new):
            # Older versions of systemd tell no more once they meet a unit that isn't there.
            words = [host.run("systemctl is-enabled %s", unit).stdout.strip() for unit in new]
        known.update(zip(new, words, strict=True))
    return {unit: known[unit] for unit in units}


def programs(host: Host, names: Collection[str]) -> set[str]:
    """Return those of the names by which a shell of root's finds a program."""
    known = once(host, programs, dict[str, bool])
    if not known.keys() >= set(names):
        asked = {*names, *PROGRAMS} - known.keys()
        script = f"for p in {' '.join(sorted(asked))}; do command -v $p >/dev/null && echo $p; done; true"
        found = output(host, script).split()
        known.update({name: name in found for name in asked})
    return {name for name in names if known[name]}


def apt_settings(host: Host) -> list[str]:
    """Return all settings of apt's, a line each."""
    # Which architectures there are is one of them. Of a file that one of these includes nothing is known.
    reads = _printing("/etc/apt/apt.conf", "/etc/apt/apt.conf.d/*", "/var/lib/dpkg/arch")
    return alike(host, "apt-config dump", lambda printed: _text(printed).splitlines(), reads)


def boot_sysctls(host: Host) -> dict[str, str]:
    """Return the kernel settings that systemd makes at boot, by name with dots: the last of each."""
    reads = _printing("/etc/sysctl.conf", *(f"{folder}/sysctl.d/*" for folder in _FOLDERS))
    command = "/usr/lib/systemd/systemd-sysctl --cat-config"
    return once(host, command, lambda: alike(host, command, lambda printed: _sysctls(_text(printed)), reads))


def live_sysctls(host: Host, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the running kernel's settings, of those that are declared."""
    names = [*variables["__system_sysctl"], *variables.get("hardening_sysctl", ())]
    lines = once(host, live_sysctls, lambda: host.run(f"sysctl --ignore {' '.join(names)}").stdout)
    return _sysctls(lines)


def _sysctls(lines: str) -> dict[str, str]:
    found = assignments(lines).items()
    return {name.lstrip("-").replace("/", "."): " ".join(value.split()) for name, value in found}


def merged(host: Host, name: str) -> str:
    """Return a configuration of systemd's with its drop-ins, merged by systemd; no text where there is none."""
    names = CONFIGURATIONS if name in CONFIGURATIONS else (name,)
    reads = _printing(
        *(f"{folder}/{each}{files}" for each in names for folder in _FOLDERS for files in ("", ".d/*"))
    )
    command = f"systemd-analyze cat-config {' '.join(names)}"
    texts = once(
        host, names, lambda: alike(host, command, lambda printed: texts_of(_text(printed), names), reads)
    )
    return texts[name]


def _printing(*paths: str) -> str:
    """Return the command that prints files with their names, empty ones too: such a file hides another folder's."""
    # A pipe would be waited for.
    those = f'set --; for f in {" ".join(paths)}; do [ -p "$f" ] || set -- "$@" "$f"; done'
    return f'{those}; tail --verbose --lines=+1 -- "$@" 2>/dev/null'


def _text(printed: bytes) -> str:
    return printed.decode(errors="replace")


def texts_of(printed: str, names: Iterable[str]) -> dict[str, str]:
    """Split what ``systemd-analyze cat-config`` prints for some names into the text of each."""
    texts: dict[str, list[str]] = {name: [] for name in names}
    current: list[str] = []
    for line in printed.splitlines():
        part = _PART.fullmatch(line)
        for path in part.groups() if part else ():
            current = texts.get(path, current)
        current.append(line)
    return {name: "\n".join(lines) for name, lines in texts.items()}
