"""Guest Health Reporting: the documented rules for requests, but nothing of what Azure does with them.

https://learn.microsoft.com/azure/azure-impact-reporting/guest-health-impact-report
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.arm.fleet import NoDisks
from tests.support.arm.model import SUBSCRIPTION, Answer, Disks, Json, Request, error
from tests.support.arm.service import Arm

_PATH = f"/subscriptions/{SUBSCRIPTION}/providers/microsoft.impact/workloadimpacts/"
_REQUIRED = ("startDateTime", "impactCategory", "impactDescription", "impactedResourceId")


@dataclass
class Impacts(Arm):
    """The service with Guest Health Reporting; ``reported`` has the accepted bodies by the impact's name."""

    disks: Disks = field(default_factory=NoDisks)
    reported: dict[str, Json] = field(default_factory=dict)

    def _true(self, request: Request) -> Answer:
        path, name = request.path.lower(), request.path.rpartition("/")[2]
        if request.method != "PUT" or path != _PATH + name.lower():
            return super()._true(request)
        if request.query.get("api-version") != "2025-01-01-preview":
            return error(400, "InvalidApiVersionParameter", "The api-version is invalid.")
        properties = (request.body or {})["properties"]
        required = {name: properties.get(name) for name in _REQUIRED}
        required["PhysicalHostName"] = properties.get("additionalProperties", {}).get("PhysicalHostName")
        if lacking := [name for name, value in required.items() if not value]:
            return error(400, "BadRequest", f"Required: {', '.join(lacking)}")
        if name in self.reported:
            return error(409, "Conflict", f"The impact '{name}' exists already.")
        self.reported[name] = request.body or {}
        return Answer(200, request.body)
