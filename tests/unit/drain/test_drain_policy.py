"""The policy of a drain, from a file and from options."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.drain.policy import Policy
from image_builder.errors import DefinitionError
from image_builder.strict_yaml import load


def test_nothing_is_evicted_unless_it_is_asked_for() -> None:
    assert Policy().mode == "fence"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "drain.yml"
    path.write_text("mode: evict\nrules:\n  - {action: wait, namespace: prod, labels: {app: db}}\n")
    policy = load(path, Policy, "policy")
    assert policy.rules[0].labels == {"app": "db"} and policy.mode == "evict"


@pytest.mark.parametrize(
    "text",
    [
        "max_wait_seconds: -1",
        "max_wait_seconds: .inf",
        "max_fenced: 0",
        "grace: 1",
    ],
)
def test_what_is_refused(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "drain.yml").write_text(text)
    with pytest.raises(DefinitionError):
        load(path, Policy, "policy")
