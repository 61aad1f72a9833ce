"""The installed packages are the locked ones, complete, and stay that way."""

from __future__ import annotations

import re
from typing import Any

from answers import files, in_folder
from questions import apt_settings, owned_files, packages, programs, unit_states
from suite import Facts, booted, nothing, offline, output
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]


@offline
@booted
def test_packages_are_installed_whole(host: Host) -> None:
    """No package is half installed, removed but still configured, or waiting for a trigger."""
    nothing(f"{name} is {state}" for name, (state, *_) in packages(host).items() if state not in ("ii", "hi"))


@offline
@booted
def test_dependencies_are_met(host: Host, v: V) -> None:
    """apt finds no package with an unmet dependency."""
    # Otherwise apt asks dpkg for the architectures, twice; test_architecture checks that there is only this one.
    options = (
        "Debug::NoLocking=true",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        f"APT::Architectures::={v['image_base']['architecture']}",
    )
    output(host, f"apt-get check -q -o {' -o '.join(options)}")


@offline
@booted
def test_dpkg_has_no_unfinished_work(host: Host) -> None:
    """dpkg's own audit finds nothing, and its journal is empty."""
    assert output(host, "dpkg --audit && ls -A /var/lib/dpkg/updates") == ""


@offline
@booted
def test_roles_packages_are_installed(host: Host, v: V) -> None:
    """Every package that a role of the image names is installed."""
    expected = {
        re.sub(r"[=:].*", "", package)
        for name, value in v.items()
        if re.fullmatch(r"__\w+_packages", name) and isinstance(value, list)
        for package in value
    }
    assert expected, "no role names a package"
    installed = {name for name, package in packages(host).items() if package.installed}
    nothing(sorted(expected - installed))


@offline
@booted
def test_packages_are_the_listed_ones(host: Host, facts: Facts) -> None:
    """The installed packages and versions are exactly those that the lock has for this image."""
    listed = {package["name"].partition(":")[0]: package["version"] for package in facts.packages}
    installed = {name: package.version for name, package in packages(host).items()}
    assert listed, "the lock has no packages"
    nothing(
        f"{name} is {installed.get(name, 'missing')}, locked {listed.get(name, 'not at all')}"
        for name in sorted(set(listed) | set(installed))
        if listed.get(name) != installed.get(name)
    )


@offline
def test_packages_files_are_unchanged(host: Host) -> None:
    """Every file of a package, except configuration files, has the bytes that were shipped."""
    # A line is "??5??????   /path" or "missing     /path"; "c" precedes a configuration file's path.
    done = host.run("dpkg --verify")
    # 1 if a file differs, even a configuration file; with 2 dpkg hasn't checked any.
    assert done.rc in (0, 1), f"dpkg --verify ended with {done.rc}: {done.stderr.strip()[-500:]}"
    actual = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    damaged = [f"{change} {path}" for change, path in actual if not path.startswith("c ")]
    # dpkg's path filters may leave out documentation and translations.
    documents = re.compile(r"missing /usr/share/(doc|man|locale|info|lintian|linda)/.*")
    nothing(line for line in damaged if not documents.fullmatch(line))


@offline
@booted
def test_sources_are_signed(host: Host) -> None:
    """Every apt source names the key that signs it, and apt trusts none without one."""
    folder, single = "/etc/apt/sources.list.d", "/etc/apt/sources.list"
    stanzas = "\n".join(in_folder(host, folder, ".sources").values()).split("\n\n")
    types = [s for s in stanzas if re.search(r"^Types:", s, re.MULTILINE)]
    nothing(re.sub(r"\s+", " ", s)[:80] for s in types if not re.search(r"^Signed-By:", s, re.MULTILINE))
    texts = [files(host).get(single, ""), *in_folder(host, folder, ".list").values()]
    lines = "\n".join(texts).splitlines()
    nothing(line for line in lines if line.startswith("deb") and "signed-by=" not in line)


@offline
@booted
def test_no_key_is_trusted_for_everything(tree: Tree, host: Host) -> None:
    """Only the distribution's own keys, which come from packages, are trusted for every source."""
    keys = [e.path for e in tree.under("/etc/apt/trusted.gpg.d") if e.kind == "f"] + tree.matching(
        "/etc/apt/trusted\\.gpg"
    )
    nothing(path for path in keys if path not in owned_files(host))


@offline
@booted
def test_apt_uses_no_builders_settings(host: Host) -> None:
    """apt has no proxy, trusts nothing unsigned, and has no option left from the bake."""
    names = "|".join(
        (
            r"Acquire::.*[Pp]roxy.*",
            "Acquire::AllowInsecureRepositories",
            "Acquire::AllowWeakRepositories",
            "APT::Get::AllowUnauthenticated",
            r"DPkg::Options::.*unsafe-io",
        )
    )
    nothing(line for line in apt_settings(host) if re.match(rf'({names}) "(?!(false|no|0|)";)', line))


@offline
@booted
def test_nothing_upgrades_by_itself(host: Host) -> None:
    """apt's timers don't start, so no package changes under running pods."""
    service = "unattended-upgrades.service"
    states = unit_states(host, ("apt-daily.timer", "apt-daily-upgrade.timer", service))
    # Older versions of systemd print nothing for a unit that doesn't exist.
    quiet = {"masked", "disabled", "not-found"}
    nothing(
        f"{unit} is {state}"
        for unit, state in states.items()
        if state not in quiet and not (unit == service and state == "")
    )


@offline
@booted
def test_no_compiler(host: Host) -> None:
    """The image has no tools for building programs."""
    tools = ("gcc", "cc", "g++", "clang", "make", "ld", "go", "rustc", "dpkg-buildpackage")
    nothing(sorted(programs(host, tools)))


@offline
@booted
def test_no_build_packages(host: Host) -> None:
    """No headers, -dev packages or debug symbols are installed."""
    pattern = re.compile(r".*-(dev|dbg|dbgsym)|linux-headers-.*|build-essential|gcc(-\d+)?|dpkg-dev")
    nothing(name for name in packages(host) if pattern.fullmatch(name))
