"""The report of a pool's rollout, as `pool report --json` writes it, used as proof that a version may be promoted.

Only the fields below are read; the suite on the hosts has compared the build that they run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from image_builder.bake.publish import BUILD_DIGITS
from image_builder.errors import PublishError, UsageError
from image_builder.gallery.versions import Version

_HINT = "image-builder pool report PLAN --json > REPORT.json"


class _Report(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    format: Literal[1]
    state: str
    reason: str | None
    hosts: int
    counts: Mapping[str, int]
    verified: int
    builds: Mapping[str, tuple[str, ...]]


def require(path: Path, version: Version) -> str:
    """Return, in one line, what a report proves about a version. Raises PublishError with all problems, UsageError."""
    try:
        data = path.read_bytes()
        report = _Report.model_validate_json(data)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", hint=_HINT) from error
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()
        ]
        raise UsageError("\n  ".join([f"{path} is no report of a rollout:", *faults]), hint=_HINT) from error
    if problems := list(_problems(report, version.build)):
        raise PublishError(
            "\n".join([f"{path} doesn't prove {version.name}:", *(f"  {problem}" for problem in problems)]),
            hint="nothing was changed; --because REASON promotes without a rollout",
        )
    digest = hashlib.sha256(data).hexdigest()
    return f"rolled out to {report.hosts} hosts, {report.verified} of them verified: report sha256 {digest}"


def _problems(report: _Report, build: str) -> Iterator[str]:
    if report.state != "finished":
        yield f"the rollout is {report.state}{f': {report.reason}' if report.reason else ''}"
    if report.hosts < 1:
        yield "it has no host"
    if others := {name: count for name, count in report.counts.items() if count and name != "ok"}:
        yield f"not every host is ok: {', '.join(f'{count} {name}' for name, count in others.items())}"
    elif report.counts.get("ok", 0) != report.hosts:
        yield f"{report.counts.get('ok', 0)} of {report.hosts} hosts are ok"
    if report.verified < 1:
        yield "the suite verified no host"
    verified_against = sorted({name[:BUILD_DIGITS] for names in report.builds.values() for name in names})
    if not build or verified_against != [build]:
        yield f"its hosts were verified against build {', '.join(verified_against) or '(none)'}, not {build}"
