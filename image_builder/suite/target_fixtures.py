"""The fixtures of a run on one target, which all checks share."""

from __future__ import annotations

import pytest
from suite import Facts, list_tree
from targets import TARGET, open_target
from testinfra.host import Host
from tree import Tree


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config) -> Host:
    """The target, as testinfra sees it; one connection for the whole run."""
    return open_target(pytestconfig.stash[TARGET])


@pytest.fixture(scope="session")
def tree(host: Host, facts: Facts, pytestconfig: pytest.Config) -> Tree:
    """Everything on the root filesystem, from one ``find``."""
    return list_tree(host, facts, booted=pytestconfig.stash[TARGET].booted)
