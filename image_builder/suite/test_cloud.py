"""First boot and the cloud: what provisions a machine, what it leaves alone, and what pods can't reach."""

from __future__ import annotations

import json
import re
from typing import Any

from answers import files, output_once
from cloud_config import MAIN, cloud_config
from packet_rules import parse, ways_by
from questions import RULES, merged, programs
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

MARKER = "/var/lib/cloud/instance/first-boot-is-on-disk"
FIRST_BOOT_CONDITIONS = (
    "Before=cloud-init-main.service cloud-init-local.service",
    "ConditionPathExists=/var/lib/cloud/instance",
    f"ConditionPathExists=!{MARKER}",
)

with_cloud_init = needs("system", azure_guest_cloud_init=True)


def _modules(config: dict[str, Any]) -> set[str]:
    """Return the names of all modules that cloud-init runs, with underscores."""
    stages = ("cloud_init_modules", "cloud_config_modules", "cloud_final_modules")
    entries = [entry for stage in stages for entry in config[stage]]
    return {(entry[0] if isinstance(entry, list) else entry).replace("-", "_") for entry in entries}


@offline
@booted
@with_cloud_init
def test_cloud_init_looks_where_declared(host: Host, v: V) -> None:
    """The datasources are the declared ones, in order, and on one line, as ds-identify reads them."""
    assert cloud_config(host)["datasource_list"] == v["azure_guest_datasources"]
    texts = (files(host).get(path, "") for path in (MAIN, f"{MAIN}.d/95_image.cfg"))
    lines = re.findall("^datasource_list:.*", "\n".join(texts), re.MULTILINE)
    assert lines, "no datasource is declared"
    nothing(line for line in lines if not re.fullmatch(r"datasource_list: *\[.*\] *", line))


@offline
@booted
@with_cloud_init
def test_cloud_init_starts_at_boot(tree: Tree) -> None:
    """cloud-init is enabled and starts at boot."""
    units = ["cloud-init-local.service", "cloud-config.service", "cloud-final.service"]
    nothing(unit for unit in units if not starts_at_boot(tree, unit))
    nothing(tree.matching("/etc/cloud/cloud-init.disabled"))


@offline
@booted
@with_cloud_init
def test_first_boot_survives_a_power_failure(host: Host, tree: Tree) -> None:
    """A first boot counts as done once its results are on the disk; until then the next boot starts it from scratch."""
    again, durable = (
        read(host, f"/etc/systemd/system/first-boot-{name}.service") for name in ("again", "durable")
    )
    nothing(u for u in ("again", "durable") if not starts_at_boot(tree, f"first-boot-{u}.service"))
    nothing(line for line in FIRST_BOOT_CONDITIONS if line not in again.splitlines())
    assert "ExecStart=/usr/bin/cloud-init clean" in again.splitlines()
    starts_again("first-boot-durable.service", durable.splitlines())
    assert re.search(
        rf"^ExecStart=/usr/bin/sync .*\n(.*\n)*ExecStart=/usr/bin/touch {MARKER}$", durable, re.MULTILINE
    )


@offline
@booted
@with_cloud_init
def test_cloud_init_leaves_the_network_alone(host: Host) -> None:
    """cloud-init configures no interfaces, which have another owner, or extra Azure addresses, which are for pods."""
    config = cloud_config(host)
    assert config.get("network", {}).get("config") == "disabled", f"{config.get('network')}"
    assert config["datasource"]["Azure"]["apply_network_config"] is False


@offline
@booted
@with_cloud_init
def test_cloud_init_leaves_disks_alone(host: Host) -> None:
    """cloud-init never partitions, formats or mounts a disk: the local one has another owner."""
    config = cloud_config(host)
    nothing(sorted({"disk_setup", "fs_setup", "mounts"} & (_modules(config) | set(config))))


@offline
@booted
@with_cloud_init
def test_cloud_init_leaves_packages_alone(host: Host) -> None:
    """cloud-init installs and upgrades nothing, and changes no package source."""
    owners = {"apt_configure", "package_update_upgrade_install", "snap", "ubuntu_pro", "yum_add_repo"}
    nothing(sorted(owners & _modules(cloud_config(host))))


@offline
@booted
@with_cloud_init
def test_cloud_init_makes_the_declared_user(host: Host, v: V) -> None:
    """cloud-init creates the declared user, without a password, and keeps root closed."""
    config = cloud_config(host)
    user = config["system_info"]["default_user"]
    nothing(differences({"name": v["azure_guest_default_user"], "lock_passwd": True}, user))
    nothing(differences({"disable_root": True, "ssh_pwauth": False}, config))
    nothing(sorted({"users_groups", "ssh"} - _modules(config)))


@offline
@booted
@with_cloud_init
def test_cloud_init_makes_host_keys(host: Host, v: V) -> None:
    """Every machine gets its own host keys, of the declared types."""
    expected = {"ssh_deletekeys": True, "ssh_genkeytypes": v["azure_guest_ssh_host_key_types"]}
    nothing(differences(expected, cloud_config(host)))


@offline
@booted
@with_cloud_init
def test_cloud_init_grows_the_root(host: Host) -> None:
    """cloud-init grows the root partition to fill its disk at first boot, and the programs for it are installed."""
    config = cloud_config(host)
    assert config["growpart"]["mode"] in ("auto", "growpart"), f"{config['growpart']}"
    assert config["growpart"]["devices"] == ["/"] and config["resize_rootfs"] is True
    nothing(sorted({"growpart", "resizefs"} - _modules(config)))
    nothing({"growpart", "resize2fs"} - programs(host, ("growpart", "resize2fs")))


@offline
@booted
@needs("system", azure_guest_agent=True)
def test_agent_leaves_the_local_disk_alone(host: Host) -> None:
    """Azure's agent neither formats the local disk nor swaps on it, and doesn't update itself."""
    expected = {
        "ResourceDisk.Format": "n",
        "ResourceDisk.EnableSwap": "n",
        "Provisioning.Agent": "cloud-init",
        "AutoUpdate.Enabled": "n",
        "AutoUpdate.UpdateToLatestVersion": "n",
    }
    nothing(differences(expected, assignments(read(host, "/etc/waagent.conf"))))


@offline
@booted
@needs("system", azure_guest_agent=False)
def test_no_agent_is_installed(tree: Tree) -> None:
    """An image that doesn't declare Azure's agent doesn't have it."""
    nothing(
        tree.matching(
            r"/usr/(bin|sbin)/waagent2?\.?0?|/(etc|usr/lib)/systemd/system/(walinux|wa)agent\.service"
        )
    )


@offline
@booted
@needs("system", azure_guest_disk_rules=True)
def test_azure_disks_have_names(host: Host, tree: Tree) -> None:
    """udev gives Azure's local disks names of their own, through rules that udev accepts."""
    rules = tree.matching(r"/(etc|usr/lib)/udev/rules\.d/80-azure-disk\.rules")
    assert rules, "no rules for Azure's disks"
    text = read(host, rules[0])
    nothing(word for word in ("Microsoft NVMe Direct Disk", "disk/azure/") if word not in text)
    verified = host.run("udevadm verify --no-style %s", rules[0])
    # systemd can check rules since version 254.
    assert verified.rc == 0 or "Unknown command verb" in verified.stderr, verified.stdout + verified.stderr


@offline
@needs("system", system_bootable=True)
def test_initramfs_has_the_clouds_drivers(host: Host, tree: Tree, v: V) -> None:
    """The drivers for disks on Hyper-V and NVMe are in the initramfs or built in."""
    versions = [path.partition("-")[2] for path in tree.matching(r"/boot/vmlinuz-.*")]
    assert len(versions) == 1, f"kernels: {versions}"
    files = output(host, "lsinitramfs %s", f"/boot/initrd.img-{versions[0]}").splitlines()
    files += read(host, f"/usr/lib/modules/{versions[0]}/modules.builtin").splitlines()
    names = {re.sub(r"\.ko(\.\w+)?$", "", path.rpartition("/")[2]).replace("-", "_") for path in files}
    nothing(m for m in v["azure_guest_initramfs_modules"] if m.replace("-", "_") not in names)


@offline
@booted
@needs("system", azure_guest_blocked_for_pods=bool)
def test_pods_are_kept_from_the_host_addresses(host: Host, tree: Tree, v: V) -> None:
    """A unit blocks forwarded packets to every declared address before the network is up."""
    assert starts_at_boot(tree, "azure-pod-guard.service")
    unit = merged(host, "systemd/system/azure-pod-guard.service")
    rules = [
        line for line in unit.splitlines() if line.startswith("ExecStart=/") and line.endswith("--jump DROP")
    ]
    for target in v["azure_guest_blocked_for_pods"]:
        target_match = f"--append FORWARD --destination {target['address']} --protocol tcp"
        ports = f"--destination-ports {','.join(map(str, target['ports']))} "
        assert any(target_match in rule and ports in rule for rule in rules), f"{target} is not blocked"


@offline
@booted
@needs("system", azure_guest_blocked_for_pods=bool)
def test_kubelet_waits_for_the_pod_guard(host: Host) -> None:
    """The kubelet, and so every pod, starts only after the rules are in place; both units retry by themselves."""
    guard = statements(read(host, "/etc/systemd/system/azure-pod-guard.service"))
    assert "ExecStartPost=/usr/bin/touch /run/azure-pod-guard" in guard and "Restart=on-failure" in guard
    waits = statements(read(host, "/etc/systemd/system/kubelet.service.d/15-pod-guard.conf"))
    for line in ("After=azure-pod-guard.service", "ExecStartPre=/usr/bin/test -e /run/azure-pod-guard"):
        assert line in waits, f"{line} is not there"


@booted
@with_cloud_init
def test_cloud_init_is_done(host: Host) -> None:
    """cloud-init found a datasource and finished without errors."""
    done = host.run("timeout 300 cloud-init status --wait --format json")
    assert done.stdout, f"cloud-init tells nothing (status {done.rc})"
    status = json.loads(done.stdout)
    nothing(differences({"status": "done", "errors": []}, status))
    assert status["detail"], "no datasource"


@booted
@with_cloud_init
def test_first_boot_is_on_the_disk(host: Host) -> None:
    """The results of the first boot were synced to the disk, so no later boot starts it again."""
    output(host, f"test -e {MARKER}")


@booted
@with_cloud_init
def test_fstab_is_the_images(host: Host) -> None:
    """Nothing added a disk to fstab at first boot."""
    mounts = [line.split()[1] for line in statements(read(host, "/etc/fstab"))]
    assert sorted(mounts) == ["/", "/boot/efi"], f"{mounts}"


@booted
@needs("system", azure_guest_blocked_for_pods=bool)
def test_pod_guard_is_in_force(host: Host, v: V) -> None:
    """The kernel drops forwarded packets to every declared address and port, and no earlier rule lets any by."""
    chains = parse(output_once(host, RULES))
    rules = chains.get("FORWARD", [])
    for target in v["azure_guest_blocked_for_pods"]:
        address, ports = target["address"], target["ports"]
        numbers = [n for n, rule in enumerate(rules) if rule.drops(address, ",".join(map(str, ports)))]
        assert numbers, f"{target} is not dropped: {[rule.text for rule in rules]}"
        before = rules[: numbers[0]]
        nothing(rule for port in ports for rule in ways_by(chains, before, address, port))
