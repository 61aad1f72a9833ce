"""The disk's plan: sizes, boot configuration, and the choice of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.bake import boot_partition, identity
from image_builder.bake.stages.disk.run import MIB, Content, Layout, measure, plan_layout, repart_definitions
from image_builder.errors import ImageBuilderError

BUILD = "ab" * 32
GIB = 1 << 30
AUTO = {"esp_size_mib": 512, "root_size_mib": "auto"}


def test_auto_leaves_room_to_boot_and_the_disk_is_whole_mib() -> None:
    layout = plan_layout(BUILD, AUTO, Content(2 * GIB, 60_000))
    assert layout.root_mib * MIB > 2 * GIB * 12 // 10
    assert layout.size % MIB == 0
    esp, root = layout.partitions()
    assert (esp.start, esp.size) == (MIB, 512 * MIB)
    assert root.start == esp.start + esp.size
    assert root.start + root.size + MIB == layout.size


def test_a_tree_that_does_not_fit_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ImageBuilderError, match=r"needs a root partition of \d+ MiB.*is 1024") as caught:
        plan_layout(BUILD, {"esp_size_mib": 512, "root_size_mib": 1024}, Content(2 * GIB, 60_000))
    assert "image_disk.root_size_mib" in (caught.value.hint or "")


def test_an_explicit_size_is_kept() -> None:
    assert plan_layout(BUILD, {"esp_size_mib": 600, "root_size_mib": 8192}, Content(GIB, 9)) == Layout(
        BUILD, 600, 8192
    )


def test_partitions_bear_the_builds_own_names() -> None:
    files = repart_definitions(Layout(BUILD, 512, 1024))
    assert list(files) == ["10-esp.conf", "20-root.conf"]
    assert f"UUID={identity.partition_uuid(BUILD, 'root')}" in files["20-root.conf"]
    assert "Label=root" in files["20-root.conf"]
    other = repart_definitions(Layout("cd" * 32, 512, 1024))
    assert other != files


def test_a_tree_is_measured_in_blocks_with_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4097)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "short").symlink_to("a")
    (tmp_path / "long").symlink_to("x" * 60)
    (tmp_path / "dir").mkdir()
    # Two blocks for a, one for the long link, and one for the non-empty one of the two directories.
    assert measure(tmp_path) == Content(4 * 4096, 5)


def test_the_kernels_arguments_name_root_and_a_serial_console() -> None:
    arguments = boot_partition.kernel_arguments("1234", ["quiet", "net.ifnames=0"])
    assert arguments == (
        "root=PARTUUID=1234",
        "rw",
        "console=tty0",
        "console=ttyS0,115200n8",
        "quiet",
        "net.ifnames=0",
    )
    assert boot_partition.kernel_arguments("1", ["console=ttyS1"]) == (
        "root=PARTUUID=1",
        "rw",
        "console=ttyS1",
    )


def test_grub_falls_back_to_the_previous_kernel() -> None:
    config = boot_partition.grub_config("worker 0123", ["root=PARTUUID=1", "rw"])
    assert "linux /EFI/image/vmlinuz root=PARTUUID=1 rw\n" in config
    assert "if [ -f /EFI/image/vmlinuz.old ]" in config
    assert "initrd /EFI/image/initrd.img.old" in config
    assert "set fallback=1" in config


def _kernel(tree: Path, version: str, initrd: bool = True) -> None:
    (tree / "boot").mkdir(exist_ok=True)
    (tree / f"boot/vmlinuz-{version}").write_bytes(b"kernel")
    if initrd:
        (tree / f"boot/initrd.img-{version}").write_bytes(b"initrd")


def test_the_newest_kernel_with_an_initrd_is_booted(tmp_path: Path) -> None:
    _kernel(tmp_path, "6.12.9+deb13-cloud-amd64")
    _kernel(tmp_path, "6.12.107+deb13-cloud-amd64")
    _kernel(tmp_path, "6.13.1-cloud-amd64", initrd=False)
    assert boot_partition.find_kernel(tmp_path).version == "6.12.107+deb13-cloud-amd64"


def test_a_tree_without_a_kernel_or_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageBuilderError, match="no kernel in /boot"):
        boot_partition.find_kernel(tmp_path)
    _kernel(tmp_path, "6.12", initrd=False)
    with pytest.raises(ImageBuilderError, match="no initrd for any kernel"):
        boot_partition.find_kernel(tmp_path)
    _kernel(tmp_path, "6.12")
    kernel = boot_partition.find_kernel(tmp_path)
    with pytest.raises(ImageBuilderError, match=r"shimx64.*mmx64.*grubx64") as caught:
        boot_partition.assemble(tmp_path, tmp_path / "esp", kernel, "", 0)
    assert "shim-signed" in (caught.value.hint or "")
