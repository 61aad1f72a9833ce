"""The sandbox: what it offers, what it keeps out, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
# A root of the host's own programs: enough to run a shell in, made without any package.
_SETUP = """
import os, sys, json
from pathlib import Path

from image_builder.system import namespace, sandbox, trees
from image_builder.node import mounts
base = Path(sys.argv[1])
HOST = {f"/{d}": Path(f"/{d}") for d in ("usr", "etc")}
def lower():
    tree = base / "lower"
    tree.mkdir(exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if not os.path.lexists(tree / name):
            (tree / name).symlink_to(f"usr/{name}")
    (tree / "data").mkdir(exist_ok=True)
    (tree / "data/file").write_text("lower")
    return tree
def work():
%s
    return 0
sys.exit(namespace.run_isolated(work))
"""


def _run(tmp_path: Path, body: str) -> str:
    code = _SETUP % "\n".join(f"    {line}" for line in body.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPO,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_changes_go_to_the_upper_and_the_lower_stays(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    _run(
        tmp_path,
        "with sandbox.open_root([lower()], base / 'work', upper=base / 'upper', binds=HOST) as root:\n"
        "    root.run(['sh', '-c', 'echo changed > /data/file; rm -f /data/none; echo x > /tmp/x; echo y > /run/y'])\n",
    )
    assert (tmp_path / "lower/data/file").read_text() == "lower"
    assert (tmp_path / "upper/data/file").read_text() == "changed\n"
    assert list((tmp_path / "upper/tmp").iterdir()) == []
    assert list((tmp_path / "upper/run").iterdir()) == []


def test_there_is_no_network_and_no_inherited_environment(tmp_path: Path) -> None:
    out = _run(
        tmp_path,
        "os.environ['SECRET_TOKEN'] = 'abc'\n"
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    print(root.run(['sh', '-c', 'cat /proc/net/dev | wc -l; env']).stdout)\n",
    )
    assert out.splitlines()[0].strip() == "3"  # two header lines, and lo
    assert "SECRET_TOKEN" not in out


def test_checks_run_in_a_root_whose_path_is_not_ascii(tmp_path: Path) -> None:
    base = tmp_path / "büro"
    base.mkdir()
    out = _run(
        base,
        "sys.path[:0] = ['image_builder/suite']\n"
        "from targets import enter\n"
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    print(enter(root.path).check_output('echo %s', 'größe'))\n",
    )
    assert out.split() == ["größe"]


def test_the_hosts_kernel_is_not_set_from_inside(tmp_path: Path) -> None:
    """Neither by a sysctl, nor by anything that programs in a root may request from the kernel."""
    out = _run(
        tmp_path,
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    print(root.run(['sh', '-c', 'cat /proc/sys/kernel/panic > /proc/sys/kernel/panic'], ok=(1, 2)).stderr)\n"
        "    print(root.run(['sh', '-c', 'grep CapBnd /proc/self/status']).stdout)\n",
    )
    assert "Read-only file system" in out
    bounding = int(out.split("CapBnd:")[1], 16)
    for capability in (16, 17, 22, 25):  # SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_TIME (linux/capability.h)
        assert not bounding & 1 << capability, capability
    assert bounding & 1 << 21, "SYS_ADMIN is left to container engines"


def test_a_sysrq_key_is_not_pressed_from_inside(tmp_path: Path) -> None:
    """Not every kernel has SysRq, and a test mustn't trigger it: this /proc consists of plain files."""
    out = _run(
        tmp_path,
        "mount = sandbox._mount\n"
        "def mount_files(mounts, kind, target, options=''):\n"
        "    mount(mounts, 'tmpfs' if kind == 'proc' else kind, target, options)\n"
        "    if kind == 'proc':\n"
        "        (target / 'sys').mkdir()\n"
        "        (target / 'sysrq-trigger').touch()\n"
        "sandbox._mount = mount_files\n"
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    try:\n"
        "        (root.path / 'proc/sysrq-trigger').write_text('h')\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n",
    )
    assert out == "Read-only file system\n"


def test_a_play_makes_no_devices(tmp_path: Path) -> None:
    """The device number of the host's disk would be enough to write to it."""
    (tmp_path / "hosts.yml").write_text("images: {hosts: {mine: }}\n")
    (tmp_path / "play.yml").write_text(
        "- hosts: images\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.command: mknod /data/pipe p\n"
        "    - ansible.builtin.command: mknod /data/disk b 8 0\n"
    )
    out = _run(
        tmp_path,
        "from image_builder import errors; from image_builder.bake import ansible\n"
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    try:\n"
        "        ansible.play(base / 'play.yml', 'mine', inventories=[base / 'hosts.yml'], root=root.path,\n"
        "            environment_in_root=root.environment, variables={}, work=base / 'ansible', log=base / 'log',\n"
        "            roles=[Path('roles').absolute()], collections=[], doing=print,\n"
        "            config=Path('ansible.cfg').absolute(), python=Path(sys.executable))\n"
        "    except errors.CommandError as error:\n"
        "        print(error.tail)\n"
        "    print(sorted(os.listdir(root.path / 'data')))\n",
    )
    assert "mknod: /data/disk: Operation not permitted" in out
    assert out.splitlines()[-1] == "['file', 'pipe']"


def test_files_are_copied_within_the_root_wherever_its_links_lead(tmp_path: Path) -> None:
    """A link with an absolute path refers to the root's own file, and never to one on the build host."""
    (tmp_path / "host").write_text("host")
    out = _run(
        tmp_path,
        "from ansible.errors import AnsibleError\n"
        "from ansible.playbook.play_context import PlayContext\n"
        "from ansible.plugins.loader import connection_loader\n"
        "connection_loader.add_directory('image_builder/bake/plugins/connection')\n"
        "tree, host, taken, sent = lower(), base / 'host', base / 'taken', base / 'sent file'\n"
        "(tree / 'data/inside').symlink_to('/data/file')\n"
        "(tree / 'data/outside').symlink_to(host)\n"
        "(tree / 'data/up').symlink_to('../' * 20 + os.fspath(host).lstrip('/'))\n"
        "sent.write_text('sent')\n"
        "with sandbox.open_root([tree], base / 'work', binds=HOST) as root:\n"
        "    connection = connection_loader.get('sandbox', PlayContext(), os.devnull)\n"
        "    connection.set_options(direct={'root': os.fspath(root.path)})\n"
        "    connection.fetch_file('/data/inside', os.fspath(taken))\n"
        "    print(taken.read_text())\n"
        "    connection.put_file(os.fspath(sent), '/data/inside')\n"
        "    connection.put_file(os.fspath(sent), '/data/a name')\n"
        "    print((root.path / 'data/file').read_text(), (root.path / 'data/a name').read_text())\n"
        "    for link in ('/data/outside', '/data/up'):\n"
        "        for copy in (connection.fetch_file, lambda a, b: connection.put_file(os.fspath(sent), a)):\n"
        "            try:\n"
        "                copy(link, os.fspath(taken))\n"
        "            except AnsibleError:\n"
        "                print('refused', taken.read_text(), host.read_text())\n",
    )
    assert out.splitlines()[-6:] == ["lower", "sent sent", *["refused  host"] * 4]


def test_a_daemon_left_in_the_root_is_ended(tmp_path: Path) -> None:
    _run(
        tmp_path,
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    root.run(['sh', '-c', 'setsid sleep 300 >/dev/null 2>&1 & sleep 0.2'])\n"
        "    left = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "    assert len(left) == 3, left\n"
        "left = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "assert len(left) == 2, left\n"
        "assert mounts.below(base) == [], mounts.below(base)\n",
    )


def test_a_program_whose_first_thread_ended_is_ended(tmp_path: Path) -> None:
    """Like a killed dockerd for a moment: all that is left of it in the root is threads with open files."""
    program = (
        "import ctypes, threading, time\n"
        "hold = open('/dev/null')\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit of this thread only (x86-64)
    )
    (tmp_path / "program.py").write_text(program)
    _run(
        tmp_path,
        "with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "    (root.path / 'tmp/program.py').write_text((base / 'program.py').read_text())\n"
        "    root.run(['sh', '-c', '/usr/bin/python3 /tmp/program.py > /tmp/out 2>&1 & '\n"
        "                          'while ! grep -q ready /tmp/out; do sleep 0.1; done; sleep 0.3'])\n"
        "assert all(m.target.find(str(base)) < 0 for m in mounts.listed())\n",
    )


def test_a_failure_inside_leaves_no_mount(tmp_path: Path) -> None:
    _run(
        tmp_path,
        "try:\n"
        "    with sandbox.open_root([lower()], base / 'work', binds=HOST) as root:\n"
        "        raise RuntimeError\n"
        "except RuntimeError:\n"
        "    pass\n"
        "assert mounts.below(base) == [], mounts.below(base)\n",
    )


@pytest.mark.parametrize("kind", ["tmpfs", "bind", "nested"])
def test_a_tree_that_holds_a_mount_is_not_deleted(tmp_path: Path, kind: str) -> None:
    tmp_path = tmp_path / "büro"  # the kernel's list of mounts escapes blanks, but not letters
    (tmp_path / "canary").mkdir(parents=True)
    (tmp_path / "canary/alive").write_text("alive")
    _run(
        tmp_path,
        "from image_builder.errors import StoreError\n"
        "tree = base / 'tree'; (tree / 'a/b').mkdir(parents=True); (tree / 'file').write_text('x')\n"
        f"kind = {kind!r}\n"
        "where = os.fspath(tree / ('a/b' if kind == 'nested' else 'a'))\n"
        "if kind == 'tmpfs': namespace.mount('tmpfs', 'tmpfs', where)\n"
        "else: namespace.bind(os.fspath(base / 'canary'), where, read_only=False)\n"
        "try:\n"
        "    trees.remove_tree(tree)\n"
        "except StoreError as error:\n"
        "    assert where in str(error)\n"
        "else:\n"
        "    raise AssertionError('it was deleted')\n"
        "assert (tree / 'file').read_text() == 'x'\n",
    )
    assert (tmp_path / "canary/alive").read_text() == "alive"


def test_the_callers_umask_decides_no_mode(tmp_path: Path) -> None:
    """Neither of what the builder makes, nor of what programs make in a root."""
    modes = []
    for umask in (0o022, 0o077):
        base = tmp_path / f"{umask:o}"
        base.mkdir()
        before = os.umask(umask)
        try:
            out = _run(
                base,
                "product = base / 'product'; product.mkdir()\n"
                "with sandbox.open_root([lower()], base / 'work', upper=product, binds=HOST) as root:\n"
                "    root.run(['sh', '-c', 'mkdir /opt; echo x > /opt/file'])\n"
                "for path in (product, *sorted(product.rglob('*'))):\n"
                "    print(path.relative_to(base), oct(path.lstat().st_mode))\n",
            )
        finally:
            os.umask(before)
        modes.append(out)
    assert modes[0] == modes[1]
    assert "product/opt 0o40755" in modes[0]
