"""The simulator as Azure's own SDK sees it: its typed operations, their status codes, pollers and models.

Anything that the SDK considers an error would fail here: a status that an operation doesn't have, a header that its
poller needs, an answer that doesn't match the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.identity import DefaultAzureCredential
from azure.mgmt.compute import ComputeManagementClient

from image_builder.gallery.plan import DISK_API, GALLERY_API, IMAGE_API
from tests.support.arm.place import MIB, SETTINGS, TRUSTED, Place

pytestmark = [pytest.mark.root, pytest.mark.process]

GROUP, GALLERY, IMAGE = SETTINGS["resource_group"], SETTINGS["gallery"], SETTINGS["definition"]
SIZE = 20 * MIB + 512
HEADERS = [("Location",), ("Azure-AsyncOperation", "Location")]


class Client:
    """The SDK's operations on disks, managed images and galleries, with pollers that don't wait between polls."""

    def __init__(self, azure: Place, credential: Any) -> None:
        def client(api: str) -> Any:
            return ComputeManagementClient(
                credential,
                SETTINGS["subscription"],
                base_url=azure.arm.url,
                api_version=api,
                polling_interval=0,
                retry_total=0,
            )

        self.disks, galleries = client(DISK_API).disks, client(GALLERY_API)
        self.images, self.versions = galleries.gallery_images, galleries.gallery_image_versions
        self.managed = client(IMAGE_API).images


@pytest.fixture
def client(azure: Place) -> Iterator[Client]:
    with DefaultAzureCredential() as credential:
        yield Client(azure, credential)


def _upload(azure: Place, client: Client, footer: bytes) -> str:
    """Make a disk, write its last page and release it; return its ID."""
    creation = {"createOption": "Upload", "uploadSizeBytes": SIZE}
    body = {"location": "westus3", "sku": {"name": "Standard_LRS"}, "properties": {"creationData": creation}}
    disk = client.disks.begin_create_or_update(GROUP, "d", body).result()
    assert (disk.disk_state, disk.creation_data.upload_size_bytes) == ("ReadyToUpload", SIZE)
    grant = {"access": "Write", "durationInSeconds": 600}
    assert "sig=" in client.disks.begin_grant_access(GROUP, "d", grant).result().access_sas
    azure.store.blob("d").upload_page(footer.ljust(512, b"\0"), SIZE - 512, 512)
    client.disks.begin_revoke_access(GROUP, "d").result()
    return str(disk.id)


@pytest.mark.parametrize("security_type", [TRUSTED], indirect=True)
@pytest.mark.parametrize("headers", HEADERS, ids=["location", "both"])
def test_the_sdks_operations_go_from_a_disk_to_a_version_and_back(
    azure: Place, client: Client, headers: tuple[str, ...]
) -> None:
    azure.arm.monitors, azure.arm.looks = headers, 2
    source = _upload(azure, client, b"conectix")
    assert client.disks.get(GROUP, "d").disk_state == "Unattached"
    os_disk = {"osType": "Linux", "osState": "Generalized", "managedDisk": {"id": source}}
    properties = {"hyperVGeneration": "V2", "storageProfile": {"osDisk": os_disk}}
    image = {"location": "westus3", "properties": properties}
    client.managed.begin_create_or_update(GROUP, "i", image).result()
    made = client.managed.get(GROUP, "i")
    assert (made.provisioning_state, made.storage_profile.os_disk.os_state) == ("Succeeded", "Generalized")
    assert client.images.get(GROUP, GALLERY, IMAGE).hyper_v_generation == "V2"
    profile: dict[str, Any] = {"excludeFromLatest": True, "targetRegions": [{"name": "westus3"}]}
    body = {
        "location": "westus3",
        "properties": {
            "publishingProfile": profile,
            "storageProfile": {"source": {"id": made.id}},
        },
    }
    name = (GROUP, GALLERY, IMAGE, "1.0.0")
    client.versions.begin_create_or_update(*name, body).result()
    looks = [client.versions.get(*name, expand="ReplicationStatus") for _ in range(3)]
    assert looks[0].replication_status.aggregated_state == "InProgress"
    version = looks[-1]
    assert version.replication_status.aggregated_state == "Completed"
    assert [(r.region, r.state, r.progress) for r in version.replication_status.summary] == [
        ("West US 3", "Completed", 100)
    ]
    changed = {"properties": {"publishingProfile": profile | {"excludeFromLatest": False}}}
    client.versions.begin_update(*name, changed).result()
    assert client.versions.get(*name).publishing_profile.exclude_from_latest is False
    assert [v.name for v in client.versions.list_by_gallery_image(GROUP, GALLERY, IMAGE)] == ["1.0.0"]
    client.versions.begin_delete(*name).result()
    client.managed.begin_delete(GROUP, "i").result()
    client.disks.begin_delete(GROUP, "d").result()
    with pytest.raises(ResourceNotFoundError):
        client.versions.get(*name)


@pytest.mark.parametrize("headers", HEADERS, ids=["location", "both"])
def test_the_sdk_sees_that_an_operation_failed(
    azure: Place, client: Client, headers: tuple[str, ...]
) -> None:
    azure.arm.monitors = headers
    with pytest.raises(HttpResponseError, match="conectix"):
        _upload(azure, client, b"none")
