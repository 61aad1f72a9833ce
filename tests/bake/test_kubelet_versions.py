"""The golden renderings of the role kubelet, given to real kubelets.

A kubelet has no dry run, so each one is started: it reads its flags and configuration, reports its version, and then
exits, since it finds no cgroups that it can use or, in cluster mode, nothing to join with.

The kubelet of the lab's worker is built by a bake. Today's are in the directory that IMAGE_BUILDER_PROGRAMS names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image_builder.system import process
from tests.support.images.builds import Workplace
from tests.support.images.programs import needs_programs
from tests.support.nodes.kubelets import VERSIONS, complaints, program

pytestmark = [pytest.mark.root, pytest.mark.slow]

GOLDEN = Path(__file__).resolve().parents[1] / "unit" / "golden" / "kubelet"

# Nothing it does reaches the host: no network, no cgroups, no old state. $1 is a scratch directory, $2 "v2" for
# cgroup version 2.
_START = """
mount -t tmpfs tmpfs /sys/fs/cgroup
# From 1.35 on, one that finds no version 2 ends before it says anything.
if test "$2" = v2; then mount -t cgroup2 none /sys/fs/cgroup; mount -o remount,bind,ro /sys/fs/cgroup; fi
mount -t tmpfs tmpfs /run
if test -d /var/lib/kubelet; then mount -t tmpfs tmpfs /var/lib/kubelet; fi
scratch=$1; shift 2
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj /CN=ca \
  -keyout "$scratch/key" -out "$scratch/ca" 2>/dev/null
exec "$@" --root-dir="$scratch/root" --cert-dir="$scratch/pki" --client-ca-file="$scratch/ca" --v=1
"""
# What a kubelet logs once it has read flags and configuration and found them valid.
_STARTED = re.compile(r"Version: v1|kubeletVersion=")
# What a kubelet complains about here, and why that isn't the rendering's fault.
_EXPECTED = {
    "Flag --client-ca-file has been deprecated": "given by the test",
    "unable to load bootstrap kubeconfig": "nothing to join with",
    "/run/containerd/containerd.sock: connect: no such file": "no engine runs",
}


@pytest.fixture(scope="module", params=["built", *(pytest.param(v, marks=needs_programs) for v in VERSIONS)])
def kubelet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "built":
        built: Workplace = request.getfixturevalue("whole_worker")
        return built.object("kubelet_build") / "product" / "kubelet"
    return program(request.param, tmp_path_factory.mktemp("programs"))


def series(kubelet: Path) -> str:
    found = re.search(r"v(\d+\.\d+)", process.run([kubelet, "--version"]).stdout)
    assert found, f"{kubelet} does not say its version"
    return found[1]


def _cgroups(kubelet: Path) -> str:
    return "v2" if int(series(kubelet).split(".")[1]) >= 35 else "none"


def start(kubelet: Path, scenario: Path, scratch: Path, *more: str) -> str:
    """Start a kubelet as the scenario's unit does, for a moment, and return its output."""
    unit = (scenario / "kubelet.service").read_text(encoding="utf-8")
    words = unit.split("ExecStart=")[1].split("\nRestart=")[0].replace("\\\n", " ").split()
    files = {"--config": "kubelet.yaml", "--image-credential-provider-config": "credential-providers.yaml"}
    for name, file in files.items():
        words = [f"{name}={scenario / file}" if w.startswith(f"{name}=") else w for w in words]
    # As systemd does if the node has no node.env.
    flags = [re.sub(r"\$\{\w+\}", "", w) for w in words[1:] if not w.startswith("$")]
    isolate = "unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private timeout 20"
    argv = [
        *isolate.split(),
        "sh",
        "-c",
        _START,
        "sh",
        str(scratch),
        _cgroups(kubelet),
        str(kubelet),
        *flags,
        *more,
    ]
    done = process.run(argv, ok=range(256), timeout=60)
    return done.stdout + done.stderr


def scenarios(kubelet: Path) -> list[Path]:
    found = [path for path in sorted(GOLDEN.iterdir()) if path.name.startswith(f"{series(kubelet)}-")]
    assert found, f"there is no golden rendering for Kubernetes {series(kubelet)}"
    return found


def test_it_accepts_its_flags_and_its_configuration(kubelet: Path, tmp_path: Path) -> None:
    for scenario in scenarios(kubelet):
        said = start(kubelet, scenario, tmp_path)
        assert _STARTED.search(said), f"{scenario.name}: {said[-3000:]}"
        assert "unknown field" not in said, scenario.name
        assert "lenient" not in said, f"{scenario.name}: a field that it doesn't know"
        assert "unrecognized feature gate" not in said, scenario.name


todays = pytest.mark.parametrize(
    "kubelet", [pytest.param(version, marks=needs_programs) for version in VERSIONS], indirect=True
)


@todays
def test_todays_kubelets_complain_of_nothing(kubelet: Path, tmp_path: Path) -> None:
    """No flag or field is deprecated, and there are no warnings about anything that the role writes."""
    for scenario in scenarios(kubelet):
        said = start(kubelet, scenario, tmp_path)
        assert _STARTED.search(said), f"{scenario.name}: {said[-3000:]}"
        assert complaints(said, _EXPECTED) == [], scenario.name


@todays
def test_the_check_sees_a_deprecated_flag(kubelet: Path, tmp_path: Path) -> None:
    said = start(kubelet, scenarios(kubelet)[0], tmp_path, "--max-pods=5")
    assert _STARTED.search(said)
    (line,) = complaints(said, _EXPECTED)
    assert line.startswith("Flag --max-pods has been deprecated")


def test_the_check_sees_a_wrong_flag(kubelet: Path, tmp_path: Path) -> None:
    said = start(kubelet, scenarios(kubelet)[0], tmp_path, "--no-such-flag=1")
    assert "unknown flag" in said
    assert not _STARTED.search(said)


def test_the_check_sees_a_wrong_field(kubelet: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario"
    scenario.mkdir()
    for file in scenarios(kubelet)[0].iterdir():
        (scenario / file.name).write_bytes(file.read_bytes())
    with (scenario / "kubelet.yaml").open("a", encoding="utf-8") as config:
        config.write("noSuchField: 1\n")
    assert re.search("lenient|unknown field", start(kubelet, scenario, tmp_path))


def test_a_rendering_for_another_version_is_not_accepted(kubelet: Path, tmp_path: Path) -> None:
    """The oldest kubelet doesn't know the newest fields, and vice versa."""
    other = "1.36-containerd" if series(kubelet) == "1.20" else "1.20-docker"
    said = start(kubelet, GOLDEN / other, tmp_path)
    assert re.search("lenient|unknown field|unknown flag", said)
