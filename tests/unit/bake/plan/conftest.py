"""The small repository of these tests, made once: each test gets it as it was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.bake.plan.model import Plan
from tests.unit.bake.plan import user_layer
from tests.unit.bake.plan.tree import Tree


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A repository with a user's layer and its inventory; a file of tests may have another one."""
    return user_layer.make(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def root(tree: Tree) -> Iterator[Path]:
    """The repository's directory; what a test changes below it is put back."""
    yield tree.root
    tree.restore()


@pytest.fixture(scope="session")
def unchanged(tree: Tree) -> Plan:
    """The plan of the user's layer before any change."""
    return user_layer.plan(tree.root)
