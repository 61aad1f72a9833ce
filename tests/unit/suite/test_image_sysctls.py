"""Kernel settings that a running node may have instead of the declared ones."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest

from image_builder.settings import SUITE

CONNECTIONS = "net.netfilter.nf_conntrack_max"


class Node:
    """A node with this limit of tracked connections; kube-proxy runs there if ``proxy_cores`` isn't 0."""

    def __init__(self, connections: int, proxy_cores: int) -> None:
        self._answers = {
            "sysctl": f"{CONNECTIONS} = {connections}",
            "pgrep": "7" if proxy_cores else "",
            "getconf": str(proxy_cores),
        }

    def run(self, command: str) -> SimpleNamespace:
        answer = self._answers[command.split(maxsplit=1)[0]]
        return SimpleNamespace(rc=0 if answer else 1, stdout=answer)


@pytest.mark.parametrize(
    ("declared", "connections", "proxy_cores", "is_sound"),
    [
        pytest.param(1 << 20, 1 << 20, 0, True, id="as declared"),
        pytest.param(1 << 20, 3 << 20, 0, True, id="more than declared"),
        pytest.param(1 << 20, 262144, 0, False, id="fewer than declared"),
        pytest.param(1 << 20, 131072, 2, True, id="kube-proxy with few cores"),
        pytest.param(1 << 20, 262144, 8, True, id="kube-proxy with 8 cores"),
        pytest.param(1 << 20, 262144, 16, False, id="fewer than kube-proxy sets"),
        pytest.param(1 << 20, 262144, 2, False, id="more than kube-proxy sets"),
        pytest.param(4 << 20, 2 << 20, 64, True, id="kube-proxy with many cores"),
        pytest.param(4 << 20, 1 << 20, 64, True, id="a recent kube-proxy with many cores"),
    ],
)
def test_connections_are_as_declared_or_as_kube_proxy_sets_them(
    monkeypatch: pytest.MonkeyPatch, declared: int, connections: int, proxy_cores: int, is_sound: bool
) -> None:
    monkeypatch.syspath_prepend(os.fspath(SUITE))
    check = importlib.import_module("test_sysctl").test_sysctls_are_live
    node, variables = Node(connections, proxy_cores), {"__system_sysctl": {CONNECTIONS: declared}}
    if is_sound:
        check(node, variables)
    else:
        with pytest.raises(AssertionError, match=CONNECTIONS):
            check(node, variables)
