"""What is installed is what was locked, whole, and stays so."""

from __future__ import annotations

import re
from typing import Any

from suite import Facts, Tree, booted, nothing, offline, output
from testinfra.host import Host

V = dict[str, Any]


def _status(host: Host) -> dict[str, tuple[str, str]]:
    """Return dpkg's view: name to (status letters, version)."""
    lines = output(
        host, r"dpkg-query --show --showformat='${Package}\t${db:Status-Abbrev}\t${Version}\n'"
    ).splitlines()
    return {name: (state.strip(), version) for name, state, version in (line.split("\t") for line in lines)}


@offline
@booted
def test_packages_are_installed_whole(host: Host) -> None:
    """No package is half installed, removed but configured, or waits for a trigger."""
    nothing(f"{name} is {state}" for name, (state, _) in _status(host).items() if state not in ("ii", "hi"))


@offline
@booted
def test_dependencies_are_met(host: Host) -> None:
    """apt finds no package that lacks another one."""
    output(
        host, "apt-get check -q -o Debug::NoLocking=true -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache="
    )


@offline
@booted
def test_dpkg_has_no_unfinished_work(host: Host) -> None:
    """dpkg's own audit finds nothing, and its journal is empty."""
    assert output(host, "dpkg --audit") == ""
    assert output(host, "ls -A /var/lib/dpkg/updates") == ""


@offline
@booted
def test_roles_packages_are_installed(host: Host, v: V) -> None:
    """Every package that a role of the image names is there."""
    wanted = {
        re.sub(r"[=:].*", "", package)
        for name, value in v.items()
        if re.fullmatch(r"__\w+_packages", name) and isinstance(value, list)
        for package in value
    }
    assert wanted, "no role names a package"
    installed = {name for name, (state, _) in _status(host).items() if state[1] == "i"}
    nothing(sorted(wanted - installed))


@offline
@booted
def test_packages_are_the_listed_ones(host: Host, facts: Facts) -> None:
    """Installed are exactly the packages and versions that the lock has for this image."""
    listed = {package["name"].partition(":")[0]: package["version"] for package in facts.packages}
    installed = {name: version for name, (_, version) in _status(host).items()}
    assert listed, "the lock has no packages"
    nothing(
        f"{name} is {installed.get(name, 'missing')}, locked {listed.get(name, 'not at all')}"
        for name in sorted(set(listed) | set(installed))
        if listed.get(name) != installed.get(name)
    )


@offline
def test_packages_files_are_unchanged(host: Host) -> None:
    """Every file of a package has the bytes that were shipped, configuration files excepted."""
    # A line is "??5??????   /path" or "missing     /path"; "c" stands before a configuration file's path.
    found = [line.split(maxsplit=1) for line in host.run("dpkg --verify").stdout.splitlines()]
    damaged = [f"{what} {path}" for what, path in found if not path.startswith("c ")]
    # dpkg's path filters may leave documentation and translations out.
    documents = re.compile(r"missing /usr/share/(doc|man|locale|info|lintian|linda)/.*")
    nothing(line for line in damaged if not documents.fullmatch(line))


@offline
@booted
def test_sources_are_signed(host: Host) -> None:
    """Every apt source names the key that signs it, and apt trusts none without one."""
    # `|| true`: a folder without any such file is fine, cat's status about it tells nothing.
    stanzas = output(host, "cat /etc/apt/sources.list.d/*.sources /dev/null 2>/dev/null || true").split(
        "\n\n"
    )
    types = [s for s in stanzas if re.search(r"^Types:", s, re.MULTILINE)]
    nothing(re.sub(r"\s+", " ", s)[:80] for s in types if not re.search(r"^Signed-By:", s, re.MULTILINE))
    lines = output(  # `|| true` as above
        host, "cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true"
    ).splitlines()
    nothing(line for line in lines if line.startswith("deb") and "signed-by=" not in line)


@offline
@booted
def test_no_key_is_trusted_for_everything(tree: Tree, host: Host) -> None:
    """No key but the distribution's own vouches for any source that likes to use it."""
    keys = [e.path for e in tree.under("/etc/apt/trusted.gpg.d") if e.kind == "f"] + tree.matching(
        "/etc/apt/trusted\\.gpg"
    )
    nothing(path for path in keys if host.run("dpkg-query --search %s", path).rc != 0)


@offline
@booted
def test_apt_uses_no_builders_settings(host: Host) -> None:
    """apt has no proxy, trusts nothing unsigned, and no option of the bake."""
    names = "|".join(
        (
            r"Acquire::.*[Pp]roxy.*",
            "Acquire::AllowInsecureRepositories",
            "Acquire::AllowWeakRepositories",
            "APT::Get::AllowUnauthenticated",
            r"DPkg::Options::.*unsafe-io",
        )
    )
    options = output(host, "apt-config dump").splitlines()
    nothing(line for line in options if re.match(rf'({names}) "(?!(false|no|0|)";)', line))


@offline
@booted
def test_nothing_upgrades_by_itself(host: Host) -> None:
    """apt's timers can't start, so no package changes under running pods."""
    for unit in ("apt-daily.timer", "apt-daily-upgrade.timer"):
        state = host.run("systemctl is-enabled %s", unit).stdout.strip()
        assert state in ("masked", "disabled", "not-found"), f"{unit} is {state}"
    state = host.run("systemctl is-enabled unattended-upgrades.service").stdout.strip()
    assert state in ("masked", "disabled", "not-found", ""), f"unattended-upgrades.service is {state}"


@offline
@booted
def test_no_compiler(host: Host) -> None:
    """An image has no tools to build programs with."""
    tools = "gcc cc g++ clang make ld go rustc dpkg-buildpackage"
    found = host.run(f"for p in {tools}; do command -v $p; done; true").stdout.split()
    nothing(found)


@offline
@booted
def test_no_build_packages(host: Host) -> None:
    """No headers, -dev packages or debug symbols are installed."""
    pattern = re.compile(r".*-(dev|dbg|dbgsym)|linux-headers-.*|build-essential|gcc(-\d+)?|dpkg-dev")
    nothing(name for name in _status(host) if pattern.fullmatch(name))
