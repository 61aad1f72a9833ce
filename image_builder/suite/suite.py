"""The common parts of the checks: the facts that drive them, their conditions, and helpers that read the target.

A check reads its subject the way the program concerned does (``sshd -T``, ``dockerd --validate``, the
kernel's /proc) and compares it with the variables that the image was baked with. It fails with an assertion
whose message names what was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import yaml
from answers import FILES, files, once, succeeded
from testinfra.host import Host
from tree import Tree

_SHOWN = 12

offline = pytest.mark.offline
booted = pytest.mark.booted


def needs(*layers: str, **conditions: Any) -> pytest.MarkDecorator:
    """Collect a check only if every layer is in the image and every variable meets its condition.

    A condition is a value that the variable must equal, or a predicate on it.
    """
    return pytest.mark.needs.with_args(layers, conditions)


class Facts:
    """facts.json: the image's name and build id, the resolved variables, the packages.

    Raises ValueError when a key is missing.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        missing = sorted({"image", "build_id", "variables", "packages"} - set(data))
        if missing:
            raise ValueError(f"the facts lack {', '.join(missing)}")
        self.image: str = data["image"]
        self.build_id: str = data["build_id"]
        self.variables: dict[str, Any] = data["variables"]
        self.packages: list[dict[str, str]] = data["packages"]
        self.partitions: dict[str, str] = data.get("partitions", {})


def check_name(nodeid: str) -> str:
    """Return a check's name: its node id relative to the suite, whatever pytest's rootdir."""
    path, colons, function = nodeid.partition("::")
    return path.rpartition("/")[2] + colons + function


def title(item: pytest.Item) -> str:
    """Return a check's title: the first line of its docstring."""
    doc = (getattr(item, "function", item).__doc__ or "").strip()
    return doc.splitlines()[0] if doc else ""


def applicability(item: pytest.Item, facts: Facts) -> str:
    """Return why a check doesn't apply to the image, or an empty string if it does.

    Raises UsageError for a variable that no role of the image has: a misspelled name would otherwise
    disable the check forever.
    """
    for mark in item.iter_markers("needs"):
        layers, conditions = mark.args
        for layer in layers:
            if layer not in facts.variables["image_layers"]:
                return f"no layer {layer}"
        for name, expected in conditions.items():
            if name not in facts.variables:
                raise pytest.UsageError(f"{item.nodeid} needs {name}, which no role of this image has")
            value = facts.variables[name]
            if not (expected(value) if callable(expected) else value == expected):
                return f"{name} is {value!r:.60}"
    return ""


def list_tree(host: Host, facts: Facts, *, booted: bool) -> Tree:
    """List a target's root filesystem.

    On a running machine, leave out the containers' files, which aren't the image's, and the mounts of volumes, whose
    servers may no longer answer.
    """
    names = ("container_runtime_data_root", "container_runtime_containerd_root")
    roots = [str(facts.variables[name]) for name in names if name in facts.variables]
    kubelets = ("/var/lib/kubelet/pods", "/var/lib/kubelet/plugins")
    return Tree.read(host, (*kubelets, *roots) if booted else ())


def read(host: Host, path: str) -> str:
    """Return a file's text; fail the check if the file can't be read."""
    if (text := files(host).get(path)) is not None:
        return text
    # A file that is missing or unreadable is also requested only once.
    return once(host, (read, path), lambda: _cat(host, path)) if path in FILES else _cat(host, path)


def _cat(host: Host, path: str) -> str:
    done = host.run("cat %s", path)
    assert done.rc == 0, f"can't read {path}: {done.stderr.strip()}"
    return str(done.stdout)


def output(host: Host, command: str, *args: str) -> str:
    """Return what a command prints; fail the check with the command's message if the command fails."""
    return str(succeeded(command, host.run(command, *args)).stdout).rstrip("\n")


def release(version: str) -> str:
    """Return the numeric part of a program's version, without a build suffix: 2.1.9 for ``v2.1.9+unknown``."""
    match = re.match(r"v?([0-9.]+[0-9])", version)
    return match[1] if match else version


def load(host: Host, path: str) -> Any:
    """Return the parsed content of a YAML (or JSON) file."""
    text = read(host, path)
    try:
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise AssertionError(f"{path} is not YAML: {error}") from error


def statements(text: str) -> list[str]:
    """Return the stripped lines of a configuration file, without comments and blank lines."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and line[0] not in "#;"]


def named(lines: Iterable[str], key: str) -> set[str]:
    """Return the units that a unit's lines list under a key, such as ``After``."""
    return {word for line in lines if line.startswith(f"{key}=") for word in line.partition("=")[2].split()}


def assignments(text: str) -> dict[str, str]:
    """Return ``key = value`` lines as a mapping; the last line of a key wins, and quotes around a value are dropped."""
    actual = {}
    for line in statements(text):
        key, equals, value = line.partition("=")
        if equals:
            actual[key.strip()] = value.strip().strip("\"'")
    return actual


def starts_at_boot(tree: Tree, unit: str) -> bool:
    """Return whether another unit pulls this one in at boot.

    ``systemctl is-enabled`` would also report a unit that only has an alias as enabled.
    """
    masked = tree.get(f"/etc/systemd/system/{unit}")
    return unit in tree.pulled_in and not (masked and masked.link == "/dev/null")


def is_member(host: Host, variables: Mapping[str, Any]) -> bool:
    """Return whether the target is a node of a cluster: it has the kubelet's kubeconfig, which no image has."""
    if variables.get("kubelet_mode") != "cluster":
        return False
    return once(
        host, is_member, lambda: bool(host.run("test -e %s", variables["kubelet_kubeconfig"]).rc == 0)
    )


def is_held_back(host: Host, variables: Mapping[str, Any]) -> bool:
    """Return whether the kubelet may have failed to start until the GPUs passed, by trying again: a member's may."""
    return bool(variables.get("gpu_preflight_hard")) and is_member(host, variables)


def starts_again(unit: str, lines: Iterable[str]) -> None:
    """Fail unless a unit is restarted after every failure: a brief fault must not last for the whole boot."""
    expected = {"Restart=on-failure", "StartLimitIntervalSec=0"}
    assert expected <= set(lines), f"{unit} is not started again"


def gpus(host: Host) -> int:
    """Return the number of NVIDIA GPUs on the machine's PCI bus."""
    vendors = host.run("grep -lx 0x10de /sys/bus/pci/devices/*/vendor").stdout.split()
    classes = [read(host, f"{path.rpartition('/')[0]}/class").strip() for path in vendors]
    return sum(kind in ("0x030000", "0x030200") for kind in classes)


def nothing(actual: Iterable[str]) -> None:
    """Fail if anything was found, and name it."""
    __tracebackhide__ = True
    items = list(actual)
    if items:
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        raise AssertionError(", ".join(items[:_SHOWN]) + more)


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Describe every key of ``expected`` whose value in ``actual`` differs or is missing."""
    return [
        f"{key} is {actual.get(key, 'not set')!r}, not {value!r}"
        for key, value in expected.items()
        if key not in actual or actual[key] != value
    ]
