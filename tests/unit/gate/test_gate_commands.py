"""What `image-builder gate` is told."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli import app


@pytest.mark.parametrize("rate", ["0", "-1"])
def test_a_rate_that_lets_nobody_in_is_refused(rate: str) -> None:
    done = CliRunner().invoke(app, ["gate", "run", "--rate", rate, "--kubeconfig", "/none"])
    assert done.exit_code == errors.UsageError.exit_code and "--rate" in done.stderr
