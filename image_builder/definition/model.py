"""The builder's own variables, and the frozen definition of one image."""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from image_builder.canonical import JSON
from image_builder.settings import REPO_ROOT, ansible_config, own_checks, repository_id
from image_builder.strict_yaml import Strict
from image_builder.text import did_you_mean

PREFIX = "image_"
MIN_ESP_MIB = 512
MIN_ROOT_MIB = 1024
# Azure refuses an OS disk image above 1023 GiB.
MAX_VHD_MIB = 1023 * 1024
SUITES = ("bookworm", "trixie")
# Where a bake's tree has, while a play runs, the locked downloads and the results of stages that aren't layers.
ARCHIVES = "/run/image-builder/archives"
INPUTS = "/run/image-builder/inputs"
APT_AUTH = "credentials belong into /etc/apt/auth.conf.d, or into a file like those that IMAGE_BUILDER_APT_AUTH names"

Format = Literal["raw", "qcow2", "vhd", "tar"]
Component = Literal["main", "contrib", "non-free", "non-free-firmware"]
LayerName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
KernelArg = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:/=@%+*\[\]-]+$")]
PreloadMode = Literal["reference", "copy", "archive"]
Url = Annotated[str, StringConstraints(pattern=r"^(https?|file|copy)://?[^\s]+$")]


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if double := sorted({v for v in values if values.count(v) > 1}):
        raise ValueError(f"listed twice: {', '.join(double)}")
    return values


class ImageBase(Strict):
    """The Debian release that an image starts from."""

    distribution: Literal["debian"] = Field("debian", description="The distribution.")
    suite: str = Field(description="The release's code name: bookworm or trixie.")
    components: tuple[Component, ...] = Field(
        ("main",), min_length=1, description="Sections of the archive to install from."
    )
    mirror: Url | None = Field(
        None,
        description="The mirror to install from; by default the host's own Debian source, else mmdebstrap's "
        "default. Its name is not part of a build's identity; the locked bytes are.",
    )
    keyring: Path | None = Field(
        None,
        description="Keyring that signs the archive, relative to the inventory; without it, the host's "
        "debian-archive-keyring.",
    )
    architecture: Literal["amd64"] = Field("amd64", description="The processor architecture.")

    @field_validator("suite")
    @classmethod
    def _known(cls, suite: str) -> str:
        if suite not in SUITES:
            raise ValueError(
                f"unknown suite `{suite}`{did_you_mean(suite, SUITES)}, known: {', '.join(SUITES)}"
            )
        return suite

    @field_validator("mirror")
    @classmethod
    def _without_credentials(cls, mirror: str | None) -> str | None:
        if mirror and "@" in urllib.parse.urlsplit(mirror).netloc:
            raise ValueError(f"has credentials in it; {APT_AUTH}")
        return mirror

    @field_validator("components")
    @classmethod
    def _complete(cls, components: tuple[str, ...]) -> tuple[str, ...]:
        if "main" not in components:
            raise ValueError("`main` is missing")
        return _distinct(components)


class ImageDisk(Strict):
    """The disk's partitions. Sizes are in MiB; root is the last one and grows to fill the disk at first boot."""

    esp_size_mib: int = Field(
        MIN_ESP_MIB, ge=MIN_ESP_MIB, description="Size of the EFI system partition in MiB."
    )
    root_size_mib: Annotated[int, Field(ge=MIN_ROOT_MIB)] | Literal["auto"] = Field(
        "auto", description="Size of the root partition in MiB; `auto` is the tree's size plus a margin."
    )
    filesystem: Literal["ext4"] = Field("ext4", description="The root filesystem.")


# registry/name:tag, where the registry has a dot or a port, or is "localhost". Anything else is a short name, which
# each runtime completes in its own way (docker/distribution reference grammar).
_REFERENCE = re.compile(
    r"(?:(?:[a-z0-9-]+\.)+[a-z0-9-]+(?::[0-9]+)?|[a-z0-9-]+:[0-9]+|localhost)"
    r"/[a-z0-9]+(?:[._/-]+[a-z0-9]+)*:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
)


class PreloadedImage(Strict):
    """A container image that nodes have before their first pod."""

    ref: str = Field(
        max_length=255,
        description="Registry, name and tag: `registry.k8s.io/pause:3.10`. The lock pins its digest.",
    )
    pin: bool = Field(False, description="Protect it from the kubelet's garbage collection.")
    required: bool = Field(
        True, description="The build fails without it; if false, it is left out with a warning."
    )
    mode: PreloadMode | None = Field(
        None, description="How it gets to the local disk; overrides `image_preload_mode`."
    )
    platform: Annotated[str, StringConstraints(pattern=r"^linux/[a-z0-9]+(/v[0-9]+)?$")] = Field(
        "linux/amd64", description="The platform to pull; must be the image's own."
    )

    @field_validator("ref")
    @classmethod
    def _qualified(cls, ref: str) -> str:
        if not _REFERENCE.fullmatch(ref):
            raise ValueError(
                f"must name registry, image and tag, such as registry.k8s.io/pause:3.10, got `{ref}`"
            )
        registry, _, name = ref.partition("/")
        if registry == "index.docker.io" or (registry == "docker.io" and "/" not in name):
            # The kubelet asks containerd for Docker Hub's images by their full names, and containerd knows no others.
            full = f"docker.io/{name if '/' in name else f'library/{name}'}"
            raise ValueError(f"is a short name of Docker Hub's, write `{full}`")
        return ref


class ImagePull(Strict):
    """Limits of pulling container images during a bake."""

    parallel: int = Field(10, ge=1, le=64, description="Images pulled in parallel.")
    progress_seconds: float = Field(
        1800, gt=0, description="A pull that downloads or extracts no new byte for this long is aborted."
    )
    min_bytes_per_second: int = Field(
        16384,
        ge=0,
        description="A pull that is slower than this over five minutes is aborted; 0 disables the check.",
    )
    overall_seconds: float = Field(
        14400, gt=0, description="One image's deadline across all attempts; time in a queue doesn't count."
    )
    attempts: int = Field(5, ge=1, le=20, description="Attempts for each image; permanent errors get one.")


class GalleryRegion(Strict):
    """A region that a published version is replicated to."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(
        description="Azure's short name: `westus3`."
    )
    replicas: int = Field(
        1, ge=1, le=100, description="Copies there; one for every 20 to 50 machines at once."
    )


class GalleryPrices(Strict):
    """What Azure charges you, in your currency."""

    gib_month: float = Field(ge=0, description="A GiB of a snapshot, for a month.")
    gib_egress: float = Field(0.0, ge=0, description="A GiB that is copied to another region.")


class ImageGallery(Strict):
    """Where `publish` uploads an image: a definition in an Azure Compute Gallery."""

    subscription: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
    ] = Field(description="Id of the subscription.")
    resource_group: Annotated[str, StringConstraints(pattern=r"^[\w.()-]{1,90}$")] = Field(
        description="Resource group of the gallery; the upload's disk is made in it, too."
    )
    gallery: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.]{0,78}[A-Za-z0-9]$")] = Field(
        description="Name of the gallery, which must exist."
    )
    definition: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([\w.-]{0,78}[A-Za-z0-9])?$")] = Field(
        description="Name of the image definition in it."
    )
    regions: tuple[GalleryRegion, ...] = Field(
        min_length=1, description="Where versions are replicated to; the first one takes the upload."
    )
    end_of_life_days: int = Field(
        180, ge=1, description="Days until a version's end of life. Azure refuses to delete it before."
    )
    create: bool = Field(False, description="Create the definition if it is missing.")
    publisher: str = Field(
        "image-builder",
        description="Publisher in a new definition's identifier; offer and SKU are its name and `gen2`.",
    )
    security_type: Literal["Standard", "TrustedLaunchSupported", "TrustedLaunch"] | None = Field(
        None,
        description="Security type of the definition; by default `TrustedLaunchSupported` with `image_secure_boot`, "
        "else `Standard`.",
    )
    disk_controllers: tuple[Literal["SCSI", "NVMe"], ...] = Field(
        ("SCSI", "NVMe"), min_length=1, description="Disk controllers that the image boots from."
    )
    prices: GalleryPrices | None = Field(None, description="For `publish plan` to say what a version costs.")
    sign_key: str = Field(
        "",
        description="What `publish run` signs its statement with: a private key's file (PEM), or the URI of a key of a "
        "KMS or an HSM.",
    )
    public_key: str = Field(
        "",
        description="File of its public key (PEM). With it `publish promote` requires the signed statement.",
    )

    @field_validator("regions")
    @classmethod
    def _each_once(cls, regions: tuple[GalleryRegion, ...]) -> tuple[GalleryRegion, ...]:
        _distinct(tuple(region.name for region in regions))
        return regions


class BuilderVariables(Strict):
    """The variables that the builder itself reads. Everything else in the inventory belongs to a role."""

    image_base: ImageBase = Field(description="The release that the image starts from.")
    image_layers: tuple[LayerName, ...] = Field(
        min_length=1, description="Layers, bottom first; layer L is `playbooks/layers/L.yml`."
    )
    image_disk: ImageDisk = Field(
        default_factory=lambda: ImageDisk.model_validate({}), description="The disk's partitions."
    )
    image_formats: tuple[Format, ...] = Field(
        ("raw",),
        min_length=1,
        description="Artifacts to publish. `[tar]` with `system_bootable: false` makes no disk.",
    )
    image_kernel_args: tuple[KernelArg, ...] = Field(
        (), description="Arguments added to the kernel command line; the builder sets `root=`."
    )
    image_secure_boot: bool = Field(
        False,
        description="Declares that the image boots with UEFI Secure Boot. The build proves it or fails.",
    )
    image_preload: tuple[PreloadedImage, ...] = Field(
        (),
        description="Container images to pull during the bake; a node has them at its first boot.",
    )
    image_preload_mode: PreloadMode = Field(
        "reference",
        description="How preloaded images get to a blank local disk: `reference` links their layers and copies them "
        "later, `copy` copies them before the engine starts, `archive` has the engine load them.",
    )
    image_preload_verity: bool = Field(
        True,
        description="The kernel checks the preload store by dm-verity, and the build fails without it. False: it "
        "isn't checked.",
    )
    image_preload_archive: bool = Field(
        True,
        description="Keep an archive of the preloaded images in the image, for nodes that can't use the preload store. "
        "False saves its space; without a usable store such a node is tainted and names the missing images.",
    )
    image_pull: ImagePull = Field(
        default_factory=lambda: ImagePull.model_validate({}),
        description="Limits of these pulls; they don't affect the image.",
    )
    image_gallery: ImageGallery | None = Field(
        None, description="Where `publish` takes the image; it doesn't affect the image."
    )

    @field_validator("image_layers", "image_formats")
    @classmethod
    def _once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return _distinct(values)

    @field_validator("image_preload")
    @classmethod
    def _each_once(cls, images: tuple[PreloadedImage, ...]) -> tuple[PreloadedImage, ...]:
        _distinct(tuple(image.ref for image in images))
        return images

    @field_validator("image_kernel_args")
    @classmethod
    def _not_ours(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if owned := [a for a in values if re.match(r"(root|rootfstype|ro|rw)(=|$)", a)]:
            raise ValueError(f"set by the builder itself: {', '.join(owned)}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.image_secure_boot and set(self.image_formats) == {"tar"}:
            raise ValueError("image_secure_boot: needs a disk format, a tar can't boot")
        if self.image_secure_boot and (to := self.image_gallery) and to.security_type == "Standard":
            raise ValueError("image_gallery: image_secure_boot needs another security_type than Standard")
        disk = self.image_disk
        size = 0 if disk.root_size_mib == "auto" else disk.root_size_mib + disk.esp_size_mib
        if "vhd" in self.image_formats and size > MAX_VHD_MIB:
            raise ValueError(f"image_disk: a VHD for Azure holds at most {MAX_VHD_MIB} MiB")
        if self.image_preload and "container_runtime" not in self.image_layers:
            raise ValueError("image_preload: needs an engine, so the layer container_runtime")
        modes = {i.mode or self.image_preload_mode: i.ref for i in self.image_preload}
        if "archive" in modes and not self.image_preload_archive:
            raise ValueError(
                f"image_preload_archive: {modes['archive']} has the mode archive, so nodes need the archive"
            )
        own = f"linux/{self.image_base.architecture}"
        if other := [i.ref for i in self.image_preload if i.platform != own]:
            raise ValueError(f"image_preload: this image runs {own}, not the platform of {', '.join(other)}")
        return self

    def for_roles(self) -> dict[str, JSON]:
        """Return the variables as roles see them: with all defaults, without the source of packages.

        A mirror's name must reach neither an image nor its id; what is preloaded must not reach a layer's id.
        """
        included = dict.fromkeys(BUILDER_NAMES - NOT_FOR_ROLES, True)
        values: dict[str, JSON] = self.model_dump(
            mode="json",
            include={**included, "image_base": {"distribution", "suite", "components", "architecture"}},
        )
        return values


BUILDER_NAMES = frozenset(BuilderVariables.model_fields)
NOT_FOR_ROLES = frozenset({"image_gallery", "image_preload", "image_preload_mode", "image_pull"})


def record_names(image: str, inventories: Sequence[Path], project: Path) -> tuple[str, ...]:
    """Return the name under which a store keeps an image's lock and builds (``worker@lab-1b9d6bcd``), then its former
    names.

    It includes a hash of the inventories' paths, because other inventories may have an image of the same name, and of
    the repository: of its id, so that the name is the same in every checkout, or else of its path. This program's own
    checkouts count as one repository. A repository without an id had a name without its path before, and one that gets
    an id had one with it.
    """
    root = project.resolve()
    places = [path.resolve() for path in inventories]
    named = [os.fsencode(path.relative_to(root) if path.is_relative_to(root) else path) for path in places]
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", places[0].name)[:40]

    def name(*repository: bytes) -> str:
        digest = hashlib.sha256(b"\0".join([*named, *repository])).hexdigest()
        return f"{image}@{readable}-{digest[:8]}"

    if root == REPO_ROOT:
        return name(), image
    by_path = name(b"", os.fsencode(root))
    return (name(b"", key.encode()), by_path) if (key := repository_id(root)) else (by_path, name(), image)


def record_name(image: str, inventories: Sequence[Path], project: Path) -> str:
    """Return the name under which a store keeps an image's lock and builds now."""
    return record_names(image, inventories, project)[0]


@dataclass(frozen=True)
class ImageDefinition:
    """One image, checked.

    Each of the builder's variables is a field, without its prefix.

    ``variables`` are the inventory's variables of this host, untemplated, with every vaulted value replaced
    by ``{"__vault__": sha256 of the ciphertext}``, Ansible's ``inventory_hostname`` and ``group_names``, and
    the builder's variables as ``BuilderVariables.for_roles`` returns them (so plays must get those as extra
    variables), without those that roles never see; ``variables_of_ours`` are the variables in this program's
    playbooks, if they differ. ``roots`` hold ``roles/`` and ``playbooks/``: first the user's repository, if there is
    one, and last this program's.

    ``extra`` holds the values of ``-e`` as plays get them, and ``extra_variables`` the variables that result, which win
    over all others.

    ``magic`` are the variables that Ansible sets itself: ``inventory_dir``, ``groups`` and so on; ``hostvars`` returns
    the variables of all hosts. ``place_of`` returns the ``file:line`` of a value in the inventory, ``where`` that of a
    variable's part by its path; both return an empty string for what isn't there.
    """

    name: str
    base: ImageBase
    layers: tuple[str, ...]
    disk: ImageDisk
    formats: tuple[Format, ...]
    kernel_args: tuple[str, ...]
    secure_boot: bool
    variables: Mapping[str, JSON]
    inventory_paths: tuple[Path, ...]
    roots: tuple[Path, ...] = (REPO_ROOT,)
    variables_of_ours: Mapping[str, JSON] | None = None
    extra: tuple[str, ...] = ()
    extra_variables: Mapping[str, JSON] = field(default_factory=dict)
    preload: tuple[PreloadedImage, ...] = ()
    preload_mode: PreloadMode = "reference"
    preload_verity: bool = True
    preload_archive: bool = True
    pull: ImagePull = field(default_factory=lambda: ImagePull.model_validate({}))
    gallery: ImageGallery | None = None
    magic: Mapping[str, JSON] = field(default_factory=dict, repr=False, compare=False)
    hostvars: Callable[[], Mapping[str, JSON]] = field(default=dict, repr=False, compare=False)
    place_of: Callable[[str], str] = field(default=lambda _: "", repr=False, compare=False)
    where: Callable[[Sequence[str | int]], str] = field(default=lambda _: "", repr=False, compare=False)
    # Roles evaluated so far, by playbook; see evaluate.evaluated_playbook.
    evaluated: dict[Path, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Plays as Ansible loads them, by playbook, and what layers read, by layer; see reading.
    plays: dict[Path, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    readings: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def record_name(self) -> str:
        """Return the name under which the store remembers the image's lock and builds."""
        return self.record_names[0]

    @property
    def record_names(self) -> tuple[str, ...]:
        """Return that name and, after it, the image's former ones."""
        return record_names(self.name, self.inventory_paths, self.roots[0])

    @property
    def repo_root(self) -> Path:
        """Return the directory of this program."""
        return self.roots[-1]

    @property
    def checks(self) -> Path | None:
        """Return the directory of the user's own checks."""
        return own_checks(self.roots[0])

    @property
    def ansible_config(self) -> Path | None:
        """Return the ``ansible.cfg`` that applies to an image's plays."""
        return ansible_config(self.roots)

    def variables_in(self, playbook: Path) -> Mapping[str, JSON]:
        """Return the variables of the image's host as a playbook's play sees them."""
        around = max(filter(playbook.is_relative_to, self.roots), key=lambda root: len(root.parts))
        ours = self.variables_of_ours if around == self.repo_root else None
        return self.variables if ours is None else ours

    @property
    def play_variables(self) -> dict[str, JSON]:
        """Return every play's extra variables: the ``image_*`` ones, checked and complete, and ``target``."""
        return {name: self.variables[name] for name in sorted(BUILDER_NAMES - NOT_FOR_ROLES)} | self.target

    @property
    def target(self) -> dict[str, JSON]:
        """Return all that roles know about the tree that a bake changes (the role `target`), and where inputs are."""
        return {
            "target_booted": False,
            "target_distribution": self.base.distribution,
            "target_suite": self.base.suite,
            "target_architecture": self.base.architecture,
            "target_archives": ARCHIVES,
            "image_inputs": INPUTS,
        }


@dataclass(frozen=True)
class Fault:
    """A value that a model refused: its path as parts, and why."""

    path: tuple[str | int, ...]
    reason: str


def parse_builder_variables(values: Mapping[str, JSON]) -> BuilderVariables | list[Fault]:
    """Check the ``image_*`` variables and return them, or everything that is wrong with them."""
    try:
        # JSON mode stays strict ("30" is not a number) but accepts a list for a tuple.
        return BuilderVariables.model_validate_json(json.dumps(values))
    except ValidationError as error:
        return _faults(error, values)


def _faults(error: ValidationError, values: Mapping[str, JSON]) -> list[Fault]:
    faults: dict[tuple[str | int, ...], str] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"], values)
        reason = detail["msg"]
        match detail["type"]:
            case "missing":
                reason = "is missing"
            case "too_short":
                reason = "must not be empty"
            case "extra_forbidden":
                reason = "unknown key"
            case "value_error":
                reason = str(detail["ctx"]["error"])
                if not path:  # a check across variables names the one to change
                    name, _, reason = reason.partition(": ")
                    path = (name,)
            case _:
                reason = reason.removeprefix("Input ").removeprefix("String ")
                if not isinstance(detail["input"], dict | list):
                    reason += f", got {json.dumps(detail['input'])}"
        # A union reports each of its members: one line for the value is enough.
        faults[path] = f"{faults[path]}; or {reason}" if path in faults else reason
    return [Fault(path, reason) for path, reason in faults.items()]


def _real_path(loc: Sequence[str | int], values: Mapping[str, JSON]) -> tuple[str | int, ...]:
    """Drop the names of union members that pydantic puts into a path."""
    path: list[str | int] = []
    at: JSON = values
    for n, part in enumerate(loc):
        if isinstance(part, int) and isinstance(at, list):
            at = at[part] if part < len(at) else None
        elif isinstance(part, str) and isinstance(at, Mapping):
            at = at.get(part)
        elif n == len(loc) - 1 or n:
            continue
        path.append(part)
    return tuple(path)
