"""From power-on to a running pod of a preloaded image, compared with a bare Debian 13 cloud image to its first login.

    .venv/bin/python tests/bench/power_on.py [--artefact DIR] [--store DIR] [--smallest] [--json]

Needs root, QEMU, a network with Debian's archive, and a build: by default the last one of `worker_current` in this
checkout. Both machines have the same emulated hardware and boot once each, one after the other; the worker also has a
blank local disk, as after a deallocation.

The bare image is made here from Debian's archive, which doesn't include the published one: the packages that Debian's
own cloud image has for its boot (cloud kernel, cloud-init, netplan, systemd-resolved, sshd), with systemd-boot, which
waits less than GRUB. Its login is the first one that SSH accepts, with the key that cloud-init was given.

The worker's pod is a manifest that cloud-init writes; its image is a preloaded one, other than the pause image. The
start of the container's process is what counts.

    power_on_ratio   power-on to the pod's process / power-on to the bare image's login, goal <= 2
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.machine.ssh import SshTarget  # noqa: E402
from image_builder.machine.vm import Vm, VmOptions  # noqa: E402
from image_builder.settings import DEFAULT_STORE  # noqa: E402
from image_builder.system import namespace, process  # noqa: E402
from image_builder.system.sandbox import open_root  # noqa: E402
from image_builder.verify.boot import (  # noqa: E402
    GROWTH_BYTES,
    LOCAL_DISK,
    POD_SECONDS,
    find_disk,
    static_pod,
    virtual_size,
)
from tests.bench import report  # noqa: E402
from tests.bench.debian_root import debian_root  # noqa: E402
from tests.bench.report import Row  # noqa: E402
from tests.support.images.builds import Workplace  # noqa: E402

GOALS = {"power_on_ratio": ("<=", 2.0)}
PACKAGES = (
    *("systemd-sysv", "udev", "dbus", "systemd-resolved", "systemd-timesyncd", "systemd-boot"),
    *(
        "linux-image-cloud-amd64",
        "initramfs-tools",
        "e2fsprogs",
        "iproute2",
        "ca-certificates",
        "locales-all",
    ),
    *(
        "cloud-init",
        "cloud-guest-utils",
        "fdisk",
        "netplan.io",
        "openssh-server",
        "sudo",
        "unattended-upgrades",
    ),
)
_ARGUMENTS = "root=PARTLABEL=root ro console=tty0 console=ttyS0,115200"
# A duration that nothing else on the machine sleeps for.
_COMMAND = ("/usr/bin/sleep", "86399")
# Prints the start time of the pod's process, in seconds of the kernel's clock (proc(5): field 22 of stat, in ticks).
_WAIT_FOR_POD = """\
until pid=$(pgrep -o -f '^[/]usr/bin/sleep 86399'); do sleep 1; done
awk -v hz="$(getconf CLK_TCK)" '{print $22 / hz}' "/proc/$pid/stat"
"""
# Units that the worker and the bare image wait for, in no particular order; a machine shows those that it has.
_UNITS = {
    "cloud-init, local": "cloud-init-local.service",
    "network": "systemd-networkd.service",
    "cloud-init, network": "cloud-init-network.service",
    "local disk mounted": "local-disk.service",
    "images seeded": "preload-seed.service",
    "containerd": "containerd.service",
    "docker": "docker.service",
    "kubelet": "kubelet.service",
    "sshd": "ssh.service",
    "cloud-init, end": "cloud-final.service",
}
Seconds = dict[str, float]


# -- the bare image --------------------------------------------------------------------------------------------


def bare_disk(store: Path, work: Path) -> Path:
    """Make the bare Debian image below ``work``; return its disk."""
    tools = Workplace(store, Path(os.devnull), "worker_current").object("tools") / "product/tree"
    with debian_root(store.parent, PACKAGES) as tree:
        esp, out = work / "esp", work / "out"
        _fill_esp(tree, esp)
        _make_anonymous(tree)
        _write_partitions(out / "repart.d")

        def make() -> int:
            binds = {"/mnt": tree, "/esp": esp}
            with open_root([tools], work / "root", binds=binds, writable_binds={"/out": out}) as root:
                argv = ["systemd-repart", "--offline=yes", "--empty=create", "--size=auto", "--dry-run=no"]
                root.run([*argv, "--definitions=/out/repart.d", "/out/disk.raw"], log=work / "repart.log")
            return 0

        if status := namespace.run_isolated(make):
            raise SystemExit(status)
    return out / "disk.raw"


def _fill_esp(tree: Path, esp: Path) -> None:
    """Copy the loader, the kernel and its initrd. The loader doesn't show a menu."""
    (esp / "EFI/BOOT").mkdir(parents=True)
    (esp / "loader/entries").mkdir(parents=True)
    (loader,) = (tree / "usr/lib/systemd/boot/efi").glob("systemd-bootx64.efi*")
    (kernel,), (initrd,) = (tree / "boot").glob("vmlinuz-*"), (tree / "boot").glob("initrd.img-*")
    for source, target in ((loader, "EFI/BOOT/BOOTX64.EFI"), (kernel, "vmlinuz"), (initrd, "initrd.img")):
        process.run(["cp", source, esp / target])
    (esp / "loader/loader.conf").write_text("timeout 0\n")
    (esp / "loader/entries/debian.conf").write_text(
        f"title Debian\nlinux /vmlinuz\ninitrd /initrd.img\noptions {_ARGUMENTS}\n"
    )


def _make_anonymous(tree: Path) -> None:
    """Remove what is specific to one machine, as an image must."""
    for path in (tree / "etc/hostname", tree / "etc/resolv.conf", *(tree / "etc/ssh").glob("ssh_host_*")):
        path.unlink(missing_ok=True)
    (tree / "etc/machine-id").write_text("uninitialized\n")
    (tree / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    (tree / "etc/fstab").write_text("PARTLABEL=root / ext4 defaults 0 1\n")


def _write_partitions(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "10-esp.conf").write_text(
        "[Partition]\nType=esp\nLabel=esp\nFormat=vfat\nSizeMinBytes=512M\nSizeMaxBytes=512M\nCopyFiles=/esp:/\n"
    )
    (folder / "20-root.conf").write_text(
        "[Partition]\nType=root-x86-64\nLabel=root\nFormat=ext4\nMinimize=guess\nCopyFiles=/mnt:/\n"
    )


# -- the machines ----------------------------------------------------------------------------------------------


def boot_bare(disk: Path, work: Path) -> Seconds:
    """Boot the bare image to its login; return the time of each event, in seconds since power-on."""
    options = VmOptions("bare", disk, disk_size=virtual_size(disk) + GROWTH_BYTES)
    with Vm(options, work) as vm:
        ssh = vm.wait_for_ssh()
        return {**timeline(vm, ssh), "login": vm.seconds_to_ssh or 0.0}


def boot_worker(artefact: Path, work: Path) -> Seconds:
    """Boot a worker until a pod of a preloaded image runs; return the time of each event, as ``boot_bare`` does."""
    variables = json.loads((artefact / "facts.json").read_bytes())["variables"]
    disk = find_disk(artefact)
    options = VmOptions(
        name="worker",
        disk=disk,
        extra_disks=(LOCAL_DISK,),
        secure_boot=bool(variables["image_secure_boot"]),
        user=str(variables["azure_guest_default_user"]),
        disk_size=virtual_size(disk) + GROWTH_BYTES,
    )
    vm = Vm(options, work)
    _give_pod(work / "seed/user-data", variables)
    with vm:
        ssh = vm.wait_for_ssh()
        login = vm.seconds_to_ssh or 0.0
        began = float(ssh.run(["sh", "-c", _WAIT_FOR_POD], timeout=POD_SECONDS).stdout)
        return {**timeline(vm, ssh), "login": login, "pod": began + kernel_start(vm, ssh)}


def _give_pod(user_data: Path, variables: Mapping[str, Any]) -> None:
    """Make cloud-init write the manifest of a pod of the first preloaded image that isn't the pause image."""
    images = [image["ref"] for image in variables["image_preload"]]
    reference = next(ref for ref in images if ref != variables["container_runtime_pause_image"])
    pod = json.loads(static_pod(reference))
    pod["spec"]["containers"][0]["command"] = list(_COMMAND)
    first_line, _, document = user_data.read_text().partition("\n")
    folder = str(variables.get("kubelet_static_pod_path", "/etc/kubernetes/manifests"))
    manifest = {"path": f"{folder}/bench.json", "permissions": "0600", "content": json.dumps(pod)}
    told = {**json.loads(document), "write_files": [manifest]}
    user_data.write_text(f"{first_line}\n{json.dumps(told)}\n")


def kernel_start(vm: Vm, ssh: SshTarget) -> float:
    """Return the seconds from power-on to the start of the kernel's clock: firmware and loader."""
    before = vm.seconds
    uptime = float(ssh.run(["cat", "/proc/uptime"]).stdout.split()[0])
    return (before + vm.seconds) / 2 - uptime


def timeline(vm: Vm, ssh: SshTarget) -> Seconds:
    """Return when the kernel, systemd and the units of ``_UNITS`` were up, in seconds since power-on."""
    start = kernel_start(vm, ssh)
    found = {"firmware, loader": start}
    manager = _properties(ssh, ["UserspaceTimestampMonotonic"])
    found["kernel, initrd"] = start + int(manager["UserspaceTimestampMonotonic"]) / 1e6
    for title, unit in _UNITS.items():
        moment = int(
            _properties(ssh, ["ActiveEnterTimestampMonotonic"], unit)["ActiveEnterTimestampMonotonic"]
        )
        if moment:
            found[title] = start + moment / 1e6
    return found


def _properties(ssh: SshTarget, names: Sequence[str], *units: str) -> dict[str, str]:
    lines = ssh.run(["systemctl", "show", f"--property={','.join(names)}", *units]).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


# -- the report ------------------------------------------------------------------------------------------------


def measure(artefact: Path, store: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-power-on-", dir=store.parent) as folder:
        places = {name: Path(folder, name) for name in ("disk", "bare", "worker")}
        for place in places.values():
            place.mkdir()
        bare = boot_bare(bare_disk(store, places["disk"]), places["bare"])
        worker = boot_worker(artefact, places["worker"])
    return {
        "build": artefact.resolve().name,
        "bare": {name: round(value, 1) for name, value in bare.items()},
        "worker": {name: round(value, 1) for name, value in worker.items()},
        "power_on_ratio": round(worker["pod"] / bare["login"], 2),
    }


def show(found: Mapping[str, Any]) -> None:
    """Print the events of both machines in order of time, and how long each came after the previous one."""
    for name in ("worker", "bare"):
        print(f"{name:<24}{'at':>8}{'after':>8}")
        before = 0.0
        for event, moment in sorted(found[name].items(), key=lambda item: float(item[1])):
            print(f"  {event:<22}{moment:>6.1f} s{moment - before:>6.1f} s")
            before = moment


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--artefact", type=Path, default=REPO / "output/worker_current/latest")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    options = report.parse(parser)
    found = measure(options.artefact, options.store)
    if not options.json:
        show(found)
    moments = f"{found['worker']['pod']} s", f"{found['bare']['login']} s"
    return report.conclude(options, found, GOALS, [Row("pod, or bare login", *moments, "power_on_ratio")])


if __name__ == "__main__":
    sys.exit(main())
