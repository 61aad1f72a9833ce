"""Build a driver's kernel modules from its DKMS package, for the image's kernel and nothing else.

DKMS compiles them in a root of the image's release that has the image's kernel headers; the compiler, the headers
and the sources don't end up in any image. The result is judged by the files, not by the exit status: a package's own
scripts succeed even if they built nothing, or built for the kernel that happened to be running.

Product: ``files/usr/lib/modules/KERNEL/updates/dkms/NAME.ko``, each under the name that the module itself has, and
``modules.json``, which describes them. The same packages give the same bytes on any host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.lock import repository
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.errors import CommandError, HostError, ImageBuilderError, LockError
from image_builder.system.sandbox import Root, open_root

# Where the product's files go in an image: below the kernel's own, and found before them.
MODULE_DIR = "usr/lib/modules/{kernel}/updates/dkms"
RECORD = "modules.json"
# Modules that a GPU needs. The package's others (drm, peermem) are built, too.
REQUIRED = ("nvidia", "nvidia_uvm", "nvidia_modeset")
# The licenses that the modules of each flavour declare.
LICENSES: Mapping[str, tuple[str, ...]] = {"open": ("Dual MIT/GPL", "MIT"), "proprietary": ("NVIDIA",)}
# nvidia-peermem has a version of its own; every other module has the driver's.
_OWN_VERSION = ("nvidia_peermem",)

_TREE = "/var/lib/dkms"
_UNPACKED = "/run/image-builder/driver"
_BUILT = "/run/image-builder/modules"
# Names the file with the private key (PEM) on the baking host. Neither the key nor its path is part of a build's
# identity; the certificate is, and a signature that doesn't match it is detected.
KEY_VARIABLE = "IMAGE_BUILDER_MODULE_KEY"
_KEY, _CERTIFICATE = "/run/image-builder/module.key", "/run/image-builder/module.pem"
# A key that DKMS generates here would differ in each build, and nothing would trust it.
_NO_SIGNING = 'sign_file="/nonexistent"\n'
_ERROR = re.compile(r"error|undefined|No rule|No such file", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    """A module file's own information, and its SHA-256."""

    name: str
    version: str
    vermagic: str
    license: str
    signer: str
    sha256: str


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Build the modules. Raises ImageBuilderError if they don't compile or aren't what was requested."""
    options = ctx.plan.options
    kernel, driver, flavour = options["kernel"], options["driver"], options["flavour"]
    certificate = options["certificate"]
    signing = _signing_files(certificate, ctx.work) if certificate else {}
    package, unsigned = _build(ctx, driver, kernel, options["source_date_epoch"])
    tree = ctx.inputs["module_root"] / "tree"
    # Not the root in which third-party code ran: that code never sees the key, and leaves nothing here.
    with open_root([tree], ctx.work / "signing", binds=signing) as root:
        built = root.path / _BUILT.lstrip("/")
        shutil.copytree(unsigned, built)
        if certificate:
            _sign(root, built, kernel)
        target = ctx.product / "files" / MODULE_DIR.format(kernel=kernel)
        target.mkdir(parents=True)
        modules = _collect(root, built, target)
        compiler = root.run(["gcc", "-dumpfullversion"]).stdout.strip()
        configuration = (root.path / f"usr/src/linux-headers-{kernel}/.config").read_text(encoding="utf-8")
    faults = problems(modules, kernel, driver, flavour, signed=bool(certificate))
    if compiler != (kernel_compiler := compiler_of(configuration)):
        faults.append(f"the compiler is gcc {compiler}, the kernel was compiled by gcc {kernel_compiler}")
    if faults:
        raise ImageBuilderError("the modules that were built are not usable:\n  " + "\n  ".join(faults))
    record: dict[str, JSON] = {
        "kernel": kernel,
        "driver": driver,
        "flavour": flavour,
        "package": package,
        "compiler": f"gcc {compiler}",
        "modules": {
            m.name: {"sha256": m.sha256, "vermagic": m.vermagic, "signer": m.signer} for m in modules
        },
    }
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    (ctx.product / RECORD).write_text(text, encoding="ascii")
    return record


def _build(ctx: StageContext, driver: str, kernel: str, epoch: int) -> tuple[str, Path]:
    """Compile the modules; return the package, NAME/VERSION, and a directory with the files."""
    assert ctx.repo is not None
    with open_root(
        [ctx.inputs["module_root"] / "tree"],
        ctx.work / "root",
        binds={repository.MOUNT_POINT: ctx.repo},
        env=_environment(epoch),
    ) as root:
        if not (root.path / f"usr/src/linux-headers-{kernel}").is_dir():
            raise LockError(f"the build root has no headers of the kernel {kernel}", hint="make a new lock")
        ctx.doing("unpacking the driver's source")
        package = _unpack(root, driver)
        ctx.doing(f"compiling for {kernel}")
        _compile(ctx, root, package, kernel)
        built = root.path / f"{_TREE.lstrip('/')}/{package}/{kernel}/x86_64/module"
        for packed in sorted(built.glob("*.ko.xz")):  # DKMS compresses if the release does
            root.run(["xz", "--decompress", f"/{packed.relative_to(root.path)}"])
        folder = ctx.work / "modules"
        folder.mkdir()
        for file in sorted(built.glob("*.ko")):
            if file.is_symlink() or not file.is_file():
                raise ImageBuilderError(f"{file.name} was built, and is not a regular file")
            shutil.copyfile(file, folder / file.name)
    return package, folder


def problems(
    modules: Sequence[Module], kernel: str, driver: str, flavour: str, *, signed: bool = False
) -> list[str]:
    """Return what is wrong with built modules, one sentence each.

    Every module must be for exactly ``kernel`` (``6.1.0-50-cloud-amd64``), of the version ``driver``, and signed if
    ``signed`` says so. The required ones must be there, with the license of ``flavour`` (open or proprietary).
    """
    faults = [f"no module {name} was built" for name in REQUIRED if name not in {m.name for m in modules}]
    for module in modules:
        if module.vermagic.split(" ")[0] != kernel:
            faults.append(
                f"{module.name} is for {module.vermagic.split(' ')[0] or 'no kernel'}, not {kernel}"
            )
        if module.name not in _OWN_VERSION and module.version != driver:
            faults.append(f"{module.name} is version {module.version or '?'}, not {driver}")
        if module.name in REQUIRED and module.license not in LICENSES[flavour]:
            faults.append(f"{module.name} has the license {module.license!r}, so it is not {flavour}")
        if bool(module.signer) != signed:
            faults.append(f"{module.name} is {'' if module.signer else 'not '}signed")
    return faults


def compiler_of(configuration: str) -> str:
    """Return the version of the gcc that compiled a kernel (``12.2.0``), from its ``.config``, or an empty string."""
    match = re.search(r"^CONFIG_GCC_VERSION=(\d+)$", configuration, re.MULTILINE)
    number = int(match[1]) if match else 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else ""


def parse_modinfo(text: str) -> dict[str, str]:
    """Return the fields of ``modinfo --null``; of repeated ones (alias, parm) the first."""
    fields: dict[str, str] = {}
    for field in text.split("\0"):
        name, _, value = field.partition("=")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _signing_files(certificate: str, work: Path) -> dict[str, Path]:
    """Return where the root shows the key and its certificate, with their files. Raises HostError without a key."""
    key = Path(os.environ.get(KEY_VARIABLE) or "/nonexistent")
    if not key.is_file():
        raise HostError(
            "the modules must be signed, but there is no private key",
            hint=f"set {KEY_VARIABLE} to the file with the key of nvidia_certificate",
        )
    public = work / "module.pem"
    public.write_text(certificate, encoding="ascii")
    return {_KEY: key, _CERTIFICATE: public}


def _sign(root: Root, built: Path, kernel: str) -> None:
    """Append a signature to every module. Raises CommandError if the key isn't the certificate's."""
    program = f"/usr/src/linux-headers-{kernel}/scripts/sign-file"
    for file in sorted(built.glob("*.ko")):
        root.run([program, "sha256", _KEY, _CERTIFICATE, f"/{file.relative_to(root.path)}"])


def _environment(epoch: int) -> dict[str, str]:
    """Return the environment that keeps the host's name and clock out of the modules."""
    return {
        "SOURCE_DATE_EPOCH": str(epoch),
        "KBUILD_BUILD_TIMESTAMP": f"@{epoch}",
        "KBUILD_BUILD_USER": "image-builder",
        "KBUILD_BUILD_HOST": "image-builder",
    }


def _unpack(root: Root, driver: str) -> str:
    """Put the DKMS package's source where DKMS looks for it; return NAME/VERSION.

    The package isn't installed: its scripts would build for kernels of their own choice.
    """
    archives = sorted((root.path / repository.MOUNT_POINT.lstrip("/")).glob("*.deb"))
    for archive in archives:
        root.run(["dpkg-deb", "--extract", f"{repository.MOUNT_POINT}/{archive.name}", _UNPACKED])
    configurations = sorted((root.path / _UNPACKED.lstrip("/")).glob("usr/src/*/dkms.conf"))
    if len(configurations) != 1:
        raise LockError(f"one DKMS source is needed, the locked packages have {len(configurations)}")
    source = configurations[0].parent
    name, dash, version = source.name.rpartition("-")
    if not dash or version != driver:
        raise LockError(f"the locked source is {source.name}, not version {driver}")
    shutil.copytree(source, root.path / "usr/src" / source.name, symlinks=True)
    return f"{name}/{version}"


def _compile(ctx: StageContext, root: Root, package: str, kernel: str) -> None:
    framework = root.path / "etc/dkms/framework.conf.d/image-builder.conf"
    framework.parent.mkdir(parents=True, exist_ok=True)
    framework.write_text(_NO_SIGNING, encoding="ascii")
    root.run(["dkms", "add", package], log=ctx.log)
    try:
        root.run(["dkms", "build", package, "-k", kernel, "--arch", "x86_64"], log=ctx.log)
    except CommandError as error:
        log = root.path / f"{_TREE.lstrip('/')}/{package}/build/make.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        with ctx.log.open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")
        errors = [line for line in lines if _ERROR.search(line)][:10] or lines[-10:] or [error.tail]
        raise ImageBuilderError(
            f"{package} doesn't compile for {kernel}:\n  " + "\n  ".join(errors),
            hint="name a kernel (system_kernel_package) and a driver that go together",
        ) from error


def _collect(root: Root, built: Path, target: Path) -> list[Module]:
    """Copy the modules, each under its own name, and read their information."""
    modules = []
    for file in sorted(built.glob("*.ko")):
        fields = parse_modinfo(root.run(["modinfo", "--null", f"/{file.relative_to(root.path)}"]).stdout)
        data = file.read_bytes()
        name = fields.get("name", "")
        (target / f"{name.replace('_', '-')}.ko").write_bytes(data)
        modules.append(
            Module(
                name=name,
                version=fields.get("version", ""),
                vermagic=fields.get("vermagic", ""),
                license=fields.get("license", ""),
                signer=fields.get("signer", ""),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    return modules
