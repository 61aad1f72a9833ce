"""The only interface to Ansible: run one playbook against one sandbox and report what its tasks do."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ansible_runner
import yaml
from ansible_runner.utils import get_callback_dir

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.errors import CommandError
from image_builder.settings import Settings, VaultId
from image_builder.system.environment import environment
from image_builder.system.sandbox import BOUNDED
from image_builder.text import human_seconds

# The only one of the caller's settings that applies in plays, as it does when the inventory is read.
_VAULT = "ANSIBLE_VAULT_PASSWORD_FILE"
_PLUGINS = Path(__file__).parent / "plugins"
# What ansible-runner adds to a play's environment.
_OF_RUNNER = frozenset({"ANSIBLE_CALLBACK_PLUGINS", "ANSIBLE_STDOUT_CALLBACK", "AWX_ISOLATED_DATA_DIR"})
# ansible-runner gives a play a terminal, at which nobody sits: standard input is closed, so that Ansible knows it.
_UNATTENDED = ("/bin/sh", "-c", 'exec "$@" </dev/null', "sh")
# What Ansible says then of a question that it doesn't ask: of `pause`, and of `vars_prompt`.
_UNASKED = re.compile(
    r"\[WARNING\]: Not (?:waiting for response to prompt|prompting as we are not in interactive mode)"
)
_UNDEFINED = re.compile(r"has no attribute '(\w+)'|'(\w+)' is undefined")


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
    idle_minutes: float = Settings.idle_minutes,
) -> PlayResult:
    """Run ``playbook`` against ``host`` of the inventories, which stands for the sandbox with the merged root ``root``.

    The environment of the play is made from nothing. A play that acts on another machine or asks a question is ended,
    and so is one from which Ansible reports nothing for ``idle_minutes``.

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
    withheld = private / "withheld"
    own = {**variables, **_connection(host, root, environment_in_root, withheld)}
    (private / "extra.json").write_text(json.dumps(own), encoding="utf-8")
    arguments += ["--extra-vars", f"@{private / 'extra.json'}"]
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"+ ansible-playbook {playbook} --limit {host}\n")
        watch = Watch(doing, idle_minutes)
        counts: dict[str, int] = {}
        handle = _listener(sink, watch, counts)
        environment_of_play = _environment(private, roles, collections, config, python)
        status, code = _run(playbook, arguments, private, environment_of_play, python, handle, watch)
    if status != "successful" or watch.end:
        raise CommandError(
            f"the play {playbook.name} {watch.end or f'{status} (exit status {code})'} on {host}",
            tail="\n".join(watch.failures) or "no task failed: see the log for Ansible's own message",
            hint=watch.hint or _hint(watch.failures, withheld),
        )
    return PlayResult(counts.get("ok", 0), counts.get("changed", 0))


def _connection(
    host: str, root: Path, environment_in_root: Mapping[str, str], withheld: Path
) -> dict[str, JSON]:
    """Return the variables that map ``host`` to the sandbox at ``root``, and refuse every other host.

    The names of facts that aren't the image's own go to the file ``withheld``.
    """
    return {
        "ansible_connection": "sandbox",
        "ansible_sandbox_image": host,
        "ansible_sandbox_root": os.fspath(root),
        "ansible_sandbox_withheld": os.fspath(withheld),
        "ansible_sandbox_enter": list(_ENTER),
        "ansible_sandbox_environment": [f"{k}={v}" for k, v in sorted(environment_in_root.items())],
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_remote_tmp": "/tmp/.ansible",
    }


@dataclass
class Watch:
    """Shows for how many minutes a task has been running, and ends a play that hangs or asks a question.

    ``end`` says how the play was ended, if it was, with a ``hint``; ``failures`` are those of its tasks. ``clock``
    returns seconds.
    """

    doing: Callable[[str], None]
    idle_minutes: float
    clock: Callable[[], float] = time.monotonic
    failures: list[str] = field(default_factory=list)
    end: str = ""
    hint: str | None = None

    def __post_init__(self) -> None:
        self._task, self._minutes = "", 0
        self._since = self._heard = self.clock()

    def start(self, task: str) -> None:
        """Show that a task starts."""
        self._task, self._minutes, self._since = task, 0, self.clock()
        self.doing(task)

    def hear(self, text: str) -> None:
        """Note that Ansible reported something."""
        self._heard = self.clock()
        if _UNASKED.match(text.lstrip()):
            self.end = f"asked a question in {self._where()}"
            self.hint = "nobody answers in a bake: give variables with `-e`, and a pause its `seconds`"

    def is_over(self) -> bool:
        """Show a task's minutes; return whether the play must end. The runner asks this every few seconds."""
        minutes = int((self.clock() - self._since) / 60)
        if minutes > self._minutes:
            self._minutes = minutes
            self.doing(f"{self._task} ({minutes} min)")
        if not self.end and (idle := self.clock() - self._heard) > self.idle_minutes * 60:
            self.end = f"was ended: nothing happened for {human_seconds(idle)} in {self._where()}"
            self.hint = "`--idle-limit MINUTES` gives a task more time"
        return bool(self.end)

    def _where(self) -> str:
        return f"task {self._task!r}" if self._task else "the time before its first task"


def _listener(sink: TextIO, watch: Watch, counts: dict[str, int]) -> Callable[[dict[str, Any]], bool]:
    """Return the runner's handler for Ansible's events. The runner keeps none of them, so its ``stats`` are empty."""

    def handle(event: dict[str, Any]) -> bool:
        text = _plain(event.get("stdout") or "")
        if text:
            sink.write(text + "\n")
        watch.hear(text)
        data = event.get("event_data", {})
        if event["event"] == "playbook_on_task_start":
            watch.start(data.get("name") or data.get("task", ""))
        elif event["event"] == "runner_on_unreachable":  # even if the play ignores that
            watch.failures.append(_failure(data))
            watch.end = f"left the image in task {data.get('task')!r}"
        elif event["event"] == "runner_on_failed" and not data.get("ignore_errors"):
            watch.failures.append(_failure(data))
        elif event["event"] == "playbook_on_stats":
            counts.update({name: sum(data[name].values()) for name in ("ok", "changed")})
        return False

    return handle


def _hint(failures: Sequence[str], withheld: Path) -> str | None:
    """Return a hint for a task that failed for want of a fact of the machine that builds."""
    names = set(withheld.read_text(encoding="utf-8").split()) if withheld.is_file() else set()
    for fact, variable in _UNDEFINED.findall("\n".join(failures)):
        if (name := variable or f"ansible_{fact}") in names:
            return f"`{name}` is a fact of the machine that builds: set it in the inventory, or ask at boot"
    return None


def _run(
    playbook: Path,
    arguments: Sequence[str],
    private: Path,
    environment_of_play: Mapping[str, str],
    python: Path,
    handle: Callable[[dict[str, Any]], bool],
    watch: Watch,
) -> tuple[str, int]:
    """Run ansible-playbook until it or the watch ends it; return (the runner's status, the exit status)."""
    config = _configuration(playbook, arguments, private, environment_of_play, python)
    runner = ansible_runner.Runner(
        config, event_handler=handle, cancel_callback=watch.is_over, remove_partials=True
    )
    status, code = runner.run()
    return status, code


def _configuration(
    playbook: Path,
    arguments: Sequence[str],
    private: Path,
    environment_of_play: Mapping[str, str],
    python: Path,
) -> ansible_runner.RunnerConfig:
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
    config.command = [*_UNATTENDED, *config.command]
    # The runner starts from this process's own environment.
    config.env = {**environment_of_play, **{name: config.env[name] for name in _OF_RUNNER}}
    return config


_TEXT = "tag:yaml.org,2002:str"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _plain(text: str) -> str:
    return _COLOUR.sub("", text)


def _failure(data: Mapping[str, Any]) -> str:
    """Return the failed task, its location and its output, without anything that ``no_log`` hides."""
    result = data.get("res", {})
    lines = _ended(result, data)
    lines += [str(result[key]) for key in ("msg", "stderr", "stdout") if result.get(key)]
    for item in result.get("results", []):
        if item.get("failed") or item.get("unreachable"):
            lines.append(f"{item.get('item', '')}: {'; '.join([*_ended(item, data), item.get('msg', '')])}")
    return "\n".join([f"task {data.get('task')!r} ({data.get('task_path', '?')})", *lines])


def _ended(result: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """Return how a program ended, and which one, if a task's result, or that of one item of its loop, says so.

    `raw` and `script` don't: theirs is in the task's file, maybe as a template.
    """
    if "rc" not in result:
        return []
    command = result.get("cmd") or ""
    if not isinstance(command, str):
        command = shlex.join(map(str, command))
    if (module := _module_name(data)) in ("raw", "script"):
        command = _written(module, str(data.get("task_path", "")))
    return [f"exit status {result['rc']}{': ' if command else ''}{command}"]


def _written(module: str, place: str) -> str:
    """Return a task's command as its file has it, at ``place``, its ``file:line``; empty if it isn't plain text."""
    file, _, line = place.rpartition(":")
    try:
        nodes: list[Any] = [yaml.compose(Path(file).read_bytes(), yaml.SafeLoader)]
    except (OSError, yaml.YAMLError):
        return ""
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            nodes.append(value)
            if str(node.start_mark.line + 1) == line and str(key.value).rpartition(".")[2] == module:
                arguments = value.value if isinstance(value, yaml.MappingNode) else [(key, value)]
                command = next((of for name, of in arguments if name is key or name.value == "cmd"), value)
                return str(command.value).strip() if command.tag == _TEXT else ""
    return ""


def _module_name(data: Mapping[str, Any]) -> str:
    return str(data.get("resolved_action", "")).rpartition(".")[2]


def _environment(
    private: Path, roles: Sequence[Path], collections: Sequence[Path], config: Path, python: Path
) -> dict[str, str]:
    return {
        **environment(),
        **engine.plugin_settings(config, private / "nowhere"),
        **({_VAULT: os.environ[_VAULT]} if _VAULT in os.environ else {}),
        "PATH": f"{python.parent}:{environment()['PATH']}",
        "HOME": os.fspath(private),
        "ANSIBLE_CONFIG": os.fspath(config),
        "ANSIBLE_ROLES_PATH": ":".join(map(os.fspath, roles)),
        "ANSIBLE_COLLECTIONS_PATH": ":".join(map(os.fspath, collections)),
        "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",
        "ANSIBLE_CONNECTION_PLUGINS": os.fspath(_PLUGINS / "connection"),
        "ANSIBLE_CALLBACK_PLUGINS": "",
        "AWX_LIB_DIRECTORY": get_callback_dir(),
        "ANSIBLE_TRANSPORT": "sandbox",
        "ANSIBLE_PIPELINING": "true",
        # Every image has `su`. As with sudo, the user that a task becomes needs no login shell.
        "ANSIBLE_BECOME_METHOD": "su",
        "ANSIBLE_SU_FLAGS": "--shell /bin/sh",
        "ANSIBLE_HOME": os.fspath(private / "home"),
        "ANSIBLE_LOCAL_TEMP": os.fspath(private / "tmp"),
        # They may hold a vaulted value, which Ansible shows in clear.
        "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "false",
        "ANSIBLE_FORCE_COLOR": "false",
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_RETRY_FILES_ENABLED": "false",
        "ANSIBLE_FORKS": "1",
        # What an ansible.cfg may say: facts of earlier plays, and questions.
        "ANSIBLE_CACHE_PLUGIN": "memory",
        "ANSIBLE_ASK_PASS": "false",
        "ANSIBLE_BECOME_ASK_PASS": "false",
        "ANSIBLE_ASK_VAULT_PASS": "false",
        "ANSIBLE_ENABLE_TASK_DEBUGGER": "false",
        # Sets have the same order in every play.
        "PYTHONHASHSEED": "0",
    }
