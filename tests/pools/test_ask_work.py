"""The command by which a roll asks a node what it is working on, against the node's own endpoint."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from image_builder.node.health.application import Places, Settings, open_server
from image_builder.pool.steps.nodes import ask_work

pytestmark = pytest.mark.root


def ask(settings: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        ask_work(settings),
        capture_output=True,
        text=True,
        check=False,
        env={"http_proxy": "http://192.0.2.1:1"},
    )
    return done.returncode, done.stdout.splitlines()


def test_a_node_says_what_it_works_on(tmp_path: Path) -> None:
    """Leases and users of GPUs count; a node that isn't up yet answers with 503, and is asked anyway."""
    settings = tmp_path / "health-endpoint.json"
    assert ask(settings) == (0, []), "an image without the endpoint"
    (tmp_path / "boot_id").write_text("b-1\n")
    places = Places(run=tmp_path / "run", etc=tmp_path, boot_id=tmp_path / "boot_id", sys=tmp_path / "sys")
    places.leases.mkdir(parents=True)
    with open_server(Settings(port=0), places) as server:
        settings.write_text(json.dumps({"port": server.server_address[1]}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert ask(settings) == (0, [])
            (places.leases / "train 17").touch()
            uvm = tmp_path / "sys/module/nvidia_uvm"
            uvm.mkdir(parents=True)
            (uvm / "refcnt").write_text("2\n")
            assert ask(settings) == (0, ["lease train 17", "2 users of /dev/nvidia-uvm"])
        finally:
            server.shutdown()
            thread.join()
    status, lines = ask(settings)
    assert status and lines == [], "an endpoint that is gone says nothing"
