"""docs/how-to/bring-a-pool-up.md: its commands are understood as written, and its policy does what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.pool.plan import plan as plans
from image_builder.settings import REPO_ROOT
from tests.support.shipped import filled

PAGE = (REPO_ROOT / "docs/how-to/bring-a-pool-up.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _where_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inventories").mkdir()
    filled("azure_vmss", tmp_path / "inventories")
    monkeypatch.chdir(tmp_path)


def test_its_commands_are_refused_for_what_is_not_there_alone() -> None:
    """No key, no facts, no journal: each is a definition error. An unknown word would be a different error."""
    commands = [shlex.split(block.replace("\\\n", " ")) for block in _blocks("sh")]
    assert [argv[:3] for argv in commands] == [
        ["image-builder", "pool", name] for name in ("plan", "run", "resume", "verify")
    ]
    ended = [CliRunner().invoke(app, argv[1:]) for argv in commands]
    missing = errors.DefinitionError.exit_code
    assert [done.exit_code for done in ended] == [0, missing, missing, missing]
    for done in ended[1:]:
        assert (
            "--facts: " in done.stderr and "--key: " in done.stderr and "no host was touched" in done.stderr
        )


def test_its_policy_brings_few_hosts_up() -> None:
    (policy,) = [block for block in _blocks("yaml") if "kind:" not in block]
    Path("few.yml").write_text(policy, encoding="utf-8")
    hosts = ", ".join(f"n-{n}: {{ansible_host: 10.0.0.{n + 1}}}" for n in range(20))
    Path("hosts.yml").write_text(
        f"all: {{children: {{few: {{vars: {{pool_image: w, pool_vm_size: D16}}, hosts: {{{hosts}}}}}}}}}"
    )
    for cells, sizes, budget in (
        ([], [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 1], 0),
        (["--policy", "few.yml"], [1, 5, 14], 2),
    ):
        done = CliRunner().invoke(app, ["pool", "plan", "-i", "hosts.yml", "few", "--out", "p.json", *cells])
        assert done.exit_code == 0, done.stderr
        plan = plans.load(Path("p.json"))
        assert ([len(wave.hosts) for wave in plan.waves], plan.budget) == (sizes, budget)
