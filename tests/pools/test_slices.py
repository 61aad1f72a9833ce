"""The last results of `slices`, which are in the docs; and its parts, without any machine.

The run itself boots a machine and takes ten minutes: `.venv/bin/python -m tests.e2e.slices`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import slices_facts, slices_image, slices_run
from tests.e2e.slices import RECORD
from tests.support import slices_howto
from tests.support.pools.fleet import new_key

pytestmark = pytest.mark.root

Record = dict[str, Any]


@pytest.fixture(scope="module")
def record() -> Record:
    found: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


# -- what was seen ---------------------------------------------------------------------------------------------


def test_every_fact_holds_in_the_record(record: Record) -> None:
    """This is about the page's current commands and Job: anyone who changes them has to run them again."""
    assert len(slices_facts.facts(record)) >= 14
    assert slices_facts.broken(record) == []


def _dead(record: Record) -> int:
    return next(n for n, names in enumerate(record["slices"]) if record["dead"] in names)


def _pod(record: Record, *, dead: bool) -> Record:
    number = _dead(record)
    found: Record = record["pods"][f"{number if dead else 1 - number}"]
    return found


def _other_commands(record: Record) -> None:
    record["commands"][0] = record["commands"][0].replace("umask 077\n", "")


def _other_job(record: Record) -> None:
    record["manifest"] = record["manifest"].replace("PerIndex: 0", "PerIndex: 1")


def _not_ready(record: Record) -> None:
    record["node"]["conditions"]["Ready"] = "False"


def _nobody_dead(record: Record) -> None:
    record["dead"] = "host-9"


def _second_attempt(record: Record) -> None:
    _pod(record, dead=True)["pods"] = 2


def _restarted(record: Record) -> None:
    _pod(record, dead=False)["ends"][0]["restarts"] = 1


def _elsewhere(record: Record) -> None:
    _pod(record, dead=False)["nodes"] = ["another"]


def _failed_with_it(record: Record) -> None:
    record["job"] |= {"completed": "", "failed": "0,1"}


def _not_failed(record: Record) -> None:
    record["job"] |= {"completed": "0,1", "failed": ""}


def _all_in_vain(record: Record) -> None:
    record["job"]["conditions"] = [["Failed", "BackoffLimitExceeded"]]


def _cut_short(record: Record) -> None:
    record["job"]["last_end"] = "2999-01-01T00:00:00Z"


def _said_too_early(record: Record) -> None:
    record["last_line"] = "done:  failed: 0"


def _cut_off(record: Record) -> None:
    record["processed"][str(_dead(record))]["status"] = "error"


def _told_twice(record: Record) -> None:
    record["told_by_jobs"][record["slices"][0][0]] = 2


def _told_again(record: Record) -> None:
    name = next(n for n, count in record["told_by_jobs"].items() if count)
    record["told_in_the_end"][name] = 2


def _never_told(record: Record) -> None:
    record["told_in_the_end"][record["dead"]] = 0


def _ended_badly(record: Record) -> None:
    record["ends"][record["dead"]] = "timeout"


def _on_disk(record: Record) -> None:
    record["volumes"] = ["tmpfs secret streams"]


def _stays(record: Record) -> None:
    record["left"] = ["tmpfs empty-dir work"]


def _found(record: Record) -> None:
    record["disks"]["secrets_found"] = 1


def _blind(record: Record) -> None:
    record["disks"]["controls_found"] = 0


@pytest.mark.parametrize(
    "change",
    [
        _other_commands,
        _other_job,
        _not_ready,
        _nobody_dead,
        _second_attempt,
        _restarted,
        _elsewhere,
        _failed_with_it,
        _not_failed,
        _all_in_vain,
        _cut_short,
        _said_too_early,
        _cut_off,
        _told_twice,
        _told_again,
        _never_told,
        _ended_badly,
        _on_disk,
        _stays,
        _found,
        _blind,
    ],
)
def test_facts_see_what_is_wrong(record: Record, change: Callable[[Record], None]) -> None:
    other = copy.deepcopy(record)
    change(other)
    assert slices_facts.broken(other) != []


# -- its parts -------------------------------------------------------------------------------------------------


def test_the_documented_commands_are_shell(tmp_path: Path) -> None:
    """The Job has an index for each slice, and their Secret."""
    start, take_in = slices_howto.commands()
    for text in (start, take_in):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    (tmp_path / "job.yaml").write_text(slices_howto.manifest())
    for name in ("0", "1", "2"):
        (tmp_path / "slices" / name).mkdir(parents=True)
    (line,) = (line for line in start.splitlines() if line.strip().startswith("sed "))
    script = line.rpartition("|")[0]
    done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    job = yaml.safe_load(done.stdout)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    volumes = job["spec"]["template"]["spec"]["volumes"]
    (secret,) = (volume["secret"]["secretName"] for volume in volumes if "secret" in volume)
    assert f"create secret generic {secret} " in start and f"delete secret {secret}" in take_in


def test_the_node_is_one_that_the_job_asks_for() -> None:
    assert list(slices_run.labels()) == ["node.example/pool"]
    assert slices_run.reference().partition(":")[0].endswith("/ansible-runner")


def test_the_image_has_what_a_worker_needs_in_the_locked_versions() -> None:
    found = slices_image.distributions()
    assert {"ansible-core", "ansible-runner", "jinja2", "pexpect", "pyyaml"} <= set(found)
    assert not {"pytest", "paramiko", "image-builder"} & set(found)


def test_volumes_of_pods_are_told_from_other_mounts() -> None:
    pod = "/var/lib/kubelet/pods/1f/volumes"
    mounts = (
        f"tmpfs {pod}/kubernetes.io~secret/stream\n"
        f"tmpfs {pod}/kubernetes.io~empty-dir/work\n"
        f"ext4 {pod}/kubernetes.io~empty-dir/other\n"
        "tmpfs /run\noverlay /var/lib/docker/overlay2/1f/merged\n"
    )
    assert slices_run.volumes(mounts) == {
        "tmpfs secret stream",
        "tmpfs empty-dir work",
        "ext4 empty-dir other",
    }


def test_the_search_finds_a_key_on_a_disk_and_nothing_that_is_not_there(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    key, stream = (tmp_path / "key").read_bytes(), b'{"zipfile": 4000}\n' + os.urandom(2000).hex().encode()
    secrets = slices_run.pieces(key, [stream])
    assert len([piece for piece in secrets if piece in key]) >= 3
    assert len([piece for piece in secrets if piece in stream]) >= 3
    disks = tmp_path / "disks"
    disks.mkdir()
    with (disks / "local.raw").open("wb") as disk:
        disk.truncate(1 << 30)
        disk.seek(700 << 20)
        disk.write(b"an event" + bytes(5000))
    seen = slices_run.search(disks, secrets, [b"an event"])
    assert (seen["secrets_found"], seen["controls_found"]) == (0, 1)
    assert seen["bytes"] < 1 << 20
    with (disks / "local.raw").open("r+b") as disk:
        disk.seek((900 << 20) - 3)
        disk.write(key + stream)
    assert slices_run.search(disks, secrets, [b"an event"])["secrets_found"] == len(secrets)


def test_what_lies_across_two_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_run, "BLOCK", 4096)
    for at in range(4096 - 8, 4096 + 2):
        (tmp_path / "x.raw").write_bytes(bytes(at) + b"a secret" + bytes(9000))
        assert slices_run.search(tmp_path, [b"a secret"], [])["secrets_found"] == 1
