"""The `publish` command, as a test runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from image_builder.cli.main import app
from tests.support.arm.place import Place


class Publisher:
    """The command, with the arguments that say what to publish."""

    def __init__(self, azure: Place, inventory: Path, output: Path, image: str = "worker") -> None:
        self.image = image
        self.arguments = ["-i", str(inventory), "--endpoint", azure.arm.url, "--json"]
        self.build = ["--output", str(output)]

    def __call__(self, command: str, *arguments: str, status: int = 0) -> dict[str, Any]:
        build = self.build if command in ("plan", "run", "promote") else []
        done = CliRunner().invoke(app, ["publish", command, self.image, *self.arguments, *build, *arguments])
        assert done.exit_code == status, done.output
        self.output = done.output
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
