"""`publish` with Azure's real SDK against the simulated service and its import host: from a build to a version."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from image_builder.errors import PublishError, UsageError
from image_builder.pool.show.report import report
from tests.support.arm.kills import started
from tests.support.arm.place import TRUSTED, Place, write_build
from tests.support.arm.publisher import Publisher
from tests.support.pools.simulated.rollouts import Faults, make, simulate
from tests.support.users import NOBODY, open_to_all

pytestmark = pytest.mark.root


@pytest.mark.parametrize("security_type", ["Standard", TRUSTED], indirect=True)
def test_a_build_becomes_a_version_by_the_calls_of_its_plan(
    azure: Place, publish: Publisher, tmp_path: Path
) -> None:
    planned = publish("plan")
    assert azure.changes() == []
    result = publish("run")
    assert result["version"] == planned["version"]
    calls = [call for call in planned["calls"] if call["step"] not in ("pages", "footer")]
    assert [(c["method"], c["path"], c["body"]) for c in calls] == [
        (entry.method, entry.path, entry.body) for entry in azure.arm.log
    ]
    ranges = [tuple(r) for c in planned["calls"] if c["step"] in ("pages", "footer") for r in c["ranges"]]
    assert sorted((page.start, page.start + page.length) for page in azure.host.log) == sorted(ranges)
    assert azure.host.log[-1].length == 512
    properties = azure.arm.resources[result["version"].lower()].content["properties"]
    assert properties["publishingProfile"]["excludeFromLatest"] is True
    assert properties["safetyProfile"]["blockDeletionBeforeEndOfLife"] is True
    versions = publish("status")["versions"]
    assert [(v["name"], v["in_latest"], set(v["regions"].values())) for v in versions] == [
        (result["version"].rsplit("/", 1)[1], False, {"Completed"})
    ]
    before = azure.changes()
    assert publish("run")["version"] == result["version"]
    assert azure.changes() == before


def test_an_ordinary_user_publishes_what_root_built(azure: Place, inventory: Path, tmp_path: Path) -> None:
    """The build belongs to root; the journal is in the user's own directory."""
    write_build(tmp_path / "output")
    (tmp_path / "output/publish").mkdir()
    os.chown(tmp_path / "output/publish", NOBODY, NOBODY)
    open_to_all(tmp_path)
    with started(azure, inventory, tmp_path / "output", user=NOBODY) as publication:
        out, err = publication.communicate()
    assert publication.returncode == 0, err
    assert json.loads(out)["version"].lower() in azure.arm.resources


def _write_keys(folder: Path) -> tuple[Path, Path]:
    """Write a key pair; return the file of the private key and that of the public one."""
    private, public = folder / "key.pem", folder / "key.pub"
    key = Ed25519PrivateKey.generate()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_keys_of_the_inventory_sign_and_are_required(
    azure: Place, publish: Publisher, inventory: Path, tmp_path: Path
) -> None:
    reason = ("--because", "canaries are well")
    name = publish("run")["version"].rsplit("/", 1)[1]
    _write_keys(tmp_path)
    document = yaml.safe_load(inventory.read_text())
    keys = {"sign_key": "{{ inventory_dir }}/key.pem", "public_key": "{{ inventory_dir }}/key.pub"}
    document["images"]["hosts"]["worker"]["image_gallery"] |= keys
    inventory.write_text(yaml.safe_dump(document))
    publish("promote", name, *reason, status=PublishError.exit_code)
    assert "no signed statement" in publish.output
    publish("run")
    publish("promote", name, *reason)
    assert [v["in_latest"] for v in publish("status")["versions"]] == [True]
    _write_keys(tmp_path)  # a different pair
    publish("promote", name, *reason, status=PublishError.exit_code)


def test_a_version_is_promoted_with_a_reason_and_a_signed_statement_and_withdrawn_for_good(
    azure: Place, publish: Publisher, tmp_path: Path
) -> None:
    private, public = _write_keys(tmp_path)
    name = publish("run", "--sign-key", str(private))["version"].rsplit("/", 1)[1]
    reason = ("--because", "canaries are well")
    publish("promote", name, "--public-key", str(public), *reason)
    assert [v["in_latest"] for v in publish("status")["versions"]] == [True]
    # Someone who may write to the gallery gives this version's tags to other bytes.
    content = next(r.content for path, r in azure.arm.resources.items() if path.endswith(name))
    content["tags"]["image-builder-vhd-sha256"] = "0" * 64
    publish("promote", name, "--public-key", str(public), *reason, status=PublishError.exit_code)
    assert "another VHD" in publish.output
    publish("withdraw", name, "--because", "it loses GPUs")
    (version,) = publish("status")["versions"]
    assert not version["in_latest"] and version["withdrawn"] == "it loses GPUs"
    publish("promote", name, *reason, status=PublishError.exit_code)
    assert "it was withdrawn: it loses GPUs" in publish.output and "its life ended" in publish.output


def test_a_version_is_promoted_by_the_report_of_a_rollout_of_its_build(
    azure: Place, publish: Publisher, tmp_path: Path
) -> None:
    name = publish("run")["version"].rsplit("/", 1)[1]
    build = json.loads((tmp_path / "output/worker/latest/manifest.json").read_text())["build_id"]
    progress, _, records = simulate(make(20), Faults())
    records[0] = records[0].model_copy(update={"builds": {"worker": "0" * 64}})
    proof = tmp_path / "report.json"
    proof.write_text(json.dumps(report(progress, records)))
    before = azure.changes()
    publish("promote", name, status=UsageError.exit_code)
    publish("promote", name, "--proof", str(proof), "--because", "x", status=UsageError.exit_code)
    publish("promote", name, "--proof", str(proof), status=PublishError.exit_code)
    assert f"verified against build {'0' * 12}, not {build[:12]}" in publish.output
    assert azure.changes() == before
    records[0] = records[0].model_copy(update={"builds": {"worker": build}})
    proof.write_text(json.dumps(report(progress, records)))
    publish("promote", name, "--proof", str(proof))
    assert [v["in_latest"] for v in publish("status")["versions"]] == [True]
    tags = next(r.content["tags"] for path, r in azure.arm.resources.items() if path.endswith(name))
    digest = hashlib.sha256(proof.read_bytes()).hexdigest()
    assert tags["image-builder-promoted"].startswith("rolled out to 20 hosts, ")
    assert tags["image-builder-promoted"].endswith(f"report sha256 {digest}")


def test_an_unverified_build_has_to_be_asked_for_and_is_never_promoted(
    azure: Place, publish: Publisher, tmp_path: Path
) -> None:
    for boot in (tmp_path / "output/boot").iterdir():
        (boot / "verify.json").unlink()
    publish("run", status=PublishError.exit_code)
    assert azure.changes() == []
    name = publish("run", "--unverified", "a fire")["version"].rsplit("/", 1)[1]
    publish("promote", name, "--because", "it is late", status=PublishError.exit_code)
    assert "it wasn't verified: a fire" in publish.output
