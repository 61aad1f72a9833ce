"""The arguments for ctr of each containerd version."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.pull import containerd_engine
from image_builder.bake.pull.containerd_engine import ContainerdEngine, _reason
from image_builder.bake.pull.credentials import VARIABLE
from image_builder.bake.pull.gateway import Gateway
from image_builder.bake.pull.model import CANT_START
from image_builder.bake.pull.network import Mirror, Network
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.registry import RegistryClient
from image_builder.errors import CommandError, PullError
from image_builder.system.process import Completed
from image_builder.system.sandbox import Root
from tests.unit.bake.pull.test_pull_docker import DIGEST, image

REF = "registry.example/team/app:1"


class Programs(Root):
    """A root with a containerd that reports a version, and a ctr whose containers don't start."""

    version = ""

    def run(self, argv: Sequence[Any], **_: Any) -> Completed:
        match argv:
            case ["containerd", "--version"]:
                out = f"containerd github.com/containerd/containerd {self.version} 1c4457e00fac\n"
            case ["ctr", "-n", _, "content", "get", _]:
                out = '{"config": {"Entrypoint": ["/entry"]}}'
            case ["ctr", "-n", _, "run", *_]:
                raise CommandError("exit status 1", tail="ctr: exec: libcuda.so.1: no such file")
            case _:
                out = ""
        return Completed(tuple(argv), 0, out, "", 0.0)


def engine(tmp_path: Path, version: str) -> ContainerdEngine:
    root = Programs(tmp_path, {})
    object.__setattr__(root, "version", version)
    return ContainerdEngine(root, 7, {}, 1, lambda: True, tmp_path / "log")


@pytest.mark.parametrize(
    ("version", "local"),
    [
        ("1.6.20~ds1", []),
        ("v1.7.24", []),
        ("v2.0.7", ["--local"]),
        ("v2.1.9", ["--local"]),
        ("v2.3.0-rc.1", ["--local"]),
    ],
)
def test_from_2_0_on_ctr_pulls_and_exports_itself(tmp_path: Path, version: str, local: list[str]) -> None:
    """Otherwise it leaves both to the daemon's transfer service, which doesn't limit downloads and truncates archives.

    ctr 1.6 doesn't know ``--local``, and 1.7 has it by default (containerd's cmd/ctr/commands/images/pull.go).
    """
    assert engine(tmp_path, version).pull_command(image(REF), "/hosts") == [
        *("ctr", "-n", "k8s.io", "images", "pull", "--snapshotter", "overlayfs"),
        *("--platform", "linux/amd64", "--max-concurrent-downloads", "7", *local),
        *("--hosts-dir", "/hosts", f"registry.example/team/app@{DIGEST}"),
    ]
    assert engine(tmp_path, version).export_arguments("/images.tar", [image(REF)]) == [
        *("images", "export", "--platform", "linux/amd64", *local, "/images.tar", REF),
    ]


def test_what_an_image_can_be_given_that_starts_on_nodes_only_is_said(tmp_path: Path) -> None:
    with pytest.raises(PullError, match=f"no container of {REF} starts: ctr: exec: libcuda.so.1") as error:
        engine(tmp_path, "v1.7.24").try_out(image(REF))
    assert error.value.hint == CANT_START


@pytest.mark.parametrize(("pin", "label"), [(True, "pinned"), (False, "")])
def test_an_image_that_is_no_longer_pinned_loses_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: bool, label: str
) -> None:
    """The data root of an earlier bake has the label, and ``ctr`` doesn't touch labels that it isn't given."""
    taken_over = engine(tmp_path, "v1.7.24")
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(taken_over, "_ctr", lambda *arguments: ran.append(arguments))
    taken_over.mark(image(REF), pin=pin)
    labels = ("io.cri-containerd.image=managed", f"io.cri-containerd.pinned={label}")
    names = (f"registry.example/team/app@{DIGEST}", REF)
    assert ran == [("images", "label", name, *labels) for name in names]


def test_a_mirror_that_wants_a_login_is_reached_through_a_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other mirrors are used as they are: by their addresses."""
    clients: list[RegistryClient] = []

    @contextmanager
    def gateway(client: RegistryClient) -> Iterator[Gateway]:
        clients.append(client)
        yield Gateway(client, "Bearer key", f"http://127.0.0.1:{len(clients)}")

    monkeypatch.setattr(containerd_engine, "gateway", gateway)
    monkeypatch.setenv(VARIABLE, json.dumps({"one.example": {"username": "robot", "password": "canary"}}))
    one = Mirror("https://one.example/v2/hub", skip_verify=True, override_path=True)
    two = Mirror("https://two.example")
    pulling = engine(tmp_path, "v1.7.24")
    pulling.network = Network({"registry.example": [one, two]})
    with pulling._hosts(image(REF)) as (folder, ways):
        written = tmp_path / folder.lstrip("/") / "registry.example/hosts.toml"
        assert written.stat().st_mode & 0o777 == 0o600
        hosts = tomllib.loads(written.read_text())
    assert not written.exists()
    assert [way.client for way in ways] == clients
    assert (clients[0].server, clients[0].api) == ("https://one.example", "/v2/hub")
    allowed = {"capabilities": ["pull", "resolve"]}
    assert hosts == {
        "server": "https://registry.example",
        **allowed,
        "host": {
            "http://127.0.0.1:1/v2/hub": {
                **allowed,
                "override_path": True,
                "header": {"Authorization": ["Bearer key"]},
            },
            "https://two.example": allowed,
        },
    }


def test_a_mirror_that_refuses_is_named_behind_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("elapsed: 1 s\nctr: failed to resolve http://127.0.0.1:1/v2/: i/o timeout\n")
    ways = []
    for number, mirror in enumerate((None, Mirror("https://one.example"))):
        ways.append(Gateway(RegistryClient(parse(REF), {}, mirror), "", f"http://127.0.0.1:{number + 1}"))
    ways[1].note("/v2/", "one.example answered 401")
    refused = "; mirror https://one.example: one.example answered 401"
    server = "https://registry.example"
    expected = f"failed to resolve https://registry.example/v2/: i/o timeout{refused}"
    assert _reason(log, ways, server) == expected
    ways[0].note("/v2/", "registry.example answered 403")
    assert _reason(log, ways, server) == f"registry.example answered 403{refused}"
