"""Settings that are wrong, each once, and what an image's own programs say of them (``image_builder/bake/trial.py``).

The rows of a program are tried one after another in one open root, as the trial of a bake tries what the roles wrote.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from image_builder.bake import trial
from image_builder.bake.trial import Refusal, Unit
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from image_builder.system.sandbox import Root

_FIELDS = REPO_ROOT / "tests/data/kubelet-fields.json"
_SIGNALS = ("memory.available", "nodefs.available", "imagefs.available", "pid.available")
_RESOURCES = ("cpu", "memory", "ephemeral-storage", "pid")

DURATIONS = (
    *("containerLogMonitorInterval", "cpuCFSQuotaPeriod", "cpuManagerReconcilePeriod"),
    *("evictionPressureTransitionPeriod", "fileCheckFrequency", "httpCheckFrequency", "imageMaximumGCAge"),
    *("imageMinimumGCAge", "nodeStatusReportFrequency", "nodeStatusUpdateFrequency", "runtimeRequestTimeout"),
    *(
        "shutdownGracePeriod",
        "shutdownGracePeriodCriticalPods",
        "streamingConnectionIdleTimeout",
        "syncFrequency",
    ),
    "volumeStatsAggPeriod",
)
_LISTS = (
    *("allowedUnsafeSysctls", "clusterDNS", "enforceNodeAllocatable", "preloadedImagesVerificationAllowlist"),
    *("registerWithTaints", "reservedMemory", "shutdownGracePeriodByPodPriority", "tlsCipherSuites"),
    "tlsCurvePreferences",
)
_TAINTS: tuple[Mapping[str, str], ...] = (
    {"key": "gpu", "value": "a", "effect": "NoSchedul"},
    {"key": "gpu pool", "value": "a", "effect": "NoSchedule"},
    {"key": "gpu", "value": "a b", "effect": "NoSchedule"},
)
# Of fields: by their paths.
_WRONG: tuple[tuple[str, Any], ...] = (
    *((field, value) for field in DURATIONS for value in ("14d", "1800")),
    *((field, "a string, not a list") for field in _LISTS),
    ("authentication.webhook.cacheTTL", "2 minutes"),
    ("authorization.webhook.cacheAuthorizedTTL", "1w"),
    ("crashLoopBackOff.maxContainerRestartPeriod", "1d"),
    ("evictionSoftGracePeriod", {"memory.available": "1d"}),
    ("imageMinimumGCAge", "-1s"),
    ("shutdownGracePeriodCriticalPods", "30s"),
    *((field, {name: "lots"}) for field in ("kubeReserved", "systemReserved") for name in _RESOURCES),
    *((field, {"gpu": "1"}) for field in ("kubeReserved", "systemReserved")),
    ("kubeReserved", {"memory": "-1Gi"}),
    *(("evictionHard", {signal: "lots"}) for signal in _SIGNALS),
    *(("evictionHard", {signal: "110%"}) for signal in _SIGNALS),
    ("evictionHard", {"memory.availabel": "1Gi"}),
    ("evictionMinimumReclaim", {"memory.available": "lots"}),
    ("evictionSoft", {"memory.available": "1Gi"}),
    ("containerLogMaxSize", "50 MiB"),
    ("containerLogMaxSize", "lots"),
    ("reservedMemory", [{"numaNode": 0, "limits": {"memory": "lots"}}]),
    ("imageGCHighThresholdPercent", 101),
    ("imageGCLowThresholdPercent", 99),
    ("imageGCLowThresholdPercent", -1),
    ("qosReserved", {"memory": "150%"}),
    ("qosReserved", {"memory": "half"}),
    ("memoryThrottlingFactor", 2.0),
    *(("registerWithTaints", [taint]) for taint in _TAINTS),
    ("allowedUnsafeSysctls", ["bad sysctl!"]),
    ("clusterDNS", ["dns.example"]),
    ("enforceNodeAllocatable", ["podz"]),
    ("enforceNodeAllocatable", ["kube-reserved"]),
    ("reservedSystemCPUs", "a-b"),
    ("tlsCipherSuites", ["NONE_SUCH"]),
    ("tlsMinVersion", "TLS12"),
    ("authorization.mode", "Everyone"),
    ("cpuManagerPolicy", "dynamic"),
    ("hairpinMode", "none such"),
    ("memoryManagerPolicy", "dynamic"),
    ("topologyManagerPolicy", "dynamic"),
    ("topologyManagerScope", "node"),
    ("imagePullCredentialsVerificationPolicy", "Sometimes"),
    ("memorySwap", {"swapBehavior": "Sometimes"}),
    ("featureGates", {"NoSuchGate": True}),
    ("maxPods", -1),
    ("maxPods", "many"),
    ("oomScoreAdj", 5000),
    ("healthzPort", 70000),
    ("readOnlyPort", 70000),
    ("maxOpenFiles", -1),
    ("kubeAPIQPS", -1),
    ("registryPullQPS", -1),
    ("eventRecordQPS", -1),
    ("nodeLeaseDurationSeconds", -3),
    ("nodeStatusMaxImages", -2),
    ("containerLogMaxFiles", 1),
    ("containerLogMaxWorkers", 0),
    ("maxParallelImagePulls", 0),
    ("podsPerCore", -1),
    ("tracing", {"samplingRatePerMillion": -1}),
    ("logging", {"format": "none such"}),
    ("noSuchField", 1),
)
_LABELS = (
    *(
        "node-role.kubernetes.io/gpu=",
        "kubernetes.io/role=gpu",
        "k8s.io/team=gpu",
        "pool=gpu pool",
        "gpu pool=a",
    ),
    *("a/b/c=d", f"pool={'a' * 64}", "pool=-gpu", "-pool=gpu"),
)
_FLAGS = (
    *(f"--node-labels={label}" for label in _LABELS),
    *("--register-with-taints=gpu=a:NoSchedul", "--register-with-taints=gpu", "--max-pods=many", "--v=loud"),
    *("--no-such-flag", "--eviction-hard=lots", "--feature-gates=NoSuchGate=true", "a word"),
)
# What 1.20 takes: it starts, and some of it the API server refuses.
_TAKEN_BY_1_20 = {
    "imageMinimumGCAge: -1s",
    *(f"evictionHard: {{'{signal}': '110%'}}" for signal in _SIGNALS),
    *(f"--node-labels={label}" for label in ("pool=gpu pool", "gpu pool=a", "a/b/c=d", f"pool={'a' * 64}")),
    *("--node-labels=pool=-gpu", "--node-labels=-pool=gpu"),
}
# Removed since 1.20.
_REMOVED = (
    *("--pod-infra-container-image=a", "--network-plugin=cni", "--image-pull-progress-deadline=5m"),
    *(
        "--container-runtime=remote",
        "--docker-endpoint=unix:///run/docker.sock",
        "--cni-bin-dir=/opt/cni/bin",
    ),
    *("--dynamic-config-dir=/tmp", "--cloud-provider=azure"),
)
# Lines of containerd's configuration, by the part of the CRI plugin that they are added to.
_CONTAINERD = (
    *(("images", f'image_pull_progress_timeout = "{text}"') for text in ("1800", "30min", "14d", "-")),
    *(("images", f"max_concurrent_downloads = {text}") for text in ('"ten"', "1.5", "[3]")),
    ("images", 'snapshotter = "none_such"'),
    ("images", "max_concurent_downloads = 3"),
    ("runtime", 'stream_idle_timeout = "4 hours"'),
    ("runtime", 'enable_selinux = "no"'),
    ("runtime", "max_container_log_line_size = true"),
    ("runtime.containerd", 'default_runtime_name = "none_such"'),
    ("", "version = 99"),
    ("", "root = 5"),
    ("", "not TOML"),
)
_DOCKER: tuple[Mapping[str, Any], ...] = (
    *({"log-opts": {key: "5"}} for key in ("max-fil", "size")),
    {"log-opts": {"max-size": "50m", "max-file": 5}},
    {"exec-opts": ["native.cgroupdriver=sys"]},
    {"hosts": ["fd://"]},
    {"storage-drivr": "overlay2"},
    {"live-restore": "yes"},
    {"max-concurrent-downloads": -1},
    {"max-concurrent-downloads": "ten"},
    {"max-download-attempts": -1},
    {"registry-mirrors": ["mirror.example"]},
    {"default-shm-size": "5x"},
    {"dns": ["dns.example"]},
    {"labels": ["pool"]},
    {"log-level": "loud"},
    {"mtu": -5},
    {"features": {"cdi": "yes"}},
    {"shutdown-timeout": "5m"},
    {"default-cgroupns-mode": "none such"},
    {"data-root": 5},
)

_CRI_DOCKERD = (
    *("--image-pull-progress-deadline=30min", "--image-pull-progress-deadline=14d", "--no-such-flag"),
    *("--ipv6-dual-stack=perhaps", "--network-plugin-mtu=big"),
)


@dataclass(frozen=True)
class Row:
    """A wrong setting of a program, and what it said of it; nothing if it accepted it."""

    program: str
    setting: str
    said: tuple[str, ...]


def rows(root: Root, log: Path) -> Iterator[Row]:
    """Try everything, with each program that the image has. First, each accepts what the roles wrote."""
    trial.prepare(root)
    engine, docker, kubelet = (
        trial.read_unit(root.path, name) for name in ("containerd", "docker", "kubelet")
    )
    assert engine
    assert list(trial.ask(root, log)) == []
    if (
        "io.containerd.grpc.v1.cri"
        not in _text(root, "/etc/containerd/config.toml").partition("disabled_plugins")[2]
    ):
        yield from _containerd(root, engine, log)
    if docker:
        with trial.containerd(root, engine, log) as refused:
            assert refused == []
            yield from _docker(root, docker, log)
    if shim := trial.read_unit(root.path, "cri-docker"):
        for flag in _CRI_DOCKERD:
            asked = dataclasses.replace(shim, argv=(*shim.argv, flag))
            yield _row("cri-dockerd", flag, trial.ask_cri_dockerd(root, asked, log))
    if kubelet:
        endpoint = trial.runtime_endpoint(root, kubelet)
        with trial.runtime(root, engine, endpoint, log):
            yield from _kubelet(root, kubelet, log)


def _containerd(root: Root, unit: Unit, log: Path) -> Iterator[Row]:
    path = root.path / "etc/containerd/config.toml"
    right = path.read_text()
    for part, line in _CONTAINERD:
        path.write_text(_added(right, part, line))
        with trial.containerd(root, unit, log) as refused:
            yield _row("containerd", f"{part}: {line}".removeprefix(": "), refused)
    path.write_text(right)


def _added(text: str, part: str, line: str) -> str:
    """Return a configuration with a line at the top, or in a part of the CRI plugin, in place of any of its key."""
    key = line.partition(" = ")[0]
    if not part:
        return f"{line}\n" + re.sub(rf"^{re.escape(key)} = .*\n", "", text, flags=re.MULTILINE)
    first, dot, more = part.partition(".")
    plugin = (
        f"io.containerd.cri.v1.{first}" if "io.containerd.cri.v1" in text else "io.containerd.grpc.v1.cri"
    )
    head = f'plugins."{plugin}"{dot}{more}'
    before, _, after = text.partition(f"[{head}]\n")
    own, bracket, others = after.partition("\n[")
    own = re.sub(rf"^\s*{re.escape(key)} = .*(\n|$)", "", own, flags=re.MULTILINE)
    return f"{before}[{head}]\n  {line}\n{own}{bracket}{others}"


def _docker(root: Root, unit: Unit, log: Path) -> Iterator[Row]:
    path = root.path / "etc/docker/daemon.json"
    right = path.read_text()
    for wrong in _DOCKER:
        path.write_text(json.dumps({**json.loads(right), **wrong}))
        yield _row("dockerd", json.dumps(wrong), trial.ask_dockerd(root, unit, log))
    path.write_text(right)


def _kubelet(root: Root, unit: Unit, log: Path) -> Iterator[Row]:
    version = re.search(r"v1\.(\d+)", root.run([unit.argv[0], "--version"]).stdout)
    assert version
    minor = int(version[1])
    path = root.path / "etc/kubernetes/kubelet.yaml"
    right = path.read_text()

    def ask(asked: Unit) -> list[Refusal]:
        # Checkpoints of an earlier start with other policies would be refused, too.
        process.run(["find", root.path / "var/lib/kubelet", "-mindepth", "1", "-delete"])
        return trial.ask_kubelet(root, asked, log)

    for field, value in _WRONG:
        if minor < 21 and f"{field}: {value}" in _TAKEN_BY_1_20:
            continue
        if field.partition(".")[0] in (*fields(minor), "noSuchField"):
            config = yaml.safe_load(right)
            *outer, last = field.split(".")
            place = config
            for name in outer:
                place = place.setdefault(name, {})
            place[last] = value
            path.write_text(yaml.safe_dump(config))
            yield _row("kubelet", f"{field}: {value}", ask(unit))
    path.write_text(right)
    for flag in (*_FLAGS, *(_REMOVED if minor >= 35 else ())):
        if minor < 21 and flag in _TAKEN_BY_1_20:
            continue
        yield _row("kubelet", flag, ask(dataclasses.replace(unit, argv=(*unit.argv, flag))))


def fields(minor: int) -> set[str]:
    """Return the fields of a minor version of Kubernetes; those of an older one than the sources have aren't known."""
    read = json.loads(_FIELDS.read_text("utf-8"))
    found: set[str] = set(read[f"1.{max(minor, 28)}"]["fields"])
    newer = {
        "containerRuntimeEndpoint",
        "imageServiceEndpoint",
        "maxParallelImagePulls",
        "tracing",
        "registerWithTaints",
    }
    newer |= {"memoryThrottlingFactor", "memorySwap", "memoryManagerPolicy", "reservedMemory"}
    newer |= {"shutdownGracePeriodByPodPriority", "topologyManagerPolicyOptions", "enableSystemLogQuery"}
    return found if minor >= 28 else found - newer


def _row(program: str, setting: str, refused: list[Refusal]) -> Row:
    return Row(program, setting, tuple(map(str, refused)))


def _text(root: Root, name: str) -> str:
    return (root.path / name.lstrip("/")).read_text()
