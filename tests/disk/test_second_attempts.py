"""Units of a boot that fail once, under a real systemd in namespaces of its own: what follows them runs after a retry.

The units and drop-ins are the roles' own, with shorter pauses and without sandboxes. Disk, engine, kubelet and images
are stand-ins. The agent itself decides what follows from their reports: whether to seed and to join, and the verdict.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.builds import REPO
from tests.support.nodes import user_manager
from tests.support.roles import templates

pytestmark = pytest.mark.root

ENGINES = ("docker", "containerd")
# The agent's command of each unit that is started at boot.
COMMANDS = {
    "local-disk": "disk",
    "preload-seed": "seed",
    "image-preload": "preload",
    "preflight": "preflight",
    "node-join": "join",
}
# Units that are ordered after another one without needing its second attempt, and why.
INDEPENDENT = {
    ("preload-promote", "image-preload"): "it copies what the seed linked",
    ("node-join", "preflight"): "it waits for the verdict by itself",
    ("node-join", "image-preload"): "the kubelet waits for the images by itself",
    ("preload-promote", "docker"): "it copies what the seed linked",
    ("preload-promote", "containerd"): "it copies what the seed linked",
    ("preflight", "docker"): "it waits for the engine by itself",
    ("preflight", "containerd"): "it waits for the engine by itself",
}
# A program of the node: each start, and each success, is a line of the log.
AGENT = """
import json, os, subprocess, sys, time
from pathlib import Path
from image_builder.node import status
from image_builder.node.errors import NodeError

here, verb, again = Path(__file__).parent, sys.argv[1], "--again" in sys.argv
etc, mount_point = here / "etc", Path("/mnt/local")
root, images = mount_point / "engine", Path("/run/engine-with-images")

def log(*words):
    with (here / "log").open("a") as file:
        file.write(json.dumps(words) + "\\n")

def tell(section, **value):
    status.update(section, {"state": "ok", **value}, status.Places(etc=etc))

def fails():
    marker = here / "failed"
    if verb != os.environ["FAILS"] or marker.exists():
        return False
    marker.touch()
    if os.environ["HOW"] == "killed":
        os.kill(os.getpid(), 9)
    return True

def disk():
    if fails():
        tell("disk", state="failed", code="disk.failed", reason="once")
        return 1
    hidden = sorted(os.listdir(mount_point)) if mount_point.exists() else []
    mount_point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount_point], check=True)
    tell("disk", action="format", reason="")
    log("hidden", hidden)
    return 0

def seed():
    from image_builder.node.seed import command
    def fill(settings, store):
        if fails():
            raise NodeError("store.io", "once")
        if images.with_name("engine").exists():
            raise NodeError("seed.busy", "the engine runs on it")
        (root / "images").mkdir(parents=True)
        return {"state": "ok", "engine": settings.engine, "action": "seeded"}
    command.seed, command.read_manifest, command._ATTEMPTS = fill, lambda path: None, 1
    command.close_store = lambda: None
    return command.run(command.Places(etc=etc, manifest=Path("/opt/preload/store.json")), pause=0)

def preload():
    if fails() or not images.with_name("engine").exists():
        tell("preload", state="failed", code="preload.engine", reason="no answer")
        return 1
    if not images.exists():
        tell("preload", state="failed", code="preload.missing", reason="no archive")
        return 1
    tell("preload")
    return 0

def preflight():
    from image_builder.node.preflight import command
    if fails():
        return 1
    reboot = ("touch", "/run/rebooted")
    places = command.Places(etc=etc, release=here / "release", attempts=here / "attempts.json", reboot=reboot,
        uptime=lambda: 60.0)
    code = command.again(places) if again else command.run(places)
    verdict = json.loads(Path("/run/node/preflight.json").read_bytes())
    log("verdict", verdict["state"], verdict["action"], verdict["code"])
    return code

def join():
    from image_builder.node.join import surroundings
    from image_builder.node.join.codes import JoinError
    from image_builder.node.net.retry import Deadline
    places = surroundings.Places(etc=etc)
    if fails():
        return 1
    try:
        surroundings.disk(places, Deadline.after(1))
        surroundings.runtime(places, os.environ["ENGINE"], Deadline.after(1))
        surroundings.gpu(places, Deadline.after(1))
    except JoinError as error:
        log("join", error.number)
        return 1
    return 0

def promote():
    from image_builder.node.promote import command
    settings = command.load_all(etc)
    log("promote", command._no_promotion(settings, command.Places(etc=etc)).get("code", ""))
    return 0

log("start", verb)
code = globals()[verb]()
if code == 0:
    log("success", verb)
sys.exit(code)
"""
# An engine knows the images that its data root has as it starts.
ENGINE = """#!/bin/sh
FAILS={fails}
echo '["start", "engine"]' >> {here}/log
if test $FAILS = engine && test ! -e {here}/failed; then touch {here}/failed; exit 1; fi
rm -f /run/engine-with-images
test ! -e /mnt/local/engine/images || touch /run/engine-with-images
touch /run/engine
echo '["success", "engine"]' >> {here}/log
exec sleep infinity
"""
KUBELET = """#!/bin/sh
echo '["start", "kubelet"]' >> {here}/log
exec sleep infinity
"""
KUBELET_UNIT = """[Unit]
Wants={engine}.service
After={engine}.service
StartLimitIntervalSec=0
[Service]
ExecStart=/usr/local/sbin/kubelet
Restart=always
RestartSec=100ms
[Install]
WantedBy=multi-user.target
"""
DRIVER = """
engine, units = arguments[0], arguments[1].split(",")
for place in ("/mnt", "/opt", "/usr/local/sbin"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
Path("/opt/preload").mkdir()
Path("/opt/preload/store.json").touch()
Path("/opt/preloaded_docker_images.json").touch()
for name, text in json.loads((here / "programs.json").read_text()).items():
    program = Path("/usr/local/sbin", name)
    program.write_text(text)
    program.chmod(0o755)

def is_ready():
    states = ctl("is-active", *units).split()
    if states != ["active"] * len(units):
        return False
    verdict = json.loads(Path("/run/node/preflight.json").read_bytes())["state"]
    log = (here / "log").read_text()
    # The log has each verdict after it was written, and a repeated one may follow.
    last = [line for line in log.splitlines() if '"verdict"' in line][-1:]
    return verdict == "passed" and '"passed"' in "".join(last) and '["success", "promote"]' in log

ctl("--no-block", "start", "multi-user.target")
# Six nodes boot at once, beside whatever else the machine does.
up = until(is_ready, 240)
status = json.loads(Path("/run/node/status.json").read_bytes())
states = dict(zip(units, ctl("is-active", *units).split(), strict=True))
lines = [json.loads(line) for line in (here / "log").read_text().splitlines()]
print(json.dumps({
    "up": up, "states": states, "ready": status["ready"], "status": status, "log": lines,
    "rebooted": Path("/run/rebooted").exists(),
    "kubelet": Path("/run/node/kubelet.env").read_text(),
}))
manager.terminate()
manager.wait(120)
"""
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0}
# What a user's instance can't do, and limits that only matter on a machine.
_SYSTEM_ONLY = (
    r"(?m)^(StandardOutput|Protect\w+|Private\w+|Restrict[A-Z]\w+|LockPersonality|NoNewPrivileges|SystemCall\w+"
    r"|ReadWritePaths|RuntimeDirectory\w*|OOM\w+|Limit\w+|TasksMax|Nice|RequiresMountsFor|\w+Accounting)=.*\n"
)


def _shorter(match: re.Match[str]) -> str:
    seconds = float(match[2]) * _SECONDS[match[3]]
    return f"{match[1]}={max(100, round(seconds * 1000 / 100))}ms"


def unit(role: str, name: str, **variables: Any) -> str:
    """Return a role's unit or drop-in for a user's instance, with pauses of a hundredth."""
    text = re.sub(_SYSTEM_ONLY, "", templates.render(role, name, **variables))
    text = re.sub(r"(?m)^(RestartSec|OnActiveSec|OnUnitInactiveSec)=(\d+)(s|min|)$", _shorter, text)
    text = re.sub(r"(?m)^RandomizedDelaySec=.*\n", "", text)
    text = text.replace("systemctl ", "systemctl --user ")
    # With these pauses, a unit is started more often than systemd allows.
    return text.replace("[Unit]\n", "[Unit]\nStartLimitIntervalSec=0\n")


@cache
def node_units(engine: str) -> dict[str, str]:
    """Return a node's units and drop-ins, by their paths."""
    roots = {"image_preload_engine": engine, "image_preload_data_root": "/mnt/local/engine"}
    gate = {"gpu_preflight_kubeconfig": "", "gpu_preflight_engine": engine}
    files = {
        "local-disk.service": unit("local_disk", "local-disk.service.j2"),
        **{
            f"{name}.service": unit("image_preload", f"{name}.service.j2", **roots)
            for name in ("preload-seed", "image-preload", "preload-promote")
        },
        **{
            name: unit("gpu_preflight", f"{name}.j2", **gate)
            for name in ("preflight.service", "preflight-again.service", "preflight-again.timer")
        },
        "node-join.service": unit("node_join", "node-join.service.j2"),
        "kubelet.service": KUBELET_UNIT.format(engine=engine),
        f"{engine}.service": "[Service]\nExecStart=/usr/local/sbin/engine\n[Install]\nWantedBy=multi-user.target\n",
        f"{engine}.service.d/00-role.conf": unit("container_runtime", f"{engine}.conf.j2"),
        "multi-user.target": "[Unit]\nDescription=Multi-User\n",
    }
    for role, variables in (("local_disk", {}), ("image_preload", roots), ("gpu_preflight", gate)):
        for item in templates.value(role, f"__{role}_files", **variables):
            if item["dest"].endswith(".conf") and ".service.d/" in item["dest"]:
                name = item["dest"].removeprefix("/etc/systemd/system/")
                files[name] = unit(role, item["src"], **variables)
    return files


def write_units(units: Path, engine: str) -> None:
    """Write a node's units, and enable them."""
    for name, text in node_units(engine).items():
        path = units / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if "WantedBy=multi-user.target" in text:
            wants = units / "multi-user.target.wants"
            wants.mkdir(exist_ok=True)
            (wants / name).symlink_to(path)


def prepare(directory: Path, engine: str, name: str, how: str) -> None:
    """Write a node without an archive, one of whose units fails once or is killed once."""
    fails = COMMANDS.get(name, "engine")
    write_units(directory / "config/systemd/user", engine)
    (directory / "etc").mkdir()
    preload = templates.value(
        "image_preload",
        "__image_preload_settings",
        image_preload_engine=engine,
        image_preload_data_root="/mnt/local/engine",
    )
    for name, document in (
        ("disk", {}),
        ("preload", preload),
        ("preflight", {"wait_seconds": 1, "kubeconfig": "", "engine": engine}),
    ):
        (directory / f"etc/{name}.json").write_text(json.dumps(document))
    (directory / "agent.py").write_text(AGENT)
    client = "#!/bin/sh\nexec test -e /run/engine\n"
    programs = {
        "node-agent": f"#!/bin/sh\nexport PYTHONPATH={REPO} FAILS={fails} HOW={how} ENGINE={engine}\n"
        f'exec {sys.executable} {directory}/agent.py "$@" >> {directory}/agent.log 2>&1\n',
        "engine": ENGINE.format(here=directory, fails=fails),
        "kubelet": KUBELET.format(here=directory),
        "docker": client,
        "ctr": client,
    }
    (directory / "programs.json").write_text(json.dumps(programs))


def boot(directory: Path, engine: str) -> dict[str, Any]:
    """Boot a prepared node, until it is up or four minutes have passed; return what became of it."""
    up = [f"{name}.service" for name in (*COMMANDS, engine, "kubelet")]
    found = user_manager.drive(directory, DRIVER, engine, ",".join(up), seconds=600)
    logs = (directory / name for name in ("systemd.log", "agent.log"))
    return found | {"text": "".join(path.read_text()[-4000:] for path in logs if path.exists())}


Case = tuple[str, str, str]
CASES: list[Case] = [(engine, name, "fails") for engine in ENGINES for name in (*COMMANDS, engine)]
CASES += [("docker", "local-disk", "killed"), ("containerd", "image-preload", "killed")]
Boots = dict[Case, dict[str, Any]]


@pytest.fixture(scope="module")
def boots(tmp_path_factory: pytest.TempPathFactory) -> Boots:
    """Boot all nodes, a few at a time."""
    directories = [tmp_path_factory.mktemp("-".join(case)) for case in CASES]
    for directory, case in zip(directories, CASES, strict=True):
        prepare(directory, *case)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(boot, directories, [engine for engine, _, _ in CASES]))
    units = [directory / "config/systemd/user" for directory in directories]
    return {
        case: {**each, "followers": followers(place, case[1])}
        for case, each, place in zip(CASES, found, units, strict=True)
    }


every_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@every_case
def test_node_comes_up(case: Case, boots: Boots) -> None:
    """No person and no reboot is needed, and no verdict condemns the machine or its image in the meantime."""
    found = boots[case]
    assert found["up"] is True, f"{found['states']}\n{found['log']}\n{found['text']}"
    assert found["ready"] is True and found["rebooted"] is False, found["status"]
    verdicts = [line[1:3] for line in found["log"] if line[0] == "verdict"]
    assert {tuple(verdict) for verdict in verdicts} <= {("inconclusive", "none"), ("passed", "none")}
    assert verdicts[-1] == ["passed", "none"]
    assert "register-with-taints=image-builder/preflight=" in found["kubelet"], "another taint"


@every_case
def test_seed_is_on_the_local_disk(case: Case, boots: Boots) -> None:
    """Nothing was on the OS disk when the local disk was mounted over it, and the engine started with its images."""
    found = boots[case]
    assert [line[1] for line in found["log"] if line[0] == "hidden"] == [[]]
    assert found["status"]["seed"]["action"] == "seeded"
    assert {line[1] for line in found["log"] if line[0] == "promote"} == {""}


@every_case
def test_what_follows_a_unit_runs_after_its_second_attempt(case: Case, boots: Boots) -> None:
    engine, name, _ = case
    log = [tuple(line[:2]) for line in boots[case]["log"]]
    second = len(log) - log[::-1].index(("success", COMMANDS.get(name, "engine")))
    programs = {**COMMANDS, "preflight": "verdict", "preload-promote": "promote", engine: "engine"}
    programs["kubelet"] = "kubelet"
    later = {word if kind == "start" else kind for kind, word in log[second:] if kind in ("start", "verdict")}
    late = {unit for unit in boots[case]["followers"] if programs[unit] not in later}
    assert {(unit, name) for unit in late} <= set(INDEPENDENT), log


def followers(units: Path, name: str) -> set[str]:
    """Return the services that are ordered after one, by their own files and drop-ins or by its own."""

    def named(unit: str, key: str) -> set[str]:
        files = [units / f"{unit}.service", *(units / f"{unit}.service.d").glob("*.conf")]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return {
            word for line in lines if line.startswith(f"{key}=") for word in line.partition("=")[2].split()
        }

    names = {path.stem for path in units.glob("*.service")} - {"preflight-again"}
    after = {unit for unit in names if f"{name}.service" in named(unit, "After")}
    return after | {unit for unit in names if f"{unit}.service" in named(name, "Before")}
