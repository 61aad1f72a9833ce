"""The files of the EFI system partition, and the proof that Secure Boot accepts them.

    EFI/BOOT/BOOTX64.EFI    shim, signed by Microsoft: the path that firmware tries on a disk it has never seen
    EFI/BOOT/grubx64.efi    GRUB, signed by the distribution, whose key shim carries
    EFI/BOOT/mmx64.efi      MokManager, for keys that an administrator enrols
    EFI/{BOOT,debian}/grub.cfg
    EFI/image/vmlinuz, EFI/image/initrd.img

The kernel has a fixed name, so grub.cfg never changes. Anything that installs another kernel on a running
system keeps the old pair as ``vmlinuz.old`` and ``initrd.img.old``; GRUB offers that pair if it exists and falls
back to it when the new one can't be loaded. Kernel and initrd are stored here, not on the root filesystem,
because the signed GRUB always reads FAT but doesn't support every feature of ext4.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from image_builder.bake.formats import pe
from image_builder.errors import ImageBuilderError
from image_builder.system.process import Completed
from image_builder.system.sandbox import Root

SHIM, GRUB = PurePosixPath("EFI/BOOT/BOOTX64.EFI"), PurePosixPath("EFI/BOOT/grubx64.efi")
KERNEL, INITRD = PurePosixPath("EFI/image/vmlinuz"), PurePosixPath("EFI/image/initrd.img")
GRUB_CONFIGS = (PurePosixPath("EFI/BOOT/grub.cfg"), PurePosixPath("EFI/debian/grub.cfg"))
CONSOLES = ("console=tty0", "console=ttyS0,115200n8")

# Microsoft's certificates with which firmware verifies software other than Windows, in PEM, by name.
FIRMWARE_AUTHORITIES: Mapping[str, str] = dict(
    re.findall(
        r"^(.+)\n(-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n)",
        Path(__file__).with_name("firmware_authorities.pem").read_text(encoding="ascii"),
        re.MULTILINE,
    )
)
_LOADERS: Mapping[PurePosixPath, str] = {
    SHIM: "usr/lib/shim/shimx64.efi.signed",
    PurePosixPath("EFI/BOOT/mmx64.efi"): "usr/lib/shim/mmx64.efi.signed",
    GRUB: "usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed",
}
_GRUB_CONFIG = """\
# Written by image-builder; it never changes. The kernel's update replaces the files named here.
set timeout=0
set default=0
set fallback=1
menuentry "{title}" {{
    linux /{kernel} {arguments}
    initrd /{initrd}
}}
if [ -f /{kernel}.old ]; then
    menuentry "{title}, previous kernel" {{
        linux /{kernel}.old {arguments}
        initrd /{initrd}.old
    }}
fi
"""


@dataclass(frozen=True)
class Kernel:
    """The kernel that is booted: its version and its files in the tree."""

    version: str
    image: Path
    initrd: Path


@dataclass(frozen=True)
class SecureBootProof:
    """The authorities that verify shim, and the digests of shim and of the GRUB and kernel that its key verifies."""

    firmware_authorities: tuple[str, ...]
    shim_sha256: str
    grub_sha256: str
    kernel_sha256: str


def kernel_arguments(root_uuid: str, extra: Sequence[str]) -> tuple[str, ...]:
    """Return the kernel command line: root, the default consoles unless ``extra`` names its own, then ``extra``."""
    consoles = () if any(a.startswith("console=") for a in extra) else CONSOLES
    return (f"root=PARTUUID={root_uuid}", "rw", *consoles, *extra)


def grub_config(title: str, arguments: Sequence[str]) -> str:
    """Return grub.cfg."""
    return _GRUB_CONFIG.format(title=title, kernel=KERNEL, initrd=INITRD, arguments=" ".join(arguments))


def find_kernel(tree: Path) -> Kernel:
    """Return the newest kernel in ``tree`` that has an initrd. Raises ImageBuilderError if there is none."""
    boot = tree / "boot"
    images = sorted(boot.glob("vmlinuz-*"), key=lambda p: _version_key(p.name)) if boot.is_dir() else []
    for image in reversed(images):
        version = image.name.removeprefix("vmlinuz-")
        initrd = boot / f"initrd.img-{version}"
        if initrd.is_file() and initrd.stat().st_size:
            return Kernel(version, image, initrd)
    missing = "no initrd for any kernel" if images else "no kernel"
    raise ImageBuilderError(
        f"the tree has {missing} in /boot, a disk of it can't boot",
        hint="a layer has to install linux-image-cloud-amd64 and initramfs-tools",
    )


def _version_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def assemble(tree: Path, target: Path, kernel: Kernel, config: str, epoch: int) -> list[PurePosixPath]:
    """Write the partition's files to ``target``, all dated ``epoch``; return their paths in it, sorted.

    Raises ImageBuilderError naming every boot loader that the tree lacks.
    """
    sources = {path: tree / source for path, source in _LOADERS.items()}
    if missing := [f"/{source}" for source in _LOADERS.values() if not (tree / source).is_file()]:
        raise ImageBuilderError(
            f"the tree lacks the boot loader: {', '.join(missing)}",
            hint="a layer has to install shim-signed and grub-efi-amd64-signed",
        )
    sources |= {KERNEL: kernel.image, INITRD: kernel.initrd}
    for path, source in sources.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / path)
    for path in GRUB_CONFIGS:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(config, encoding="utf-8")
    paths = sorted([*sources, *GRUB_CONFIGS])
    for path in paths:
        os.utime(target / path, (epoch, epoch))
    return paths


def prove_secure_boot(
    tools: Root, esp: Path, mounted: str, work: Path, certificate_at: str
) -> SecureBootProof:
    """Prove that firmware with Microsoft's keys starts shim, and that shim starts GRUB and the kernel.

    Each program's signature must cover exactly its bytes; one of shim's must verify with one of Microsoft's
    certificates, and those of GRUB and the kernel with the certificate that is built into this shim. Not proven,
    because the files don't show it: which of Microsoft's certificates a firmware has, and that it hasn't revoked the
    programs (dbx, SBAT). ``esp`` is visible in ``tools`` as ``mounted``, and ``work`` as ``certificate_at``. Raises
    ImageBuilderError if any of this fails.
    """
    programs = {name: _parse_signed(name, esp / path) for name, path in _CHAIN.items()}
    authorities = tuple(
        name
        for name, pem in FIRMWARE_AUTHORITIES.items()
        if _verifies(tools, f"{mounted}/{SHIM}", pem, work, certificate_at).returncode == 0
    )
    if not authorities:
        issuers = ", ".join(_issuers(tools, f"{mounted}/{SHIM}")) or "no one"
        raise _refusal("shim", f"is signed by {issuers}, which no certificate of Microsoft's confirms")
    try:
        certificate = pe.vendor_certificate(programs["shim"])
    except pe.PeError as error:
        raise _refusal("shim", f"carries no key to check GRUB and the kernel with: {error}") from error
    encoded = base64.encodebytes(certificate).decode("ascii")
    pem = f"-----BEGIN CERTIFICATE-----\n{encoded}-----END CERTIFICATE-----\n"
    for name in ("grub", "kernel"):
        checked = _verifies(tools, f"{mounted}/{_CHAIN[name]}", pem, work, certificate_at)
        if checked.returncode:
            raise _refusal(name, f"is not signed with the key that shim carries: {checked.stderr.strip()}")
    return SecureBootProof(
        authorities, programs["shim"].digest, programs["grub"].digest, programs["kernel"].digest
    )


_CHAIN = {"shim": SHIM, "grub": GRUB, "kernel": KERNEL}


def _refusal(name: str, reason: str) -> ImageBuilderError:
    return ImageBuilderError(
        f"image_secure_boot is set, but {name} {reason}",
        hint="install the distribution's signed packages, or set image_secure_boot to false",
    )


def _parse_signed(name: str, path: Path) -> pe.Program:
    try:
        program = pe.parse(path.read_bytes())
    except pe.PeError as error:
        raise _refusal(name, f"is not an EFI program: {error}") from error
    if not program.signed:
        reason = "bears a signature of other bytes" if program.signatures else "is not signed"
        raise _refusal(name, reason)
    return program


def _verifies(tools: Root, path: str, pem: str, work: Path, certificate_at: str) -> Completed:
    """Return sbverify's result: status 0 if a signature is by that certificate, or by one that it issued."""
    (work / "authority.pem").write_text(pem, encoding="ascii")
    return tools.run(["sbverify", "--cert", f"{certificate_at}/authority.pem", path], ok=(0, 1))


def _issuers(tools: Root, path: str) -> tuple[str, ...]:
    """Return the common names of the issuers of the signatures' certificates."""
    listed = tools.run(["sbverify", "--list", path]).stdout
    blocks = re.findall(r"image signature issuers:\n((?: - .*\n)+)", listed)
    return tuple(name for block in blocks for name in re.findall(r"CN=([^/\n]+)", block))
