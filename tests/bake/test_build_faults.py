"""Bad days for a build: a clear error with its own exit code, nothing published, existing data intact."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder import errors
from tests.support.debian_mirror import build_deb
from tests.support.images.builds import IMAGE, REPO, Ended, Workplace, left_behind
from tests.support.images.fixtures import WHOLE

pytestmark = pytest.mark.root


def _inventory(tmp_path: Path, text: str) -> Path:
    """Return a copy of the lab's inventory in which the image has more variables."""
    inventory = tmp_path / "inventory"
    subprocess.run(["cp", "-a", REPO / "inventories/lab", inventory], check=True)
    (inventory / "host_vars").mkdir(exist_ok=True)
    with (inventory / "host_vars" / f"{IMAGE}.yml").open("a") as file:
        file.write(f"\n{text}\n")
    return inventory


def _assert_refused(done: Ended, workplace: Workplace, before: dict[str, str], code: int, *told: str) -> None:
    assert done.status == code, done.stderr
    for word in told:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    _assert_untouched(workplace, before)


def _assert_untouched(workplace: Workplace, before: dict[str, str]) -> None:
    assert workplace.published() == before
    assert left_behind(workplace.store) == []
    assert list((workplace.store / "staging").iterdir()) == []


def _forget_packages_of_others(workplace: Workplace) -> None:
    """Leave only the packages in the image's lock: the downloads of all images together are many times larger."""
    groups = json.loads(workplace.lock.read_text())["groups"].values()
    locked = {package["sha256"] for group in groups for package in group["packages"]}
    for path in (workplace.store / "debs").iterdir():
        if path.name.partition(".")[0] not in locked:
            path.unlink()


def test_the_mirror_is_down(workplace: Workplace, published: dict[str, str]) -> None:
    workplace.lock.unlink()
    done = workplace.build(env={"IMAGE_BUILDER_MIRROR": "http://127.0.0.1:9/debian"})
    _assert_refused(done, workplace, published, errors.FetchError.exit_code, "127.0.0.1", "hint:")


def test_a_locked_package_is_gone_from_the_mirror(workplace: Workplace, published: dict[str, str]) -> None:
    workplace.forget("base")
    workplace.forget("system", "seal", "verify", "convert")
    lock = json.loads(workplace.lock.read_text())
    package = lock["groups"]["base"]["packages"][0]
    (workplace.store / "debs" / package["sha256"]).unlink()
    done = workplace.build(env={"IMAGE_BUILDER_MIRROR": "http://127.0.0.1:9/debian"})
    _assert_refused(done, workplace, published, errors.FetchError.exit_code, package["name"], "hint:")


@pytest.mark.parametrize(
    ("built", "stages"),
    [
        ("tiny", ["convert"]),
        pytest.param("tiny", ["base", "system", "seal", "verify", "convert"], marks=pytest.mark.slow),
        pytest.param(
            WHOLE,
            ["preload", "preload_store", "rehearsal", "seal", "verify", "disk", "convert"],
            marks=pytest.mark.slow,
        ),
        # mkfs.erofs never ends by itself.
        pytest.param(
            WHOLE,
            ["preload_store", "rehearsal", "seal", "verify", "disk", "convert"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_disk_fills_up_in_the_middle(
    copies: Callable[[Workplace], Workplace],
    built: str,
    stages: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Put store and artifacts on a separate filesystem; another program takes the rest of it while a stage runs."""
    source = copies(request.getfixturevalue(built))
    published = source.take_artefact(request.getfixturevalue(built))
    # The stages are run again, and don't need to be copied.
    source.forget(*stages)
    _forget_packages_of_others(source)
    image = source.store.parent / "small.ext4"
    mount = source.store.parent / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 30)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", image], check=True)
    script = tmp_path / "in_namespace.py"
    script.write_text(_FILL)
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            sys.executable,
            script,
            image,
            mount,
            source.store,
            source.output,
            REPO,
            source.image,
            stages[0],
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == errors.SpaceError.exit_code, told
    assert f"stage {stages[0]}: " in told["stderr"] and "no space left" in told["stderr"].lower(), told
    assert "Traceback" not in told["stderr"]
    assert told["staging"] == []
    # Nothing was added to the earlier artifact, and not a byte of it has changed.
    assert told["published"] == published
    assert told["latest"] == source.artefact.name
    assert told["again"] == 0, told
    image.unlink()


# Runs in a mount namespace of its own: the mount is gone when it ends.
_FILL = """
import json, os, subprocess, sys
from pathlib import Path
image, mount, earlier_store, earlier_output, repo, name, stage = sys.argv[1:]
sys.path.insert(0, repo)
from tests.support.images.builds import Workplace
subprocess.run(["mount", "-o", "loop", image, mount], check=True)
place = Workplace(Path(mount, "store"), Path(mount, "output"), name)
subprocess.run(["cp", "-a", earlier_store, place.store], check=True)
subprocess.run(["cp", "-a", "--sparse=always", earlier_output, place.output], check=True)
argv = [repo + "/image-builder", "build", name, "--store", place.store, "--output", place.output]
env = {**os.environ, "CI": "true"}
child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
lines = []
for line in child.stderr:
    lines.append(line)
    if f" {stage} " in line and "start" in line:
        break
stats = os.statvfs(mount)
ballast = mount + "/ballast"
subprocess.run(["fallocate", "-l", str(stats.f_bavail * stats.f_frsize - (60 << 20)), ballast], check=True)
lines += child.stderr.readlines()
status = child.wait()
staging = os.listdir(place.store / "staging")
published, latest = place.published(), place.artefact.name
os.unlink(ballast)
again = subprocess.run([*argv, "--stop-after", stage], env=env, stdout=subprocess.DEVNULL).returncode
print(json.dumps({"status": status, "stderr": "".join(lines)[-4000:], "staging": staging,
                  "published": published, "latest": latest, "again": again}))
"""


def test_a_package_whose_postinst_fails(
    workplace: Workplace, published: dict[str, str], tmp_path: Path
) -> None:
    deb = build_deb(tmp_path, "broken-package", postinst="#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    data = deb.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    (workplace.store / "debs" / sha256).write_bytes(data)
    lock = json.loads(workplace.lock.read_text())
    system = lock["groups"]["system"]
    system["requested"] = sorted([*system["requested"], "broken-package"])
    system["packages"].append(
        {
            "name": "broken-package",
            "version": "1.0",
            "architecture": "amd64",
            "sha256": sha256,
            "size": len(data),
            "path": "pool/broken-package.deb",
            "repository": "debian",
        }
    )
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    inventory = _inventory(tmp_path, "system_packages_extra: [broken-package]")
    done = workplace.build("--locked", tmp_path / "lock.json", inventory=inventory)
    _assert_refused(
        done,
        workplace,
        published,
        errors.StageError.exit_code,
        "system",
        "broken-package",
        "the disk is on fire",
    )


# Inventories with faults: their texts, and the lines with a fault.
WRONG = {
    """
system_sysctrl: {a: 1}
system_swap_off: 3
image_layers: [system, container_runtime, kubernetes]
container_runtime_docker_version: "31.0"
kubelet_version: "1.99"
""": (3, 4, 6, 7),
    "image_layers: [system, nonsense]": (2,),
}


def test_a_wrong_definition(workplace: Workplace, published: dict[str, str], tmp_path: Path) -> None:
    """Both are refused before anything is touched, so one store and one earlier artifact serve them."""
    for text, lines in WRONG.items():
        folder = tmp_path / str(len(lines))
        folder.mkdir()
        done = workplace.build(inventory=_inventory(folder, text))
        assert done.status == errors.DefinitionError.exit_code, done.stderr
        for line in lines:
            assert f"host_vars/{IMAGE}.yml:{line} " in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    # If any of them had touched anything, it would show at the end: all bytes are hashed once.
    _assert_untouched(workplace, published)


def _vaulted(password: Path, secret: str) -> str:
    """Return the inventory text for a variable with a vaulted value."""
    program = Path(sys.executable).parent / "ansible-vault"
    argv: list[str | Path] = [program, "encrypt_string", "--vault-password-file", password]
    argv += ["--name", "site_secret", secret]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_wrong_vault_password(workplace: Workplace, published: dict[str, str], tmp_path: Path) -> None:
    secret = "correct horse battery staple"
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("right\n")
    bad.write_text("wrong\n")
    inventory = _inventory(tmp_path, _vaulted(good, secret))
    done = workplace.build("--vault-password-file", bad, inventory=inventory)
    _assert_refused(done, workplace, published, errors.VaultError.exit_code, f"host_vars/{IMAGE}.yml")
    assert secret not in done.stderr + done.stdout


def test_a_vaulted_value_reaches_no_record_of_a_build(workplace: Workplace, tmp_path: Path) -> None:
    """A play may write it into the image; the plan, the records, the logs and the facts never show it."""
    secret = "9f1c-canary-77aa"
    password = tmp_path / "password"
    password.write_text("right\n")
    use = "system_sysctl_extra: {kernel.domainname: '{{ site_secret }}'}"
    inventory = _inventory(tmp_path, f"{_vaulted(password, secret)}\n{use}")
    done = workplace.build("--vault-password-file", password, "--stop-after", "verify", inventory=inventory)
    assert secret not in done.stderr + done.stdout
    trees = workplace.store.glob("objects/*/product/tree/etc/sysctl.d/90-image.conf")
    assert any(secret in p.read_text() for p in trees), "the play did not use it"
    for path in workplace.store.rglob("*"):
        if path.is_file() and not path.is_symlink() and "tree" not in path.parts and "debs" not in path.parts:
            assert secret.encode() not in path.read_bytes(), path


def test_a_damaged_store_is_refused_and_repaired_by_building_again(
    workplace: Workplace, published: dict[str, str]
) -> None:
    workplace.forget("seal", "verify", "convert")
    damaged = "etc/sysctl.d/90-image.conf"
    victim = workplace.object("system") / "product/tree" / damaged
    subprocess.run(["cp", "--remove-destination", "/proc/version", victim], check=True)
    done = workplace.build()
    _assert_refused(done, workplace, published, errors.StoreError.exit_code, damaged, "hint:")
    verified = subprocess.run(
        workplace.command("store", "verify", "--store", workplace.store, "--json"),
        capture_output=True,
        text=True,
    )
    assert verified.returncode == errors.StoreError.exit_code
    assert damaged in verified.stdout
    workplace.forget("system")
    again = workplace.build("--stop-after", "system")
    assert again.status == 0, again.stderr


def test_two_builds_at_once_share_the_work(workplace: Workplace) -> None:
    workplace.forget("seal", "verify", "convert")
    ended: list[Ended] = []
    threads = [threading.Thread(target=lambda: ended.append(workplace.build())) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert [e.status for e in ended] == [0, 0], [e.stderr for e in ended]
    one, two = (e.result for e in ended)
    assert one["build_id"] == two["build_id"]
    assert one["artefact"] == two["artefact"]
    # Exactly one of the two ran each stage.
    for first, second in zip(one["stages"], two["stages"], strict=True):
        ran = [not first["cached"], not second["cached"]]
        assert sum(ran) == (1 if first["name"] in ("seal", "verify", "convert") else 0), first
    assert list((workplace.store / "staging").iterdir()) == []


def test_too_little_space_is_named_before_anything_starts(workplace: Workplace, tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs -o size=300m none "$1" && mkdir "$1/output" && '
        '"$2/image-builder" build tiny --store "$3" --output "$1/output"'
    )
    workplace.forget("base", "system", "seal", "verify", "convert")
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            script,
            "sh",
            tmp_path,
            REPO,
            workplace.store,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "CI": "true"},
        check=False,
    )
    assert done.returncode == errors.SpaceError.exit_code, done.stderr
    assert "MiB are missing" in done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
