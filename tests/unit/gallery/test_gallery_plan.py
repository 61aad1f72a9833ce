"""The plan: what is sent, in which order, and how a definition is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.errors import PublishError
from image_builder.gallery import artefact
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.plan import (
    Call,
    Pages,
    Plan,
    Target,
    definition_problems,
    definition_properties,
    make_plan,
    needs_image,
    next_version,
    require_free,
)
from tests.support.arm.place import MIB, SETTINGS, TRUSTED, write_build
from tests.support.images.manifests import DISK

NOW = datetime(2026, 11, 25, 22, 30, tzinfo=UTC)


def _target(**changes: Any) -> Target:
    return Target(ImageGallery.model_validate_json(json.dumps(SETTINGS | changes)))


@pytest.fixture
def built(tmp_path: Path) -> Artefact:
    record = write_build(tmp_path / "output", size=2 * MIB, data=MIB)
    build = record.build_id[:12]
    folder = tmp_path / "output/worker" / build
    return artefact.read(folder, tmp_path / "output/boot" / build, unverified=False)


def _plan(built: Artefact, **options: Any) -> Plan:
    options = {"now": NOW, "creates_definition": False, **options}
    target = _target(security_type=options.pop("security_type", None))
    return make_plan(target, built, "2026.1125.0", [(0, MIB)], **options)


def _calls(plan: Plan) -> dict[str, Call]:
    return {step.step: step for step in plan.steps if isinstance(step, Call)}


def test_the_footer_is_the_last_page_and_everything_else_of_the_upload_is_before_it(built: Artefact) -> None:
    steps = [step.step for step in _plan(built).steps]
    assert steps == ["disk", "access", "pages", "footer", "release", "version", "clean"]
    footer = _plan(built).steps[3]
    assert isinstance(footer, Pages) and footer.ranges == ((built.size - 512, built.size),)
    assert _plan(built, creates_definition=True).steps[0].step == "definition"


def test_only_a_definition_that_refuses_disks_gets_its_versions_from_a_managed_image(built: Artefact) -> None:
    plan = _plan(built, security_type=TRUSTED)
    calls = [step for step in plan.steps if isinstance(step, Call)]
    disk, image = plan.disk, plan.disk.replace("/disks/", "/images/")
    assert [step.step for step in calls[-4:]] == ["image", "version", "clean", "clean"]
    assert [(c.method, c.path) for c in calls[-2:]] == [("DELETE", image), ("DELETE", disk)]
    made, bodies = calls[-4], {call.step: call.body or {} for call in calls}
    assert (made.method, made.path, bodies["image"]["properties"]) == (
        "PUT",
        image,
        {
            "hyperVGeneration": "V2",
            "storageProfile": {
                "osDisk": {"osType": "Linux", "osState": "Generalized", "managedDisk": {"id": disk}}
            },
        },
    )
    for key in ("tags", "location"):
        assert bodies["image"][key] == bodies["disk"][key]
    assert bodies["version"]["properties"]["storageProfile"] == {"source": {"id": image}}
    secure = built.manifest.model_copy(update={"disk": DISK.model_copy(update={"secure_boot": object()})})
    assert needs_image(_target(), replace(built, manifest=secure))
    for other in (None, "Standard", "TrustedLaunch"):
        plan = _plan(built, security_type=other)
        assert [step.step for step in plan.steps][-2:] == ["version", "clean"]
        profile = (_calls(plan)["version"].body or {})["properties"]["storageProfile"]
        assert profile == {"osDiskImage": {"source": {"id": disk}}}


def test_a_version_is_born_outside_of_latest_and_protected_until_its_end_of_life(built: Artefact) -> None:
    body = _calls(_plan(built))["version"].body or {}
    profile = body["properties"]["publishingProfile"]
    assert profile["excludeFromLatest"] is True
    assert profile["endOfLifeDate"] == "2027-05-24T00:00:00Z"
    assert body["properties"]["safetyProfile"]["blockDeletionBeforeEndOfLife"] is True
    assert [(r["name"], r["regionalReplicaCount"]) for r in profile["targetRegions"]] == [
        ("westus3", 12),
        ("eastus", 3),
    ]
    assert body["tags"]["image-builder-suite"] == "offline 5/5, booted 5/5"
    assert body["tags"]["image-builder-vhd-sha256"] == built.sha256
    assert "image-builder-unverified" not in body["tags"]
    unverified = _calls(_plan(built, unverified="a fire"))["version"].body or {}
    assert unverified["tags"]["image-builder-unverified"] == "a fire"


def test_firmware_gets_the_images_certificate_beside_microsofts(built: Artefact) -> None:
    body = _calls(_plan(replace(built, certificate="QUJD")))["version"].body or {}
    assert body["properties"]["securityProfile"]["uefiSettings"] == {
        "signatureTemplateNames": ["MicrosoftUefiCertificateAuthorityTemplate"],
        "additionalSignatures": {"db": [{"type": "x509", "value": ["QUJD"]}]},
    }
    assert "securityProfile" not in (_calls(_plan(built))["version"].body or {})["properties"]


def test_a_plan_says_how_long_the_upload_takes_and_by_the_users_prices_what_replicas_cost(
    built: Artefact,
) -> None:
    ranges = [(n << 30, n + 1 << 30) for n in range(6)]
    prices = {"gib_month": 0.05, "gib_egress": 0.02}
    plan = make_plan(_target(prices=prices), built, "1.0.0", ranges, now=NOW, creates_definition=False)
    assert plan.estimate() == {"seconds": 102.4, "month": 4.5, "once": 0.12}
    assert set(_plan(built).estimate()) == {"seconds"}


def test_the_same_bytes_have_the_same_disk_and_others_have_another(built: Artefact) -> None:
    target = _target()
    assert target.disk(built) == target.disk(replace(built, suite="other"))
    assert target.disk(built) != target.disk(replace(built, sha256="0" * 64))


@pytest.mark.parametrize(
    ("existing", "day", "version"),
    [
        ([], date(2026, 11, 25), "2026.1125.0"),
        (["2026.1125.0", "2026.1125.10", "2026.1124.99", "1.0.0"], date(2026, 11, 25), "2026.1125.11"),
        (["2026.1105.0"], date(2026, 1, 5), "2026.105.0"),
    ],
)
def test_versions_rise_within_a_day(existing: list[str], day: date, version: str) -> None:
    assert next_version(existing, day) == version


def test_a_definition_is_the_same_whatever_the_order_of_its_controllers(built: Artefact) -> None:
    ours = definition_properties(_target(), built)
    others = {**ours, "identifier": {"publisher": "x"}}
    others["features"] = [
        {"name": "IsAcceleratedNetworkSupported", "value": "True"},
        {"name": "DiskControllerTypes", "value": "NVMe, SCSI"},
        {"name": "IsHibernateSupported", "value": "True"},
    ]
    assert definition_problems(others, ours) == []


def test_every_difference_of_a_definition_is_named_at_once(built: Artefact) -> None:
    ours = definition_properties(_target(security_type="TrustedLaunch"), built)
    others = {"osType": "Linux", "osState": "Specialized", "hyperVGeneration": "V1", "architecture": "Arm64"}
    assert definition_problems(others, ours) == [
        "osState is Specialized, the image needs Generalized",
        "hyperVGeneration is V1, the image needs V2",
        "architecture is Arm64, the image needs x64",
        "SecurityType is Standard, the image needs TrustedLaunch",
        "IsAcceleratedNetworkSupported is None, the image needs True",
        "DiskControllerTypes is None, the image needs NVMe,SCSI",
    ]


def test_a_version_of_other_bytes_is_never_taken(built: Artefact) -> None:
    require_free({"tags": {"image-builder-vhd-sha256": built.sha256}}, built)
    for tags in ({"image-builder-vhd-sha256": "0" * 64}, {}, None):
        with pytest.raises(PublishError, match="is of another image"):
            require_free({"id": "v", "tags": tags}, built)
