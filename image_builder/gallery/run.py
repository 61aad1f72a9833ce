"""Publishing: sends the plan's requests, each once its intent is in the journal, but none for what already exists."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from image_builder.canonical import JSON
from image_builder.errors import ImageBuilderError, PublishError
from image_builder.events import Monitor, shown_stage
from image_builder.gallery import pages
from image_builder.gallery.artefact import Artefact
from image_builder.gallery.azure import Service
from image_builder.gallery.journal import Done, Failed, Finished, Intent, Journal, Opened, Record, Region
from image_builder.gallery.plan import (
    DISK_API,
    GALLERY_API,
    Call,
    Pages,
    Plan,
    Target,
    make_plan,
    next_version,
    require_free,
)
from image_builder.gallery.survey import look
from image_builder.gallery.tags import SHA256_TAG
from image_builder.gallery.upload import Upload
from image_builder.gallery.versions import whole_profile

# A resource that was just created may still read as missing, and a changed one as it was before.
_PATIENCE_SECONDS = 120.0
_UPLOADING = ("ReadyToUpload", "ActiveUpload")
_COMPLETED, _FAILED = "Completed", "Failed"


def plan(
    service: Service, target: Target, artefact: Artefact, records: Sequence[Record], unverified: str = ""
) -> Plan:
    """Return what is to be sent for an artifact; the records of an earlier run preserve its version and end of life.

    Raises PublishError with everything that is in the way, FetchError.
    """
    survey = look(service, target, artefact)
    opened = _opened(records, artefact)
    now = datetime.fromtimestamp(opened.at, UTC) if opened else datetime.now(UTC)
    version = survey.published(artefact) or (
        opened.version if opened else next_version(survey.names, now.date())
    )
    for existing in survey.versions:
        if existing["name"] == version:
            require_free(existing, artefact)
    return make_plan(
        target,
        artefact,
        version,
        pages.data_ranges(artefact.disk),
        now=now,
        creates_definition=survey.definition is None,
        unverified=opened.unverified if opened else unverified,
    )


def _opened(records: Sequence[Record], artefact: Artefact) -> Opened | None:
    """Return the record that began a journal's publication. Raises PublishError if that was of other bytes."""
    opened = next((record for record in reversed(records) if isinstance(record, Opened)), None)
    if opened and opened.sha256 != artefact.sha256:
        raise PublishError(
            f"the journal belongs to another VHD (SHA-256 {opened.sha256})",
            hint="the image was rebuilt: image-builder publish run --restart",
        )
    return opened


@dataclass
class Run:
    """One process that publishes. ``figures`` count what it sent.

    ``restart`` discards what was uploaded, ``replace_failed`` a version that failed and is in no region.
    """

    plan: Plan
    service: Service
    journal: Journal
    monitor: Monitor
    restart: bool = False
    replace_failed: bool = False
    figures: dict[str, int] = field(default_factory=lambda: {"bytes_sent": 0, "requests": 0})
    _step: str = ""

    def perform(self) -> dict[str, JSON]:
        """Send what is missing, wait for every region, and return the outcome. Raises PublishError, FetchError."""
        if self.restart or not self.journal.records:
            plan = self.plan
            self.journal.append(
                Opened(
                    at=time.time(),
                    version=plan.version,
                    sha256=plan.artefact.sha256,
                    unverified=plan.unverified,
                )
            )
        try:
            return self._perform()
        except ImageBuilderError as error:
            self.journal.append(Failed(at=time.time(), step=self._step, message=error.message))
            raise

    def _perform(self) -> dict[str, JSON]:
        plan, monitor = self.plan, self.monitor
        calls: dict[str, Call] = {step.step: step for step in plan.steps if isinstance(step, Call)}
        if self._version(replaces=self.replace_failed) is None:
            if self.restart:
                self._clean()
            with shown_stage(monitor, "upload"):
                if definition := calls.get("definition"):
                    self._create(definition)
                self._upload(calls)
            with shown_stage(monitor, "version"):
                if image := calls.get("image"):
                    self._make_image(image)
                plan.artefact.require_unchanged()
                self._create(calls["version"])
        with shown_stage(monitor, "replicate"):
            regions = self._replicate()
        with shown_stage(monitor, "clean"):
            self._clean()
        self.journal.append(Finished(at=time.time()))
        return {"version": plan.target.version(plan.version), "regions": regions, **self.figures}

    # -- steps -----------------------------------------------------------------------------------------------

    def _change(self, call: Call, is_done: Callable[[], bool], *, follows: bool = True) -> Mapping[str, Any]:
        self._step = call.step
        self.journal.append(Intent(at=time.time(), step=call.step))
        self.monitor.stage_doing("upload" if call.step in ("access", "release") else call.step, call.path)
        result = self.service.change(call, is_done, follows=follows)
        self.figures["requests"] += 1
        self.journal.append(Done(at=time.time(), step=call.step))
        return result

    def _create(self, call: Call) -> None:
        """Create a resource unless it exists, and wait until it is provisioned."""
        if not self._is_there(call):
            # A version's operation ends once all regions have it, but it doesn't report on the regions.
            self._change(call, partial(self._is_there, call), follows=call.step != "version")
        while (state := self._appeared(call)["properties"].get("provisioningState")) not in (
            "Succeeded",
            None,
        ):
            if state == _FAILED:
                raise PublishError(
                    f"{call.path}: provisioning failed", hint="delete it, then rerun the same command"
                )
            if call.step == "version":
                return  # it stays Creating while it is replicated
            self.service.wait()

    def _is_there(self, call: Call) -> bool:
        return self.service.get(call.path, call.api) is not None

    def _appeared(self, call: Call) -> Mapping[str, Any]:
        """Return a resource that was created; it may not be visible for some time."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (resource := self.service.get(call.path, call.api)) is None:
            if time.monotonic() > deadline:
                raise PublishError(
                    f"{call.path} was created but can't be found", hint="rerun the same command to resume"
                )
            self.service.wait(attempt=0)
        return resource

    def _upload(self, calls: Mapping[str, Call]) -> None:
        plan = self.plan
        self._create(calls["disk"])
        disk = self._appeared(calls["disk"])
        self._require_ours(disk)
        if disk["properties"].get("diskState") not in _UPLOADING:
            return  # its footer was accepted
        upload = Upload(lambda: self._grant(calls["access"]))
        try:
            for step in (step for step in plan.steps if isinstance(step, Pages)):
                self._send(step, upload)
        finally:
            self.figures["bytes_sent"] += upload.sent
        self._change(calls["release"], lambda: self._state() not in _UPLOADING)

    def _make_image(self, call: Call) -> None:
        """Make a managed image of the disk unless it exists; one that failed is made again."""
        if image := self.service.get(call.path, call.api):
            self._require_ours(image)
            if image["properties"].get("provisioningState") == _FAILED:
                self._delete(Call("image", "DELETE", call.path, call.api))
        self._create(call)

    def _require_ours(self, source: Mapping[str, Any]) -> None:
        """Raise PublishError unless a disk or a managed image was made for these bytes."""
        if (source.get("tags") or {}).get(SHA256_TAG) != self.plan.artefact.sha256:
            raise PublishError(f"{source['id']} is not an upload of this image", hint="delete it")

    def _send(self, step: Pages, upload: Upload) -> None:
        self._step = step.step
        present = upload.present()
        if step.step == "footer":
            self._require_complete(present)
        else:
            upload.clear(pages.beyond(present, [*step.ranges, self._footer.ranges[0]]))
        self.journal.append(Intent(at=time.time(), step=step.step))
        todo = pages.lacking(step.ranges, present)
        before = upload.sent
        self.monitor.stage_doing("upload", f"{len(todo)} of {len(step.ranges)} ranges")
        upload.write(
            self.plan.artefact.disk,
            todo,
            lambda done, total: self.monitor.stage_progress("upload", done, total, "B"),
        )
        self.figures["requests"] += len(todo)
        details = {
            "bytes_sent": upload.sent - before,
            "bytes_present": step.size - sum(e - s for s, e in todo),
        }
        self.journal.append(Done(at=time.time(), step=step.step, details=details))

    @property
    def _footer(self) -> Pages:
        return next(step for step in self.plan.steps if isinstance(step, Pages) and step.step == "footer")

    def _require_complete(self, present: list[pages.Range]) -> None:
        """Raise PublishError unless the disk has all ranges, no others, and the file they came from is unchanged."""
        self.plan.artefact.require_unchanged()
        data = next(step for step in self.plan.steps if isinstance(step, Pages) and step.step == "pages")
        footer = self._footer.ranges
        if pages.lacking(data.ranges, present) or pages.beyond(present, [*data.ranges, *footer]):
            raise PublishError(
                "the disk's ranges differ from the image's: its footer wasn't written, so it can't become a version",
                hint="rerun the same command to send the missing ranges",
            )

    def _grant(self, call: Call) -> str:
        """Return the disk's signed URL. It is a secret: neither shown nor stored."""
        for _ in range(3):
            answer = self._change(call, lambda: False)
            if address := answer.get("accessSAS") or answer.get("accessSas"):
                return str(address)
        raise PublishError(f"{call.path}: no address was granted")

    def _state(self) -> str:
        disk = self.service.get(self.plan.disk, DISK_API) or {"properties": {}}
        return str(disk["properties"].get("diskState", ""))

    def _clean(self) -> None:
        for step in self.plan.steps:
            if isinstance(step, Call) and step.step == "clean":
                self._delete(step)

    def _delete(self, call: Call) -> None:
        if self._is_there(call):
            self._change(call, lambda: not self._is_there(call))

    # -- the version -----------------------------------------------------------------------------------------

    def _version(self, *, replaces: bool = False) -> Mapping[str, Any] | None:
        """Return the version with its replication. Raises PublishError if it has other bytes or has failed.

        With ``replaces``, a failed version is deleted.
        """
        path = self.plan.target.version(self.plan.version)
        version = self.service.get(path, GALLERY_API, **{"$expand": "ReplicationStatus"})
        if version is None:
            return None
        require_free(version, self.plan.artefact)
        usable = any(region["state"] == _COMPLETED for region in _summary(version))
        if version["properties"].get("provisioningState") == _FAILED and not usable:
            if not replaces:
                raise PublishError(
                    f"{path}: provisioning failed", hint="image-builder publish run --replace-failed"
                )
            unprotected = {"properties": {"safetyProfile": {"blockDeletionBeforeEndOfLife": False}}}
            self._change(Call("version", "PATCH", path, GALLERY_API, unprotected), lambda: False)
            self._delete(Call("version", "DELETE", path, GALLERY_API))
            return None
        return version

    def _replicate(self) -> dict[str, JSON]:
        """Wait until every region has the version, and return their states.

        A region that the version doesn't name is added, one that failed is added again, each once.
        """
        self._step = "replicate"
        states: dict[str, str] = {}
        repaired: set[str] = set()
        is_compared = False
        deadline = time.monotonic() + _PATIENCE_SECONDS
        names = [region.name for region in self.plan.target.settings.regions]
        while True:
            version = self._version()
            if version is None and time.monotonic() > deadline:
                raise PublishError(
                    "the version was created but can't be found", hint="rerun the same command to resume"
                )
            idle = None if version is None or _is_changing(version) else version
            if idle and not is_compared:
                is_compared = True
                # A run that was killed had taken it out, or the inventory has it since.
                if len(regions := self._regions(idle)) > len(_targets(idle)):
                    self._target(idle, regions, follows=False)
                    idle = None
            current = {_short(region["region"]): region for region in _summary(version)}
            for name, region in current.items():
                if states.get(name) != region["state"]:
                    states[name] = region["state"]
                    self.journal.append(Region(at=time.time(), name=name, state=region["state"]))
            progress = sum(int(current[name].get("progress", 0)) for name in names if name in current)
            self.monitor.stage_progress("replicate", progress, 100 * len(names), "percent")
            pending = [name for name in names if states.get(name) != _COMPLETED]
            if not pending:
                return dict(states)
            failed = [name for name in pending if states.get(name) == _FAILED]
            # The version itself is in the first region, which can't be removed from it.
            fresh = [name for name in failed if name not in repaired and name != names[0]]
            if fresh and idle:
                self._repair(idle, fresh[0])
                repaired.add(fresh[0])
                del states[fresh[0]]
            elif failed and not fresh and len(failed) == len(pending):
                details = "; ".join(f"{name}: {current[name].get('details', '')}" for name in failed)
                raise PublishError(
                    f"replication failed in {', '.join(failed)}: {details}",
                    hint="the other regions are usable"
                    if len(failed) < len(names)
                    else "image-builder publish run --replace-failed",
                )
            self.service.wait(attempt=None if version else 0)

    def _regions(self, version: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the regions that a version names, and then those that only the plan has."""
        body = next(s for s in self.plan.steps if isinstance(s, Call) and s.step == "version").body or {}
        planned, named = body["properties"]["publishingProfile"]["targetRegions"], _targets(version)
        known = {_short(region["name"]) for region in named}
        return [*named, *(region for region in planned if region["name"] not in known)]

    def _repair(self, version: Mapping[str, Any], name: str) -> None:
        """Remove a region from the version and add it again."""
        regions = self._regions(version)
        self._target(version, [region for region in regions if _short(region["name"]) != name])
        self._target(version, regions, follows=False)

    def _target(
        self, version: Mapping[str, Any], regions: Sequence[Mapping[str, Any]], *, follows: bool = True
    ) -> None:
        """Send a version's list of regions, in full."""
        body = {"properties": {"publishingProfile": whole_profile(version, {"targetRegions": regions})}}
        path = self.plan.target.version(self.plan.version)
        self._change(Call("version", "PATCH", path, GALLERY_API, body), lambda: False, follows=follows)


def _summary(version: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the states of a version's regions."""
    status = (version or {"properties": {}})["properties"].get("replicationStatus") or {}
    return status.get("summary") or ()


def _targets(version: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the regions that a version is meant to be in."""
    regions: Sequence[Mapping[str, Any]] = version["properties"]["publishingProfile"]["targetRegions"]
    return regions


def _is_changing(version: Mapping[str, Any]) -> bool:
    """Return whether a version's last change is still in progress: another one would be refused."""
    return version["properties"].get("provisioningState") in ("Creating", "Updating")


def _short(region: str) -> str:
    """Return a region's short name; responses have the display name, ``West US 3``."""
    return region.replace(" ", "").lower()
