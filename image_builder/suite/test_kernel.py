"""One kernel, held, with the modules that the image needs and without those that it denies."""

from __future__ import annotations

import re
from typing import Any

from answers import files, in_folder, output_once, succeeded
from questions import packages
from suite import booted, needs, nothing, offline, output, read, statements
from testinfra.host import Host
from tree import Tree

from image_builder.bake.formats import pe

V = dict[str, Any]

bootable = needs("system", system_bootable=True)


def _versions(tree: Tree) -> list[str]:
    """Return the versions of the kernels in /boot."""
    return [path.partition("-")[2] for path in tree.matching(r"/boot/vmlinuz-.*")]


def _image_kernel(tree: Tree) -> str:
    """Return the version of the image's kernel."""
    versions = _versions(tree)
    assert len(versions) == 1, f"kernels: {versions}"
    return versions[0]


@offline
@booted
@bootable
def test_kernel_is_the_declared_one(host: Host, tree: Tree, v: V) -> None:
    """There is one kernel, and the declared package installed it."""
    version = _image_kernel(tree)
    name, actual = v["__system_kernel"].strip(), packages(host)
    assert name in actual, f"{name} is not there"
    expected = f"linux-image-{version}"
    assert expected in actual[name].depends or expected == name, actual[name].depends
    assert expected in actual, f"no package brought {version}"


@offline
@booted
@bootable
def test_kernel_is_held(host: Host) -> None:
    """The kernel is held, so no package upgrade installs another one, for which there may be no drivers."""
    kernels = {name: package for name, package in packages(host).items() if name.startswith("linux-image-")}
    installed = {name: package for name, package in kernels.items() if package.installed}
    assert installed, "no kernel is installed"
    nothing(sorted(name for name, package in installed.items() if not package.held))


@offline
@booted
@bootable
def test_kernel_is_complete(tree: Tree) -> None:
    """The kernel has its initramfs and its modules, indexed."""
    version = _image_kernel(tree)
    for path in (
        f"/boot/vmlinuz-{version}",
        f"/boot/initrd.img-{version}",
        f"/usr/lib/modules/{version}/modules.dep.bin",
    ):
        assert tree[path].size > 1000, f"{path} has {tree[path].size} bytes"


@offline
@bootable
def test_initramfs_finds_the_root(host: Host, tree: Tree) -> None:
    """The drivers for the root filesystem and for virtual machines' disks are in the initramfs or built in."""
    version = _image_kernel(tree)
    actual = set(output(host, "lsinitramfs %s", f"/boot/initrd.img-{version}").splitlines())
    builtin = read(host, f"/usr/lib/modules/{version}/modules.builtin")
    names = {
        re.sub(r"\.ko(\.\w+)?$", "", path.rpartition("/")[2]) for path in [*actual, *builtin.splitlines()]
    }
    nothing(sorted({"ext4", "nvme", "virtio_blk", "virtio_pci"} - names))


@offline
@booted
@bootable
def test_initramfs_waits_for_no_swap(host: Host) -> None:
    """The boot doesn't look for a hibernated system."""
    lines = statements(read(host, "/etc/initramfs-tools/conf.d/image.conf"))
    texts = (text for path, text in files(host).items() if path.startswith("/etc/initramfs-tools/"))
    others = re.findall("^RESUME=.*", "\n".join(texts), re.MULTILINE)
    assert "RESUME=none" in lines
    assert set(others) == {"RESUME=none"}, f"{others}"


@offline
@booted
@bootable
def test_boot_loader_is_signed(host: Host, tree: Tree) -> None:
    """The shim and the GRUB that the ESP is filled from have signatures that cover exactly their bytes."""
    for path in ("/usr/lib/shim/shimx64.efi.signed", "/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed"):
        assert tree[path].size > 100_000, path
        try:
            signed = pe.parse(succeeded("cat", host.run("cat %s", path)).stdout_bytes).signed
        except pe.PeError as error:
            raise AssertionError(f"{path}: {error}") from error
        assert signed, f"{path} has no signature of its bytes"


@offline
@booted
@bootable
def test_esp_follows_the_kernel(host: Host, tree: Tree) -> None:
    """Kernel packages and update-initramfs both run the hook that keeps the ESP up to date."""
    hook = "/etc/kernel/postinst.d/zz-image-esp"
    assert tree[hook].mode == 0o755, f"{tree[hook].mode:o}"
    output_once(host, f"sh -n {hook}")
    links = ("/etc/kernel/postrm.d/zz-image-esp", "/etc/initramfs/post-update.d/zz-image-esp")
    nothing(f"{link} -> {tree[link].link}" for link in links if tree[link].link != hook)


@offline
@booted
@needs("system")
def test_modules_are_loaded_at_boot(host: Host, v: V) -> None:
    """Every declared module is loaded at boot, before kernel settings that need it."""
    lines = statements("\n".join(in_folder(host, "/etc/modules-load.d", ".conf").values()))
    nothing(module for module in v["system_modules"] if module not in lines)


@offline
@booted
@bootable
def test_modules_exist(host: Host, tree: Tree, v: V) -> None:
    """The image's kernel has every declared module, as a file or built in."""
    version, missing = _image_kernel(tree), []
    # First all at once; only to find out which one is missing, one at a time.
    command = ("modprobe --all --show-depends --set-version", version, *v["system_modules"])
    together = host.run(" ".join(command))
    for module in v["system_modules"] if together.rc != 0 or "install " in together.stdout else ():
        # "insmod PATH" or "builtin NAME"; "install /bin/false" where the module is denied.
        done = host.run("modprobe --show-depends --set-version %s %s", version, module)
        if done.rc != 0 or "install " in done.stdout:
            missing.append(f"{module}: {(done.stdout + done.stderr).strip()}")
    nothing(missing)


@booted
@needs("system")
def test_modules_are_loaded(host: Host, v: V) -> None:
    """The running kernel has every declared module."""
    loaded = {line.split()[0] for line in read(host, "/proc/modules").splitlines()}
    missing = [module for module in v["system_modules"] if module.replace("-", "_") not in loaded]
    nothing(m for m in missing if output(host, "modinfo --field filename %s", m) != "(builtin)")


@booted
@bootable
def test_running_kernel_is_the_images(host: Host, tree: Tree) -> None:
    """The machine booted the kernel that is in the image."""
    assert read(host, "/proc/sys/kernel/osrelease").strip() == _image_kernel(tree)


@booted
@bootable
def test_esp_has_the_images_kernel(host: Host, tree: Tree) -> None:
    """The ESP, from which the machine boots, has the same kernel and initramfs as /boot."""
    version = _image_kernel(tree)
    output_once(host, f"cmp /boot/vmlinuz-{version} /boot/efi/EFI/image/vmlinuz")
    output_once(host, f"cmp /boot/initrd.img-{version} /boot/efi/EFI/image/initrd.img")
