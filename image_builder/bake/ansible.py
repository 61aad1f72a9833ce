"""The only interface to Ansible: run one playbook against one sandbox and report what its tasks do."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import ansible_runner

from image_builder.canonical import JSON
from image_builder.errors import CommandError
from image_builder.settings import VaultId
from image_builder.system.environment import environment
from image_builder.system.sandbox import BOUNDED

# The only one of the caller's settings that applies in plays, as it does when the inventory is read.
_VAULT = "ANSIBLE_VAULT_PASSWORD_FILE"
_PLUGINS = Path(__file__).parent / "plugins"


@dataclass(frozen=True)
class PlayResult:
    """The result of a play: how many tasks succeeded, and how many changed something."""

    ok: int
    changed: int


# Roles and package scripts can't make device nodes: with the number of the host's disk, they could write to it.
_ENTER = ("setpriv", "--bounding-set", "-mknod", "--", *BOUNDED)


def play(
    playbook: Path,
    host: str,
    *,
    inventories: Sequence[Path],
    root: Path,
    environment_in_root: Mapping[str, str],
    variables: Mapping[str, JSON],
    work: Path,
    log: Path,
    roles: Sequence[Path],
    collections: Sequence[Path],
    config: Path,
    doing: Callable[[str], None],
    vault: Sequence[VaultId] = (),
    extra: Sequence[str] = (),
    python: Path,
) -> PlayResult:
    """Run ``playbook`` against ``host`` of the inventories, which stands for the sandbox with the merged root ``root``.

    ``roles`` and ``collections`` are the directories that contain these, ``config`` is an ``ansible.cfg``, and
    ``extra`` holds the values of ``-e``. ``variables`` take precedence over ``extra`` and must not be secret: the
    runner writes them to a file in ``work``. All output goes to ``log``. Raises CommandError with the failed task and
    its message.
    """
    private = work / "ansible"
    (private / "env").mkdir(parents=True)
    arguments = ["--limit", host]
    for inventory in inventories:
        arguments += ["-i", os.fspath(inventory)]
    for vault_id in vault:
        arguments += ["--vault-id", str(vault_id)]
    for text in extra:
        arguments += ["--extra-vars", text]
    own = {**variables, **_connection(root, environment_in_root)}
    (private / "extra.json").write_text(json.dumps(own), encoding="utf-8")
    arguments += ["--extra-vars", f"@{private / 'extra.json'}"]
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"+ ansible-playbook {playbook} --limit {host}\n")
        failures: list[str] = []
        counts: dict[str, int] = {}
        handle = _listener(sink, doing, failures, counts)
        environment_of_play = _environment(private, roles, collections, config, python)
        status, code = _run(playbook, arguments, private, environment_of_play, python, handle)
    if status != "successful":
        raise CommandError(
            f"the play {playbook.name} {status} (exit status {code}) on {host}",
            tail="\n".join(failures) or "no task failed: see the log for Ansible's own message",
        )
    return PlayResult(counts.get("ok", 0), counts.get("changed", 0))


def _connection(root: Path, environment_in_root: Mapping[str, str]) -> dict[str, JSON]:
    """Return the variables that map a host of the inventory to the sandbox at ``root``."""
    return {
        "ansible_connection": "sandbox",
        "ansible_sandbox_root": os.fspath(root),
        "ansible_sandbox_enter": list(_ENTER),
        "ansible_sandbox_environment": [f"{k}={v}" for k, v in sorted(environment_in_root.items())],
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_remote_tmp": "/tmp/.ansible",
    }


def _listener(
    sink: TextIO, doing: Callable[[str], None], failures: list[str], counts: dict[str, int]
) -> Callable[[dict[str, Any]], bool]:
    """Return the runner's handler for Ansible's events. The runner keeps none of them, so its ``stats`` are empty."""

    def handle(event: dict[str, Any]) -> bool:
        if event.get("stdout"):
            sink.write(_plain(event["stdout"]) + "\n")
        data = event.get("event_data", {})
        failed = event["event"] in ("runner_on_failed", "runner_on_unreachable")
        if event["event"] == "playbook_on_task_start":
            doing(data.get("name") or data.get("task", ""))
        elif failed and not data.get("ignore_errors"):
            failures.append(_failure(data))
        elif event["event"] == "playbook_on_stats":
            counts.update({name: sum(data[name].values()) for name in ("ok", "changed")})
        return False

    return handle


def _run(
    playbook: Path,
    arguments: Sequence[str],
    private: Path,
    environment_of_play: Mapping[str, str],
    python: Path,
    handle: Callable[[dict[str, Any]], bool],
) -> tuple[str, int]:
    """Run ansible-playbook to completion; return (the runner's status, the exit status)."""
    config = ansible_runner.RunnerConfig(
        private_data_dir=os.fspath(private),
        project_dir=os.fspath(playbook.parent),
        playbook=os.fspath(playbook),
        cmdline=shlex.join(arguments),
        envvars=dict(environment_of_play),
        quiet=True,
        rotate_artifacts=0,
    )
    config.prepare()
    config.command[0] = os.fspath(python.parent / "ansible-playbook")
    runner = ansible_runner.Runner(config, event_handler=handle, remove_partials=True)
    status, code = runner.run()
    return status, code


_RAW = "_raw_params="
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _plain(text: str) -> str:
    return _COLOUR.sub("", text)


def _failure(data: Mapping[str, Any]) -> str:
    """Return the failed task, its location and its output, without anything that ``no_log`` hides."""
    result = data.get("res", {})
    lines = _ended(result, data)
    lines += [str(result[key]) for key in ("msg", "stderr", "stdout") if result.get(key)]
    for item in result.get("results", []):
        if item.get("failed"):
            lines.append(f"{item.get('item', '')}: {'; '.join([*_ended(item, data), item.get('msg', '')])}")
    return "\n".join([f"task {data.get('task')!r} ({data.get('task_path', '?')})", *lines])


def _ended(result: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """Return how a program ended, and which one, if a task's result, or that of one item of its loop, says so.

    `raw` and `script` don't: theirs is in the task's arguments, maybe as a template.
    """
    if "rc" not in result:
        return []
    command = result.get("cmd") or ""
    if not isinstance(command, str):
        command = shlex.join(map(str, command))
    if _module_name(data) in ("raw", "script"):
        command = str(data.get("task_args", "")).removeprefix(_RAW)
    return [f"exit status {result['rc']}{': ' if command else ''}{command}"]


def _module_name(data: Mapping[str, Any]) -> str:
    return str(data.get("resolved_action", "")).rpartition(".")[2]


def _environment(
    private: Path, roles: Sequence[Path], collections: Sequence[Path], config: Path, python: Path
) -> dict[str, str]:
    return {
        **environment(),
        **({_VAULT: os.environ[_VAULT]} if _VAULT in os.environ else {}),
        "PATH": f"{python.parent}:{environment()['PATH']}",
        "HOME": os.fspath(private),
        "ANSIBLE_CONFIG": os.fspath(config),
        "ANSIBLE_ROLES_PATH": ":".join(map(os.fspath, roles)),
        "ANSIBLE_COLLECTIONS_PATH": ":".join(map(os.fspath, collections)),
        "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",
        "ANSIBLE_CONNECTION_PLUGINS": os.fspath(_PLUGINS / "connection"),
        "ANSIBLE_PIPELINING": "true",
        # Every image has `su`. As with sudo, the user that a task becomes needs no login shell.
        "ANSIBLE_BECOME_METHOD": "su",
        "ANSIBLE_SU_FLAGS": "--shell /bin/sh",
        "ANSIBLE_HOME": os.fspath(private / "home"),
        "ANSIBLE_LOCAL_TEMP": os.fspath(private / "tmp"),
        # So that a failure has the arguments of its task.
        "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "true",
        "ANSIBLE_FORCE_COLOR": "false",
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_RETRY_FILES_ENABLED": "false",
        "ANSIBLE_FORKS": "1",
    }
