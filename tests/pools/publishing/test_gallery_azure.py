"""Resource Manager refuses, conflicts, loses answers and is slow: nothing is sent blindly, only one version is made.

The simulator makes each failure happen to Azure's real SDK.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from azure.core.exceptions import ServiceRequestError

from image_builder.errors import PublishError
from image_builder.events import Monitor
from image_builder.gallery import artefact, pages, run
from image_builder.gallery.azure import Service
from image_builder.gallery.journal import open_journal, read_journal
from image_builder.gallery.plan import DISK_API, Call
from image_builder.gallery.tags import SHA256_TAG
from image_builder.system.resource_manager import readable, remaining
from tests.support.arm.limits import Limits, Policy
from tests.support.arm.model import Answer, Fault, Request, error
from tests.support.arm.place import SETTINGS, TRUSTED, Place, write_build

pytestmark = pytest.mark.root

STEPS = [
    ("PUT", "/disks/"),
    ("POST", "/beginGetAccess"),
    ("POST", "/endGetAccess"),
    ("PUT", "Compute/images/"),
    ("PUT", "/versions/"),
    ("DELETE", "Compute/images/"),
    ("DELETE", "/disks/"),
]


class Publishing:
    """A build, and the process that publishes it."""

    def __init__(self, cloud: Place, output: Path) -> None:
        build = write_build(output, data=4 << 20).build_id[:12]
        self.cloud, self.journal = cloud, output / "journal.jsonl"
        self.artefact = artefact.read(output / "worker" / build, output / "boot" / build, unverified=False)

    def __call__(self, *, restart: bool = False, replace_failed: bool = False) -> dict[str, Any]:
        target = self.cloud.target
        with (
            open_journal(self.journal) as journal,
            Service(target.settings.subscription, endpoint=self.cloud.arm.url) as service,
        ):
            records = () if restart else journal.records
            plan = run.plan(service, target, self.artefact, records)
            return run.Run(plan, service, journal, Monitor(), restart, replace_failed).perform()

    def versions(self) -> list[dict[str, Any]]:
        return [r.content for path, r in self.cloud.arm.resources.items() if "/versions/" in path]

    def disks(self) -> list[str]:
        """Return what is left of the upload: disk and managed image."""
        left = ("/disks/", "compute/images/")
        return [path for path in self.cloud.arm.resources if any(part in path for part in left)]

    def accepted(self, method: str, part: str) -> int:
        """Return how often the service accepted such a request, whether or not the answer arrived."""
        return sum(
            e.method == method and part in e.path and e.status in (200, 201, 202) for e in self.cloud.arm.log
        )

    def require_published(self) -> None:
        assert [(v["tags"][SHA256_TAG], v["properties"]["provisioningState"]) for v in self.versions()] == [
            (self.artefact.sha256, "Succeeded")
        ]
        assert self.disks() == []
        text = self.journal.read_text()
        assert "sig=" not in text and "Bearer" not in text


@pytest.fixture
def publishing(azure: Place, tmp_path: Path) -> Publishing:
    return Publishing(azure, tmp_path / "output")


def _once(method: str, part: str, effect: Answer | Literal["drop", "lose"], count: int = 1) -> Fault:
    """Return a fault for the first requests of a kind."""
    numbers = itertools.count()

    def fault(request: Request) -> Answer | Literal["drop", "lose"] | None:
        hit = request.method == method and part in request.path and next(numbers) < count
        return effect if hit else None

    return fault


def trusted(function: Any) -> Any:
    """Publish to a definition whose versions are made of a managed image, so with every kind of request."""
    return pytest.mark.parametrize("security_type", [TRUSTED], indirect=True)(function)


@trusted
@pytest.mark.parametrize(
    "effect",
    [
        "lose",
        "drop",
        error(500, "InternalServerError", "try later"),
        error(409, "Conflict", "another operation is in progress", Retry_After="0"),
        error(429, "TooManyRequests", "wait", Retry_After="0"),
    ],
    ids=["lost after", "lost before", "500", "409", "429"],
)
def test_what_was_refused_or_lost_is_asked_for_and_made_once(publishing: Publishing, effect: Any) -> None:
    """Each kind of request is, once."""
    hit: list[str] = []

    def note(fault: Fault, part: str) -> Fault:
        def noted(request: Request) -> Any:
            if (found := fault(request)) is not None:
                hit.append(part)
            return found

        return noted

    publishing.cloud.arm.faults = [note(_once(*step, effect), step[1]) for step in STEPS]
    publishing()
    publishing.require_published()
    assert hit == [part for _, part in STEPS]
    for method, part in STEPS:
        if part != "/beginGetAccess":  # whose answer, the address, can't be read again
            assert publishing.accepted(method, part) == 1


def test_operations_are_followed_by_their_location_where_that_is_all_there_is(publishing: Publishing) -> None:
    """The reference documents disks that way."""
    arm = publishing.cloud.arm
    arm.monitors, arm.looks = ("Location",), 3
    publishing()
    publishing.require_published()


def test_an_operation_that_fails_ends_the_run_with_its_reason(publishing: Publishing) -> None:
    """The host loses the footer after it was written, so the disk can't be released."""
    arm = publishing.cloud.arm
    for monitors in (("Location",), ("Azure-AsyncOperation",)):
        arm.monitors = monitors
        publishing.cloud.host.faults = [lambda page: 201 if page.length == 512 else None]
        with pytest.raises(PublishError, match="endGetAccess: .*InvalidVhd"):
            publishing()
    publishing.cloud.host.faults = []
    publishing()
    publishing.require_published()


def _requests(publishing: Publishing) -> int:
    return publishing.cloud.arm.reads + len(publishing.cloud.arm.log)


def test_an_empty_bucket_is_waited_for_and_only_what_it_refused_is_asked_again(
    publishing: Publishing, tmp_path: Path
) -> None:
    arm = publishing.cloud.arm
    publishing()
    clean = _requests(publishing)
    assert arm.limits.refused == 0 and max(arm.limits.shares().values()) <= 0.5
    arm.resources = {path: r for path, r in arm.resources.items() if "/versions/" not in path}
    tight = {kind: Policy(4, 120) for kind in ("reads", "writes", "deletes")}
    arm.limits = Limits({**arm.limits.policies, **tight}, tells=False)
    other = Publishing(publishing.cloud, tmp_path / "other")
    other()
    other.require_published()
    assert arm.limits.refused > 0 and arm.limits.early == 0
    assert _requests(other) - clean <= clean + arm.limits.refused


def test_the_headers_about_what_is_left_are_heeded_before_anything_is_refused(publishing: Publishing) -> None:
    arm = publishing.cloud.arm
    arm.limits = Limits({**arm.limits.policies, "reads": Policy(8, 120)})
    publishing()
    publishing.require_published()
    assert arm.limits.refused == 0


def test_the_time_that_an_answer_asks_for_is_waited(publishing: Publishing) -> None:
    refusal = error(429, "TooManyRequests", "wait", Retry_After="1")
    publishing.cloud.arm.faults = [_once("PUT", "/disks/", refusal)]
    started = time.monotonic()
    with Service(SETTINGS["subscription"], endpoint=publishing.cloud.arm.url) as service:
        call = Call("disk", "PUT", publishing.cloud.target.disk(publishing.artefact), DISK_API, {})
        service.change(call, lambda: True)
    assert time.monotonic() - started >= 1


def test_what_is_left_is_the_least_that_any_header_names() -> None:
    headers = {
        "x-ms-ratelimit-remaining-subscription-reads": "249",
        "X-Ms-Ratelimit-Remaining-Resource": "Microsoft.Compute/A;12,Microsoft.Compute/B;7",
        "Retry-After": "1",
    }
    assert sorted(remaining(headers)) == [7, 12, 249]
    assert remaining({"x-ms-ratelimit-remaining-subscription-reads": "many"}) == []


def test_a_resource_that_shows_late_is_waited_for(publishing: Publishing) -> None:
    publishing.cloud.arm.lag = 3
    publishing()
    publishing.require_published()
    assert publishing.accepted("PUT", "/versions/") == publishing.accepted("PUT", "/disks/") == 1


def test_a_region_that_failed_is_taken_out_and_added_once(publishing: Publishing) -> None:
    publishing.cloud.arm.failing_regions = {"eastus": 1}
    result = publishing()
    publishing.require_published()
    assert set(result["regions"].values()) == {"Completed"}
    regions = [
        [r["name"] for r in entry.body["properties"]["publishingProfile"]["targetRegions"]]
        for entry in publishing.cloud.arm.log
        if entry.method == "PATCH" and entry.body
    ]
    assert regions == [["westus3"], ["westus3", "eastus"]]


def test_a_region_that_fails_again_is_named_and_the_others_are_usable(publishing: Publishing) -> None:
    publishing.cloud.arm.failing_regions = {"eastus": 9}
    with pytest.raises(PublishError, match="replication failed in eastus"):
        publishing()
    summary = publishing.versions()[0]["properties"]["replicationStatus"]["summary"]
    assert {r["region"]: r["state"] for r in summary} == {"West US 3": "Completed", "East US": "Failed"}
    assert publishing.disks() != []


def test_each_region_that_failed_is_taken_out_and_added_by_itself(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = [{"name": name} for name in ("westus3", "eastus", "northeurope")]
    monkeypatch.setitem(SETTINGS, "regions", regions)
    publishing.cloud.arm.failing_regions = {"eastus": 1, "northeurope": 9}
    with pytest.raises(PublishError, match="replication failed in northeurope") as caught:
        publishing()
    assert caught.value.hint == "the other regions are usable"
    states = {r["region"]: r["state"] for r in _summary(publishing)}
    assert states == {"West US 3": "Completed", "East US": "Completed", "North Europe": "Failed"}
    publishing.cloud.arm.failing_regions = {}
    publishing()
    publishing.require_published()


def test_the_region_that_a_version_is_in_is_never_taken_out(publishing: Publishing) -> None:
    publishing.cloud.arm.failing_regions = {"westus3": 1}
    with pytest.raises(PublishError, match="replication failed in westus3"):
        publishing()
    assert [entry for entry in publishing.cloud.arm.log if entry.method == "PATCH"] == []
    assert {r["region"]: r["state"] for r in _summary(publishing)}["East US"] == "Completed"


def _summary(publishing: Publishing) -> list[dict[str, Any]]:
    summary: list[dict[str, Any]] = publishing.versions()[0]["properties"]["replicationStatus"]["summary"]
    return summary


def test_a_version_that_failed_everywhere_is_replaced_only_when_that_is_asked_for(
    publishing: Publishing,
) -> None:
    publishing.cloud.arm.failing_regions = {"eastus": 9, "westus3": 9}
    with pytest.raises(PublishError, match="failed"):
        publishing()
    with pytest.raises(PublishError, match="provisioning failed") as caught:
        publishing()
    assert "--replace-failed" in str(caught.value.hint)
    publishing.cloud.arm.failing_regions = {}
    before = publishing.cloud.host.received
    publishing(replace_failed=True)
    publishing.require_published()
    assert publishing.cloud.host.received == before


@trusted
def test_a_managed_image_that_failed_is_made_again_and_one_of_other_bytes_is_kept(
    publishing: Publishing,
) -> None:
    arm = publishing.cloud.arm
    arm.failing_images = 1
    with pytest.raises(PublishError, match="Internal error"):
        publishing()
    (image,) = [r.content for path, r in arm.resources.items() if "compute/images/" in path]
    image["tags"][SHA256_TAG] = "0" * 64
    before = publishing.cloud.changes()
    with pytest.raises(PublishError, match="is not an upload of this image"):
        publishing()
    assert publishing.cloud.changes() == before
    image["tags"][SHA256_TAG] = publishing.artefact.sha256
    publishing()
    publishing.require_published()
    path = publishing.cloud.target.image(publishing.artefact)
    again = [change for change in publishing.cloud.changes() if change[1] == path]
    assert again == [("PUT", path), ("DELETE", path), ("PUT", path), ("DELETE", path)]
    assert publishing.accepted("PUT", "/disks/") == 1


@trusted
def test_starting_over_uploads_to_another_disk(publishing: Publishing) -> None:
    publishing.cloud.arm.faults = [_once("PUT", "/versions/", error(403, "AuthorizationFailed", "no"))]
    with pytest.raises(PublishError, match="no"):
        publishing()
    publishing(restart=True)
    publishing.require_published()
    assert publishing.accepted("PUT", "/disks/") == publishing.accepted("PUT", "Compute/images/") == 2


def test_starting_over_during_the_upload_sends_it_again(publishing: Publishing) -> None:
    publishing.cloud.host.faults = [lambda page: 403 if page.length == 512 else None]
    with pytest.raises(PublishError, match="Put Page"):
        publishing()
    publishing.cloud.host.faults = []
    before = publishing.cloud.host.received
    publishing(restart=True)
    publishing.require_published()
    assert publishing.cloud.host.received == before + (4 << 20) + 512
    assert publishing.accepted("PUT", "/disks/") == 2


def test_a_version_with_other_bytes_is_refused_and_nothing_changed(publishing: Publishing) -> None:
    publishing()
    version = publishing.versions()[0]
    version["tags"][SHA256_TAG] = "0" * 64
    before = publishing.cloud.changes()
    with pytest.raises(PublishError, match="is of another image"):
        publishing()
    assert publishing.cloud.changes() == before


def test_a_lost_journal_costs_no_second_upload(publishing: Publishing) -> None:
    publishing()
    publishing.journal.unlink()
    before = publishing.cloud.changes()
    publishing()
    assert publishing.cloud.changes() == before


def test_two_machines_that_publish_the_same_build_make_one_version(publishing: Publishing) -> None:
    """The second may be refused, since the first takes the disk away; the same command again finds the version done."""
    other = copy.copy(publishing)
    other.journal = publishing.journal.with_name("other.jsonl")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(publishing), pool.submit(other)]
    errors = [error for run in runs if (error := run.exception())]
    assert len(errors) < 2 and all(isinstance(error, PublishError) for error in errors), errors
    assert publishing()["version"] == other()["version"]
    publishing.require_published()
    assert publishing.accepted("PUT", "/versions/") >= 1


@pytest.mark.parametrize("security_type", ["Standard", TRUSTED], indirect=True)
def test_rights_that_are_missing_are_all_named_before_anything_is_made(publishing: Publishing) -> None:
    publishing.cloud.arm.actions = ["*/read"]
    with pytest.raises(PublishError) as caught:
        publishing()
    for action in ("galleries/images/versions/write", "disks/write", "disks/beginGetAccess/action"):
        assert f"the right Microsoft.Compute/{action} is missing" in caught.value.message
    of_images = "the right Microsoft.Compute/images/write is missing" in caught.value.message
    assert of_images == (SETTINGS["security_type"] == TRUSTED)
    assert publishing.cloud.changes() == []


def test_a_right_that_is_lost_meanwhile_is_named_with_its_scope(publishing: Publishing) -> None:
    refusal = error(
        403, "AuthorizationFailed", "no authorization to perform action 'Microsoft.Compute/…/write'"
    )
    publishing.cloud.arm.faults = [_once("PUT", "/versions/", refusal)]
    with pytest.raises(PublishError, match="perform action 'Microsoft.Compute/…/write'"):
        publishing()
    assert [(r.kind, getattr(r, "step", "")) for r in read_journal(publishing.journal)[-2:]] == [
        ("intent", "version"),
        ("failed", "version"),
    ]
    publishing()
    publishing.require_published()


def test_everything_that_is_in_the_way_is_said_at_once(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm, target = publishing.cloud.arm, publishing.cloud.target
    arm.resources[target.definition.lower()].content["properties"]["hyperVGeneration"] = "V1"
    monkeypatch.setitem(SETTINGS, "regions", [{"name": "westus3"}, {"name": "atlantis"}])
    behind = property(lambda _: 1000.0, lambda *_: None)
    monkeypatch.setattr(Service, "clock_lag", behind, raising=False)
    with pytest.raises(PublishError) as caught:
        publishing()
    for reason in ("clock is", "no region atlantis", "hyperVGeneration is V1, the image needs V2"):
        assert reason in caught.value.message
    assert publishing.cloud.changes() == []


def test_a_certificate_that_the_definition_can_not_take_is_refused_before_the_upload(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing.artefact = replace(publishing.artefact, certificate="QUJD")
    features = [
        {"name": "IsAcceleratedNetworkSupported", "value": "True"},
        {"name": "DiskControllerTypes", "value": "SCSI,NVMe"},
        {"name": "SecurityType", "value": "TrustedLaunch"},
    ]
    definition = publishing.cloud.arm.resources[publishing.cloud.target.definition.lower()]
    definition.content["properties"]["features"] = features
    monkeypatch.setitem(SETTINGS, "security_type", "TrustedLaunch")
    with pytest.raises(PublishError, match="must be TrustedLaunchSupported"):
        publishing()
    assert publishing.cloud.changes() == []
    features[2]["value"] = "TrustedLaunchSupported"
    monkeypatch.setitem(SETTINGS, "security_type", "TrustedLaunchSupported")
    publishing()


def test_quota_that_is_used_up_is_named_by_region_before_anything_is_made(publishing: Publishing) -> None:
    arm = publishing.cloud.arm
    arm.quotas = {
        ("westus3", "StandardDiskCount"): 0,
        ("westus3", "GalleryImage"): 1,  # the definition already exists
        ("eastus", "GalleryImageVersion"): 0,
    }
    with pytest.raises(PublishError) as caught:
        publishing()
    for reason in (
        "westus3: no quota for Standard Storage Managed Disks: 0 of 0 are used, 1 more needed",
        "eastus: no quota for Gallery Image Versions: 0 of 0 are used, 1 more needed",
    ):
        assert reason in caught.value.message
    assert "Gallery Images" not in caught.value.message
    assert publishing.cloud.changes() == []
    arm.quotas = {}
    publishing()
    arm.quotas = {("eastus", "GalleryImageVersion"): 0, ("westus3", "StandardDiskCount"): 0}
    publishing()  # it already exists, so it needs no quota
    publishing.require_published()


def test_a_gallery_that_is_missing_and_a_foreign_subscription_are_refused(publishing: Publishing) -> None:
    arm, target = publishing.cloud.arm, publishing.cloud.target
    del arm.resources[target.gallery.lower()]
    with pytest.raises(PublishError, match="no gallery nodes"):
        publishing()
    arm.group = arm.group.replace("images", "others")
    with pytest.raises(PublishError, match="no resource group images in subscription"):
        publishing()


def test_a_source_that_changes_meanwhile_ends_before_the_footer(publishing: Publishing) -> None:
    disk = publishing.artefact.disk

    def touched(_: object) -> None:
        os.utime(disk, (1, 1))

    publishing.cloud.host.faults = [touched]
    with pytest.raises(PublishError, match="was changed"):
        publishing()
    log = publishing.cloud.host.log
    assert log and all(page.length != 512 for page in log)
    assert publishing.versions() == []


def test_a_disk_without_a_footer_never_becomes_a_version(publishing: Publishing) -> None:
    """The simulator enforces the service's own rule: what is revoked without the cookie isn't a disk."""
    target, arm = publishing.cloud.target, publishing.cloud.arm
    publishing.cloud.host.faults = [lambda page: 403 if page.length == 512 else None]
    with pytest.raises(PublishError, match="Put Page"):
        publishing()
    path = target.disk(publishing.artefact)
    answer = arm.answer(Request("POST", f"{path}/endGetAccess", {"api-version": "x"}))
    assert answer and answer.status == 202
    look = arm.answer(
        Request("GET", answer.headers["Azure-AsyncOperation"].removeprefix(arm.url).split("?")[0])
    )
    assert look and look.body and look.body["error"]["code"] == "InvalidVhd"
    publishing.cloud.host.faults = []
    before = publishing.cloud.host.received
    publishing()
    publishing.require_published()
    assert publishing.cloud.host.received == before + 512


def test_a_disk_that_lacks_a_page_gets_no_footer(publishing: Publishing) -> None:
    """The host claims to have a page that it doesn't have."""
    numbers = itertools.count()
    publishing.cloud.host.faults = [lambda _: 201 if next(numbers) == 0 else None]
    with pytest.raises(PublishError, match="ranges differ from the image's"):
        publishing()
    log = publishing.cloud.host.log
    assert log and all(page.length != 512 for page in log)
    publishing()
    publishing.require_published()


def test_what_another_attempt_left_in_the_disk_is_cleared(publishing: Publishing) -> None:
    publishing.cloud.host.faults = [lambda page: 403 if page.length == 512 else None]
    with pytest.raises(PublishError, match="Put Page"):
        publishing()
    publishing.cloud.host.faults = []
    name = publishing.cloud.target.disk(publishing.artefact).rsplit("/", 1)[1]
    ranges = pages.data_ranges(publishing.artefact.disk)
    hole = next(end for (_, end), (start, _) in itertools.pairwise(ranges) if end < start)
    publishing.cloud.store.blob(name).upload_page(b"s" * 1024, hole, 1024)
    publishing()
    publishing.require_published()


def test_a_journal_about_other_bytes_is_refused(publishing: Publishing) -> None:
    publishing()
    text = publishing.journal.read_text()
    publishing.journal.write_text(text.replace(publishing.artefact.sha256, "0" * 64))
    before = publishing.cloud.changes()
    with pytest.raises(PublishError, match=r"the journal belongs to another VHD \(SHA-256 0000"):
        publishing()
    assert publishing.cloud.changes() == before


def test_an_error_of_the_sdk_is_shown_without_secrets() -> None:
    error = ServiceRequestError("no answer from https://md-x.blob.core.windows.net/d?sp=rw&sig=a%2Bb%3D&sv=1")
    assert "sp=rw&sig=…&sv=1" in readable(error)
    assert readable(Exception("Authorization: Bearer ey.J0 b")).endswith("Bearer … b")


@pytest.mark.parametrize(
    ("security_type", "source", "clean"),
    [("Standard", ["version"], ["clean"]), (TRUSTED, ["image", "version"], ["clean", "clean"])],
    indirect=["security_type"],
)
def test_the_journal_tells_the_steps_in_order(
    publishing: Publishing, source: list[str], clean: list[str]
) -> None:
    publishing()
    kinds = [(r.kind, getattr(r, "step", "")) for r in read_journal(publishing.journal)]
    assert [step for kind, step in kinds if kind == "intent"] == [
        *("disk", "access", "pages", "footer", "release", *source, *clean),
    ]
    assert kinds[0][0] == "opened" and kinds[-1][0] == "finished"
