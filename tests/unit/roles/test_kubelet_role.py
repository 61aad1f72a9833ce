"""The files of the role kubelet for every version it knows, and what it refuses.

Golden files are whole renderings (tests/support/roles/kubelet.py); ``pytest --update-golden`` rewrites them.
tests/bake/test_kubelet_versions.py shows the same files to a real kubelet.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.roles.kubelet import (
    CRI_DOCKERD,
    KNOWN,
    PROVIDER,
    REPOSITORY,
    ROLE,
    SCENARIOS,
    TAINT,
    Rendered,
    containerd,
    docker,
    every_option,
    fields_of,
    scenario,
    table,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "kubelet"


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_rendering_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    files = {
        str(f["src"]).removesuffix(".j2"): str(f["src"]) for f in scenario(name).value("__kubelet_files")
    }
    folder = GOLDEN / name
    if request.config.getoption("--update-golden", default=False):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for file, template in files.items():
            (folder / file).write_text(scenario(name).file(template), encoding="utf-8")
    assert sorted(f.name for f in folder.iterdir()) == sorted(files)
    for file, template in files.items():
        assert scenario(name).file(template) == (folder / file).read_text(encoding="utf-8")


CNI_PLUGINS = {"url": "https://a.test/cni.tgz", "sha256": "0" * 64, "programs": ["azure-vnet"]}
BAKED_NETWORK: dict[str, Any] = {"kubelet_cni": "baked", "kubelet_cni_conf": {"name": "a", "plugins": []}}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_scenario_is_without_problems(name: str) -> None:
    assert scenario(name).problems == []


def test_every_known_version_is_in_the_table() -> None:
    assert tuple(table()) == KNOWN
    assert len({tuple(sorted(row)) for row in table().values()}) == 1, "a row lacks a fact"


@pytest.mark.parametrize("version", KNOWN)
def test_flags_exist_in_their_version(version: str) -> None:
    """A kubelet exits if it doesn't know a flag."""
    minor = int(version.split(".")[1])
    flags = Rendered(containerd(version, kubelet_register_with_taints=[TAINT])).flags
    assert "pod-infra-container-image" not in flags, (
        "1.20 heeds it with dockershim only; later it is deprecated"
    )
    assert ("container-runtime" in flags) == ("container-runtime-endpoint" in flags) == (minor < 27)
    assert ("register-with-taints" in flags) == (minor < 23)
    assert not {"image-pull-progress-deadline", "network-plugin", "docker-endpoint", "cni-bin-dir"} & set(
        flags
    )


@pytest.mark.parametrize("version", KNOWN)
def test_fields_exist_in_their_version(version: str) -> None:
    minor = int(version.split(".")[1])
    config = Rendered(containerd(version, kubelet_register_with_taints=[TAINT])).config
    assert ("maxParallelImagePulls" in config) == (minor >= 27)
    assert ("containerRuntimeEndpoint" in config) == (minor >= 27)
    assert ("registerWithTaints" in config) == (minor >= 23)
    assert ("streamingConnectionIdleTimeout" in config) == (minor < 34)


@pytest.mark.parametrize("mode", ["cluster", "standalone"])
@pytest.mark.parametrize("version", KNOWN)
def test_every_written_field_is_one_of_its_version(version: str, mode: str) -> None:
    """With all options set, as far as the version has them: nothing unknown, and nothing deprecated."""
    rendered = Rendered({**every_option(version), **containerd(version, kubelet_mode=mode)})
    assert rendered.problems == []
    written = rendered.config.keys() - {"apiVersion", "kind"}
    assert written - fields_of(version) == set()
    assert written & fields_of(version, "__kubelet_deprecated_fields") == set()
    assert "failCgroupV1" not in written, "nobody asked for it"


def test_the_table_of_fields_names_each_field_once_and_knows_the_versions() -> None:
    named = [field for new in table("__kubelet_fields").values() for field in new]
    assert len(named) == len(set(named))
    assert len(fields_of("1.20")) == 94 and len(fields_of("1.37")) == 125, "as the sources' structs have"
    deprecated = {field for old in table("__kubelet_deprecated_fields").values() for field in old}
    assert deprecated <= set(named)


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize(
    ("runtime", "has_flag"), [("1.6", True), ("1.6.33", True), ("1.7", False), ("2.2", False)]
)
def test_the_deprecated_pause_flag_is_for_a_runtime_that_does_not_pin(
    version: str, runtime: str, has_flag: bool
) -> None:
    rendered = Rendered(containerd(version, container_runtime_containerd_version=runtime))
    assert rendered.problems == []
    assert ("pod-infra-container-image" in rendered.flags) == has_flag


@pytest.mark.parametrize(
    ("version", "gates"),
    [
        ("1.33", {"KubeletEnsureSecretPulledImages": True}),
        ("1.34", {"AllAlpha": True}),
        ("1.35", {}),
        ("1.35", {"KubeletEnsureSecretPulledImages": True, "AllBeta": False}),
        ("1.36", {}),
    ],
)
def test_who_may_use_a_preloaded_image_is_written(version: str, gates: dict[str, bool]) -> None:
    name = "imagePullCredentialsVerificationPolicy"
    assert name not in Rendered(containerd(version)).config
    policy = {
        "kubelet_image_credentials_policy": "NeverVerifyAllowlistedImages",
        "kubelet_feature_gates": gates,
    }
    images = ["registry.test/team/trainer", "registry.test:5000/base/*", "registry.test/*"]
    rendered = Rendered(containerd(version, **policy, kubelet_image_credentials_allowlist=images))
    assert rendered.problems == []
    assert rendered.config[name] == "NeverVerifyAllowlistedImages"
    assert rendered.config["preloadedImagesVerificationAllowlist"] == images


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_large_images_are_pulled_side_by_side(name: str) -> None:
    config = scenario(name).config
    assert config["serializeImagePulls"] is False
    assert config.get("maxParallelImagePulls", 2) > 1
    assert config["registryPullQPS"] >= 20
    assert config["registryBurst"] >= config["registryPullQPS"]
    assert config["cgroupDriver"] == "systemd"


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_status_frequencies_are_left_alone(name: str) -> None:
    """Setting the update frequency makes thousands of kubelets report every ten seconds."""
    assert not {
        key for key in scenario(name).config if key.startswith("nodeStatus") and key.endswith("Frequency")
    }


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_nobody_gets_in_without_a_name(name: str) -> None:
    config = scenario(name).config
    assert config["authentication"]["anonymous"]["enabled"] is False
    assert config["readOnlyPort"] == 0
    if config["authorization"]["mode"] == "AlwaysAllow":
        assert "standalone" in name
        assert config["address"] == "127.0.0.1"
        assert config["authentication"] == {"anonymous": {"enabled": False}, "webhook": {"enabled": False}}
    else:
        assert config["authorization"]["mode"] == "Webhook"
        assert config["authentication"]["x509"]["clientCAFile"]


STATIC = {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0,1"}
MEMORY = {
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1124Mi"}}],
    "kubeReserved": {"memory": "1Gi"},
}
CPU_NONE = '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
CPU_STATIC = '{"policyName":"static","defaultCpuSet":"0-7","entries":{},"checksum":1}'
MEMORY_NONE = '{"policyName":"None","machineState":{},"checksum":1}'
MEMORY_STATIC = '{"policyName":"Static","machineState":{},"checksum":1}'


@pytest.mark.parametrize(
    ("config", "flags", "before", "states", "wrong"),
    [
        ({}, [], {}, ("", ""), []),
        ({}, [], {}, (CPU_NONE, MEMORY_NONE), []),
        (STATIC, [], {}, (CPU_NONE, MEMORY_NONE), ["cpu"]),
        (STATIC, [], {}, ("", ""), []),
        ({}, ["--cpu-manager-policy=static"], {}, (CPU_NONE, MEMORY_NONE), ["cpu"]),
        ({}, [], STATIC, (CPU_STATIC, MEMORY_NONE), ["cpu"]),
        (STATIC, [], STATIC, (CPU_STATIC, MEMORY_NONE), []),
        ({**STATIC, "reservedSystemCPUs": "0-3"}, [], STATIC, (CPU_STATIC, MEMORY_NONE), ["cpu"]),
        (MEMORY, [], {}, (CPU_NONE, MEMORY_NONE), ["memory"]),
        (MEMORY, [], MEMORY, (CPU_NONE, MEMORY_STATIC), []),
        ({**MEMORY, "kubeReserved": {"memory": "2Gi"}}, [], MEMORY, (CPU_NONE, MEMORY_STATIC), ["memory"]),
        ({"maxPods": 60}, [], {}, (CPU_NONE, MEMORY_NONE), []),
        ({**STATIC, "maxPods": 60}, [], STATIC, (CPU_STATIC, ""), []),
        ({}, [], {}, ("garbage", ""), ["cpu"]),
        ({**STATIC, **MEMORY}, [], {}, (CPU_NONE, MEMORY_NONE), ["cpu", "memory"]),
    ],
)
def test_a_configuration_that_would_end_a_running_kubelet_is_noticed(
    config: dict[str, Any],
    flags: list[str],
    before: dict[str, Any],
    states: tuple[str, str],
    wrong: list[str],
) -> None:
    old = Rendered(containerd("1.36") | {"kubelet_config": before}).file("kubelet.yaml.j2") if before else ""
    old = old or Rendered(containerd("1.36")).file("kubelet.yaml.j2")
    kept = [
        {"content": base64.b64encode(text.encode()).decode()} if text else {"failed": False}
        for text in (*states, old)
    ]
    rendered = Rendered(
        containerd("1.36")
        | {"kubelet_config": config, "kubelet_extra_args": flags, "__kubelet_kept": {"results": kept}}
    )
    found = rendered.value("__kubelet_conflicts")
    assert [Path(path).name for path in found] == [f"{name}_manager_state" for name in wrong]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_first_start_of_a_boot_has_no_state_of_another(name: str) -> None:
    """Neither another policy nor another machine may end it: its state is removed until it was started once."""
    lines = scenario(name).file("kubelet.service.j2").splitlines()
    before = [line for line in lines if line.startswith("ExecStartPre=")]
    states = " ".join(f"/var/lib/kubelet/{kind}_manager_state" for kind in ("cpu", "memory"))
    assert before == [
        f"ExecStartPre=/bin/sh -c 'test -e /run/kubelet-started || rm --force {states}'",
        "ExecStartPre=/usr/bin/touch /run/kubelet-started",
    ]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_unit_waits_in_a_fresh_image(name: str) -> None:
    """Without a kubeconfig the service is skipped, so that a node without join instructions isn't degraded."""
    unit = scenario(name).file("kubelet.service.j2")
    conditions = re.findall(r"^ConditionPathExists=(.*)$", unit, re.MULTILINE)
    flags = scenario(name).flags
    if "standalone" in name:
        assert conditions == []
        assert not {"kubeconfig", "bootstrap-kubeconfig"} & set(flags)
        assert scenario(name).value("__kubelet_units") == ["kubelet.service"]
    else:
        assert conditions == [f"|{flags['kubeconfig']}", f"|{flags['bootstrap-kubeconfig']}"]
        assert scenario(name).value("__kubelet_units") == ["kubelet.service", "kubelet.path"]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("1.20-docker", ["docker.service"]),
        ("1.34-cri-dockerd", ["docker.service", "cri-docker.service"]),
        ("1.36-cri-dockerd", ["docker.service", "cri-docker.service"]),
        ("1.34-containerd", ["containerd.service"]),
    ],
)
def test_the_unit_starts_after_its_runtime(name: str, units: list[str]) -> None:
    unit = scenario(name).file("kubelet.service.j2")
    for key in ("After", "Wants"):
        found = re.search(rf"^{key}=(.*)$", unit, re.MULTILINE)
        assert found
        assert found[1].split() == ["network-online.target", *units]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_node_agents_arguments_come_last(name: str) -> None:
    """Unbraced, so that systemd splits them; empty where no agent has written any."""
    unit = scenario(name).file("kubelet.service.j2").splitlines()
    assert scenario(name).command[-1] == "$NODE_AGENT_KUBELET_ARGS"
    files = [line for line in unit if line.startswith("EnvironmentFile=")]
    assert files[-1] == "EnvironmentFile=-/run/node/kubelet.env"
    assert any(line.startswith("Environment=") and "NODE_AGENT_KUBELET_ARGS=" in line for line in unit)


def test_the_node_agent_is_told_the_taints() -> None:
    """Its flag replaces the taints of the configuration, whichever way the version receives them."""
    for name in ("1.20-docker", "1.36-every-option"):
        assert json.loads(scenario(name).file("kubelet.json.j2")) == {"taints": ["gpu=h100:NoSchedule"]}
    assert json.loads(scenario("1.34-containerd").file("kubelet.json.j2")) == {"taints": []}


def test_dockershim_has_the_long_deadline_and_the_pause_image() -> None:
    flags = Rendered(
        docker(
            "1.20.2",
            container_runtime_pause_image="registry.test/pause:3.2",
            container_runtime_image_pull_progress_deadline="45m",
        )
    ).flags
    assert flags["image-pull-progress-deadline"] == "45m"
    assert flags["pod-infra-container-image"] == "registry.test/pause:3.2"
    assert flags["container-runtime"] == "docker"


def test_with_dockershim_any_number_of_log_files_will_do() -> None:
    """Docker rotates them, so the number isn't written."""
    rendered = Rendered(docker("1.20", kubelet_container_log_max_files=1))
    assert rendered.problems == [] and "containerLogMaxFiles" not in rendered.config


def test_the_kubelet_does_not_rotate_dockers_logs() -> None:
    """cri-dockerd can't reopen a log: a kubelet that rotates it leaves Docker writing to an unlinked file."""
    assert scenario("1.34-cri-dockerd").config["containerLogMaxSize"] == "-1"
    assert "containerLogMaxSize" not in scenario("1.20-docker").config
    assert scenario("1.34-containerd").config["containerLogMaxSize"] == "50Mi"


def test_the_nodes_own_values_come_from_the_first_boot() -> None:
    flags = scenario("1.36-every-option").flags
    assert flags["node-ip"] == "${KUBELET_NODE_IP}"
    assert flags["provider-id"] == "${KUBELET_PROVIDER_ID}"
    assert flags["node-labels"].split(",") == [
        "node-image/name=${IMAGE_NAME}",
        "node-image/build=${IMAGE_BUILD}",
        "node.test/fabric=ib",
        "node.test/sku=nd96",
        "${KUBELET_NODE_LABELS}",
    ]
    unit = scenario("1.36-every-option").file("kubelet.service.j2")
    used = set(re.findall(r"\$\{?([A-Z_]+)\}?", unit))
    preset = set(
        re.findall(r"([A-Z_]+)=(?=\s|$)", "\n".join(re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)))
    )
    assert used == preset, "systemd warns about a variable that is not set"
    assert scenario("1.36-every-option").command[-2] == "$KUBELET_EXTRA_ARGS"


def test_every_file_is_roots_alone_or_harmless() -> None:
    for file in scenario("1.36-every-option").value("__kubelet_files"):
        if "/etc/kubernetes" in file["dest"] or "systemd" in file["dest"]:
            assert "mode" not in file, "0600 is the tasks' default"
    tasks = (ROLE / "tasks" / "configure.yml").read_text(encoding="utf-8")
    assert "default('0600')" in tasks


def test_a_repository_brings_the_declared_version() -> None:
    repository = {"uris": ["https://packages.test/v1.34/deb/"], "suites": ["/"], "signed_by": "/etc/k.gpg"}
    rendered = Rendered(
        containerd("1.34.2", kubelet_source={"type": "repository"}, kubelet_repository=repository)
    )
    assert rendered.problems == []
    assert "kubelet=1.34.2-*" in rendered.value("__kubelet_packages")
    assert "containernetworking-plugins" not in rendered.value("__kubelet_packages")
    assert rendered.value("__kubelet_repositories") == [
        {"name": "kubernetes", "components": [], **repository}
    ]
    assert rendered.command[0] == "/usr/bin/kubelet"
    sources = rendered.file("repository.sources.j2")
    assert "Signed-By: /etc/k.gpg" in sources
    assert "Components" not in sources
    assert "kubelet=1.34.*" in Rendered(
        containerd("1.34", kubelet_source={"type": "repository"}, kubelet_repository=repository)
    ).value("__kubelet_packages")


def test_archives_are_in_the_lock_with_their_hashes() -> None:
    rendered = Rendered(
        containerd(
            "1.34.2",
            kubelet_source={"type": "archive", "url": "https://archive.test/kubelet", "sha256": "12" * 32},
            kubelet_crictl={"url": "https://archive.test/crictl.tgz", "sha256": "34" * 32},
            kubelet_image_credential_providers=[PROVIDER],
        )
    )
    assert rendered.problems == []
    assert rendered.value("__kubelet_archives") == [
        {"url": "https://archive.test/kubelet", "sha256": "12" * 32},
        {"url": "https://archive.test/crictl.tgz", "sha256": "34" * 32},
        {"url": PROVIDER["url"], "sha256": PROVIDER["sha256"]},
    ]
    assert rendered.command[0] == "/usr/local/bin/kubelet"


def test_what_the_playbook_assumes_of_the_runtime_is_its_default() -> None:
    """The kubernetes play can't see the other role's defaults, so it repeats them."""
    playbook = (REPOSITORY / "playbooks" / "layers" / "kubernetes.yml").read_text(encoding="utf-8")
    assumed = dict(re.findall(r"(container_runtime_\w+) \| default\('([^']*)'\)", playbook))
    assert len(assumed) >= 9
    defaults = yaml.safe_load(
        (REPOSITORY / "roles/container_runtime/defaults/main.yml").read_text(encoding="utf-8")
    )
    assert assumed == {name: str(defaults[name]) for name in assumed}
    assert defaults["container_runtime_cri_dockerd"] == {}


def test_argument_specs_have_the_defaults() -> None:
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    specs = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    options = specs["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == defaults
    assert all(option["description"] for option in options.values())


@pytest.mark.parametrize(
    ("inventory", "told"),
    [
        (
            docker("1.34"),
            "kubelet_container_runtime: Kubernetes 1.34 only supports Docker through cri-dockerd",
        ),
        (
            docker("1.20", container_runtime_cri_dockerd=CRI_DOCKERD),
            "kubelet_cri_dockerd: Kubernetes 1.20 supports Docker itself",
        ),
        (
            containerd("1.20", container_runtime_containerd_version="2.0"),
            "does not work with containerd 2.0; it needs 1.6 or later, before 2.0",
        ),
        (containerd("1.36", container_runtime_containerd_version="1.7.28"), "it needs 2.0 or later"),
        (containerd("1.34", kubelet_source={}), "kubelet_source: needs a type"),
        (
            containerd("1.34", kubelet_source={"type": "archive", "url": "u"}),
            "an archive needs url and sha256",
        ),
        (containerd("1.34", kubelet_source={"type": "repository"}), "kubelet_repository: needs uris"),
        (containerd("1.34", kubelet_cni="baked"), "kubelet_cni_conf: set it if kubelet_cni is baked"),
        (containerd("1.34", kubelet_cni_conf={"name": "a"}), "only then; kubelet_cni is none"),
        (containerd("1.34", kubelet_cni="delegated", kubelet_mode="standalone"), "no add-on comes to"),
        (
            containerd("1.34", kubelet_cni="delegated", kubelet_cni_plugins=CNI_PLUGINS),
            "kubelet_cni_plugins: needs url, sha256 and programs, and kubelet_cni baked",
        ),
        (
            containerd("1.34", **BAKED_NETWORK, kubelet_cni_plugins={"url": "u", "sha256": "0"}),
            "kubelet_cni_plugins: needs url, sha256 and programs",
        ),
        (containerd("1.34", kubelet_crictl={"url": "u"}), "kubelet_crictl: needs url and sha256"),
        (containerd("1.34", kubelet_image_gc_low_threshold_percent=85), "must be below"),
        (
            containerd("1.20", kubelet_image_maximum_gc_age="1h"),
            "kubelet_image_maximum_gc_age: needs Kubernetes 1.29 or later, not 1.20",
        ),
        (
            containerd("1.20", kubelet_seccomp_default=True),
            "kubelet_seccomp_default: needs Kubernetes 1.25 or later, not 1.20",
        ),
        (
            containerd("1.20", kubelet_image_credential_providers=[PROVIDER]),
            "kubelet_image_credential_providers: needs Kubernetes 1.24 or later, not 1.20",
        ),
        (
            containerd("1.34", kubelet_image_credential_providers=[{"name": "a"}]),
            "needs name and match_images",
        ),
        (
            containerd("1.34", kubelet_config={"maxPods": 5, "readOnlyPort": 10255}),
            "kubelet_config: maxPods, readOnlyPort has a variable of its own",
        ),
        (
            containerd("1.34", kubelet_config={"imagePullCredentialsVerificationPolicy": "AlwaysVerify"}),
            "kubelet_config: imagePullCredentialsVerificationPolicy has a variable of its own",
        ),
        (
            containerd("1.32", kubelet_config={"userNamespaces": {}, "maxPod": 5, "failCgroupV1": False}),
            "kubelet_config: Kubernetes 1.32 has no maxPod, userNamespaces",
        ),
        (
            containerd("1.34", kubelet_config={"iptablesDropBit": 15}),
            "kubelet_config: iptablesDropBit has no effect in Kubernetes 1.34",
        ),
        (
            containerd("1.32", kubelet_image_credentials_policy="AlwaysVerify"),
            "kubelet_image_credentials_policy: needs Kubernetes 1.33 or later, not 1.32",
        ),
        (
            containerd("1.34", kubelet_image_credentials_policy="AlwaysVerify"),
            "kubelet_image_credentials_policy: needs {KubeletEnsureSecretPulledImages: true} in kubelet_feature_gates,"
            " which Kubernetes has on from 1.35 on",
        ),
        (
            containerd(
                "1.35",
                kubelet_image_credentials_policy="AlwaysVerify",
                kubelet_feature_gates={"KubeletEnsureSecretPulledImages": False},
            ),
            "kubelet_image_credentials_policy: needs {KubeletEnsureSecretPulledImages: true} in kubelet_feature_gates,"
            " which Kubernetes has on from 1.35 on",
        ),
        (
            containerd(
                "1.35",
                kubelet_image_credentials_policy="AlwaysVerify",
                kubelet_feature_gates={"AllBeta": False},
            ),
            "kubelet_image_credentials_policy: needs {KubeletEnsureSecretPulledImages: true}",
        ),
        (
            containerd("1.36", kubelet_image_gc_high_threshold_percent=101),
            "kubelet_image_gc_high_threshold_percent: 101 is more than 100",
        ),
        (
            containerd("1.36", kubelet_container_log_max_files=1),
            "kubelet_container_log_max_files: 1, but the kubelet needs at least 2",
        ),
        (
            containerd("1.36", kubelet_image_credentials_allowlist=["registry.test/a"]),
            "kubelet_image_credentials_allowlist: only counts with",
        ),
        (
            containerd("1.36", kubelet_image_credentials_policy="NeverVerifyAllowlistedImages"),
            "NeverVerifyAllowlistedImages needs at least one image",
        ),
        (
            containerd(
                "1.36",
                kubelet_image_credentials_policy="NeverVerifyAllowlistedImages",
                kubelet_image_credentials_allowlist=[
                    "registry.test/a:1",
                    "registry.test/a@sha256:ab",
                    "registry.test/a*",
                    "*",
                    "a",
                    "registry.test/good",
                ],
            ),
            "registry.test/a:1, registry.test/a@sha256:ab, registry.test/a*, *, a must be registry/repository",
        ),
        (
            containerd("1.34", kubelet_config={"nodeStatusUpdateFrequency": "10s"}),
            "set nodeStatusReportFrequency",
        ),
    ],
)
def test_a_setting_that_can_not_work_is_refused(inventory: dict[str, Any], told: str) -> None:
    problems = Rendered(inventory).problems
    assert len(problems) == 1
    assert told in problems[0]


@pytest.mark.parametrize(
    ("variables", "problems"),
    [
        (
            {"kubelet_kube_reserved": {"cpu": 2, "memory": "16Gi"}},
            ["kubelet_kube_reserved.cpu: 2 must be a quoted string"],
        ),
        (
            {"kubelet_system_reserved": {"cpu": 0.5}, "kubelet_eviction_hard": {"memory.available": None}},
            [
                "kubelet_eviction_hard.memory.available: null must be a quoted string",
                "kubelet_system_reserved.cpu: 0.5 must be a quoted string",
            ],
        ),
        (
            {"kubelet_register_with_taints": [TAINT, {**TAINT, "key": "a", "value": True}]},
            ["kubelet_register_with_taints[1].value: true must be a quoted string"],
        ),
        (
            {"kubelet_node_labels": {"node.test/gpu": True, "node.test/sku": "1"}},
            ["kubelet_node_labels.node.test/gpu: true must be a quoted string"],
        ),
        (
            {
                "kubelet_container_log_max_size": 52428800,
                "kubelet_image_maximum_gc_age": 3600,
                "kubelet_image_minimum_gc_age": 120,
            },
            [
                "kubelet_container_log_max_size: 52428800 must be a quoted string",
                "kubelet_image_maximum_gc_age: 3600 must be a quoted string",
                "kubelet_image_minimum_gc_age: 120 must be a quoted string",
            ],
        ),
        (
            {
                "kubelet_config": {
                    "cpuManagerPolicyOptions": {"full-pcpus-only": True},
                    "evictionMaxPodGracePeriod": 60,
                    "evictionSoft": {"memory.available": "2Gi"},
                    "evictionSoftGracePeriod": {"memory.available": 30},
                    "reservedSystemCPUs": 0,
                }
            },
            [
                "kubelet_config.cpuManagerPolicyOptions.full-pcpus-only: true must be a quoted string",
                "kubelet_config.evictionSoftGracePeriod.memory.available: 30 must be a quoted string",
                "kubelet_config.reservedSystemCPUs: 0 must be a quoted string",
            ],
        ),
        (
            {
                "kubelet_image_credential_providers": [
                    {**PROVIDER, "args": ["-v", 2], "env": [{"name": "A", "value": 1}]}
                ]
            },
            [
                "kubelet_image_credential_providers[0].args: 2 must be a quoted string",
                "kubelet_image_credential_providers[0].env: 1 must be a quoted string",
            ],
        ),
        (
            {"kubelet_max_pods": "250", "kubelet_pod_pids_limit": 2.5},
            [
                'kubelet_max_pods: "250" must be an integer, not quoted',
                "kubelet_pod_pids_limit: 2.5 must be an integer, not quoted",
            ],
        ),
        (
            {
                "kubelet_container_log_max_files": "5",
                "kubelet_image_gc_high_threshold_percent": "85",
                "kubelet_image_gc_low_threshold_percent": "80",
            },
            [
                'kubelet_container_log_max_files: "5" must be an integer, not quoted',
                'kubelet_image_gc_high_threshold_percent: "85" must be an integer, not quoted',
                'kubelet_image_gc_low_threshold_percent: "80" must be an integer, not quoted',
            ],
        ),
        (
            # "100" is less than "9" only as text.
            {"kubelet_image_gc_high_threshold_percent": "100", "kubelet_image_gc_low_threshold_percent": "9"},
            [
                'kubelet_image_gc_high_threshold_percent: "100" must be an integer, not quoted',
                'kubelet_image_gc_low_threshold_percent: "9" must be an integer, not quoted',
            ],
        ),
        (
            {"kubelet_feature_gates": {"A": "true", "B": True}, "kubelet_seccomp_default": "no"},
            [
                'kubelet_seccomp_default: "no" must be true or false, not quoted',
                'kubelet_feature_gates.A: "true" must be true or false, not quoted',
            ],
        ),
    ],
)
def test_a_value_of_another_type_is_refused(variables: dict[str, Any], problems: list[str]) -> None:
    """The kubelet would exit: such a field can't be decoded."""
    assert Rendered(containerd("1.36", **variables)).problems == problems


def test_the_fields_that_are_strings_exist() -> None:
    assert set(table("__kubelet_string_fields")) <= fields_of(KNOWN[-1])
