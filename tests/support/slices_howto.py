"""What docs/how-to/run-slices-elsewhere.md tells those who have Kubernetes, taken from there: that is what is run."""

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
    """Return what starts a Job for each slice, and what takes in what they say."""
    start, take_in = _blocks("sh")
    return start, take_in
