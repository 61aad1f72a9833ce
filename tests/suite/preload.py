"""Mutations for test_preload.py and test_preload_archive.py: in-place changes of the JSON list and the archive."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.suite.booted import await_port, edited, record_booted
from tests.suite.offline import (
    Mutation,
    both,
    change,
    chmod,
    chown,
    edit_json,
    given,
    outside,
    record,
    remove,
    write,
)

LIST = "/opt/preloaded_docker_images.json"
ARCHIVE = "/opt/preloaded_docker_images.tar"
UNIT = "/etc/systemd/system/image-preload.service"
KUBELET = "/etc/systemd/system/kubelet.service.d/10-image-preload.conf"
SEED = "/etc/systemd/system/preload-seed.service"
PROMOTE = "/etc/systemd/system/preload-promote.service"
SETTINGS = "/etc/node-agent/preload.json"
MODULES = "/etc/modules-load.d/50-image-preload.conf"
PROGRAM = "/usr/local/sbin/node-agent"


def edit(change_list: Callable[[dict[str, Any]], object]) -> Mutation:
    """Change the list of images."""
    return edit_json(LIST, change_list)


def of_last(key: str, value: Any) -> Mutation:
    """Change a value of the last image in the list."""
    return edit(lambda content: content["images"][-1].update({key: value}))


def _without(variables: dict[str, Any]) -> Mutation:
    """Remove a required image from the list."""
    required = next(image["ref"] for image in variables["image_preload"] if image["required"])
    return _unlist(required)


def _unlist(ref: str) -> Mutation:
    return edit(lambda content: content.update(images=[i for i in content["images"] if i["ref"] != ref]))


def _listed_as_well(content: dict[str, Any]) -> None:
    content["images"].append({**content["images"][0], "ref": "registry.invalid/other:1"})


def overwrite(place: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file; a negative offset counts from its end."""
    with place.open("r+b") as stream:
        stream.seek(offset, 0 if offset >= 0 else 2)
        stream.write(data)


def flip(place: Path, offset: int) -> None:
    """Change one byte of a file."""
    with place.open("rb") as stream:
        stream.seek(offset, 0 if offset >= 0 else 2)
        found = stream.read(1)
    overwrite(place, offset, bytes([found[0] ^ 0x55]))


def last_byte(root: Path, _variables: dict[str, Any]) -> None:
    """Change the archive's last byte, which is past the end of the tar."""
    flip(outside(root, ARCHIVE), -1)


def longer(root: Path, _variables: dict[str, Any]) -> None:
    with outside(root, ARCHIVE).open("ab") as stream:
        stream.write(bytes(512))


def _manifest(tar: tarfile.TarFile) -> list[dict[str, Any]]:
    stream = tar.extractfile("manifest.json")
    assert stream is not None
    manifest: list[dict[str, Any]] = json.load(stream)
    return manifest


def renamed_tag(root: Path, _variables: dict[str, Any]) -> None:
    """Rename an image in the archive's manifest.json, to a name of the same length."""
    place = outside(root, ARCHIVE)
    with tarfile.open(place) as tar:
        tag = next(tag for entry in _manifest(tar) for tag in entry["RepoTags"] or []).encode()
        info = tar.getmember("manifest.json")
    with place.open("rb") as stream:
        stream.seek(info.offset_data)
        at = info.offset_data + stream.read(info.size).index(b'"' + tag + b'"')
    overwrite(place, at + 1, b"x" * len(tag))


def _layer(place: Path) -> tarfile.TarInfo:
    """Return the first image's last layer that isn't a link."""
    with tarfile.open(place) as tar:
        layers = [tar.getmember(name) for name in _manifest(tar)[0]["Layers"]]
    return next(info for info in reversed(layers) if info.isreg())


def damaged_layer(root: Path, _variables: dict[str, Any]) -> None:
    place = outside(root, ARCHIVE)
    info = _layer(place)
    flip(place, info.offset_data + info.size // 2)


def renamed_layer(root: Path, _variables: dict[str, Any]) -> None:
    """Remove a layer by changing the name in its header, with a checksum that matches."""
    place = outside(root, ARCHIVE)
    info = _layer(place)
    info.name = "x" * min(len(info.name), 90)
    overwrite(place, info.offset, info.tobuf(tarfile.USTAR_FORMAT)[:512])


def _other_pause(variables: dict[str, Any]) -> Mutation:
    """Configure the engine with another pause image."""
    if variables["container_runtime_engine"] == "containerd":
        other = r'\1 = "registry.invalid/pause:1"'
        return change("/etc/containerd/config.toml", "(sandbox(_image)?) = .*", other)
    name = "cri-docker" if variables["__container_runtime_with_cri_dockerd"] else "kubelet"
    return change(
        f"/etc/systemd/system/{name}.service",
        r"--pod-infra-container-image=\S+",
        "--pod-infra-container-image=registry.invalid/pause:1",
    )


def _other_gate(variables: dict[str, Any]) -> Any:
    """Let the kubelet start after a failure where it must not, or vice versa."""
    if variables["image_preload_gates_kubelet"]:
        return change(KUBELET, "^ExecStartPre=.*\n", "")
    return change(KUBELET, "^After=.*", "\\g<0>\n[Service]\nExecStartPre=/bin/false")


def _unpinned(content: dict[str, Any]) -> None:
    for image in content["images"]:
        image["pin"] = False


record(
    "test_preload_lists_what_is_declared",
    given(_without),
    edit(_listed_as_well),
    edit(lambda content: content["images"][0].update(pin=not content["images"][0]["pin"])),
    of_last("platform", "linux/s390x"),
    edit(lambda content: content.update(engine="podman")),
    write(LIST, "[]"),
)
record(
    "test_preload_archive_is_as_declared",
    given(lambda v: remove(ARCHIVE) if v["image_preload_archive"] else write(ARCHIVE)),
    given(lambda v: edit(lambda content: content.update(archive=None if v["image_preload_archive"] else {}))),
)
record("test_preload_archive_is_the_recorded_one", last_byte, longer, damaged_layer, remove(ARCHIVE))
record("test_preload_archive_holds_every_image", renamed_tag, of_last("id", f"sha256:{'0' * 64}"))
record(
    "test_preload_images_are_complete",
    damaged_layer,
    renamed_layer,
    of_last("diff_ids", [f"sha256:{'0' * 64}"]),
)
record("test_preload_images_are_of_their_platform", of_last("platform", "linux/s390x"))
record(
    "test_preloaded_pause_image_is_the_one_in_use",
    given(_other_pause),
    given(lambda v: _unlist(v["container_runtime_pause_image"])),
    both(edit(_unpinned), change(SETTINGS, '"pause": .*', '"pause": "registry.invalid/pause:1",')),
)
record(
    "test_preload_comes_before_the_kubelet",
    remove("/etc/systemd/system/multi-user.target.wants/image-preload.service"),
    change(UNIT, "^Before=.*", "Before=network.target"),
    change(UNIT, "^After=.*\n", ""),
    change(UNIT, "^TimeoutStartSec=.*\n", ""),
    change(UNIT, "^TimeoutStartSec=.*", "TimeoutStartSec=infinity"),
    change(UNIT, "^Restart=.*\n", ""),
    change(UNIT, "^StartLimitIntervalSec=.*\n", ""),
    change(UNIT, "preload-seed.service", ""),
    change(UNIT, "^ExecStart=(.*) preload$", r"ExecStart=\1 promote"),
    change(KUBELET, "^Wants=.*\n", ""),
    given(_other_gate),
    remove(KUBELET),
)
record(
    "test_seed_comes_before_the_engines",
    remove("/etc/systemd/system/multi-user.target.wants/preload-seed.service"),
    change(SEED, "^Before=.*", "Before=docker.service"),
    change(SEED, "^After=.*\n", ""),
    change(SEED, "^ConditionPathExists=[|]/opt/.*\n", ""),
    change(SEED, "^ConditionPathExists=[|].*/[.]node/.*\n", ""),
    change(SEED, "^RemainAfterExit=.*\n", ""),
    change(SEED, "^Restart=.*\n", ""),
    change(SEED, "^TimeoutStartSec=.*\n", ""),
    change(SEED, "^ExecStart=(.*) seed$", r"ExecStart=\1 status"),
    remove("/etc/systemd/system/containerd.service.d/10-preload-seed.conf"),
    change("/etc/systemd/system/docker.service.d/10-preload-seed.conf", "^After=.*\n", ""),
    change("/etc/systemd/system/docker.service.d/10-preload-seed.conf", "^ExecStartPre=.*\n", ""),
    change(f"{SEED}.d/05-local-disk.conf", "^Requires=", "Wants="),
    change(f"{UNIT}.d/05-local-disk.conf", "^Requires=.*\n", ""),
    remove(f"{PROMOTE}.d/05-local-disk.conf"),
)
record(
    "test_promotion_does_not_delay_the_boot",
    remove("/etc/systemd/system/multi-user.target.wants/preload-promote.service"),
    change(PROMOTE, "^Type=exec", "Type=oneshot"),
    change(PROMOTE, "^After=.*\n", ""),
    change(PROMOTE, "^ConditionPathExists=.*\n", ""),
    change(PROMOTE, "^ConditionDirectoryNotEmpty=.*\n", ""),
    change(PROMOTE, "^Nice=.*\n", ""),
    change(PROMOTE, "^Restart=.*\n", ""),
    change(PROMOTE, "^ExecStart=(.*) promote$", r"ExecStart=\1 seed"),
)
record(
    "test_preload_settings_are_declared_ones",
    change(SETTINGS, '"engine": .*', '"engine": "podman",'),
    change(SETTINGS, '"data_root": .*', '"data_root": "/var/lib/docker",'),
    change(SETTINGS, '"reserve_percent": [0-9]+', '"reserve_percent": 0'),
    write(SETTINGS, "{}"),
)
record(
    "test_store_modules_are_loaded_at_boot",
    change(MODULES, "^erofs\n", ""),
    remove(MODULES),
)
record(
    "test_preload_program_runs",
    chmod(PROGRAM, 0o775),
    chown(PROGRAM, 1, 0),
    write(PROGRAM, "#!/usr/bin/python3\nimport nothing_of_this_name\n", 0o755),
)

# The last image of the list that isn't the pause image, as shell variables for the commands below.
LAST = (
    "eval $(python3 -c 'import json; "
    f'c = json.load(open("{LIST}")); i = c["images"]; '
    'l = [x for x in i if "/pause:" not in x["ref"]] or i; '
    'print("ref=%s manifest=%s id=%s digest=%s" % tuple(l[-1][k] for k in ("ref", "manifest", "id", "digest")))'
    "'); "
)
UPPER = "$(docker image inspect --format '{{.GraphDriver.Data.UpperDir}}' $id)"
ALL_PINNED = "for n in $(ctr -n k8s.io images list --quiet | grep -v ^sha256); do "

record_booted(
    "test_preload_succeeded",
    **edited("/run/node/status.json", r's/"problems": \[\]/"problems": ["mutation"]/'),
)
record_booted(
    "test_preloaded_images_are_pinned",
    # The CRI plugin labels its pause image again whenever the image changes.
    "sed -i 's#/pause:#/gone:#' /etc/containerd/config.toml && systemctl restart containerd.service; "
    + f"{ALL_PINNED} ctr -n k8s.io images label $n io.cri-containerd.pinned= ; done",
    turn=1,
)
# This also works if no image is pinned: then the added guard is one too many.
record_booted(
    "test_preloaded_images_are_guarded",
    "guards=$(docker container ls --all --quiet --filter label=image-builder.pin=1); "
    'if test -n "$guards"; then docker container rm $guards; else '
    + LAST
    + "docker container create --name preload-pin-mutation --label image-builder.pin=1 $ref never-started; fi",
    turn=1,
)
record_booted(
    "test_preloaded_layers_are_in_containerd",
    LAST
    + "layer=$(ctr -n k8s.io content get $manifest | "
    + """python3 -c 'import json, sys; print(json.load(sys.stdin)["layers"][-1]["digest"])'); """
    + "ctr -n k8s.io content rm $layer",
)
record_booted(
    "test_preloaded_layers_are_in_docker",
    LAST + f"folder={UPPER}; mv $folder $folder.gone; mkdir $folder",
    mend=LAST + f"folder={UPPER}; rmdir $folder; mv $folder.gone $folder",
)
record_booted("test_preloaded_images_run", "chmod 0644 $(command -v runc)", mend="chmod 0755 /usr/sbin/runc")
record_booted(
    "test_preloaded_images_are_in_containerd",
    LAST + "ctr -n k8s.io images rm ${ref%:*}@$digest",
    turn=1,
)
record_booted(
    "test_preloaded_images_are_in_docker",
    LAST + "docker tag $id mutation:kept; docker image rm $ref",
    mend=LAST + "docker tag $id $ref; docker image rm mutation:kept",
)
record_booted(
    "test_preloaded_pause_image_is_spared",
    "for unit in kubelet cri-docker; do file=/etc/systemd/system/$unit.service; if test -e $file; then "
    "sed -i 's/--pod-infra-container-image=[^ ]*/--pod-infra-container-image=registry.invalid:1/' $file; "
    "fi; done; systemctl daemon-reload",
    turn=4,
)
record_booted(
    "test_preloaded_images_need_no_registry",
    LAST
    + "host=${ref%%/*}; port=${host#*:}; test $port != $host || port=443; echo 127.0.0.1 ${host%%:*} >> /etc/hosts; "
    "systemd-run --quiet --unit=mutation-registry python3 -m http.server $port; "
    # A connection made here tells a registry that doesn't answer from a check that doesn't see it.
     + await_port("$port") + '; bash -c "echo > /dev/tcp/${host%%:*}/$port"',
    mend="sed -i '$d' /etc/hosts; systemctl stop mutation-registry.service",
)
