"""The drains of a roll, without an API server: when its word is the last one."""

from __future__ import annotations

import pytest

from image_builder.node.net.kube import KubeError
from image_builder.pool.steps.drains import is_final


@pytest.mark.parametrize(
    ("status", "failures", "final"),
    [(0, 99, False), (500, 99, False), (403, 0, False), (403, 5, True), (401, 5, True), (422, 0, True)],
)
def test_an_api_server_that_knows_no_rights_yet_is_asked_again(
    status: int, failures: int, *, final: bool
) -> None:
    """One that has just started refuses everybody for some seconds."""
    assert is_final(KubeError("it says no", status), failures) is final
