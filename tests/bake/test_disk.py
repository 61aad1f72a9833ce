"""Disks made from a small tree: their contents, identical bytes on every run, and what is refused.

``IMAGE_BUILDER_TOOLS_TREE`` names a tools tree; without it, that of a build is used.
"""

from __future__ import annotations

import datetime
import json
import os
import struct
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from image_builder.bake import boot_partition, identity
from image_builder.bake.boot_partition import FIRMWARE_AUTHORITIES
from image_builder.bake.formats import gpt, vhd
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.convert import run as convert
from image_builder.bake.stages.disk import run as disk
from image_builder.definition.model import ImageDefinition
from image_builder.errors import ImageBuilderError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import sparse
from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import Root, open_root
from tests.support.images import efi_programs
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

BUILD, EPOCH, MIB = "ab" * 32, 1735689600, 1 << 20
LOADERS = ("usr/lib/shim/shimx64.efi.signed", "usr/lib/shim/mmx64.efi.signed")
GRUB = "usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed"
KERNEL = "boot/vmlinuz-6.12.107+deb13-cloud-amd64"
# cap_net_raw=ep, as `setcap` writes it (VFS_CAP_REVISION_2).
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


@pytest.fixture
def tools(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_TOOLS_TREE" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_TOOLS_TREE"]).resolve()
    found: Path = request.getfixturevalue("tools_tree")
    return found


def _tree(path: Path, *, order: int = 1) -> Path:
    """Make a tree with everything a filesystem can hold; ``order`` is the order in which names are created."""
    files: dict[str, bytes] = {
        **dict.fromkeys((*LOADERS, GRUB), efi_programs.build()),
        KERNEL: efi_programs.build(b"kernel" * 1000),
        "boot/initrd.img-6.12.107+deb13-cloud-amd64": b"initrd" * 100_000,
        "etc/fstab": b"",
        "usr/bin/ping": b"program",
        "usr/bin/sudo": b"program",
        "srv/Grüße": b"name",
        **{f"var/lib/dpkg/info/{n}.list": b"x" * n for n in range(200)},
    }
    for name in list(files)[::order]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(files[name])
    (path / "usr/bin/sudo").chmod(0o4755)
    os.chown(path / "etc/fstab", 1234, 4321)
    os.setxattr(path / "usr/bin/ping", "security.capability", CAPABILITY)
    (path / "usr/bin/sudoedit").hardlink_to(path / "usr/bin/sudo")
    (path / "vmlinuz").symlink_to(KERNEL)
    os.mknod(path / "etc/fifo", 0o10644)
    with (path / "srv/sparse").open("wb") as stream:
        stream.truncate(8 * MIB)
    for name in ("proc", "sys", "dev", "run", "tmp"):
        (path / name).mkdir()
    for found in (path, *path.rglob("*")):
        os.utime(found, (time.time(), 1700000000), follow_symlinks=False)
    os.utime(path / "srv/Grüße")  # newer than the build's date: must be clamped
    return path


def _context(
    base: Path, tools: Path, tree: Path, kind: str, options: dict[str, Any], **inputs: Path
) -> StageContext:
    for name in ("work", "product"):
        (base / name).mkdir(parents=True)
    (base / "tools").mkdir()
    (base / "tools/tree").symlink_to(tools)
    plan = StagePlan(kind, kind, {"build_id": BUILD, "source_date_epoch": EPOCH, **options})
    return StageContext(
        plan=plan,
        definition=cast("ImageDefinition", SimpleNamespace(name="lab")),
        work=base / "work",
        product=base / "product",
        ground=(),
        lowers=(tree,),
        inputs={"tools": base / "tools", **inputs},
        repo=None,
        files=None,
        monitor=Monitor(),
        log=base / "log",
        settings=Settings(store=base),
    )


def _isolated(work: Callable[[], None]) -> None:
    """Run ``work`` as a stage is run, in a child: a process can enter new namespaces only once."""

    def guarded() -> int:
        work()
        return 0

    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = run_isolated(guarded)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "see the traceback on standard error"


def _make_disk(base: Path, tools: Path, tree: Path, **options: Any) -> Path:
    size = {"esp_size_mib": 512, "root_size_mib": "auto", "filesystem": "ext4"}
    told = {"disk": size, "kernel_args": ["quiet"], "secure_boot": False, **options}
    context = _context(base, tools, tree, "disk", told)

    def work() -> None:
        try:
            facts = disk.run(context)
        except ImageBuilderError as error:
            facts = {"error": error.message}
        (base / "facts.json").write_text(json.dumps(facts))

    _isolated(work)
    return context.product / "disk.raw"


def _refusal(base: Path, tools: Path, tree: Path, **options: Any) -> str:
    _make_disk(base, tools, tree, **options)
    facts = json.loads((base / "facts.json").read_text())
    assert facts.keys() == {"error"}, "a disk was made"
    return str(facts["error"])


def _with_tools(base: Path, tools: Path, work: Callable[[Root], None], **binds: Path) -> None:
    (base / "read").mkdir(exist_ok=True)

    def isolated() -> None:
        mounts = {f"/run/{name}": path for name, path in binds.items()}
        with open_root([tools], base / "read", writable_binds=mounts) as root:
            work(root)

    _isolated(isolated)


def test_the_same_tree_gives_the_same_disk(tmp_path: Path, tools: Path) -> None:
    """Made at another time, in another place, from names created in a different order."""
    first = _make_disk(tmp_path / "a", tools, _tree(tmp_path / "one"))
    time.sleep(2.1)  # FAT has a resolution of two seconds
    second = _make_disk(tmp_path / "b", tools, _tree(tmp_path / "two", order=-1))
    assert sparse.sha256(first) == sparse.sha256(second)
    assert first.stat().st_blocks * 512 < first.stat().st_size / 4


def test_the_disk_holds_the_tree_and_boots_it(tmp_path: Path, tools: Path) -> None:
    tree = _tree(tmp_path / "tree")
    made = _make_disk(tmp_path / "disk", tools, tree)
    with made.open("rb") as stream:
        table = gpt.read(stream)
    esp, root = table.partitions
    assert table.disk_uuid == identity.disk_uuid(BUILD)
    assert (esp.name, esp.type, esp.uuid) == ("esp", gpt.TYPE_ESP, identity.partition_uuid(BUILD, "esp"))
    assert (root.name, root.uuid) == ("root", identity.partition_uuid(BUILD, "root"))
    assert esp.size >= 512 * MIB
    assert table.size % MIB == 0
    at_esp, at_root = "/run/p/esp", "/run/p/root"

    def read(mounted: Root) -> None:
        def file(name: str) -> str:
            return mounted.run(["mtype", "-i", at_esp, f"::{name}"]).stdout

        def inode(name: str) -> str:
            return mounted.run(["debugfs", "-R", name, at_root]).stdout

        for part in (esp, root):
            place = [f"skip={part.start // MIB}", f"count={part.size // MIB}"]
            mounted.run(
                ["dd", "if=/run/p/disk.raw", f"of=/run/p/{part.name}", "bs=1M", "conv=sparse", *place]
            )
            mounted.run(["truncate", f"--size={part.size}", f"/run/p/{part.name}"])
        mounted.run(["fsck.vfat", "-n", at_esp])
        mounted.run(["e2fsck", "-fn", at_root])
        config = file("EFI/BOOT/grub.cfg")
        assert config == file("EFI/debian/grub.cfg")
        assert f"linux /EFI/image/vmlinuz root=PARTUUID={root.uuid} rw" in config
        assert " quiet\n" in config
        for path, source in ((boot_partition.SHIM, LOADERS[0]), (boot_partition.KERNEL, KERNEL)):
            mounted.run(["mcopy", "-n", "-i", at_esp, f"::{path}", "/run/p/copy"])
            assert (made.parent / "copy").read_bytes() == (tree / source).read_bytes()
        header = mounted.run(["dumpe2fs", "-h", at_root]).stdout
        assert identity.filesystem_uuid(BUILD, "root") in header
        assert "Filesystem state:         clean" in header
        fields = {
            key: value.strip() for key, _, value in (line.partition(":") for line in header.splitlines())
        }
        assert "has_journal" in fields["Filesystem features"]
        # Programs older than e2fsprogs 1.47, as on rescue systems, refuse a disk with it.
        assert "orphan_file" not in fields["Filesystem features"]
        share = int(fields["Reserved block count"]) / int(fields["Block count"])
        assert round(100 * share, 1) == 1.0, "a full disk leaves root a hundredth"
        assert "Mode:  04755" in inode("stat /usr/bin/sudo")
        assert "Links: 2" in inode("stat /usr/bin/sudoedit")
        assert "User:  1234   Group:  4321" in inode("stat /etc/fstab")
        assert "security.capability" in inode("ea_list /usr/bin/ping")
        assert "Type: FIFO" in inode("stat /etc/fifo")
        assert "Blockcount: 0" in inode("stat /srv/sparse")
        assert "mtime: 0x67748580" in inode("stat /srv/Grüße")  # EPOCH
        assert inode(f"stat /{KERNEL}").startswith("Inode")
        assert "initrd.img" in inode("ls /boot")

    _with_tools(tmp_path, tools, read, p=made.parent)


def test_trees_that_make_no_disk_are_refused(tmp_path: Path, tools: Path) -> None:
    tree = _tree(tmp_path / "tree")
    small = {"esp_size_mib": 512, "root_size_mib": 64, "filesystem": "ext4"}
    assert "needs a root partition of" in _refusal(tmp_path / "small", tools, tree, disk=small)
    (tree / GRUB).unlink()
    assert f"lacks the boot loader: /{GRUB}" in _refusal(tmp_path / "loader", tools, tree)
    (tree / KERNEL).unlink()
    assert "no kernel in /boot" in _refusal(tmp_path / "kernel", tools, tree)


def test_secure_boot_is_proven_or_refused(tmp_path: Path, tools: Path) -> None:
    tree = _tree(tmp_path / "tree")

    def refusal(number: int) -> str:
        return _refusal(tmp_path / str(number), tools, tree, secure_boot=True)

    assert "but shim is not signed" in refusal(1)
    plain = efi_programs.build()
    signed = efi_programs.build(signatures=(efi_programs.sign(plain),))
    for name in (LOADERS[0], GRUB):
        (tree / name).write_bytes(signed)
    assert "but kernel is not signed" in refusal(2)
    other = efi_programs.build(b"other" * 100)
    (tree / KERNEL).write_bytes(efi_programs.build(b"kernel" * 99, (efi_programs.sign(other),)))
    assert "but kernel bears a signature of other bytes" in refusal(3)
    (tree / KERNEL).write_bytes(b"text")
    assert "but kernel is not an EFI program" in refusal(4)


def _self_made(name: str) -> tuple[bytes, str]:
    """Return a key and its certificate, both in PEM, which anyone can make under any name."""
    key = rsa.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, certificate.public_bytes(Encoding.PEM).decode()


def test_a_shim_that_only_names_microsoft_is_refused(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, signing = _tree(tmp_path / "tree"), tmp_path / "signing"
    signing.mkdir()
    name = "Microsoft Corporation UEFI CA 2011"
    key, certificate = _self_made(name)
    (signing / "key.pem").write_bytes(key)
    (signing / "certificate.pem").write_text(certificate)
    plain = efi_programs.build()
    (signing / "shim.efi").write_bytes(plain)
    for path in (GRUB, KERNEL):
        (tree / path).write_bytes(efi_programs.build(signatures=(efi_programs.sign(plain),)))

    def sign(mounted: Root) -> None:
        at = "/run/s"
        words = ["sbsign", "--key", f"{at}/key.pem", "--cert", f"{at}/certificate.pem"]
        mounted.run([*words, "--output", f"{at}/signed.efi", f"{at}/shim.efi"])

    _with_tools(tmp_path, tools, sign, s=signing)
    (tree / LOADERS[0]).write_bytes((signing / "signed.efi").read_bytes())
    told = _refusal(tmp_path / "named", tools, tree, secure_boot=True)
    assert f"but shim is signed by {name}, which no certificate of Microsoft's confirms" in told
    monkeypatch.setattr(boot_partition, "FIRMWARE_AUTHORITIES", {name: certificate})
    told = _refusal(tmp_path / "trusted", tools, tree, secure_boot=True)
    assert "but shim carries no key to check GRUB and the kernel with" in told


def test_an_image_says_which_of_microsofts_certificates_firmware_needs(minimal: Workplace) -> None:
    proof = json.loads((minimal.artefact / "manifest.json").read_bytes())["disk"]["secure_boot"]
    assert proof["firmware_authorities"]
    assert set(proof["firmware_authorities"]) <= set(FIRMWARE_AUTHORITIES)


def test_all_formats_hold_the_same_disk(tmp_path: Path, tools: Path) -> None:
    tree = _tree(tmp_path / "tree")
    raw = _make_disk(tmp_path / "disk", tools, tree)
    results = []
    for name in ("first", "second"):
        options = {"image": "lab", "formats": ["raw", "qcow2", "vhd", "tar"]}
        context = _context(tmp_path / name, tools, tree, "convert", options, disk=raw.parent)
        facts = context.product.parent / "facts.json"
        _isolated(lambda c=context, f=facts: f.write_text(json.dumps(convert.run(c))) and None)  # type: ignore[misc]
        results.append(json.loads(facts.read_text())["files"])
        time.sleep(1.1)
    assert results[0] == results[1]
    product = tmp_path / "first/product"
    for told in results[0]:
        path = product / told["name"]
        assert (told["bytes"], told["sha256"]) == (path.stat().st_size, sparse.sha256(path))
    with (product / "lab.vhd").open("rb") as stream:
        assert vhd.read(stream).timestamp == EPOCH
    _with_tools(tmp_path, tools, _compare, p=product)
    with tarfile.open(product / "lab.tar") as archive:
        _check_tar(archive.getmembers())


def _compare(mounted: Root) -> None:
    for form, name in (("vpc", "lab.vhd"), ("qcow2", "lab.qcow2")):
        argv = ["qemu-img", "compare", "-f", "raw", "-F", form, "/run/p/lab.raw", f"/run/p/{name}"]
        assert "Images are identical." in mounted.run(argv).stdout
    told = json.loads(
        mounted.run(["qemu-img", "info", "-f", "vpc", "--output=json", "/run/p/lab.vhd"]).stdout
    )
    assert told["format"] == "vpc"
    assert told["virtual-size"] % MIB == 0


def _check_tar(members: list[tarfile.TarInfo]) -> None:
    by_name = {m.name: m for m in members}
    inside = [m.name for m in members if m.name.startswith("./var/lib/dpkg/info/")]
    assert inside == sorted(inside)
    assert max(m.mtime for m in members) == EPOCH
    assert "SCHILY.xattr.security.capability" in by_name["./usr/bin/ping"].pax_headers
    assert (by_name["./etc/fstab"].uid, by_name["./etc/fstab"].gid) == (1234, 4321)
    assert by_name["./usr/bin/sudo"].mode == 0o4755
    assert {"./proc", "./dev", "./tmp"} <= by_name.keys()
    assert not [n for n in by_name if n.startswith(("./proc/", "./dev/"))]
