"""Cleaning up after a roll whose driver and journal are lost, on a real control plane."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.drain import fence, taint
from image_builder.drain.lease import NAMESPACE, Leases, Settings
from image_builder.errors import PoolError
from image_builder.node.net.kube import Client as Kube
from image_builder.pool.plan.plan import save
from image_builder.pool.salvage import salvage
from image_builder.pool.scale_set.client import Client
from image_builder.system.resource_manager import ResourceManager
from tests.support.arm.fleet import NEW, OLD
from tests.support.arm.model import SUBSCRIPTION
from tests.support.arm.serving import found_by
from tests.support.control_plane.lending import Lender
from tests.support.images.builds import REPO
from tests.support.pools.rolls import GENEROUS, PATIENCE, plan, world

pytestmark = pytest.mark.root
RUN = "roll-000000000000"
OFTEN = Settings(namespace=NAMESPACE, duration=20.0, deadline=15.0, pause=2.0)


@pytest.mark.nightly
def test_only_who_has_the_image_from_before_is_freed(
    control_plane: Lender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with control_plane.lent() as cluster, world(cluster, 1, 6, tmp_path) as fleet:
        found_by(fleet.served.environment, monkeypatch)
        admin, (path,) = fleet.admin, {host.scale_set_id for host in fleet.hosts}
        names = [host.name for host in fleet.hosts]
        for name in names[:5]:
            _, patch = fence.cordon(fleet.node(name), "roll-other" if name == names[3] else RUN, time.time())
            assert fence.send(admin, name, patch)
        for name in names[1:3]:
            taint.bar(admin, name, RUN)
        fleet.machine(fleet.hosts[2]).version = NEW
        group = fleet.scale_sets.sets[path.lower()]
        inventory = [host for host in fleet.hosts if host.name != names[4]]
        connect = partial(Kube.from_kubeconfig, fleet.account(), agent="test")
        with (
            connect() as kube,
            ResourceManager(SUBSCRIPTION, endpoint=fleet.served.url) as manager,
            Leases(connect, "abort", OFTEN) as leases,
        ):
            azure = Client(manager)
            # Before its first request, a driver holds only the Lease.
            with Leases(connect, RUN, OFTEN) as driver:
                driver.hold(path)
                with pytest.raises(PoolError, match=f"is held by {RUN} "):
                    salvage(kube, azure, inventory, RUN, NEW, leases=leases, settle=0.1)
            azure.hold(path, f"{RUN}-back-111111111111", time.time() + 600)
            azure.set_services(path, ["AutomaticRepairs"], "Suspend")
            with pytest.raises(PoolError, match="its driver may be alive"):
                salvage(kube, azure, inventory, RUN, NEW, leases=leases, settle=0.1)
            assert all(fleet.is_ours(name) for name in names[:5]), "nothing was changed"
            done = salvage(kube, azure, inventory, RUN, NEW, settle=0.1)
        assert done.freed == tuple(names[:2])
        assert set(done.remaining) == {names[2], names[4]}
        assert done.remaining[names[2]] == "it has the roll's version"
        assert "its image is unknown" in done.remaining[names[4]]
        assert [fleet.is_ours(name) for name in names] == [False, False, True, True, True, False]
        assert done.released == (path,) and "AutomaticRepairs was suspended" in done.unsure[0]
        assert done.models == {path: OLD} and done.versions == {path: {OLD: 5, NEW: 1}}
        fleet.require_clean_sets()
        assert group.image == OLD, "no model is changed"


def test_a_driver_that_is_gone_with_its_journals(
    control_plane: Lender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Azure has accepted shows within this time, instead of a minute.
    monkeypatch.setattr("image_builder.pool.salvage.salvage", partial(salvage, settle=PATIENCE.settle))
    with control_plane.lent() as cluster, world(cluster, 2, 3, tmp_path) as fleet:
        found_by(fleet.served.environment, monkeypatch)
        rolled = plan(fleet, **GENEROUS)
        save(rolled, fleet.folder / "plan.json")
        arguments = [os.fspath(fleet.folder), fleet.served.url, os.fspath(fleet.account()), "24"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.pools.rolls", *arguments],
            cwd=REPO,
            timeout=240,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        assert any(fleet.is_ours(host.name) for host in fleet.hosts)
        hosts = "".join(
            f"        {h.name}: {{ansible_host: 192.0.2.{n}, pool_scale_set: {h.scale_set}, pool_vm_id: {h.vm_id},"
            f" pool_scale_set_id: {h.scale_set_id}, pool_instance_id: '{h.instance}'}}\n"
            for n, h in enumerate(fleet.hosts, 1)
        )
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(
            f"all:\n  children:\n    gpu:\n      vars: {{pool_image: worker, pool_vm_size: s}}\n      hosts:\n{hosts}"
        )
        options = ["--run", rolled.run, "--to", NEW, "-i", os.fspath(inventory), "--pool", "gpu", "--json"]
        account = ["--kubeconfig", os.fspath(fleet.account()), "--endpoint", fleet.served.url]
        refused = CliRunner().invoke(app, ["pool", "abort", *options, *account])
        assert refused.exit_code == PoolError.exit_code and "--lost" in refused.stdout
        answer = CliRunner().invoke(app, ["pool", "abort", *options, *account, "--lost"])
        result = json.loads(answer.stdout)
        assert answer.exit_code == (PoolError.exit_code if result["remaining"] else 0)
        for host in fleet.hosts:
            has_new = fleet.machine(host).version == NEW
            assert not fleet.is_ours(host.name) or (has_new and host.name in result["remaining"])
        fleet.require_clean_sets()
