"""QEMU's command line, the seed, and the addresses: no process is started here."""

from __future__ import annotations

import importlib
import json
import os
import resource
import stat
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import paramiko
import pytest

from image_builder.definition.connection import Connection, Hop
from image_builder.errors import BootError, HostError, UsageError
from image_builder.machine import monitor, qemu, ssh
from image_builder.machine.vm import create_blank, write_seed
from image_builder.settings import SUITE
from image_builder.verify.boot import find_disk, import_command, local_disks, static_pod

FIRMWARE = qemu.Firmware(Path("/fw/code.fd"), Path("/vm/vars.fd"))
MACHINE = qemu.Machine(
    name="worker",
    firmware=FIRMWARE,
    drives=(qemu.Drive(Path("/vm/os.qcow2"), "virtio", "qcow2", "os"),),
    console=Path("/vm/console.log"),
    monitor=Path("/vm/monitor"),
    seed=Path("/vm/seed"),
)


def _options(argv: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(argv) if option == name]


def test_defaults_of_qemu_and_of_the_user_are_out_of_the_way() -> None:
    argv = qemu.command_line(MACHINE)
    assert argv[0] == "qemu-system-x86_64"
    assert {"-nodefaults", "-no-user-config"} <= set(argv)
    assert _options(argv, "-display") == ["none"]


def test_emulation_avoids_the_instruction_that_old_qemu_gets_wrong() -> None:
    argv = qemu.command_line(MACHINE)
    assert _options(argv, "-accel") == ["tcg,thread=multi"]
    assert _options(argv, "-cpu") == ["max,cx16=off"]
    assert _options(qemu.command_line(replace(MACHINE, accelerator="kvm")), "-cpu") == ["host"]


def test_network_is_private_and_reached_from_localhost_alone() -> None:
    (net,) = _options(qemu.command_line(MACHINE), "-netdev")
    assert net == "user,id=net,restrict=off,hostfwd=tcp:127.0.0.1:0-:22"
    (closed,) = _options(qemu.command_line(replace(MACHINE, restrict_network=True)), "-netdev")
    assert "restrict=on" in closed


def test_firmware_code_is_read_only_and_secure_boot_locks_the_variables() -> None:
    plain = qemu.command_line(MACHINE)
    assert _options(plain, "-drive") == [
        "if=pflash,unit=0,format=raw,readonly=on,file=/fw/code.fd",
        "if=pflash,unit=1,format=raw,file=/vm/vars.fd",
    ]
    assert _options(plain, "-machine") == ["q35,smm=off"]
    secure = qemu.command_line(replace(MACHINE, firmware=replace(FIRMWARE, secure_boot=True)))
    assert _options(secure, "-machine") == ["q35,smm=on"]
    assert "driver=cfi.pflash01,property=secure,value=on" in _options(secure, "-global")


def test_seed_is_a_read_only_volume_with_the_label_that_cloud_init_looks_for() -> None:
    (block,) = [b for b in _options(qemu.command_line(MACHINE), "-blockdev") if "vvfat" in b]
    assert block == "driver=vvfat,node-name=seed,dir=/vm/seed,label=CIDATA,read-only=on"
    assert not any("vvfat" in a for a in qemu.command_line(replace(MACHINE, seed=None)))


def test_the_suite_knows_the_machine_by_the_serial_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.fspath(SUITE))
    serial = importlib.import_module("test_boot").LAB_DISK
    assert any(a.endswith(f",serial={serial}") for a in qemu.command_line(MACHINE)) and len(serial) <= 20
    assert not any(serial in a for a in qemu.command_line(replace(MACHINE, seed=None)))


def test_disks_keep_their_order_bus_and_serial() -> None:
    drives = (
        qemu.Drive(Path("/vm/os"), "nvme", "qcow2", "os"),
        qemu.Drive(Path("/vm/local0"), "nvme", serial="local0"),
        qemu.Drive(
            Path("/vm/temp"), "scsi", serial="temp", vendor="Msft", model="Virtual Disk", durable=True
        ),
    )
    argv = qemu.command_line(replace(MACHINE, drives=drives))
    devices = [d for d in _options(argv, "-device") if "drive=disk" in d]
    assert devices == [
        "nvme,id=device0,drive=disk0,serial=os,bootindex=0",
        "nvme,id=device1,drive=disk1,serial=local0,bootindex=1",
        "scsi-hd,bus=scsi.0,id=device2,drive=disk2,serial=temp,bootindex=2,vendor=Msft,product=Virtual Disk",
    ]
    assert _options(argv, "-device").index("virtio-scsi-pci,id=scsi") < _options(argv, "-device").index(
        devices[2]
    )
    blocks = [b for b in _options(argv, "-blockdev") if "node-name=disk" in b]
    assert [b.split(",")[0] for b in blocks] == ["driver=qcow2", "driver=raw", "driver=raw"]
    assert "cache.no-flush=on" in blocks[0] and "cache.no-flush=off" in blocks[2]


@pytest.mark.parametrize(
    "drive",
    [
        qemu.Drive(Path("/d"), "nvme", model="Microsoft NVMe Direct Disk v2"),
        qemu.Drive(Path("/d"), "virtio", serial="x" * 21),
    ],
)
def test_what_qemu_can_not_show_is_refused(drive: qemu.Drive) -> None:
    with pytest.raises(ValueError, match="model|serial"):
        qemu.command_line(replace(MACHINE, drives=(drive,)))


def test_commas_in_paths_are_doubled() -> None:
    argv = qemu.command_line(replace(MACHINE, seed=Path("/a,b")))
    assert any("dir=/a,,b," in a for a in argv)
    slow = qemu.command_line(replace(MACHINE, drives=(qemu.Drive(Path("/a,b"), rate=1),)))
    assert any("file.file.filename=/a,,b," in a for a in slow)


def test_slow_disk_has_a_limit_of_its_own_above_its_file() -> None:
    drives = (
        qemu.Drive(Path("/vm/os"), "virtio", "qcow2", "os"),
        qemu.Drive(Path("/vm/local0"), serial="local0", rate=1_000_000),
    )
    argv = qemu.command_line(replace(MACHINE, drives=drives))
    assert _options(argv, "-object") == ["throttle-group,id=throttle1,x-bps-total=1000000"]
    (block,) = [b for b in _options(argv, "-blockdev") if "node-name=disk1" in b]
    options = dict(option.split("=", 1) for option in block.split(","))
    assert options["driver"] == "throttle" and options["throttle-group"] == "throttle1"
    assert options["file.driver"] == "raw" and options["file.file.filename"] == "/vm/local0"


def test_clock_is_set_only_where_it_is_told() -> None:
    assert _options(qemu.command_line(MACHINE), "-rtc") == []
    told = qemu.command_line(replace(MACHINE, clock="1970-01-01T00:00:00"))
    assert _options(told, "-rtc") == ["base=1970-01-01T00:00:00"]


def test_plugged_disk_is_named_as_one_that_was_there_from_the_start() -> None:
    content, device = qemu.plugged(qemu.Drive(Path("/a,b"), "scsi", serial="x", durable=True), 3)
    assert (content["node-name"], content["file"]["filename"]) == ("disk3", "/a,b")
    assert content["cache"] == {"no-flush": False}
    assert (device["id"], device["drive"], device["serial"]) == ("device3", "disk3", "x")
    with pytest.raises(ValueError, match="SCSI"):
        qemu.plugged(qemu.Drive(Path("/x"), "nvme"), 3)


def test_failing_layer_names_the_drive_and_every_kind_of_access() -> None:
    layer = qemu.failing(2)
    assert (layer["driver"], layer["image"]) == ("blkdebug", qemu.node_name(2))
    assert {rule["iotype"] for rule in layer["inject-error"]} >= {"read", "write", "flush"}
    assert {(rule["errno"], rule["once"]) for rule in layer["inject-error"]} == {(5, False)}


def test_port_is_read_from_the_monitor() -> None:
    usernet = (
        "Hub -1 (net):\r\n"
        "  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n"
        "  TCP[HOST_FORWARD]  14       127.0.0.1 39921       10.0.2.15    22     0     0\r\n"
    )
    assert qemu.forwarded_port(usernet) == 39921
    with pytest.raises(BootError):
        qemu.forwarded_port("Hub -1 (net):\r\n")


def test_missing_firmware_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        qemu.find_firmware(directory=tmp_path)
    assert "OVMF_CODE_4M.fd" in caught.value.message and "ovmf" in (caught.value.hint or "")


def test_disk_format_is_told_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"QFI\xfb\0\0\0\3")
    (tmp_path / "b").write_bytes(b"\0" * 8)
    assert (qemu.disk_format(tmp_path / "a"), qemu.disk_format(tmp_path / "b")) == ("qcow2", "raw")


def test_long_socket_path_is_refused_before_qemu_is() -> None:
    assert monitor.socket_path(Path("/x/monitor")) == Path("/x/monitor")
    with pytest.raises(BootError, match="too long"):
        monitor.socket_path(Path("/" + "x" * 107))


def test_seed_holds_the_public_key_alone(tmp_path: Path) -> None:
    made = write_seed(tmp_path, instance_id="i-1", hostname="worker")
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    assert sorted(p.name for p in made.directory.iterdir()) == ["meta-data", "user-data"]
    header, _, body = (made.directory / "user-data").read_text().partition("\n")
    assert header == "#cloud-config"
    (public,) = json.loads(body)["ssh_authorized_keys"]
    loaded = paramiko.Ed25519Key.from_private_key_file(str(made.key))
    assert public.split()[:2] == ["ssh-ed25519", loaded.get_base64()]
    assert "PRIVATE" not in body
    assert json.loads((made.directory / "meta-data").read_text()) == {
        "instance-id": "i-1",
        "local-hostname": "worker",
    }


@pytest.mark.parametrize(
    "address",
    [
        ssh.SshAddress("debian", "127.0.0.1", 2222, Path("/a b/key"), Path("/k&h")),
        ssh.SshAddress("root", "node.example"),
        ssh.SshAddress("admin@corp", "fe80::1", 22, Path("/key")),
        ssh.SshAddress("a", "b", jump=(Hop(address="::1", port=3, user="x"), Hop(address="gate"))),
    ],
)
def test_address_survives_its_own_url(address: ssh.SshAddress) -> None:
    assert ssh.parse(address.url) == address


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://host", "not an SSH address"),
        ("ssh://", "not an SSH address"),
        ("ssh://host/path", "not an SSH address"),
        ("ssh://user:secret@host", "not an SSH address"),
        ("ssh://host:99999", "port"),
        ("ssh://host?kez=/x", "unknown option kez"),
        ("ssh://host?jump=a%20b", "`a b` is no bastion"),
    ],
)
def test_wrong_address_is_refused(url: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        ssh.parse(url)
    assert caught.value.hint


def test_what_an_address_does_not_say_is_the_inventorys() -> None:
    known = Connection("10.0.0.7", 2222, "azureuser", "/pool", (Hop(address="gate"),))
    address = ssh.SshAddress("azureuser", "10.0.0.7", 2222, Path("/pool"), jump=known.hops)
    assert ssh.parse("ssh://node7", {"node7": known}.__getitem__) == address
    said = ssh.parse("ssh://me@node7:22?key=/mine&jump=other", {"node7": known}.__getitem__)
    assert said == ssh.SshAddress("me", "10.0.0.7", 22, Path("/mine"), jump=(Hop(address="other"),))


def test_disk_is_found_in_a_directory_of_artefacts(tmp_path: Path) -> None:
    with pytest.raises(BootError, match="holds no disk"):
        find_disk(tmp_path)
    (tmp_path / "worker.raw").touch()
    assert find_disk(tmp_path) == tmp_path / "worker.raw"
    (tmp_path / "worker.qcow2").touch()
    assert find_disk(tmp_path) == tmp_path / "worker.qcow2"
    assert find_disk(tmp_path / "worker.raw") == tmp_path / "worker.raw"


def test_local_disks_are_numbered_and_have_the_sizes_that_were_asked_for() -> None:
    made = local_disks(["16G", "512m", "1048576"])
    assert [(disk.serial, disk.size, disk.path) for disk in made] == [
        ("local0", 16 << 30, None),
        ("local1", 512 << 20, None),
        ("local2", 1 << 20, None),
    ]
    assert local_disks([]) == ()


@pytest.mark.parametrize("size", ["", "0", "0G", "G", "1.5G", "16GB", "-1G", "16 G"])
def test_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match="not a disk size"):
        local_disks([size])


@pytest.mark.parametrize("size", [2 << 20, (1 << 63) - 1, 1 << 90])
def test_a_disk_that_is_larger_than_a_file_can_be_is_refused(tmp_path: Path, size: int) -> None:
    create_blank(tmp_path / "small", 1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UsageError, match="larger than a file in") as caught:
            create_blank(tmp_path / "disk", size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--local-disk" in str(caught.value.hint)


def test_static_pod_never_pulls_and_each_engine_has_its_import() -> None:
    pod = json.loads(static_pod("registry.example/pause:1"))
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/pause:1", "Never")
    assert import_command("docker", "/x.tar")[0] == "docker"
    assert import_command("containerd", "/x.tar")[:3] == ["ctr", "--namespace", "k8s.io"]
