"""The lab's registry: Debian's own docker-registry, with pushes and pulls through its API."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from image_builder.lab import images, pause
from image_builder.lab.registry import HOST, PORT

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
_SETUP = """
import contextlib, json, os, signal, socket, sys, time
from pathlib import Path
from image_builder.system import namespace, process, sandbox
from image_builder.errors import ImageBuilderError
from image_builder.lab import images, pause, registry
from image_builder.node import mounts
tools, base = Path(sys.argv[1]), Path(sys.argv[2])
storage, scratch = base / "storage", base / "work"
storage.mkdir(exist_ok=True)
scratch.mkdir(exist_ok=True)
def get(served, path, accept=images.MANIFEST_TYPE):
    with served.connect() as pool:
        return pool.request("GET", path, headers={"Host": registry.HOST, "Accept": accept})
def pause_image():
    return images.pause_image(base / "pause.tar.gz")
def daemons():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path("/proc", pid, "cmdline").read_bytes().startswith(b"/usr/bin/docker-registry\\0"):
                found.append(int(pid))
    return found
def fails(work, *words):
    try:
        work()
    except ImageBuilderError as error:
        told = f"{error.message} {getattr(error, 'tail', '')}"
        assert all(word in told for word in words), told
        return
    raise AssertionError("it did not fail")
def work():
%s
    assert daemons() == [] and mounts.below(base) == []
    return 0
sys.exit(namespace.run_isolated(work))
"""


def _argv(tools: Path, base: Path, body: str) -> list[str]:
    code = _SETUP % "\n".join(f"    {line}" for line in body.splitlines())
    return [sys.executable, "-c", code, str(tools), str(base)]


def _run(tools: Path, base: Path, body: str) -> Any:
    """Run ``body`` in namespaces of its own; return its JSON output, or None if there is none."""
    done = subprocess.run(_argv(tools, base, body), cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else None


def _refuses(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, PORT)) != 0


def test_image_comes_back_as_it_was_pushed(tools_tree: Path, tmp_path: Path) -> None:
    got = _run(
        tools_tree,
        tmp_path,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "image = pause_image()\n"
        "def push():\n"
        "    with registry.serve(tools, storage, scratch, writable=True) as served:\n"
        "        digest = images.push(served, 'pause', '1.0', image)\n"
        "        assert images.push(served, 'pause', '1.0', image) == digest == image.digest\n"
        "        return digest, served.log.read_text()\n"
        # The registry dies with the thread that started it; a worker thread will do if it outlives the block.
        "with ThreadPoolExecutor(1) as workers:\n"
        "    digest, log = workers.submit(push).result()\n"
        "answers = {}\n"
        "with registry.serve(tools, storage, scratch) as served:\n"
        "    blobs = (f'blobs/{image.id}', f'blobs/{image.layers[0].digest}')\n"
        "    for path in ('manifests/1.0', f'manifests/{digest}', *blobs):\n"
        "        answer = get(served, f'/v2/pause/{path}')\n"
        "        answers[path] = [answer.status, answer.headers['Content-Type'], answer.data.hex()]\n"
        "print(json.dumps([answers, digest, image.id, image.layers[0].digest, log]))\n",
    )
    answers, digest, config, layer, log = got
    content = {path: bytes.fromhex(data) for path, (_, _, data) in answers.items()}
    assert {status for status, _, _ in answers.values()} == {200}
    assert answers["manifests/1.0"][1] == images.MANIFEST_TYPE
    assert f"sha256:{hashlib.sha256(content['manifests/1.0']).hexdigest()}" == digest
    assert content[f"manifests/{digest}"] == content["manifests/1.0"]
    assert content[f"blobs/{config}"] == pause.encode(pause.configuration())
    assert f"sha256:{hashlib.sha256(content[f'blobs/{layer}']).hexdigest()}" == layer
    assert log.count('"PUT /v2/pause/blobs/uploads/') == 2, "the second push sends no blob again"


def test_packages_made_by_dpkg_become_a_layer(tools_tree: Path, tmp_path: Path) -> None:
    """Build a package with the tools tree's dpkg-deb and gzip, and check what tar then finds in the layer."""
    out = _run(
        tools_tree,
        tmp_path,
        "package = base / 'package'\n"
        "(package / 'DEBIAN').mkdir(parents=True)\n"
        "(package / 'DEBIAN/control').write_text('Package: x\\nVersion: 1\\nArchitecture: all\\n'\n"
        "    'Maintainer: Nobody <nobody@example.org>\\nDescription: x\\n')\n"
        "(package / 'usr/bin').mkdir(parents=True)\n"
        "(package / 'usr/bin/x').write_text('x' * 100000)\n"
        "(package / 'usr/bin/y').symlink_to('x')\n"
        "os.chown(package / 'usr/bin/x', 1234, 1234)\n"
        "(package / 'usr/bin/x').chmod(0o4755)\n"
        "with sandbox.open_root([tools], scratch, writable_binds={str(base): base}) as root:\n"
        "    root.run(['dpkg-deb', '--build', package, base / 'x.deb'])\n"
        "    layer = images.layer_from_debs([base / 'x.deb'], base / '0.tar.gz', root.run)\n"
        "    listed = root.run(['tar', '--numeric-owner', '-tvzf', layer.path]).stdout\n"
        "print(json.dumps(listed))\n",
    )
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[1], row[5]) for row in rows] == [
        ("drwxr-xr-x", "0/0", "usr/"),
        ("drwxr-xr-x", "0/0", "usr/bin/"),
        ("-rwsr-xr-x", "0/0", "usr/bin/x"),
        ("lrwxrwxrwx", "0/0", "usr/bin/y"),
    ]


def test_without_writable_nothing_is_written_and_never_a_private_key(
    tools_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "storage").mkdir()
    _run(
        tools_tree,
        tmp_path,
        "with registry.serve(tools, storage, scratch) as served:\n"
        "    fails(lambda: images.push(served, 'pause', '1.0', pause_image()), 'POST', '/v2/pause/', 'status 405')\n"
        "    key = served.log.parent / 'sandbox/root/run/registry/server-key.pem'\n"
        "    assert b'PRIVATE KEY' in key.read_bytes()\n"
        "    root = served.log.parent / 'sandbox/root/run/registry/storage'\n"
        "    try:\n"
        "        (root / 'x').touch()\n"
        "    except OSError as error:\n"
        "        assert error.errno == 30, error\n"  # EROFS
        "    else:\n"
        "        raise AssertionError('the storage is mounted writable')\n",
    )
    assert list((tmp_path / "storage").iterdir()) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"BEGIN CERTIFICATE" in path.read_bytes()] == ["ca.pem"]
    assert [path for path in files if b"PRIVATE KEY" in path.read_bytes()] == []


def test_two_stand_side_by_side_and_each_is_only_itself(tools_tree: Path, tmp_path: Path) -> None:
    first, second = _run(
        tools_tree,
        tmp_path,
        "import dataclasses, urllib3\n"
        "with registry.serve(tools, storage, scratch, writable=True) as one:\n"
        "    images.push(one, 'pause', '1.0', pause_image())\n"
        "    with registry.serve(tools, storage, scratch) as two:\n"
        "        assert one.address != two.address\n"
        "        contents = [get(served, '/v2/pause/manifests/1.0').data for served in (one, two)]\n"
        "        assert contents[0] == contents[1] == pause_image().manifest()\n"
        "        try:\n"
        "            get(dataclasses.replace(two, ca=one.ca), '/v2/')\n"
        "        except urllib3.exceptions.SSLError as error:\n"
        "            assert 'CERTIFICATE_VERIFY_FAILED' in str(error)\n"
        "        else:\n"
        "            raise AssertionError('the other authority was believed')\n"
        "        get(two, '/v2/')\n"
        "    get(one, '/v2/')\n"
        "print(json.dumps([one.hosts_line, two.hosts_line]))\n",
    )
    for line in (first, second):
        address, host = line.split()
        assert host == HOST and address.startswith("127.") and not address.startswith("127.0.")
        assert _refuses(address)


def test_one_that_can_not_serve_says_why(tools_tree: Path, tmp_path: Path) -> None:
    _run(
        tools_tree,
        tmp_path,
        "def start(tools, storage):\n"
        "    with registry.serve(tools, storage, scratch):\n"
        "        raise AssertionError('it serves')\n"
        "nothing = base / 'nothing'\n"
        "fails(lambda: start(nothing, storage), str(nothing))\n"
        "fails(lambda: start(tools, nothing), str(nothing))\n"
        "taken = registry._random_address()\n"
        "holder = socket.create_server((taken, registry.PORT))\n"
        "registry._random_address = lambda: taken\n"
        "fails(lambda: start(tools, storage), taken, 'ended with status', 'address already in use')\n"
        "holder.close()\n",
    )


def test_one_that_dies_in_use_is_told_with_its_log(tools_tree: Path, tmp_path: Path) -> None:
    _run(
        tools_tree,
        tmp_path,
        "def work_with(use):\n"
        "    with registry.serve(tools, storage, scratch, writable=True) as served:\n"
        "        (pid,) = daemons()\n"
        "        os.kill(pid, signal.SIGKILL)\n"
        "        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
        "        use(served)\n"
        "fails(lambda: work_with(lambda served: None), 'ended with status -9', '\"GET /v2/ HTTP/1.1\" 200')\n"
        "fails(lambda: work_with(lambda served: images.push(served, 'pause', '1.0', pause_image())),\n"
        "    'ended with status -9')\n",
    )


def test_it_dies_with_a_parent_that_is_killed(tools_tree: Path, tmp_path: Path) -> None:
    body = (
        "with registry.serve(tools, storage, scratch) as served:\n"
        "    print(served.address, flush=True)\n"
        "    time.sleep(300)\n"
    )
    with subprocess.Popen(
        _argv(tools_tree, tmp_path, body), cwd=REPO, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout
        address = command.stdout.readline().strip()
        assert not _refuses(address)
        command.kill()
    while not _refuses(address):
        time.sleep(0.05)
