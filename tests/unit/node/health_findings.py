"""The common parts of the tests of the health rules: the defaults, and findings as rows to compare."""

from __future__ import annotations

from image_builder.node.health.model import Finding
from image_builder.node.health.settings import Settings

SETTINGS = Settings()


def codes(findings: list[Finding] | tuple[Finding, ...]) -> list[tuple[str, str, str]]:
    """Return each finding's code, subject and severity."""
    return [(one.code, one.subject, one.severity) for one in findings]
