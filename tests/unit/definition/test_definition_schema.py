"""The generated reference: the schema agrees with the model, and the files in the repository are up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from image_builder.definition.model import BuilderVariables, parse_builder_variables
from image_builder.settings import REPO_ROOT
from tests.support.pages.definition_schema import definition_schema, generated, variables_page

GOOD: dict[str, Any] = {
    "image_base": {"suite": "trixie", "mirror": "http://mirror.example/debian"},
    "image_layers": ["system"],
    "image_disk": {"root_size_mib": 4096},
    "image_formats": ["raw", "vhd"],
    "image_kernel_args": ["console=ttyS0,115200", "net.ifnames=0", "hugepagesz=1G", "pci=realloc"],
    "image_secure_boot": True,
}
BAD: list[dict[str, Any]] = [
    {"image_base": {"suite": "trixie", "suit": "x"}},
    {"image_base": {"suite": "trixie", "components": []}},
    {"image_base": {"suite": "trixie", "mirror": "no url"}},
    {"image_base": {}},
    {"image_layers": []},
    {"image_layers": ["../system"]},
    {"image_disk": {"root_size_mib": "4096"}},
    {"image_disk": {"root_size_mib": 10}},
    {"image_disk": {"esp_size_mib": 511}},
    {"image_disk": {"filesystem": "xfs"}},
    {"image_formats": ["iso"]},
    {"image_kernel_args": ['quiet"; reboot']},
    {"image_kernel_args": ["two words"]},
    {"image_secure_boot": 1},
]


def test_schema_is_valid_and_takes_what_the_model_takes() -> None:
    schema = json.loads(definition_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(GOOD, schema)
    assert isinstance(parse_builder_variables(GOOD), BuilderVariables)


@pytest.mark.parametrize("change", BAD, ids=[json.dumps(b) for b in BAD])
def test_schema_and_model_refuse_the_same(change: dict[str, Any]) -> None:
    values = {**GOOD, **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json.loads(definition_schema()))
    assert isinstance(parse_builder_variables(values), list)


def test_every_builder_variable_is_described() -> None:
    schema = json.loads(definition_schema())
    models = [schema, *schema["$defs"].values()]
    undescribed = [n for m in models for n, s in m["properties"].items() if not s.get("description")]
    assert undescribed == []


def test_page_has_types_defaults_and_meanings(repo: Path) -> None:
    page = variables_page(repo)
    assert '| `image_disk.root_size_mib` | integer or `auto` | `"auto"` |' in page
    assert "## Role `system`\n\nThe system.\n" in page
    assert '| `system_packages` | list of str | `["chrony"]` | Packages. Sorted. |' in page
    assert '| `system_mode` | `loose`, `tight` | `"loose"` | How \\| tight. |' in page
    assert "| `runtime_token` | str | required |" in page


@pytest.mark.parametrize("path", ["docs/reference/definition.schema.json", "docs/reference/variables.md"])
def test_reference_is_current(path: str) -> None:
    wanted = generated(REPO_ROOT)[Path(path)]
    assert (REPO_ROOT / path).read_text() == wanted, "run: python -m tests.support.pages.definition_schema"
