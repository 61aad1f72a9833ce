"""The machine booted cleanly: everything started, nothing complained, nothing listens that shouldn't."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from answers import output_once
from questions import mounted, services
from suite import booted, is_held_back, is_member, needs, nothing, offline, output, read
from testinfra.host import Host
from tree import Tree

from image_builder.machine.console import PATTERNS, problems

V = dict[str, Any]
# Seconds in which a parent on a busy machine gets to reap a process that has ended.
_TURNS = 10
# Programs that may listen to the network, by port: SSH, DHCP clients; the kubelet on a node of a cluster.
_DHCP_CLIENTS = {"systemd-network", "dhclient"}
LISTENERS = {
    ("tcp", 22): {"sshd", "systemd"},
    ("udp", 68): _DHCP_CLIENTS,
    ("udp", 546): _DHCP_CLIENTS,
}
KUBELET_LISTENERS = {("tcp", 10250): {"kubelet"}}
# Whatever ``problems`` may find, for grep -E, which has no \d; and sed's removal of the colors that would hide it.
TROUBLE = "\n".join(pattern.shows.replace(r"\d", "[0-9]") for pattern in PATTERNS)
PLAIN = r"s/\x1b\[[0-?]*[ -/]*[@-~]//g; s/\r/\n/g"
# The kernel's three lines about a pod's own limit. If the node itself runs out, "Out of memory: Kill" is there as well.
POD_OUT_OF_MEMORY = re.compile(
    r"invoked oom-killer|Memory cgroup out of memory|oom-kill:constraint=CONSTRAINT_MEMCG,.*oom_memcg=\S*kubepods"
)
# The serial of a disk that only `image-builder boot` gives its machines.
LAB_DISK = "image-builder-seed"
# Asks each name server of a resolv.conf, at a port, for the root's name servers; prints those that answer at all.
NAME_SERVERS = """
import socket, sys

query = b"\\x12\\x34\\x01\\0\\0\\1\\0\\0\\0\\0\\0\\0\\0\\0\\2\\0\\1"
words = [line.split() for line in open(sys.argv[1])]
for server in [w[1] for w in words if w[:1] == ["nameserver"] and len(w) > 1]:
    for attempt in range(2):
        try:
            family = socket.AF_INET6 if ":" in server else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.settimeout(5)
                asking.connect((server.partition("%")[0], int(sys.argv[2])))
                asking.send(query)
                if asking.recv(512)[:2] == query[:2]:
                    print(server)
                    break
        except OSError:
            pass
"""


# Runs first, so that answers that are fetched only once come from a machine that has finished booting.
@booted
def test_system_is_running(host: Host) -> None:
    """systemd reports that the boot is complete and nothing failed."""
    assert host.run("timeout 300 systemctl is-system-running --wait").stdout.strip() == "running"


@offline
@booted
def test_boots_to_the_full_system(tree: Tree) -> None:
    """The default target is the full system, not a rescue shell."""
    actual = (tree.get(f"/{folder}/systemd/system/default.target") for folder in ("etc", "usr/lib"))
    default = next((entry for entry in actual if entry), None)
    assert default and default.points_to == "f", f"no default target: {default}"
    target = default.link.rpartition("/")[2]
    assert target in ("multi-user.target", "graphical.target"), default.link
    masked = tree.get(f"/etc/systemd/system/{target}")
    assert not (masked and masked.link == "/dev/null"), f"{target} is masked"


@booted
def test_no_unit_failed(host: Host) -> None:
    """No unit of any kind is in a failed state."""
    listing = output(host, "systemctl list-units --all --state=failed,error,bad --no-legend --plain")
    nothing(line.split()[0] for line in listing.splitlines() if "not-found" not in line)


@booted
def test_no_unit_was_restarted(host: Host, v: V) -> None:
    """No service needed a second attempt, except for one-time work that was done in the end on a node of a cluster."""
    restarted = {n: s for n, s in services(host).items() if s.get("NRestarts", "0") != "0"}
    if is_member(host, v):
        # Such units wait for others by trying again: a join for its server, say.
        restarted = {n: s for n, s in restarted.items() if not _is_done(s)}
    if is_held_back(host, v):
        restarted.pop("kubelet.service", None)  # test_kubelet_runs asks whether it runs
    nothing(f"{name} {service['NRestarts']} times" for name, service in restarted.items())


def _is_done(service: Mapping[str, str]) -> bool:
    return service.get("Type") == "oneshot" and service["ActiveState"] in ("active", "inactive")


@booted
def test_journal_has_no_trouble(host: Host, v: V) -> None:
    """Neither the kernel nor a service reported a crash, a stall, a lost disk or an ordering cycle.

    A pod that exceeded its own memory limit is no trouble of a cluster's node; a node that ran out of memory is.
    """
    # By the boot's id, so that the journal is found whatever the machine's own id is now.
    boot = read(host, "/proc/sys/kernel/random/boot_id").strip().replace("-", "")
    journal = f"journalctl --merge --output=cat --no-pager _BOOT_ID={boot}"
    # The journal of a node that has been up for long no longer has its oldest entries.
    first = "." if is_member(host, v) else "Linux version"
    began = host.run(f"{journal} | grep --text --quiet --max-count=1 %s", first)
    assert began.rc == 0, f"the boot's journal has no entry with {first!r}"
    # It may have gigabytes, so it is filtered there.
    shown = host.run(f"export LC_ALL=C; {journal} | sed -E %s | grep --text -E %s", PLAIN, TROUBLE)
    assert shown.rc in (0, 1), shown.stderr
    lines = shown.stdout
    if is_member(host, v):
        lines = "\n".join(line for line in lines.splitlines() if not POD_OUT_OF_MEMORY.search(line))
    # Problems that count less on an emulated machine are rare, so ask whether it is one only if there are any.
    if problems(lines):
        emulated = host.run("systemd-detect-virt").stdout.strip() == "qemu"
        nothing(problems(lines, emulated=emulated))


@booted
def test_kernel_is_not_tainted(host: Host, v: V) -> None:
    """The kernel has no foreign, forced or crashed code in it, except for a GPU's driver where there is one."""
    tainted = int(read(host, "/proc/sys/kernel/tainted"))
    if "gpu" in v["image_layers"]:
        # Bits 12 and 13: built outside the kernel's tree, and not signed by its makers; bit 0: not under the GPL.
        tainted &= ~(1 << 12 | 1 << 13 | (v["__nvidia_flavour"].strip() == "proprietary"))
    if tainted & 1 << 14 and host.run("systemd-detect-virt").stdout.strip() == "qemu":
        # A lockup: emulated processors stand still while the host uses its own for something else.
        tainted &= ~(1 << 14)
    assert tainted == 0, f"{tainted:#x}"


@booted
@needs(image_kernel_args=bool)
def test_kernel_got_its_arguments(host: Host, v: V) -> None:
    """The declared kernel arguments are on the command line."""
    actual = read(host, "/proc/cmdline").split()
    nothing(argument for argument in v["image_kernel_args"] if argument not in actual)


@booted
def test_root_fills_the_disk(host: Host) -> None:
    """The root partition and filesystem have grown to fill the disk that the platform provided."""
    blocks = json.loads(output_once(host, "lsblk --json --bytes --output NAME,TYPE,SIZE,MOUNTPOINTS"))
    disks = [d for d in blocks["blockdevices"] if any("/" in c["mountpoints"] for c in d.get("children", []))]
    assert len(disks) == 1, f"the root filesystem is on {len(disks)} disks"
    children = disks[0]["children"]
    root = next(c for c in children if "/" in c["mountpoints"])
    free = disks[0]["size"] - sum(c["size"] for c in children)
    assert free < 64 << 20, f"{free >> 20} MiB of the disk belong to no partition"
    filesystem = int(mounted(host, "/")["size"])
    assert filesystem > 0.9 * root["size"], f"the filesystem has {filesystem} of {root['size']} bytes"


@booted
def test_root_is_sound(host: Host) -> None:
    """The root filesystem is ext4, writable, and has recorded no error."""
    root = mounted(host, "/")
    assert root["fstype"] == "ext4" and "rw" in root["options"].split(","), f"{root}"
    errors = read(host, f"/sys/fs/ext4/{root['source'].rpartition('/')[2]}/errors_count").strip()
    assert errors == "0", f"{errors} errors"


@booted
def test_esp_is_mounted(host: Host) -> None:
    """The EFI system partition is mounted at /boot/efi, and closed to users."""
    esp = mounted(host, "/boot/efi")
    assert esp["fstype"] == "vfat" and "fmask=0077" in esp["options"].split(","), f"{esp}"


@booted
def test_cgroup_v2(host: Host) -> None:
    """The only cgroup hierarchy is the unified one, in which containers are accounted."""
    mounts = [line.split() for line in read(host, "/proc/mounts").splitlines()]
    actual = {(fields[2], fields[1]) for fields in mounts if fields[2].startswith("cgroup")}
    # Network add-ons mount the same hierarchy a second time, below /run.
    assert ("cgroup2", "/sys/fs/cgroup") in actual, f"{actual}"
    assert {kind for kind, _ in actual} == {"cgroup2"}, f"{actual}"


@booted
def test_clock_is_right(host: Host) -> None:
    """The machine's clock agrees with ours within a minute, and a time service keeps it that way."""
    assert abs(int(output(host, "date +%s")) - time.time()) < 60
    keepers = ("systemd-timesyncd", "chrony", "ntpsec")
    states = {name: services(host).get(f"{name}.service", {}).get("ActiveState") for name in keepers}
    assert "active" in states.values(), f"{states}"
    if not _is_the_labs(host):
        assert output(host, "timedatectl show --property=NTPSynchronized --value") == "yes", (
            "not synchronised"
        )


def _is_the_labs(host: Host) -> bool:
    """Return whether the machine is one of `image-builder boot`'s, which has no time server and no name server."""
    return bool(host.run(f"grep --no-messages --line-regexp {LAB_DISK} /sys/block/*/serial").rc == 0)


@booted
def test_only_known_ports_are_open(host: Host, v: V) -> None:
    """Only the programs of SSH, DHCP and, in a cluster, the kubelet, its pods and tunnels listen to the network."""
    in_cluster = v.get("kubelet_mode") == "cluster"
    listeners = LISTENERS | (KUBELET_LISTENERS if in_cluster else {})
    unexpected = []
    for line in output(host, "ss --no-header --listening --numeric --tcp --udp --processes").splitlines():
        fields = line.split()
        address, _, port = fields[4].rpartition(":")
        local = re.match(r"127\.|\[::1\]|\[::ffff:127\.", address)
        programs = set(re.findall(r'\("([^"]+)",pid=', fields[-1]))
        is_expected = programs and programs <= listeners.get((fields[0], int(port)), set())
        # The kernel's own sockets have no program: network add-ons use them for VXLAN and WireGuard.
        is_kernels = fields[0] == "udp" and not programs
        is_of_cluster = in_cluster and (is_kernels or _is_in_a_pod(host, fields[-1]))
        if not local and not is_expected and not is_of_cluster:
            unexpected.append(f"{fields[0]} {fields[4]} {fields[-1]}")
    nothing(unexpected)


def _is_in_a_pod(host: Host, processes: str) -> bool:
    """Return whether a socket's processes, as ss lists them, are all those of pods, such as kube-proxy."""
    groups = [host.run(f"cat /proc/{pid}/cgroup").stdout for pid in re.findall(r"pid=(\d+)", processes)]
    return bool(groups) and all("kubepods" in group for group in groups)


@booted
def test_network_is_up(host: Host) -> None:
    """There is a default route, and a name server that answers."""
    assert json.loads(output_once(host, "ip -json route show default")), "no default route"
    assert re.search(r"^nameserver \S", read(host, "/etc/resolv.conf"), re.MULTILINE), "no name server"
    if not _is_the_labs(host):
        # systemd-resolved's own address answers whether or not the servers behind it do.
        upstream, plain = "/run/systemd/resolve/resolv.conf", "/etc/resolv.conf"
        path = upstream if host.run("test -e %s", upstream).rc == 0 else plain
        answering = output(host, "python3 -c %s %s 53", NAME_SERVERS, path)
        assert answering, f"no name server of {path} answers"


@booted
@needs("system")
def test_no_swap_is_in_use(host: Host) -> None:
    """No swap is in use, so the kubelet's memory limits are real."""
    assert len(read(host, "/proc/swaps").splitlines()) == 1


def _zombies(host: Host) -> set[str]:
    # A zombie keeps its cgroup.
    states = output(host, "ps -e -o stat=,pid=,comm=,cgroup=").splitlines()
    ours = (line for line in states if line.startswith("Z") and "kubepods" not in line)
    return {" ".join(line.split()[1:3]) for line in ours}


@booted
def test_no_zombies(host: Host) -> None:
    """No process outside of pods is left unreaped once its parent has had time to reap it."""
    zombies = _zombies(host)
    for _ in range(_TURNS):
        if not zombies:
            break
        time.sleep(1)
        zombies &= _zombies(host)
    nothing(sorted(zombies))
