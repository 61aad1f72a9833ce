"""Resource Manager as a state machine: resources by id, operations that take several polls, faults on demand.

Time is counted in polls: an operation ends after its state is polled ``looks`` times, a region's replication advances
by ``percent`` with each poll of its version, and a resource that was just PUT stays hidden for ``lag`` reads.
``actions`` are the caller's rights: everything else is answered with 403. Every request takes tokens from the buckets
of ``limits``. A list is answered ``page`` items at a time, with the address of the next page. ``monitors`` are the
headers that point to an operation: the reference has both for galleries, and only Location for disks.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from tests.support.arm.limits import Limits
from tests.support.arm.model import (
    PROVIDER,
    SUBSCRIPTION,
    Answer,
    Disks,
    Fault,
    Json,
    Logged,
    Request,
    Resource,
    action_of,
    error,
    type_of,
)

REGIONS = {"westus3": "West US 3", "eastus": "East US", "northeurope": "North Europe"}
# counter -> its display name, the resource type that it counts, its usual limit
_COUNTERS = {
    "StandardDiskCount": ("Standard Storage Managed Disks", "Microsoft.Compute/disks", 50000),
    "Gallery": ("Galleries", "Microsoft.Compute/galleries", 100),
    "GalleryImage": ("Gallery Images", "Microsoft.Compute/galleries/images", 1000),
    "GalleryImageVersion": ("Gallery Image Versions", "Microsoft.Compute/galleries/images/versions", 10000),
}
_COOKIE = b"conectix"
_TRUSTED = {"name": "SecurityType", "value": "TrustedLaunchSupported"}
_CHANGES = {"PUT", "POST", "PATCH", "DELETE"}


@dataclass
class Operation:
    """A long-running operation, which changes its target when it ends and may fail.

    Each poll of the operation or of its target lets time pass. ``resource`` is the result of a PUT or a PATCH.
    """

    target: str
    finish: Callable[[], Json]
    looks: int
    resource: Json | None = None
    result: Json | None = None

    def look(self) -> None:
        self.looks -= 1
        if self.result is None and self.looks <= 0:
            self.result = self.finish()


@dataclass
class Arm:
    """The service; ``url`` is its address. ``log`` holds the requests that change something."""

    disks: Disks
    group: str = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/images"
    url: str = ""
    looks: int = 1
    lag: int = 0
    percent: int = 50
    page: int = 2
    monitors: tuple[str, ...] = ("Azure-AsyncOperation", "Location")
    actions: list[str] = field(default_factory=lambda: ["*"])
    failing_regions: dict[str, int] = field(default_factory=dict)
    # How many of the next managed images fail to be provisioned.
    failing_images: int = 0
    # (region, counter) -> a limit that differs from the usual one
    quotas: dict[tuple[str, str], int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    resources: dict[str, Resource] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    log: list[Logged] = field(default_factory=list)
    reads: int = 0
    # Called with every request after it was handled; the answer is None for a dropped request.
    observers: list[Callable[[Request, Answer | None], None]] = field(default_factory=list)
    # Handlers for resource types that have a module of their own; they return None for any other type.
    providers: list[Callable[[Request], Answer | None]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, path: str, location: str = "westus3", **content: object) -> Json:
        """Add a resource as if it had existed for a long time."""
        resource: Json = {
            "id": path,
            "name": path.rsplit("/", 1)[1],
            "type": type_of(path),
            "location": location,
            "properties": {"provisioningState": "Succeeded"},
            **content,
        }
        self.resources[path.lower()] = Resource(resource)
        return resource

    def answer(self, request: Request) -> Answer | None:
        """Return the answer, or None if the client gets none."""
        if refusal := self.limits.take(request):
            return self._logged(request, self.limits.marked(request, refusal))
        answer = self._answer(request)
        return self.limits.marked(request, answer) if answer else None

    def _answer(self, request: Request) -> Answer | None:
        for fault in self.faults:
            match fault(request):
                case None:
                    continue
                case "drop":
                    return self._logged(request, None)
                case "lose":
                    self._logged(request, self._true(request))
                    return None
                case Answer() as instead:
                    return self._logged(request, instead)
        return self._logged(request, self._true(request))

    def _logged(self, request: Request, answer: Answer | None) -> Answer | None:
        if request.method in _CHANGES:
            self.log.append(
                Logged(request.method, request.path, request.body, answer.status if answer else 0)
            )
        else:
            self.reads += 1
        for observe in self.observers:
            observe(request, answer)
        return answer

    def _true(self, request: Request) -> Answer:
        path = request.path.lower()
        if path.startswith("/operations/"):
            return self._look(request.path)
        if path.endswith("/permissions"):
            return self._paged(request, [{"actions": self.actions, "notActions": []}])
        if path == f"/subscriptions/{SUBSCRIPTION}/locations":
            return self._paged(request, [{"name": n, "displayName": d} for n, d in REGIONS.items()])
        if path.startswith(f"/subscriptions/{SUBSCRIPTION}{PROVIDER}".lower()):
            return self._refusal(request) or self._list(request)
        if not path.startswith(self.group.lower()):
            return error(
                404, "ResourceGroupNotFound", f"Resource group of '{request.path}' could not be found."
            )
        if path == self.group.lower():
            return Answer(200, {"id": self.group, "name": "images", "location": "westus3"})
        if "api-version" not in request.query:
            return error(400, "MissingApiVersionParameter", "The api-version query parameter is required.")
        if refusal := self._refusal(request):
            return refusal
        for provider in self.providers:
            if (answer := provider(request)) is not None:
                return answer
        return self._get(request) if request.method == "GET" else self._change(request)

    def _refusal(self, request: Request) -> Answer | None:
        """Return the refusal of a request that the caller has no right to make, or None."""
        action = action_of(request)
        if any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in self.actions):
            return None
        return error(
            403,
            "AuthorizationFailed",
            f"The client does not have authorization to perform action '{action}' over scope '{request.path}'.",
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def _list(self, request: Request) -> Answer:
        """Return the resources of a type in all resource groups, or a region's usage and limits."""
        kind = request.path.lower().rpartition("/")[2]
        if kind == "usages":
            return Answer(200, {"value": self._usages(request.path.rsplit("/", 2)[1])})
        items = [
            resource.content
            for path, resource in self.resources.items()
            if path.partition(PROVIDER.lower())[2].split("/")[:-1] == [kind]
        ]
        return self._paged(request, items)

    def _paged(self, request: Request, items: list[Json]) -> Answer:
        start = int(request.query.get("$skiptoken", 0))
        end, kept = start + self.page, request.query.items()
        query = "&".join(f"{name}={quote(value)}" for name, value in kept if name != "$skiptoken")
        following = {"nextLink": f"{self.url}{request.path}?{query}&$skiptoken={end}"}
        return Answer(200, {"value": items[start:end], **(following if end < len(items) else {})})

    def _usages(self, region: str) -> list[Json]:
        """Return a region's counters in the form of Microsoft.Compute's Usage_List."""
        types = [r.content["type"] for r in self.resources.values() if r.content["location"] == region]
        return [
            {
                "unit": "Count",
                "currentValue": types.count(kind),
                "limit": self.quotas.get((region, name), limit),
                "name": {"value": name, "localizedValue": label},
            }
            for name, (label, kind, limit) in _COUNTERS.items()
        ]

    def _get(self, request: Request) -> Answer:
        path = request.path.lower()
        if len(path.partition(PROVIDER.lower())[2].split("/")) % 2:
            items = [r.seen() for p, r in self.resources.items() if p.rpartition("/")[0] == path]
            return self._paged(request, [item for item in items if item is not None])
        for operation in self.operations.values():
            if operation.target == path:
                operation.look()
        resource = self.resources.get(path)
        content = resource.seen() if resource else None
        if resource is None or content is None:
            return error(404, "ResourceNotFound", f"The Resource '{request.path}' was not found.")
        if type_of(path).endswith("/versions"):
            content = self._replicated(content, shown=request.query.get("$expand") == "ReplicationStatus")
        return Answer(200, content, {"ETag": f'"{resource.etag}"', "Retry-After": "0"})

    def _replicated(self, version: Json, *, shown: bool) -> Json:
        """Return a version as it is served; with ``shown``, advance its replication and include the status."""
        properties = version["properties"]
        summary = properties["replicationStatus"]["summary"]
        if shown:
            for region in summary:
                if region["state"] != "Replicating":
                    continue
                region["progress"] = min(100, region["progress"] + self.percent)
                short = region["region"].replace(" ", "").lower()
                if region["progress"] == 100 and self.failing_regions.get(short, 0):
                    self.failing_regions[short] -= 1
                    region |= {"state": "Failed", "details": "ReplicationJobsNotCompleted"}
                elif region["progress"] == 100:
                    region["state"] = "Completed"
            states = {region["state"] for region in summary}
            ended = "Replicating" not in states
            properties["provisioningState"] = (
                "Creating" if not ended else "Failed" if "Failed" in states else "Succeeded"
            )
            properties["replicationStatus"]["aggregatedState"] = (
                "InProgress" if not ended else "Completed" if states == {"Completed"} else "Failed"
            )
            return version
        hidden = {name: value for name, value in properties.items() if name != "replicationStatus"}
        return version | {"properties": hidden}

    # -- operations ------------------------------------------------------------------------------------------

    def _begin(self, target: str, status: int, body: Json | None, finish: Callable[[], Json]) -> Answer:
        name = f"/operations/{next(self._numbers)}"
        self.operations[name] = Operation(target.lower(), finish, self.looks, body)
        query = "?api-version=2024-03-02"
        addresses = {
            "Azure-AsyncOperation": f"{self.url}{name}{query}",
            "Location": f"{self.url}{name}/result{query}",
        }
        return Answer(
            status, body, {"Retry-After": "0", **{header: addresses[header] for header in self.monitors}}
        )

    def _look(self, path: str) -> Answer:
        operation = self.operations[path.removesuffix("/result")]
        wait = {"Retry-After": "0"}
        operation.look()
        if operation.result is None:
            return Answer(202 if path.endswith("/result") else 200, {"status": "InProgress"}, wait)
        if path.endswith("/result") and (failure := operation.result.get("error")):
            return error(400, failure["code"], failure["message"])
        if path.endswith("/result"):
            output = operation.result.get("properties", {}).get("output")
            return Answer(200, output or operation.resource, wait)
        return Answer(200, operation.result, wait)

    # -- changing --------------------------------------------------------------------------------------------

    def _change(self, request: Request) -> Answer:
        path = request.path.lower()
        target, _, verb = path.rpartition("/")
        resource = self.resources.get(target if request.method == "POST" else path)
        required = request.headers.get("if-match")
        if required and (resource is None or required != f'"{resource.etag}"'):
            return error(412, "PreconditionFailed", "The condition specified was not satisfied.")
        match (request.method, type_of(path)):
            case ("POST", _) if resource is None:
                return error(404, "ResourceNotFound", f"The Resource '{target}' was not found.")
            case ("POST", _) if verb == "begingetaccess":
                return self._grant(resource, request.body or {})
            case ("POST", _) if verb == "endgetaccess":
                return self._revoke(resource)
            case ("PUT", "Microsoft.Compute/disks"):
                return self._put_disk(request, resource)
            case ("PUT", "Microsoft.Compute/images"):
                return self._put_image(request, resource)
            case ("PUT", "Microsoft.Compute/galleries/images"):
                return self._put_definition(request)
            case ("PUT", "Microsoft.Compute/galleries/images/versions"):
                return self._put_version(request, resource)
            case ("PATCH", "Microsoft.Compute/galleries/images/versions") if resource:
                return self._patch_version(request, resource)
            case ("DELETE", _):
                return self._delete(path, resource)
            case _:
                return error(405, "MethodNotAllowed", f"{request.method} {request.path}")

    def _put_disk(self, request: Request, existing: Resource | None) -> Answer:
        body = request.body or {}
        creation = body["properties"]["creationData"]
        size = creation["uploadSizeBytes"]
        if (size - 512) % (1 << 20) or size < (20 << 20) + 512:
            return error(400, "InvalidParameter", "The value of parameter uploadSizeBytes is invalid.")
        if existing:
            old = existing.content["properties"]["creationData"]
            if old != creation:
                return error(
                    409, "PropertyChangeNotAllowed", "Changing property 'creationData' is not allowed."
                )
            return Answer(200, existing.content)
        disk = self.add(request.path, body["location"], sku=body["sku"], tags=body.get("tags", {}))
        disk["properties"] = {
            **body["properties"],
            "provisioningState": "Updating",
            "timeCreated": datetime.now(UTC).isoformat(),
        }
        self._hide(request.path)
        self.disks.create(disk["name"], size)

        def finish() -> Json:
            disk["properties"] |= {
                "provisioningState": "Succeeded",
                "diskState": "ReadyToUpload",
                "diskSizeGB": -(-size >> 30),
            }
            return {"status": "Succeeded"}

        return self._begin(request.path, 202, disk, finish)

    def _hide(self, path: str) -> None:
        self.resources[path.lower()].hidden = self.lag

    def _grant(self, resource: Resource | None, body: Json) -> Answer:
        assert resource
        disk = resource.content
        if disk["properties"].get("diskState") not in ("ReadyToUpload", "ActiveUpload"):
            return error(
                409, "OperationNotAllowed", f"Disk {disk['name']} is not in a state to be uploaded to."
            )

        def finish() -> Json:
            disk["properties"]["diskState"] = "ActiveUpload"
            address = self.disks.sas(disk["name"], body["durationInSeconds"])
            return {"status": "Succeeded", "properties": {"output": {"accessSAS": address}}}

        return self._begin(disk["id"], 202, None, finish)

    def _revoke(self, resource: Resource | None) -> Answer:
        assert resource
        disk = resource.content

        def finish() -> Json:
            footer = self.disks.footer(disk["name"])
            if not footer:
                message = f"Disk {disk['name']} is not found."
                return {"status": "Failed", "error": {"code": "NotFound", "message": message}}
            if footer[:8] != _COOKIE:
                message = (
                    "The specified cookie value in VHD footer indicates that disk is not a VHD, 'conectix'."
                )
                return {"status": "Failed", "error": {"code": "InvalidVhd", "message": message}}
            disk["properties"]["diskState"] = "Unattached"
            return {"status": "Succeeded"}

        return self._begin(disk["id"], 202, None, finish)

    def _put_image(self, request: Request, existing: Resource | None) -> Answer:
        """Make a managed image, in the shapes of the reference's Image_CreateFromAManagedDisk."""
        body = request.body or {}
        disk = body["properties"]["storageProfile"]["osDisk"]
        if existing:
            return Answer(200, existing.content)
        if not self._is_whole(disk["managedDisk"]["id"]):
            return error(400, "InvalidParameter", "The disk was not found, or is being uploaded to.")
        image = self.add(request.path, body["location"], tags=body.get("tags", {}))
        profile = {"osDisk": {**disk, "caching": "ReadWrite"}, "dataDisks": []}
        image["properties"] = body["properties"] | {
            "storageProfile": profile,
            "provisioningState": "Creating",
        }
        self._hide(request.path)

        def finish() -> Json:
            fails, self.failing_images = self.failing_images > 0, max(0, self.failing_images - 1)
            state = "Failed" if fails else "Succeeded"
            image["properties"]["provisioningState"] = state
            failure = {"error": {"code": "InternalDiskManagementError", "message": "Internal error."}}
            return {"status": state, **(failure if fails else {})}

        return self._begin(request.path, 201, image, finish)

    def _is_whole(self, source: str) -> bool:
        """Return whether a disk's upload was completed, or a managed image was made."""
        properties = r.content["properties"] if (r := self.resources.get(source.lower())) else {}
        wanted = ("diskState", "Unattached") if "/disks/" in source else ("provisioningState", "Succeeded")
        return bool(properties.get(wanted[0]) == wanted[1])

    def _put_definition(self, request: Request) -> Answer:
        body = request.body or {}
        if request.path.lower().rpartition("/images/")[0] not in self.resources:
            return error(
                404, "ParentResourceNotFound", "Can not perform requested operation on nested resource."
            )
        definition = self.add(request.path, body["location"], tags=body.get("tags", {}))
        definition["properties"] = {**body["properties"], "provisioningState": "Succeeded"}
        self._hide(request.path)
        return self._begin(request.path, 201, definition, lambda: {"status": "Succeeded"})

    def _put_version(self, request: Request, existing: Resource | None) -> Answer:
        body = request.body or {}
        name = request.path.rsplit("/", 1)[1]
        storage = body["properties"]["storageProfile"]
        source: str = (storage.get("source") or storage["osDiskImage"]["source"])["id"]
        profile = body["properties"]["publishingProfile"]
        if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", name):
            return error(400, "InvalidParameter", f"The version {name} is not of the form int.int.int.")
        definition = self.resources.get(request.path.lower().rpartition("/versions/")[0])
        if definition is None:
            return error(
                404, "ParentResourceNotFound", "Can not perform requested operation on nested resource."
            )
        features = definition.content["properties"].get("features", ())
        if _TRUSTED in features and type_of(source) != "Microsoft.Compute/images":
            # The service's own words, in microsoft/STL#4682 and hashicorp/packer-plugin-azure#304.
            return error(
                400,
                "InvalidParameter",
                f"The security type 'TrustedLaunchSupported' is not supported for the source id '{source}'. Currently "
                "only Vhd Blob, User Image and Gallery Image Version sources are supported for "
                "'TrustedLaunchSupported' images.",
            )
        if not self._is_whole(source):
            return error(400, "InvalidParameter", "The source was not found, or is being uploaded to.")
        if body["location"] not in [region["name"] for region in profile["targetRegions"]]:
            return error(
                400, "InvalidParameter", "The publishing profile must contain the version's location."
            )
        if (
            existing
            and existing.content["properties"]["storageProfile"] != body["properties"]["storageProfile"]
        ):
            return error(409, "PropertyChangeNotAllowed", "Changing property 'source' is not allowed.")
        version = self.add(request.path, body["location"], tags=body.get("tags", {}))
        version["properties"] = {**body["properties"], "provisioningState": "Creating"}
        published = datetime.now(UTC).isoformat()
        version["properties"]["publishingProfile"] = {**profile, "publishedDate": published}
        self._set_regions(version, profile["targetRegions"])
        self._hide(request.path)
        return self._begin(request.path, 201, version, lambda: {"status": "Succeeded"})

    def _patch_version(self, request: Request, resource: Resource) -> Answer:
        body = request.body or {}
        version = resource.content
        if any(r["state"] == "Replicating" for r in version["properties"]["replicationStatus"]["summary"]):
            return error(409, "Conflict", "The request failed due to conflict with a concurrent request.")
        properties = body.get("properties", {})
        targets = properties.get("publishingProfile", {}).get("targetRegions")
        if targets is not None and version["location"] not in [target["name"] for target in targets]:
            return error(
                400, "InvalidParameter", "The publishing profile must contain the version's location."
            )
        for section in ("publishingProfile", "safetyProfile"):
            version["properties"][section] = {
                **version["properties"].get(section, {}),
                **properties.get(section, {}),
            }
        version["tags"] = body.get("tags", version["tags"])
        self._set_regions(version, version["properties"]["publishingProfile"]["targetRegions"])
        resource.etag += 1
        return self._begin(request.path, 200, version, lambda: {"status": "Succeeded"})

    def _set_regions(self, version: Json, targets: list[Json]) -> None:
        old = {r["region"]: r for r in version["properties"].get("replicationStatus", {}).get("summary", ())}
        version["properties"]["replicationStatus"] = {
            "aggregatedState": "InProgress",
            "summary": [
                old.get(
                    REGIONS[target["name"]],
                    {"region": REGIONS[target["name"]], "state": "Replicating", "details": "", "progress": 0},
                )
                for target in targets
            ],
        }

    def _delete(self, path: str, resource: Resource | None) -> Answer:
        if resource is None:
            return Answer(204)
        properties = resource.content["properties"]
        end = properties.get("publishingProfile", {}).get("endOfLifeDate", "")
        if properties.get("safetyProfile", {}).get("blockDeletionBeforeEndOfLife") and datetime.fromisoformat(
            end
        ) > datetime.now(UTC):
            return error(409, "OperationNotAllowed", "Deletion is blocked until the version's end of life.")

        def finish() -> Json:
            if self.resources.pop(path, None) and "/disks/" in path:
                self.disks.delete(resource.content["name"])
            return {"status": "Succeeded"}

        return self._begin(path, 202, None, finish)
