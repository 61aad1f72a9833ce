"""The kubelet is the declared version, pulls in parallel, admits no strangers, and has never joined a cluster."""

from __future__ import annotations

import re
import shlex
from typing import Any

from questions import merged, packages, programs
from suite import (
    Facts,
    assignments,
    booted,
    differences,
    load,
    named,
    needs,
    nothing,
    offline,
    output,
    read,
    starts_at_boot,
)
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
CONFIG = "/etc/kubernetes/kubelet.yaml"

with_kubelet = needs("kubernetes")


def _config(host: Host) -> dict[str, Any]:
    """Return the kubelet's configuration file."""
    content = load(host, CONFIG)
    assert isinstance(content, dict), f"{CONFIG} holds {content!r:.80}"
    return content


def _unit(host: Host) -> str:
    """Return the kubelet's unit with its drop-ins, with continuation lines joined."""
    return merged(host, "systemd/system/kubelet.service").replace("\\\n", " ")


def _command(host: Host) -> list[str]:
    """Return the words of the kubelet's command line."""
    starts = [line.partition("=")[2] for line in _unit(host).splitlines() if re.match("ExecStart=.", line)]
    assert len(starts) == 1, f"the kubelet has {len(starts)} command lines"
    return shlex.split(starts[0])


def _flags(host: Host) -> dict[str, str]:
    """Return the flags on the kubelet's command line."""
    flags = [word.lstrip("-").partition("=") for word in _command(host)[1:]]
    return {name: value for name, _, value in flags}


def _require_declared_command(host: Host, v: V) -> None:
    """Fail unless the command line is the declared one: a flag overrides the same field of the configuration."""
    expected = shlex.split(" ".join((v["__kubelet_binary"].strip(), *v["__kubelet_flags"])))
    actual = _command(host)
    nothing(
        [f"undeclared {word}" for word in actual if word not in expected]
        + [f"missing {word}" for word in expected if word not in actual]
    )
    assert actual == expected, f"{actual}"


def _same(host: Host, v: V, **fields: str) -> None:
    """Fail unless each field of the configuration has the value of the variable named for it."""
    nothing(differences({field: v[name] for field, name in fields.items()}, _config(host)))


@offline
@booted
@with_kubelet
def test_kubelet_is_the_declared_version(host: Host, v: V) -> None:
    """The kubelet is the version that its configuration was written for."""
    matches = output(host, "%s --version", v["__kubelet_binary"].strip()).split()[-1].lstrip("v")
    assert f"{matches}.".startswith(f"{v['kubelet_version']}."), f"kubelet is {matches}"


@offline
@booted
@needs("kubernetes", __kubelet_source_type="repository")
def test_kubelet_is_held(host: Host) -> None:
    """The kubelet's package is held, so package upgrades don't change it."""
    assert "kubelet" in packages(host) and packages(host)["kubelet"].held


@offline
@booted
@with_kubelet
def test_kubelet_pulls_in_parallel(host: Host, v: V) -> None:
    """The kubelet pulls images in parallel, up to the declared number if its version can limit it."""
    config = _config(host)
    nothing(differences({"serializeImagePulls": False}, config))
    if "maxParallelImagePulls" not in v["__kubelet_missing_fields"] and v["kubelet_max_parallel_image_pulls"]:
        nothing(differences({"maxParallelImagePulls": v["kubelet_max_parallel_image_pulls"]}, config))


@offline
@booted
@with_kubelet
def test_kubelet_registry_limits(host: Host, v: V) -> None:
    """Image pulls may start at the declared rate."""
    _same(host, v, registryPullQPS="kubelet_registry_pull_qps", registryBurst="kubelet_registry_burst")


@offline
@booted
@needs("kubernetes", __kubelet_dockershim=True)
def test_kubelet_waits_for_slow_pulls(host: Host, v: V) -> None:
    """dockershim cancels a pull only after it has made no progress for the declared time."""
    expected = {"image-pull-progress-deadline": v["kubelet_image_pull_progress_deadline"]}
    nothing(differences(expected, _flags(host)))


@offline
@booted
@needs("kubernetes", __kubelet_has_pause_image_flag=True)
def test_kubelet_spares_the_pause_image(host: Host, v: V) -> None:
    """The kubelet's pause image is the runtime's, and the kubelet never garbage-collects it."""
    nothing(differences({"pod-infra-container-image": v["kubelet_pause_image"]}, _flags(host)))
    assert v["kubelet_pause_image"] == v["container_runtime_pause_image"]


@offline
@booted
@with_kubelet
def test_kubelet_asks_the_engine_in_use(host: Host, v: V) -> None:
    """The kubelet's runtime is the image's engine, through dockershim, a flag or its configuration."""
    flags, config = _flags(host), _config(host)
    if v["__kubelet_dockershim"]:
        assert v["container_runtime_engine"] == "docker" and flags.get("container-runtime") == "docker", (
            f"{flags}"
        )
    else:
        matches = flags.get("container-runtime-endpoint", config.get("containerRuntimeEndpoint"))
        assert matches == v["__container_runtime_endpoint"].strip(), matches


@offline
@booted
@with_kubelet
def test_kubelet_leaves_cgroups_to_systemd(host: Host) -> None:
    """The kubelet uses the same cgroup driver as its runtime, systemd's."""
    nothing(differences({"cgroupDriver": "systemd"}, _config(host)))


@offline
@booted
@with_kubelet
def test_kubelet_collects_images_as_declared(host: Host, v: V) -> None:
    """Image garbage collection has the declared thresholds and minimum age."""
    _same(
        host,
        v,
        imageGCHighThresholdPercent="kubelet_image_gc_high_threshold_percent",
        imageGCLowThresholdPercent="kubelet_image_gc_low_threshold_percent",
        imageMinimumGCAge="kubelet_image_minimum_gc_age",
    )


@offline
@booted
@with_kubelet
def test_kubelet_reserves_for_the_system(host: Host, v: V) -> None:
    """The kubelet reserves what the node's own daemons need, as declared, so pods can't take it."""
    _same(host, v, kubeReserved="kubelet_kube_reserved", systemReserved="kubelet_system_reserved")


@offline
@booted
@with_kubelet
def test_kubelet_bounds_pods(host: Host, v: V) -> None:
    """The number of pods, and of processes per pod, is limited as declared."""
    _same(host, v, maxPods="kubelet_max_pods", podPidsLimit="kubelet_pod_pids_limit")


@offline
@booted
@with_kubelet
def test_kubelet_request_rates(host: Host, v: V) -> None:
    """Events and requests to the API server have the declared rate limits."""
    _same(
        host,
        v,
        eventRecordQPS="kubelet_event_record_qps",
        eventBurst="kubelet_event_burst",
        kubeAPIQPS="kubelet_kube_api_qps",
        kubeAPIBurst="kubelet_kube_api_burst",
    )


@offline
@booted
@with_kubelet
def test_kubelet_reports_its_status_seldom(host: Host, v: V) -> None:
    """Status frequencies are left to the kubelet unless declared: setting one makes every node report all the time."""
    named = {name for name in _config(host) if name.startswith("nodeStatus")}
    nothing(sorted(named - set(v["kubelet_config"])))


@offline
@booted
@needs("kubernetes", kubelet_register_with_taints=bool)
def test_kubelet_registers_with_taints(host: Host, v: V) -> None:
    """The node has the declared taints from the moment it registers."""
    if v["__kubelet_facts"]["taints_flag"]:
        assert _flags(host).get("register-with-taints") == ",".join(v["__kubelet_taints"])
    else:
        _same(host, v, registerWithTaints="kubelet_register_with_taints")


@offline
@booted
@with_kubelet
def test_kubelet_heeds_the_node_agent(host: Host, v: V) -> None:
    """The node agent's arguments come last, and the agent knows the taints that its own flag would replace."""
    _require_declared_command(host, v)
    assert _command(host)[-1] == "$NODE_AGENT_KUBELET_ARGS", _command(host)
    assert "EnvironmentFile=-/run/node/kubelet.env" in _unit(host).splitlines()
    nothing(differences({"taints": v["__kubelet_taints"]}, load(host, "/etc/node-agent/kubelet.json")))


@offline
@booted
@with_kubelet
def test_kubelet_lets_no_stranger_in(host: Host, v: V) -> None:
    """The kubelet has no anonymous access, no read-only port and, without an API server, no port to the network."""
    _require_declared_command(host, v)
    config = _config(host)
    nothing(differences({"readOnlyPort": 0}, config))
    nothing(differences({"anonymous": {"enabled": False}}, config.get("authentication", {})))
    if v["kubelet_mode"] == "standalone":
        nothing(differences({"address": "127.0.0.1"}, config))
    else:
        nothing(differences({"mode": "Webhook"}, config.get("authorization", {})))
        nothing(differences({"rotateCertificates": True}, config))


@offline
@booted
@with_kubelet
def test_kubelet_speaks_modern_tls(host: Host, v: V) -> None:
    """Connections to the kubelet use the declared TLS version and ciphers."""
    _same(host, v, tlsMinVersion="kubelet_tls_min_version", tlsCipherSuites="kubelet_tls_cipher_suites")


@offline
@booted
@with_kubelet
def test_kubelet_checks_the_kernel(host: Host, v: V) -> None:
    """The kubelet checks the kernel settings that it relies on as declared, and makes its own iptables chains."""
    _same(host, v, protectKernelDefaults="kubelet_protect_kernel_defaults")
    nothing(differences({"makeIPTablesUtilChains": True}, _config(host)))


@offline
@booted
@with_kubelet
def test_kubelet_has_no_other_settings(host: Host, v: V) -> None:
    """The kubelet's configuration and command line are the declared ones, field by field and flag by flag."""
    assert _flags(host).get("config") == CONFIG, _flags(host)
    _require_declared_command(host, v)
    matches, expected = _config(host), v["__kubelet_config"]
    nothing(
        differences(expected, matches)
        + [f"undeclared {name}" for name in sorted(set(matches) - set(expected))]
    )


@offline
@booted
@with_kubelet
def test_kubelet_starts_at_boot(host: Host, tree: Tree, v: V) -> None:
    """The kubelet's units are enabled, and start after the engine in use."""
    nothing(f"{unit} does not start" for unit in v["__kubelet_units"] if not starts_at_boot(tree, unit))
    after = named(_unit(host).splitlines(), "After")
    nothing(unit for unit in v["__kubelet_runtime_units"] if unit not in after)


@offline
@booted
@with_kubelet
def test_kubelet_files_are_roots_alone(tree: Tree, v: V) -> None:
    """Only root can read or change the kubelet's configuration and data, or change its program."""
    private = [
        "/etc/systemd/system/kubelet.service",
        CONFIG,
        v["kubelet_static_pod_path"],
        "/var/lib/kubelet",
    ]
    nothing(
        f"{p} {tree[p].uid}:{tree[p].gid} {tree[p].mode:o}"
        for p in private
        if tree[p].mode & 0o077 or tree[p].uid or tree[p].gid
    )
    program = tree[v["__kubelet_binary"].strip()]
    assert (program.uid, program.mode & 0o022) == (0, 0), f"{program}"


@offline
@booted
@with_kubelet
def test_kubelet_has_its_helpers(host: Host) -> None:
    """The programs that the kubelet calls are on its path."""
    tools = {
        "conntrack",
        "ethtool",
        "ip",
        "iptables",
        "iptables-save",
        "modprobe",
        "mount",
        "nsenter",
        "socat",
        "tar",
    }
    nothing(sorted(tools - programs(host, tools)))


@offline
@booted
@needs("kubernetes", kubelet_cni_plugins_package=bool)
def test_cni_plugins(host: Host, v: V) -> None:
    """The standard network plugins, and the others that are declared, are where the kubelet's runtime looks."""
    matches = set(output(host, "ls -L %s/", v["kubelet_cni_bin_dir"]).split())
    declared = {name.rpartition("/")[2] for name in v["kubelet_cni_plugins"].get("programs", [])}
    nothing(sorted(({"bridge", "host-local", "loopback", "portmap"} | declared) - matches))


@offline
@booted
@needs("kubernetes", kubelet_crictl=bool)
def test_crictl_runs(host: Host) -> None:
    """crictl is installed for the people who look after the node, and runs."""
    assert output(host, "crictl --version").startswith("crictl version")


@offline
@booted
@needs("kubernetes", kubelet_image_credential_providers=bool)
def test_credential_providers(host: Host, v: V) -> None:
    """Every declared credential provider is configured and installed."""
    matches = {
        provider["name"]: provider
        for provider in load(host, "/etc/kubernetes/credential-providers.yaml")["providers"]
    }
    for provider in v["kubelet_image_credential_providers"]:
        configured = matches.get(provider["name"], {}).get("matchImages")
        assert configured == provider["match_images"], f"{provider['name']} is for {configured}"
        output(host, "test -x %s", f"{v['kubelet_image_credential_provider_bin_dir']}/{provider['name']}")
    assert (
        _flags(host).get("image-credential-provider-bin-dir")
        == v["kubelet_image_credential_provider_bin_dir"]
    )


@offline
@booted
@needs("kubernetes", kubelet_image_credentials_policy=bool)
def test_preloaded_images_need_the_declared_credentials(host: Host, v: V) -> None:
    """Access to images that are already on the node follows the declared policy and allowlist."""
    _same(host, v, imagePullCredentialsVerificationPolicy="kubelet_image_credentials_policy")
    listed = _config(host).get("preloadedImagesVerificationAllowlist", [])
    assert listed == v["kubelet_image_credentials_allowlist"], f"{listed}"


@offline
@with_kubelet
def test_no_pod_is_baked_in(tree: Tree, v: V) -> None:
    """The directory of static pods exists and is empty."""
    assert tree[v["kubelet_static_pod_path"]].kind == "d"
    nothing(entry.path for entry in tree.under(v["kubelet_static_pod_path"]))


@offline
@with_kubelet
def test_no_node_is_baked_in(tree: Tree, v: V) -> None:
    """The image has nothing that identifies a node, which comes at first boot, and no kubelet has ever run in it."""
    files = ["/etc/kubernetes/node.env", v["kubelet_kubeconfig"], v["kubelet_bootstrap_kubeconfig"]]
    nothing(
        [path for path in files if path in tree] + [entry.path for entry in tree.under("/var/lib/kubelet")]
    )


@offline
@booted
@needs("kubernetes", kubelet_image_label_prefix=bool)
def test_node_tells_which_image_it_runs(host: Host, facts: Facts) -> None:
    """The variables used in the node's labels are set in /etc/image-release, to valid label values."""
    release = assignments(read(host, "/etc/image-release"))
    used = re.findall(r"\$\{(IMAGE_\w+)\}", _flags(host).get("node-labels", ""))
    assert used, "no label names the image"
    nothing(f"{name} is not set" for name in used if not release.get(name))
    nothing(
        f"{name} is no label: {release[name]}"
        for name in used
        if not re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", release[name])
    )
    assert "IMAGE_NAME" in used and release["IMAGE_NAME"] == facts.image
