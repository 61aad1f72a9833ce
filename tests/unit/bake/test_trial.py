"""What the trial of a bake reads: units as systemd reads them, and the sentences of programs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from image_builder.bake import trial
from image_builder.bake.trial import Refusal
from image_builder.system.sandbox import Root

_UNIT = """
[Service]
Environment=A=1 "B=two words"
Environment=EMPTY=
EnvironmentFile=-/etc/absent
EnvironmentFile=/etc/kubelet.env
# ExecStart=/usr/bin/other
ExecStart=/usr/bin/kubelet \\
  --label=${A},x=${FROM_FILE} \\
  --ip=${EMPTY} $B $EMPTY --percent=5%% \\
  "--quoted=a b"
ExecReload=/bin/kill
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "usr/lib/systemd/system/kubelet.service": _UNIT.replace("--label", "--packaged"),
        "etc/systemd/system/kubelet.service": _UNIT,
        "etc/kubelet.env": "FROM_FILE='f'\n# A=5\n",
        "usr/bin/kubelet": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_unit_is_read_as_systemd_reads_it(tree: Path) -> None:
    unit = trial.read_unit(tree, "kubelet")
    assert unit
    assert unit.argv == (
        *("/usr/bin/kubelet", "--label=1,x=f", "--ip=", "two", "words", "--percent=5%", "--quoted=a b"),
    )
    assert unit.environment["B"] == "two words"


def test_a_drop_in_replaces_the_command(tree: Path) -> None:
    for folder, name, flag in (("usr/lib", "10", "--packaged"), ("etc", "10", "--ours"), ("etc", "20", "")):
        path = tree / folder / f"systemd/system/kubelet.service.d/{name}.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = f"ExecStart=\nExecStart=/usr/bin/kubelet {flag} ${{A}}\n" if flag else "Environment=A=9\n"
        path.write_text(f"[Service]\n{command}")
    unit = trial.read_unit(tree, "kubelet")
    assert unit and unit.argv == ("/usr/bin/kubelet", "--ours", "9")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=--one  --two \n", "--one  --two"),
        ("; don't\nA=it's\n", "it's"),
        (" A = 'a b' \n", "a b"),
        ('A="a \\"b\\" $c\nd"\n', 'a "b" $c\nd'),
        ("A=a\\\nb\\ c#d\n", "ab c#d"),
        ("A=1\nA=\nB=2\n", ""),
        ("#A=1\nA=2\n", "2"),
    ],
)
def test_an_environment_file_is_read_as_systemd_reads_it(tree: Path, line: str, value: str) -> None:
    (tree / "etc/kubelet.env").write_text(f"FROM_FILE=f\n{line}LAST=x\n")
    unit = trial.read_unit(tree, "kubelet")
    assert unit and unit.environment["A"] == value  # also over a value of Environment
    assert unit.environment["FROM_FILE"] == "f" and unit.environment["LAST"] == "x"


def test_a_quote_without_its_twin_is_no_bug(tree: Path) -> None:
    path = tree / "etc/systemd/system/kubelet.service.d/10.conf"
    path.parent.mkdir()
    path.write_text("[Service]\nEnvironment=C=it's\nExecStart=\nExecStart=/usr/bin/kubelet it's\n")
    unit = trial.read_unit(tree, "kubelet")
    assert unit and unit.argv == ("/usr/bin/kubelet", "it's")


@pytest.mark.parametrize("text", ["imports = 5", 'imports = ["", 5]', "plugins = 5", 'plugins = "a.b"'])
def test_a_configuration_of_containerd_of_the_wrong_type_is_no_bug(tmp_path: Path, text: str) -> None:
    root = Root(tmp_path, {})
    assert list(trial._plugins(root, tomllib.loads(text))) == []


@pytest.mark.parametrize("missing", ["usr/bin/kubelet", "etc/systemd/system/kubelet.service"])
def test_what_is_not_there_is_not_asked(tree: Path, missing: str) -> None:
    (tree / missing).unlink()
    (tree / "usr/lib/systemd/system/kubelet.service").unlink()
    assert trial.read_unit(tree, "kubelet") is None


_FAILED = 'E1128 20:47:03 413 run.go:72] "command failed" err='


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            f'I1128 1 2 a.go:1] "x"\n{_FAILED}"time: unknown unit \\"d\\" in duration"\n',
            'time: unknown unit "d" in duration',
        ),
        (f"{_FAILED}<\n\tunknown labels\n\tallowed: none\n >\n", "unknown labels allowed: none"),
        (
            "F1128 20:47:03.1   5 server.go:269] failed to run Kubelet: no\ngoroutine 1 [running]:\n",
            "failed to run Kubelet: no",
        ),
        ("Error: unknown flag: --no\nUsage:\n  kubelet [flags]\n", "Error: unknown flag: --no"),
    ],
)
def test_a_kubelet_is_quoted(said: str, sentence: str) -> None:
    (refusal,) = trial._refusals("kubelet", "/k.yaml", trial._reason_of_kubelet(said), 1)
    assert refusal == Refusal("kubelet", "/k.yaml", sentence, 1)


@pytest.mark.parametrize(
    "sentence",
    [
        "failed to run Kubelet: reserved-cpus: 0-95 is not a subset of online-cpus: 0-1",
        "new static policy error: [cpumanager] unable to reserve the required amount of CPUs",
        "the reserved memory configuration references a NUMA node 7 that does not exist on this machine",
        "could not read controllers for cgroup: open /sys/fs/cgroup/x.slice/cgroup.controllers: no such file",
        "kubelet is configured to not run on a host using cgroup v1",
        "running with swap on is not supported, please disable swap",
        "Enabling IP forwarding failed: open /proc/sys/net/ipv4/ip_forward: read-only file system",
        "validate service connection: validate CRI v1 API: dial unix /run/c.sock: connect: no such file or directory",
        "Error initializing network controller: Error creating default bridge network: operation not permitted",
        "failed to get docker version: Cannot connect to the Docker daemon at unix:///var/run/docker.sock",
    ],
)
def test_this_machine_decides_nothing(sentence: str) -> None:
    assert trial._refusals("kubelet", "", sentence, 1) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "invalid configuration: kubeReservedCgroup (--kube-reserved-cgroup) must be specified",
        'topologyManagerPolicy "dynamic" must be one of: ["none" "single-numa-node"]',
        "cgroupsPerQOS (--cgroups-per-qos) must be set to true",
        "native.cgroupdriver option sys not supported",
    ],
)
def test_a_setting_with_the_name_of_a_part_of_the_machine_is_refused(sentence: str) -> None:
    assert len(trial._refusals("kubelet", "", sentence, 1)) == 1


_PLUGINS = """\
TYPE                             ID            PLATFORMS   STATUS
io.containerd.grpc.v1            cri           -           error
io.containerd.snapshotter.v1     zfs           -           error
io.containerd.snapshotter.v1     btrfs         -           skip
io.containerd.service.v1         diff-service  -           error
"""
_LOG = """\
level=warning msg="Ignoring unknown key in TOML for plugin" key=max_down plugin=io.containerd.cri.v1.images
level=warning msg="failed to load plugin io.containerd.grpc.v1.cri" error="missing unit in duration \\"1800\\""
level=warning msg="failed to load plugin" error="no zfs" id=io.containerd.snapshotter.v1.zfs
"""


def test_containerd_is_judged_by_what_is_configured_and_the_cri() -> None:
    daemon = trial._Daemon(_LOG, _PLUGINS, None)
    assert list(trial._failed_parts(daemon, {"io.containerd.service.v1.diff-service"})) == [
        "io.containerd.cri.v1.images: unknown key max_down",
        'io.containerd.grpc.v1.cri: missing unit in duration "1800"',
        "io.containerd.service.v1.diff-service does not work",
    ]
