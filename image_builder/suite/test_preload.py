"""Preloaded images on a machine: the units are in order, and every image is complete in the engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from preloaded import ARCHIVE, LIST, STORE_FILE, deletable, familiar, images, plain
from questions import merged
from suite import (
    assignments,
    booted,
    differences,
    load,
    named,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_again,
    starts_at_boot,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
STATUS = "/run/node/status.json"
SETTINGS = "/etc/node-agent/preload.json"
UNIT, SEED, PROMOTE = "image-preload.service", "preload-seed.service", "preload-promote.service"
DISK = "local-disk.service"
# The lab's registries exist only while the lab bakes.
LAB = ".lab.internal"

# Proof that layers are what they claim to be: for each layer of an image in the archive, a file that no later layer
# hides, with the sha256 of its first 64 KiB. Prints [[layer, path, sha256] ...], topmost layer first.
_SAMPLES = """
import hashlib, json, sys, tarfile

samples, hidden = [], set()
with tarfile.open(sys.argv[1]) as archive:
    manifest = json.load(archive.extractfile("manifest.json"))
    entry = next(e for e in manifest if set(sys.argv[2:]) & set(e["RepoTags"] or []))
    for number, name in reversed(list(enumerate(entry["Layers"]))):
        sample, mine = None, set()
        with tarfile.open(fileobj=archive.extractfile(name), mode="r:*") as layer:
            for info in layer:
                path = info.name.removeprefix("./").strip("/")
                folder, _, base = path.rpartition("/")
                if base.startswith(".wh."):
                    mine.add(folder if base == ".wh..wh..opq" else f"{folder}/{base[4:]}".strip("/"))
                    continue
                parents = {path[:at] for at, letter in enumerate(path) if letter == "/"}
                if sample is None and info.isreg() and info.size and not hidden & (parents | {path}):
                    head = layer.extractfile(info).read(65536)
                    sample = [number, path, hashlib.sha256(head).hexdigest()]
                if not info.isdir():
                    mine.add(path)
        hidden |= mine
        samples += [sample] if sample else []
print(json.dumps(samples))
"""

# The same from the preload store, if the image has no archive: its layers are mounted at argv[1], and the other
# arguments are the diff ids, lowest first. A whiteout is a character device 0:0.
_STORE_SAMPLES = """
import hashlib, json, os, stat, sys

samples, hidden = [], set()
for number, diff_id in reversed(list(enumerate(sys.argv[2:]))):
    layer, sample, mine = os.path.join(sys.argv[1], diff_id.removeprefix("sha256:")), None, set()
    for folder, folders, names in os.walk(layer):
        folders.sort()
        here = os.path.relpath(folder, layer)
        try:
            opaque = os.getxattr(folder, "trusted.overlay.opaque") == b"y"
        except OSError:
            opaque = False
        mine |= {here} if opaque else set()
        for name in sorted(names):
            path = os.path.normpath(os.path.join(here, name))
            info = os.lstat(os.path.join(folder, name))
            parents = {path[:at] for at, letter in enumerate(path) if letter == "/"}
            if sample is None and stat.S_ISREG(info.st_mode) and info.st_size and not hidden & (parents | {path}):
                with open(os.path.join(folder, name), "rb") as stream:
                    sample = [number, path, hashlib.sha256(stream.read(65536)).hexdigest()]
            mine.add(path)
    hidden |= mine
    samples += [sample] if sample else []
print(json.dumps(samples))
"""
_STORE = "/run/store-check"

with_unit = needs("container_runtime", "node")
preloaded = needs("container_runtime", "node", image_preload=bool)
with_docker = needs("container_runtime", "node", image_preload=bool, container_runtime_engine="docker")
with_containerd = needs(
    "container_runtime", "node", image_preload=bool, container_runtime_engine="containerd"
)


def _unit(host: Host, name: str) -> list[str]:
    """Return the lines of a unit with its drop-ins, with continuation lines joined."""
    text = merged(host, f"systemd/system/{name}")
    return text.replace("\\\n", " ").splitlines()


@offline
@booted
@preloaded
def test_preloaded_pause_image_is_the_one_in_use(host: Host, v: V) -> None:
    """The engine and the kubelet use the declared pause image, which is preloaded and pinned."""
    pause = v["container_runtime_pause_image"]
    actual = dict(_told_of_pause(host, v))
    assert actual, "nothing was told of a pause image"
    nothing(f"{who} takes {ref}, not {pause}" for who, ref in actual.items() if ref != pause)
    listed = {image["ref"]: image for image in images(host)}
    assert pause in listed, f"{pause} is not preloaded"
    assert listed[pause]["pin"] or load(host, SETTINGS).get("pause") == pause, f"{pause} is not pinned"


def _told_of_pause(host: Host, v: V) -> Iterator[tuple[str, str]]:
    """Yield each program that is configured with a pause image, and that image, from its configuration."""
    if v["container_runtime_engine"] == "containerd":
        dump = output(host, "containerd config dump")
        references = re.findall(r"^\s*sandbox(?:_image)? = [\"'](.*)[\"']$", dump, flags=re.MULTILINE)
        yield "containerd", ", ".join(sorted(set(references)))
    else:
        references = (
            _unit_flags(host, "cri-docker.service") if v["__container_runtime_with_cri_dockerd"] else []
        )
        yield from (("cri-dockerd", ref) for ref in references)
    if v.get("__kubelet_has_pause_image_flag"):
        yield "the kubelet", ", ".join(_unit_flags(host, "kubelet.service")) or "none"


def _unit_flags(host: Host, unit: str) -> list[str]:
    text = " ".join(_unit(host, unit))
    return re.findall(r"--pod-infra-container-image[= ](\S+)", text)


@offline
@booted
@with_unit
def test_preload_comes_before_the_kubelet(host: Host, tree: Tree, v: V) -> None:
    """The preload starts at boot, after the engine; the kubelet waits for it and, where declared, for its success."""
    assert starts_at_boot(tree, UNIT), f"{UNIT} does not start at boot"
    unit, kubelet = _unit(host, UNIT), _drop_in(host, tree)
    engine = f"{v['container_runtime_engine']}.service"
    assert engine in named(unit, "After") & named(unit, "Wants"), f"{UNIT} does not wait for {engine}"
    assert SEED in named(unit, "After"), f"{UNIT} does not wait for {SEED}"
    assert "kubelet.service" in named(unit, "Before"), f"{UNIT} is not before the kubelet"
    assert f"ConditionPathExists={LIST}" in unit
    _tries_again(UNIT, unit)
    assert UNIT in named(kubelet, "Wants") & named(kubelet, "After"), f"the kubelet does not wait for {UNIT}"
    succeeded = f"/bin/sh -c 'test ! -e {LIST} || exec systemctl --quiet is-active {UNIT}'"
    gates = [line.removeprefix("ExecStartPre=") for line in kubelet if line.startswith("ExecStartPre=")]
    assert gates == ([succeeded] if v["image_preload_gates_kubelet"] else []), gates
    assert _started(unit) == f"{v['__image_preload_program']} preload", unit


def _tries_again(name: str, unit: list[str]) -> None:
    """Fail unless a unit is restarted after every failure and, if it is a oneshot, can't run forever."""
    starts_again(name, unit)
    endless = [line for line in unit if line in ("TimeoutStartSec=infinity", "TimeoutStartSec=0")]
    if "Type=oneshot" in unit:
        assert not endless and any(line.startswith("TimeoutStartSec=") for line in unit), f"{name} may hang"


def _started(unit: list[str]) -> str:
    """Return the command that a unit starts."""
    return " ".join(line.partition("=")[2] for line in unit if line.startswith("ExecStart="))


@offline
@booted
@with_unit
def test_seed_comes_before_the_engines(host: Host, tree: Tree, v: V) -> None:
    """The seed starts at boot, once the local disk is ready, and both engines wait for it."""
    assert starts_at_boot(tree, SEED), f"{SEED} does not start at boot"
    unit = _unit(host, SEED)
    own = read(host, f"/etc/systemd/system/{SEED}").splitlines()
    assert DISK in named(own, "After"), f"{SEED} does not wait for the local disk"
    # Ordered only, they would run beside a disk that is retried, and not again when it is there.
    nothing(f"{u} starts without {DISK}" for u in (SEED, UNIT, PROMOTE) if DISK not in _required(host, u))
    marker = f"{v['image_preload_mount_point']}/.node/seed/{v['image_preload_engine']}.json"
    assert {"ConditionPathExists=|/opt/preload/store.json", f"ConditionPathExists=|{marker}"} <= set(unit)
    assert {"Type=oneshot", "RemainAfterExit=yes"} <= set(unit)
    _tries_again(SEED, unit)
    assert _started(unit) == f"{v['__image_preload_program']} seed", unit
    for engine in ("docker", "containerd"):
        assert f"{engine}.service" in named(unit, "Before"), f"{SEED} is not before {engine}"
        drop_in = read(host, f"/etc/systemd/system/{engine}.service.d/10-preload-seed.conf").splitlines()
        waits = named(drop_in, "After") & named(drop_in, "Wants")
        assert SEED in waits, f"{engine} does not wait for {SEED}"
        gates = [line.removeprefix("ExecStartPre=") for line in drop_in if line.startswith("ExecStartPre=")]
        assert gates == [v["__image_preload_engine_gate"]], f"{engine} starts on a data root without images"


def _required(host: Host, name: str) -> set[str]:
    lines = _unit(host, name)
    return named(lines, "Requires") & named(lines, "After")


@offline
@booted
@with_unit
def test_promotion_does_not_delay_the_boot(host: Host, tree: Tree, v: V) -> None:
    """The promotion starts at boot, after the kubelet, and nothing waits for it to finish."""
    assert starts_at_boot(tree, PROMOTE), f"{PROMOTE} does not start at boot"
    unit = _unit(host, PROMOTE)
    assert "kubelet.service" in named(unit, "After"), f"{PROMOTE} does not wait for the kubelet"
    trash = f"{v['image_preload_mount_point']}/.node/trash"
    assert {"ConditionPathExists=|/opt/preload/store.json", f"ConditionDirectoryNotEmpty=|{trash}"} <= set(
        unit
    )
    assert {"Type=exec", "Nice=19"} <= set(unit), f"{PROMOTE} holds up the boot"
    _tries_again(PROMOTE, unit)
    assert _started(unit) == f"{v['__image_preload_program']} promote", unit


@offline
@booted
@with_unit
def test_preload_settings_are_declared_ones(host: Host, v: V) -> None:
    """The node agent's settings for the engine, its data root, the pause image and promotion are the declared ones."""
    actual = load(host, SETTINGS)
    expected = {
        key: v[f"image_preload_{name}"]
        for key, name in (
            ("engine", "engine"),
            ("namespace", "namespace"),
            ("pause", "pause_image"),
            ("data_root", "data_root"),
            ("mount_point", "mount_point"),
        )
    }
    nothing(differences({**expected, "verity": "require" if v["image_preload_verity"] else "off"}, actual))
    promote = {
        key: v[f"image_preload_promote{name}"]
        for key, name in (
            ("enabled", ""),
            ("bytes_per_second", "_bytes_per_second"),
            ("reserve_percent", "_reserve_percent"),
        )
    }
    nothing(differences(promote, actual.get("promote", {})))
    assert actual["engine"] == v["container_runtime_engine"], f"this node has {v['container_runtime_engine']}"


@offline
@booted
@with_unit
def test_store_modules_are_loaded_at_boot(host: Host, v: V) -> None:
    """The modules for mounting the preload store are loaded at boot: EROFS, loop and, where declared, dm-verity."""
    expected = {"erofs", "loop"} | ({"dm_verity"} if v["image_preload_verity"] else set())
    lines = read(host, "/etc/modules-load.d/50-image-preload.conf").splitlines()
    nothing(f"{module} is not asked for" for module in sorted(expected - set(lines)))
    if v["image_preload_verity"]:
        assert host.exists("dmsetup"), "dmsetup is not there"


def _drop_in(host: Host, tree: Tree) -> list[str]:
    """Return the lines of the kubelet's drop-in, whether or not the kubelet is in this image."""
    path = "/etc/systemd/system/kubelet.service.d/10-image-preload.conf"
    assert path in tree, f"{path} does not exist"
    return read(host, path).splitlines()


@offline
@booted
@with_unit
def test_preload_program_runs(host: Host, tree: Tree, v: V) -> None:
    """The preload program belongs to root, and runs with the image's Python."""
    program = v["__image_preload_program"]
    entry = tree[program]
    assert (entry.uid, entry.gid, entry.mode) == (0, 0, 0o755), f"{program} {entry}"
    assert "node-agent preload" in output(host, "%s preload --help", program)


@booted
@preloaded
def test_preload_succeeded(host: Host, v: V) -> None:
    """The preload succeeded, its unit is active, and it found every image afterwards."""
    actual = assignments(output(host, "systemctl show -p ActiveState,Result %s", UNIT))
    nothing(differences({"ActiveState": "active", "Result": "success"}, actual))
    status = load(host, STATUS).get("preload", {})
    nothing(status.get("problems", ["the status has no section preload"]))
    # It calls it a fallback if it loads an image that the seed should have provided, also one that a kubelet deleted.
    loaded = set(status.get("loaded", ()))
    is_restored = (
        status.get("code") == "preload.fallback" and len(loaded) > 0 and loaded <= deletable(host, v)
    )
    state = "degraded" if is_restored else "ok"
    nothing(differences({"state": state, "images": len(images(host))}, status))


@booted
@with_docker
def test_preloaded_images_are_in_docker(host: Host, v: V) -> None:
    """Docker has every listed reference that no kubelet deleted, with the recorded image id."""
    actual = _docker_images(host)
    nothing(
        f"{image['ref']} is {actual.get(familiar(image['ref']), 'missing')}"
        for image in _remaining(host, v)
        if actual.get(familiar(image["ref"])) != image["id"]
    )


def _remaining(host: Host, v: V) -> list[dict[str, Any]]:
    """Return the listed images, except for those that are gone because the kubelet may delete them."""
    gone = deletable(host, v)
    if gone and v["container_runtime_engine"] == "docker":
        names = _docker_images(host)
        gone = {ref for ref in gone if familiar(ref) not in names}
    elif gone:
        gone -= _names(host, v).keys()
    return [image for image in images(host) if image["ref"] not in gone]


def _docker_images(host: Host) -> dict[str, str]:
    form = "{{.Repository}}:{{.Tag}} {{.ID}}"
    lines = output(host, "docker image ls --no-trunc --format %s", form).splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


@booted
@with_docker
def test_preloaded_layers_are_in_docker(host: Host, v: V) -> None:
    """Docker has all layers of all images that no kubelet deleted, and their files are on the disk."""
    for image in _remaining(host, v):
        (actual,) = json.loads(output(host, "docker image inspect %s", image["id"]))
        assert actual["RootFS"]["Layers"] == image["diff_ids"], f"{image['ref']}: {actual['RootFS']}"
        data = actual["GraphDriver"]["Data"] or {}
        folders = [f for key in ("UpperDir", "LowerDir") for f in data.get(key, "").split(":") if f]
        assert len(folders) == len(image["diff_ids"]), f"{image['ref']}: {folders}"
        # The archive begins with the lowest layer.
        nothing(_lost(host, v, image, list(reversed(folders))))


def _samples(host: Host, v: V, image: dict[str, Any]) -> list[list[Any]]:
    """Return files that an image's layers must have, from the archive or, if there is none, from the store."""
    if v["image_preload_archive"]:
        names = (image["ref"], familiar(image["ref"]))
        text = output(host, "python3 -c %s %s %s %s", _SAMPLES, ARCHIVE, *names)
    else:
        output(host, f"mkdir -p {_STORE} && mount -t erofs -o ro,loop {STORE_FILE} {_STORE}")
        try:
            holes = " ".join(["%s"] * len(image["diff_ids"]))
            command = f"python3 -c %s {_STORE}/layers {holes}"
            text = output(host, command, _STORE_SAMPLES, *image["diff_ids"])
        finally:
            host.run(f"umount {_STORE}")
    samples: list[list[Any]] = json.loads(text)
    assert samples, f"what was baked has no file of {image['ref']}"
    return samples


def _lost(host: Host, v: V, image: dict[str, Any], folders: list[str]) -> list[str]:
    """Return the samples of an image that aren't in its layers' directories, which are given lowest layer first."""
    samples = _samples(host, v, image)
    paths = [f"{folders[layer]}/{path}" for layer, path, _ in samples]
    heads = " ".join(map(shlex.quote, paths))
    digests = output(host, f'for f in {heads}; do head -c 65536 "$f" 2>/dev/null | sha256sum; done').split()[
        ::2
    ]
    expected = [digest for _, _, digest in samples]
    return [
        f"{image['ref']} has lost {p}" for p, d, w in zip(paths, digests, expected, strict=True) if d != w
    ]


@booted
@with_containerd
def test_preloaded_images_are_in_containerd(host: Host, v: V) -> None:
    """containerd has every image that no kubelet deleted under its tag and its digest, with the recorded image id."""
    names = _names(host, v)
    for image in _remaining(host, v):
        for name in (image["ref"], _by_digest(image)):
            assert name in names, f"{name} is missing"
            assert names[name]["digest"] in (image["digest"], image["manifest"]), f"{name}: {names[name]}"
        manifest = json.loads(output(host, _ctr(v, "content get %s"), image["manifest"]))
        assert manifest["config"]["digest"] == image["id"], f"{image['ref']} is {manifest['config']}"


@booted
@with_containerd
def test_preloaded_layers_are_in_containerd(host: Host, v: V) -> None:
    """containerd has all images that no kubelet deleted complete, and unpacked in the snapshotter in use."""
    lines = output(host, _ctr(v, "images check --snapshotter overlayfs")).splitlines()[1:]
    checked = {line.split()[0]: line for line in lines}
    remaining = _remaining(host, v)
    for image in remaining:
        line = checked.get(image["ref"], "is missing")
        assert " complete (" in line and line.split()[-1] == "true", f"{image['ref']}: {line}"
    # The view of a container: all layers are in one place.
    folder = "/run/image-check"
    for image in remaining:
        output(host, f"mkdir -p {folder}")
        try:
            output(host, _ctr(v, f"images mount --snapshotter overlayfs %s {folder}"), image["ref"])
            nothing(_lost(host, v, image, [folder] * len(image["diff_ids"])))
        finally:
            host.run(_ctr(v, f"images unmount --rm {folder}"))
            host.run(f"rmdir {folder}")


@booted
@with_containerd
def test_preloaded_images_are_pinned(host: Host, v: V) -> None:
    """Pinned images, and the pause image, have the label that keeps them from garbage collection."""
    names = _names(host, v)
    pinned = {image["ref"] for image in images(host) if image["pin"]}
    for ref in pinned | {v["container_runtime_pause_image"]}:
        labels = names.get(ref, {}).get("labels", "")
        assert "io.cri-containerd.pinned=pinned" in labels.split(","), f"{ref}: {labels}"


@booted
@with_docker
def test_preloaded_pause_image_is_spared(host: Host, v: V) -> None:
    """The shim in use was started with the preloaded pause image, the only image that can be spared by name."""
    unit = "cri-docker.service" if v["__container_runtime_with_cri_dockerd"] else "kubelet.service"
    command = output(host, "systemctl show -p ExecStart %s", unit)
    assert f"--pod-infra-container-image={v['container_runtime_pause_image']} " in command, command


@booted
@with_docker
def test_preloaded_images_are_guarded(host: Host, v: V) -> None:
    """Each pinned image except the pause image has its own unstarted container, which keeps Docker from deleting it."""
    form = "{{.Names}} {{.State}}"
    command = "docker container ls --all --filter label=image-builder.pin=1 --format %s"
    lines = output(host, command, form).splitlines()
    actual = {line.split()[0]: line.split()[1] for line in lines}
    pinned = [i for i in images(host) if i["pin"] and i["ref"] != v["container_runtime_pause_image"]]
    expected = {f"preload-pin-{plain(image['id'])[:12]}": "created" for image in pinned}
    nothing(differences(expected, actual))
    nothing(f"{name} guards nothing that is pinned" for name in actual if name not in expected)


@booted
@preloaded
def test_preloaded_images_run(host: Host, v: V) -> None:
    """A container of every image except pause starts without a network, and runs its shell if it has one.

    Images that a kubelet deleted don't count.
    """
    for number, image in enumerate(_remaining(host, v)):
        if image["ref"] == v["container_runtime_pause_image"]:
            continue
        if v["container_runtime_engine"] == "docker":
            alone = "docker run --rm --pull never --network none"
            done = host.run(f"{alone} --entrypoint /bin/sh %s -c 'echo preloaded'", image["ref"])
        else:
            command = _ctr(v, "run --rm --snapshotter overlayfs %s %s /bin/sh -c 'echo preloaded'")
            done = host.run(command, image["ref"], f"preload-check-{number}")
        # An image without a shell got as far as looking for one; another check covers the files of its layers.
        shell_less = re.search(r'exec: \\?"/bin/sh\\?": stat /bin/sh: no such file', done.stderr)
        assert done.stdout.strip() == "preloaded" or shell_less, f"{image['ref']}: {done.stderr[-500:]}"


@booted
@needs(
    "container_runtime",
    image_preload=lambda images: any(image["ref"].partition("/")[0].endswith(LAB) for image in images),
)
def test_preloaded_images_need_no_registry(host: Host) -> None:
    """The lab's registry can't be reached from the machine, so the other checks hold without it."""
    for address in sorted({image["ref"].partition("/")[0] for image in images(host)}):
        name, _, port = address.partition(":")
        if name.endswith(LAB):
            reach = "getent hosts %s && timeout 5 bash -c %s"
            done = host.run(reach, name, f"echo > /dev/tcp/{name}/{port or 443}")
            assert done.rc != 0, f"{address} answers"


def _ctr(v: V, command: str) -> str:
    return f"ctr --namespace {v['image_preload_namespace']} {command}"


def _by_digest(image: dict[str, Any]) -> str:
    return f"{image['ref'].rpartition(':')[0]}@{image['digest']}"


def _names(host: Host, v: V) -> dict[str, dict[str, str]]:
    """Return containerd's images by name, from lines of REF TYPE DIGEST SIZE PLATFORMS LABELS; SIZE is two words."""
    rows = [line.split() for line in output(host, _ctr(v, "images list")).splitlines()[1:]]
    return {row[0]: {"digest": row[2], "labels": row[-1]} for row in rows}
