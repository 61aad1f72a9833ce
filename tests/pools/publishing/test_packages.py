"""`publish age --packages`: today's packages with real apt, compared with the lock of the build that machines run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.lock.resolve import resolve_lock
from image_builder.bake.plan.resolve import requirements
from image_builder.canonical import digest
from image_builder.cli.command import extensions
from image_builder.definition import load_inventory
from image_builder.events import Monitor
from image_builder.settings import Settings
from tests.support.arm.kills import started
from tests.support.arm.place import Place, write_build, write_inventory
from tests.support.arm.publisher import Publisher
from tests.support.debian_mirror import Repository, serve

pytestmark = pytest.mark.root


def test_packages_that_have_newer_versions_make_a_machine_old(azure: Place, tmp_path: Path) -> None:
    repository = Repository(tmp_path / "served/debian", tmp_path)
    (tmp_path / "served/debian-security").symlink_to("debian")
    keyring = os.fspath(repository.keyring)
    inventory = write_inventory(tmp_path / "hosts.yml", keyring=keyring)
    definition = load_inventory([inventory]).define("worker")
    needs = requirements(definition, extensions())
    names = {name for group in needs.groups.values() for name in (*group.names, *group.sources)}
    repository.add("apt", extra="Essential: yes\n")
    for name in sorted(names - {"apt"}):
        repository.add(name)
    repository.publish()
    store, output = tmp_path / "store", tmp_path / "output"
    with serve(tmp_path / "served") as address:
        settings = Settings(store=store, mirror=f"{address}/debian")
        lock = resolve_lock(definition, needs, settings, Monitor())
        build = write_build(output, lock_sha256=digest(lock.as_json())).build_id[:12]
        lock.save(output / "worker" / build / "lock.json")
        publish = Publisher(azure, inventory, output)
        version = publish("run")["version"]
        azure.arm.add(
            f"{azure.arm.group}/providers/Microsoft.Compute/virtualMachines/m",
            properties={"storageProfile": {"imageReference": {"id": version}}},
        )

        def age(status: int) -> dict[str, Any]:
            options = ("--packages", "--store", str(store), "--mirror", f"{address}/debian")
            # It works in its own namespaces, so it runs in another process.
            with started(azure, inventory, output, "age", *options) as child:
                answer, problem = child.communicate()
            assert child.returncode == status, problem
            (row,) = json.loads(answer)["ages"]
            return dict(row)

        assert age(0)["behind"] == []
        (newer,) = (package for package in lock.group("system").packages if package.name == "cloud-init")
        repository.add(newer.name, version="2.0")
        repository.publish()
        row = age(1)
        assert row["behind"] == ["cloud-init 1.0 -> 2.0"]
        assert row["problem"].startswith("1 packages are behind")
        assert publish("age")["ages"][0]["problem"] == ""
        shutil.rmtree(output / "worker" / build)
        assert "can't be compared" in age(1)["problem"]
