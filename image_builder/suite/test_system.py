"""The services below the container runtime (time, logs, network, limits), and the units that must never start."""

from __future__ import annotations

from typing import Any

from answers import files, in_folder, output_once
from questions import merged, services, unit_states
from suite import (
    assignments,
    booted,
    differences,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_again,
    starts_at_boot,
    statements,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]

with_system = needs("system")
with_network = needs("system", system_network=True)


def _merged(host: Host, path: str) -> dict[str, str]:
    """Return a systemd configuration with its drop-ins, as systemd merges them."""
    return assignments(merged(host, path))


@offline
@booted
@with_system
def test_units_are_masked(host: Host, v: V) -> None:
    """Every unit that must never start is masked."""
    states = unit_states(host, v["__system_masked"])
    nothing(f"{unit} is {state or 'not there'}" for unit, state in states.items() if state != "masked")


@offline
@booted
@with_system
def test_units_are_enabled(tree: Tree, v: V) -> None:
    """SSH, its host key generator and the network start at boot."""
    nothing(unit for unit in v["__system_units"] if not starts_at_boot(tree, unit))


@offline
@booted
@with_system
def test_units_are_valid(host: Host, tree: Tree) -> None:
    """systemd accepts the units that the roles wrote as valid."""
    units = [e.path for e in tree.under("/etc/systemd/system") if e.kind == "f" and e.path.count("/") == 4]
    assert units, "the roles wrote no units"
    output_once(host, "systemd-analyze verify --man=no --recursive-errors=no " + " ".join(units))


@offline
@booted
@needs("system", system_swap_off=True)
def test_no_swap_is_configured(host: Host) -> None:
    """No swap is activated at boot, by fstab or by any unit."""
    nothing(line for line in statements(read(host, "/etc/fstab")) if line.split()[2] == "swap")
    assert unit_states(host, ["swap.target"])["swap.target"] == "masked"


@offline
@booted
@with_system
def test_limits_are_configured(host: Host, v: V) -> None:
    """Login sessions get the declared limits; no later line overrides them."""
    matches = {}
    texts = (
        files(host)["/etc/security/limits.conf"],
        *in_folder(host, "/etc/security/limits.d", ".conf").values(),
    )
    for line in statements("\n".join(texts)):
        domain, kind, item, value = line.split()[:4]
        matches[f"{domain} {kind} {item}"] = value
    expected = {
        f"{each['domain']} {each['type']} {each['item']}": str(each["value"]) for each in v["system_limits"]
    }
    nothing(differences(expected, matches))


@offline
@booted
@with_system
def test_journal_is_bounded(host: Host, v: V) -> None:
    """The journal uses no more of the disk than declared."""
    expected = {name: str(value) for name, value in v["system_journald"].items()}
    nothing(differences(expected, _merged(host, "systemd/journald.conf")))


@offline
@booted
@needs("system", system_time_sync=lambda keeper: keeper != "none")
def test_clock_is_kept(host: Host, tree: Tree, v: V) -> None:
    """The declared time service starts at boot, and uses the declared pools."""
    unit, path = {
        "chrony": ("chrony.service", "/etc/chrony/chrony.conf"),
        "timesyncd": ("systemd-timesyncd.service", "/etc/systemd/timesyncd.conf.d/90-image.conf"),
    }[v["system_time_sync"]]
    assert starts_at_boot(tree, unit), f"{unit} does not start at boot"
    fields = " ".join(statements(read(host, path))).replace("=", " ").split()
    nothing(pool for pool in v["system_ntp_pools"] if pool not in fields)


@offline
@booted
@needs("system", system_time_sync="chrony")
def test_chrony_accepts_its_configuration(host: Host) -> None:
    """chronyd itself accepts its configuration as valid, and opens no command port."""
    dump = output_once(
        host, "{ [ -d /run/chrony ] || mkdir /run/chrony; } && chronyd -p -f /etc/chrony/chrony.conf"
    )
    assert "cmdport 0" in statements(dump), dump


@offline
@booted
@with_network
def test_interfaces_use_dhcp(host: Host) -> None:
    """Physical interfaces, and no others, are configured by DHCP."""
    matches = _merged(host, "systemd/network/90-dhcp.network")
    nothing(differences({"Type": "ether", "Kind": "!*", "DHCP": "yes"}, matches))


@offline
@booted
@with_network
def test_foreign_routes_are_left_alone(host: Host) -> None:
    """Restarting networkd keeps the routes and rules that network plugins created."""
    expected = {"ManageForeignRoutes": "no", "ManageForeignRoutingPolicyRules": "no"}
    nothing(differences(expected, _merged(host, "systemd/networkd.conf")))


@offline
@booted
@with_network
def test_pods_inherit_real_name_servers(host: Host, tree: Tree) -> None:
    """/etc/resolv.conf never names a loopback address, which in a pod would be the pod itself."""
    assert tree["/etc/resolv.conf"].link.endswith("run/systemd/resolve/resolv.conf")
    nothing(differences({"DNSStubListener": "no", "LLMNR": "no"}, _merged(host, "systemd/resolved.conf")))


@offline
@booted
@with_system
def test_host_keys_come_at_first_boot(host: Host, v: V) -> None:
    """A unit creates every declared type of host key before sshd starts; a retry starts sshd afterwards."""
    unit = merged(host, "systemd/system/ssh-host-keys.service")
    starts_again("ssh-host-keys.service", unit.splitlines())
    assert "ExecStartPost=-/bin/systemctl --no-block start multi-user.target" in unit.splitlines()
    nothing(t for t in v["system_ssh_host_key_types"] if f"ssh-keygen -q -t {t} " not in unit)
    before = [word for line in unit.splitlines() if line.startswith("Before=") for word in line[7:].split()]
    assert "ssh.service" in before, f"{before}"


# Shell commands that print a limit of the session.
_ULIMITS = {"memlock": "ulimit -l", "nofile": "ulimit -n"}


@booted
@needs("system", system_limits=lambda limits: any(limit["item"] in _ULIMITS for limit in limits))
def test_sessions_have_the_limits(host: Host, v: V) -> None:
    """A new session of root, and of any other user, has the declared limits."""
    wrong = []
    for limit in (limit for limit in v["system_limits"] if limit["item"] in _ULIMITS):
        user = {"*": "nobody"}.get(limit["domain"], limit["domain"])
        actual = output_once(host, f"su --shell /bin/sh --command '{_ULIMITS[limit['item']]}' {user}").strip()
        if actual != str(limit["value"]):
            wrong.append(f"{limit['item']} of {user} is {actual}")
    nothing(wrong)


@booted
@with_system
def test_journal_is_persistent(host: Host) -> None:
    """journald writes its journal to the disk."""
    process = services(host).get("systemd-journald.service", {}).get("MainPID", "")
    journals = output(host, r"find /proc/%s/fd -lname '*.journal' -printf '%%l\n'", process)
    assert "/var/log/journal/" in journals, journals
