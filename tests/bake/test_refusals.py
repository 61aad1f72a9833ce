"""Wrong settings are refused before the seal, by the image's own kubelet, containerd and dockerd."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.images.builds import REPO, Workplace
from tests.support.images.programs import needs_programs

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    ("image", "stage", "least"),
    [
        pytest.param(
            "worker_current", "kubernetes", {"containerd": 16, "kubelet": 130}, marks=needs_programs
        ),
        ("worker", "node", {"dockerd": 20}),
        pytest.param("whole_worker", "kubernetes", {"dockerd": 20, "kubelet": 80}, marks=pytest.mark.slow),
    ],
)
def test_each_wrong_setting_is_refused(
    request: pytest.FixtureRequest, image: str, stage: str, least: dict[str, int]
) -> None:
    """The same programs accept what the roles write, or there would be no table."""
    place: Workplace = request.getfixturevalue(image)
    argv = [sys.executable, str(REPO / "tests/bench/refusals.py"), "--json", "--trees"]
    argv += [str(tree) for tree in place.trees(stage)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["accepted"] == []
    assert found["refused"] == found["total"]
    assert found["total"].keys() == least.keys()
    assert all(found["total"][name] >= count for name, count in least.items())


@needs_programs
def test_a_bake_ends_before_its_seal_and_names_the_variable(
    worker_current: Workplace, copies: Callable[[Workplace], Workplace]
) -> None:
    place = copies(worker_current)
    ended = place.build("-e", '{"kubelet_node_labels": {"node-role.kubernetes.io/gpu": ""}}')
    assert ended.status == 3, ended.stderr
    assert (
        "kubelet_node_labels.node-role.kubernetes.io/gpu: kubelet refuses it (exit status 1)" in ended.stderr
    )
    # A value that only a bigger machine can judge doesn't end it.
    ended = place.build("-e", '{"kubelet_config": {"reservedSystemCPUs": "0-191"}}', "--stop-after", "seal")
    assert ended.status == 0, ended.stderr
