"""The Kubernetes section of docs/how-to/run-slices-elsewhere.md: tests run exactly what the page says."""

from __future__ import annotations

import re

from image_builder.settings import REPO_ROOT

PAGE = REPO_ROOT / "docs/how-to/run-slices-elsewhere.md"


def _blocks(language: str) -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def manifest() -> str:
    """Return ``job.yaml``."""
    (found,) = _blocks("yaml")
    return found


def commands() -> tuple[str, str]:
    """Return the commands that start a Job for each slice, and those that collect the results."""
    start, take_in = _blocks("sh")
    return start, take_in
