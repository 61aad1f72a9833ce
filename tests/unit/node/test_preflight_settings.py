"""The settings that the role may write; everything wrong is reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.node.errors import NodeError
from image_builder.node.preflight.settings import Settings, parse

ROLE = Path(__file__).resolve().parents[3] / "roles" / "gpu_preflight"


def test_nothing_is_the_default() -> None:
    assert parse({}) == Settings()


def test_the_roles_defaults_are_understood() -> None:
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    written = yaml.safe_load((ROLE / "vars/main.yml").read_text())["__gpu_preflight_settings"]
    made = parse({name: defaults[f"gpu_preflight_{name}"] for name in written})
    assert made == Settings(engine="docker")
    assert set(written) == set(Settings.__dataclass_fields__) - {"node_name"}


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"wait_seconds": 0}, "wait_seconds must be 1 to 900, not 0"),
        ({"engine": "podman"}, "one of docker, containerd, not"),
        ({"gpu_seconds": 5}, "gpu_seconds must be 30 to 3600, not 5"),
        ({"jitter_seconds": -1}, "jitter_seconds"),
        ({"tcp": ["a"]}, r'tcp\[0\] must be HOST:PORT, not "a"'),
        ({"tcp": ["a:1", "a:99999"]}, r'tcp\[1\] must be HOST:PORT, not "a:99999"'),
        ({"taint": "preflight"}, "must be PREFIX/NAME"),
    ],
)
def test_what_is_wrong_is_told(found: dict[str, Any], what: str) -> None:
    with pytest.raises(NodeError, match=what):
        parse(found)


def test_all_of_it_at_once() -> None:
    with pytest.raises(NodeError) as error:
        parse({"tiers": 1, "hard": 2, "wait_seconds": 0})
    assert error.value.message.count(";") == 2
