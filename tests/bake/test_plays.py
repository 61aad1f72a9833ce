"""A play of a bake: its environment, the facts that it gets, the machines that it reaches, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
# A root of the host's own programs: enough for Ansible's modules, made without any package.
_PLAY = """
import json, os, sys
from pathlib import Path
from image_builder.bake import ansible
from image_builder.errors import CommandError
from image_builder.system import namespace, sandbox

base, idle = Path(sys.argv[1]), float(sys.argv[2])
tree = base / "lower"
tree.mkdir()
for name in ("bin", "sbin", "lib", "lib64"):
    (tree / name).symlink_to(f"usr/{name}")
(tree / "opt").mkdir()
(base / "upper").mkdir()

def work():
    binds = {f"/{name}": Path(f"/{name}") for name in ("usr", "etc")}
    ended = None
    with sandbox.open_root([tree], base / "work", upper=base / "upper", binds=binds) as root:
        try:
            ansible.play(base / "play.yml", "node", inventories=[base / "hosts.yml"], root=root.path,
                environment_in_root=root.environment, variables={}, work=base / "private", log=base / "log",
                roles=[base], collections=[base], config=base / "ansible.cfg", doing=lambda _: None,
                python=Path(sys.executable), idle_minutes=idle)
        except CommandError as error:
            ended = {"message": error.message, "tail": error.tail, "hint": error.hint}
    (base / "end.json").write_text(json.dumps(ended))
    return 0

sys.exit(namespace.run_isolated(work))
"""


@dataclass(frozen=True)
class End:
    """How a play ended: its error, if it failed; what its log says; the files below /opt in the image."""

    error: dict[str, str] | None
    log: str
    made: list[str]


def run(base: Path, tasks: str, *, idle_minutes: float = 10, more: str = "", **environment: str) -> End:
    """Run a play with these tasks in a sandbox, started with more variables in the environment."""
    (base / "hosts.yml").write_text("images: {hosts: {node: }}\nothers: {hosts: {lb: }}\n")
    if not (base / "ansible.cfg").exists():
        (base / "ansible.cfg").write_text("[defaults]\n")
    (base / "play.yml").write_text(f"- hosts: images\n  gather_facts: false\n{more}  tasks:\n{tasks}")
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(REPO)!r})\n{_PLAY}",
            base,
            str(idle_minutes),
        ],
        check=True,
        env={"PATH": os.environ["PATH"], **environment},
    )
    made = (
        sorted(file.name for file in (base / "upper/opt").glob("*")) if (base / "upper/opt").exists() else []
    )
    return End(json.loads((base / "end.json").read_text()), (base / "log").read_text(), made)


def test_the_callers_environment_and_plugins_reach_neither_plugins_nor_modules(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    for folder in (planted, planted / ".ansible/plugins/filter", planted / ".ansible/plugins/callback"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("sitecustomize.py", "planted.py", "awx_display.py"):
            (folder / name).write_text(f"open({str(tmp_path / 'loaded')!r}, 'a').write(__file__ + '\\n')\n")
    (tmp_path / "loaded").touch()
    (tmp_path / "ansible.cfg").write_text(
        "[defaults]\nfact_caching = jsonfile\ntransport = local\nask_pass = true\nask_vault_pass = true\n"
    )
    end = run(
        tmp_path,
        "    - copy: {content: \"{{ lookup('pipe', 'env') }}\", dest: /opt/plugin}\n"
        "    - shell: env > /opt/module\n"
        "    - copy: {content: \"{{ lookup('config', 'DEFAULT_FILTER_PLUGIN_PATH') }}\", dest: /opt/path}\n"
        "    - setup:\n"
        "    - copy: {content: \"{{ ansible_facts.keys() | join(' ') }}\", dest: /opt/facts}\n"
        '    - copy: {content: "{{ ansible_facts.service_mgr }} {{ ansible_facts.distribution }}", dest: /opt/mine}\n'
        '    - copy: {content: "{{ ansible_facts.memtotal_mb }}", dest: /opt/theirs}\n',
        PYTHONPATH=str(planted),
        HOME=str(planted),
        SITE_TOKEN="hunter2",
        SSH_AUTH_SOCK="/planted/agent",
        ANSIBLE_FILTER_PLUGINS=str(planted),
        ANSIBLE_GATHER_SUBSET="all",
        AWX_LIB_DIRECTORY=str(planted),
    )
    opt = tmp_path / "upper/opt"
    for name in ("plugin", "module"):
        text = (opt / name).read_text()
        assert "PATH=" in text
        assert [word for word in ("planted", "hunter2", "GATHER_SUBSET") if word in text] == []
    loaded = (tmp_path / "loaded").read_text().splitlines()
    assert loaded == [str(planted / "sitecustomize.py")], (
        "that of the process that started the play, and no other"
    )
    assert json.loads((opt / "path").read_text()) == [str(tmp_path / "private/ansible/nowhere")]
    facts = set((opt / "facts").read_text().split())
    assert {"distribution", "os_family", "pkg_mgr", "architecture", "python", "system"} <= facts
    assert (
        not {"memtotal_mb", "processor", "kernel", "hostname", "mounts", "date_time", "default_ipv4"} & facts
    )
    assert (opt / "mine").read_text().startswith("systemd ")
    assert "theirs" not in end.made and end.error and "memtotal_mb" in end.error["hint"]


def test_a_task_for_another_machine_ends_the_play_wherever_it_learns_its_name(tmp_path: Path) -> None:
    end = run(
        tmp_path,
        "    - add_host: {name: new, ansible_connection: local}\n"
        "    - copy: {content: '', dest: '/opt/{{ item }}'}\n"
        "      delegate_to: '{{ item }}'\n"
        "      loop: [node, localhost, lb, new, 127.0.0.1]\n"
        "      ignore_errors: true\n"
        "      ignore_unreachable: true\n"
        "    - pause: {seconds: 60}\n",
    )
    assert end.made == ["node"]
    assert end.error and "left the image" in end.error["message"]
    assert [name for name in ("localhost", "lb", "new", "127.0.0.1") if f"`{name}`" in end.error["tail"]] == [
        "localhost", "lb", "new", "127.0.0.1",
    ]  # fmt: skip
    assert not [name for name in ("localhost", "lb", "new", "127.0.0.1") if Path("/opt", name).exists()]


@pytest.mark.parametrize(
    ("more", "tasks"),
    [
        ("", "    - pause: {prompt: Go on?}\n    - command: sleep 600\n"),
        ("  vars_prompt: [{name: a}]\n", "    - command: sleep 600\n"),
    ],
    ids=["pause", "vars_prompt"],
)
def test_a_play_that_asks_is_ended(tmp_path: Path, more: str, tasks: str) -> None:
    end = run(tmp_path, tasks, more=more)
    assert end.error and "asked a question" in end.error["message"]


def test_a_play_that_hangs_is_ended_and_leaves_no_process(tmp_path: Path) -> None:
    end = run(tmp_path, "    - command: sleep 601.5\n", idle_minutes=0.02)
    assert (
        end.error and "nothing happened for" in end.error["message"] and "--idle-limit" in end.error["hint"]
    )
    commands = (Path("/proc") / pid / "cmdline" for pid in os.listdir("/proc") if pid.isdigit())
    assert not [file for file in commands if b"601.5" in _content(file)]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
