"""The files of the role container_runtime for every version it knows, and what it refuses.

Golden files are the renderings with the role's defaults; ``pytest --update-golden`` rewrites them.
tests/bake/test_container_runtime_versions.py shows the same files to the real programs.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.images.declarations import CA
from tests.support.roles.container_runtime import render, value
from tests.support.roles.templates import ROLES

ROLE = ROLES / "container_runtime"
GOLDEN = Path(__file__).parents[1] / "golden" / "container_runtime"
DOCKER = ("20.10", "23.0", "26.1", "28", "29")
CONTAINERD = ("1.6", "1.7", "2.0", "2.1", "2.2.2", "2.2.4", "2.3")
CRI_DOCKERD = {"version": "0.3.16", "url": "https://archive.test/cri-dockerd.tgz", "sha256": "ab" * 32}
# Settings that make containerd >= 2.1 bypass the transfer service (CheckLocalImagePullConfigs in internal/cri).
FALLBACKS = {
    "max_concurrent_downloads",
    "discard_unpacked_layers",
    "disable_snapshot_annotations",
    "image_pull_with_sync_fs",
    "use_local_image_pull",
}


def containerd(version: str, **variables: Any) -> dict[str, Any]:
    return tomllib.loads(render("containerd.toml.j2", **containerd_variables(version), **variables))


def containerd_variables(version: str) -> dict[str, Any]:
    return {"container_runtime_engine": "containerd", "container_runtime_containerd_version": version}


def daemon(version: str, **variables: Any) -> dict[str, Any]:
    parsed = json.loads(render("daemon.json.j2", container_runtime_docker_version=version, **variables))
    assert isinstance(parsed, dict)
    return parsed


def at_least(version: str, other: str) -> bool:
    return [int(n) for n in version.split(".")] >= [int(n) for n in other.split(".")]


MIRRORS: dict[str, list[dict[str, Any]]] = {
    "docker.io": [{"url": "https://mirror.test:5000"}],
    "registry.test": [{"url": "http://10.0.0.1:5000", "skip_verify": True, "override_path": True}],
}


PROXY = {"https": "http://proxy.test:3128", "no_proxy": [".test", "10.0.0.0/8", "100%.test"]}


def _goldens() -> dict[str, tuple[str, dict[str, Any]]]:
    files: dict[str, tuple[str, dict[str, Any]]] = {}
    for version in DOCKER:
        files[f"docker-{version}.json"] = ("daemon.json.j2", {"container_runtime_docker_version": version})
    for version in CONTAINERD:
        files[f"containerd-{version}.toml"] = ("containerd.toml.j2", containerd_variables(version))
    files["containerd-1.7-below-docker.toml"] = ("containerd.toml.j2", {})
    files["docker-29-every-option.json"] = (
        "daemon.json.j2",
        {
            "container_runtime_docker_version": "29",
            "container_runtime_docker_min_api_version": "1.40",
            "container_runtime_docker_no_new_privileges": True,
            "container_runtime_docker_options": {"debug": True, "features": {"cdi": True}},
            "container_runtime_registry_mirrors": {"docker.io": MIRRORS["docker.io"]},
        },
    )
    files["docker-service.conf"] = ("docker.conf.j2", {})
    files["containerd-service.conf"] = ("containerd.conf.j2", {})
    proxy = {"container_runtime_proxy": PROXY}
    files["docker-service-proxy.conf"] = ("docker.conf.j2", proxy)
    files["containerd-service-proxy.conf"] = (
        "containerd.conf.j2",
        {**proxy, "container_runtime_engine": "containerd"},
    )
    files["containerd-service-below-docker.conf"] = ("containerd.conf.j2", proxy)
    files["cri-docker.service"] = ("cri-docker.service.j2", {"container_runtime_cri_dockerd": CRI_DOCKERD})
    files["cri-docker.socket"] = ("cri-docker.socket.j2", {"container_runtime_cri_dockerd": CRI_DOCKERD})
    files["crictl-dockershim.yaml"] = ("crictl.yaml.j2", {})
    files["crictl-cri-dockerd.yaml"] = ("crictl.yaml.j2", {"container_runtime_cri_dockerd": CRI_DOCKERD})
    files["crictl-containerd.yaml"] = ("crictl.yaml.j2", {"container_runtime_engine": "containerd"})
    files["docker-client.json"] = (
        "docker-client.json.j2",
        {"container_runtime_credential_helpers": {"lab.azurecr.io": "acr-env"}},
    )
    for registry, mirrors in MIRRORS.items():
        item = {"registry": registry, "mirrors": mirrors}
        files[f"hosts-{registry}.toml"] = ("hosts.toml.j2", {"item": item})
    repository = {
        "uris": ["https://packages.test/debian"],
        "suites": ["trixie"],
        "components": ["stable"],
        "signed_by": "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQ==\n-----END PGP PUBLIC KEY BLOCK-----\n",
    }
    files["repository.sources"] = ("repository.sources.j2", {"container_runtime_repository": repository})
    on_the_host = {**repository, "uris": ["file:repository"], "suites": ["/"], "components": []}
    files["repository-on-the-host.sources"] = (
        "repository.sources.j2",
        {"container_runtime_repository": on_the_host},
    )
    return files


GOLDENS = _goldens()


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_rendering_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    template, variables = GOLDENS[name]
    text = render(template, **variables)
    path = GOLDEN / name
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(GOLDENS)


@pytest.mark.parametrize("version", DOCKER)
def test_docker_never_chooses_its_storage_itself(version: str) -> None:
    config = daemon(version)
    assert config["storage-driver"] == "overlay2"
    assert config["data-root"] == "/mnt/local/docker"
    assert config["exec-opts"] == ["native.cgroupdriver=systemd"]
    assert config["max-concurrent-downloads"] == 10
    assert config["live-restore"] is True
    assert config["userland-proxy"] is False
    assert all(
        isinstance(option, str) for option in config["log-opts"].values()
    )  # dockerd accepts no numbers here


@pytest.mark.parametrize("version", DOCKER)
def test_containerds_image_store_is_off_where_it_would_be_the_default(version: str) -> None:
    def features(**variables: Any) -> object:
        return daemon(version, **variables).get("features")

    off = {"containerd-snapshotter": False} if version == "29" else {}
    assert features() == (off or None)
    asked = {"container_runtime_docker_options": {"features": {"cdi": True}}}
    assert features(**asked) == {"cdi": True, **off}
    assert features(container_runtime_docker_options={"features": {"containerd-snapshotter": False}}) == {
        "containerd-snapshotter": False
    }


def test_docker_has_only_what_was_asked_for() -> None:
    assert "no-new-privileges" not in daemon("29")
    assert "min-api-version" not in daemon("29")
    assert "registry-mirrors" not in daemon("29")
    assert daemon("29", container_runtime_docker_min_api_version="1.40")["min-api-version"] == "1.40"


@pytest.mark.parametrize("version", CONTAINERD)
def test_containerd_config_version(version: str) -> None:
    expected = {"1.6": 2, "1.7": 2, "2.0": 3, "2.1": 3, "2.2.2": 3, "2.2.4": 3, "2.3": 4}
    config = containerd(version)
    assert config["version"] == expected[version]
    assert config["root"] == "/mnt/local/containerd"


@pytest.mark.parametrize("version", CONTAINERD)
def test_containerd_downloads_without_losing_the_transfer_service(version: str) -> None:
    plugins = containerd(version)["plugins"]
    if not at_least(version, "2.0"):
        assert plugins["io.containerd.grpc.v1.cri"]["max_concurrent_downloads"] == 10
    elif not at_least(version, "2.1"):
        assert plugins["io.containerd.cri.v1.images"]["max_concurrent_downloads"] == 10
    else:
        assert not FALLBACKS & plugins["io.containerd.cri.v1.images"].keys()
        assert plugins["io.containerd.cri.v1.images"]["registry"].keys() == {"config_path"}
        assert plugins["io.containerd.transfer.v1.local"]["max_concurrent_downloads"] == 10


@pytest.mark.parametrize("version", [*CONTAINERD, "2.2", "2.2.0", "2.2.3", "2.3.1"])
def test_layers_unpack_in_parallel_only_where_that_is_correct(version: str) -> None:
    transfer = containerd(version)["plugins"].get("io.containerd.transfer.v1.local", {})
    assert ("max_concurrent_unpacks" in transfer) == at_least(version, "2.2.3")


@pytest.mark.parametrize("version", CONTAINERD)
def test_containerd_pulls_slowly_but_surely(version: str) -> None:
    plugins = containerd(version)["plugins"]
    split = at_least(version, "2.0")
    images = plugins["io.containerd.cri.v1.images" if split else "io.containerd.grpc.v1.cri"]
    assert images.get("image_pull_progress_timeout") == ("30m" if at_least(version, "1.7") else None)
    pause = images["pinned_images"]["sandbox"] if split else images["sandbox_image"]
    assert pause == "registry.k8s.io/pause:3.10"
    runtime = plugins["io.containerd.cri.v1.runtime"] if split else images
    assert runtime["containerd"]["runtimes"]["runc"]["options"] == {"SystemdCgroup": True}
    assert ("bin_dirs" in runtime["cni"]) == at_least(version, "2.1")
    sync = plugins.get("io.containerd.service.v1.diff-service", {}).get("sync_fs", False)
    assert sync == at_least(version, "2.0")


def test_cri_is_off_where_only_docker_uses_containerd() -> None:
    def disabled(**variables: Any) -> list[str] | None:
        return tomllib.loads(render("containerd.toml.j2", **variables)).get("disabled_plugins")

    assert disabled() == ["io.containerd.grpc.v1.cri"]
    assert disabled(container_runtime_install=["docker", "containerd"]) is None
    assert disabled(container_runtime_engine="containerd") is None


def test_known_versions_are_the_promised_ones() -> None:
    known = value("__container_runtime_known")
    assert list(known["docker"]) == ["20.10", "23", "24", "25", "26", "27", "28", "29"]
    assert list(known["containerd"]) == ["1.6", "1.7", "2.0", "2.1", "2.2", "2.3"]
    for version in (*known["docker"], "20.10.24", "26.1.5", "29.7.2"):
        assert value("__container_runtime_problems", container_runtime_docker_version=version) == []
    for version in (*known["containerd"], "1.6.20", "2.2.4"):
        assert value("__container_runtime_problems", container_runtime_containerd_version=version) == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"container_runtime_docker_version": "19.03"}, ("19.03", "20.10, 23, 24, 25, 26, 27, 28, 29")),
        ({"container_runtime_docker_version": "30.0"}, ("30.0", "not known")),
        ({"container_runtime_docker_version": "2"}, ("2 is not known",)),
        ({"container_runtime_containerd_version": "1.5"}, ("1.5", "1.6, 1.7, 2.0, 2.1, 2.2, 2.3")),
        ({"container_runtime_containerd_version": "2"}, ("2 is not known",)),
        ({"container_runtime_install": ["containerd"]}, ("lacks the engine, docker",)),
        (
            {"container_runtime_cri_dockerd": {**CRI_DOCKERD, "version": "0.3.14"}},
            ("0.3.14 cancels", "0.3.15"),
        ),
        ({"container_runtime_cri_dockerd": {**CRI_DOCKERD, "version": "0.2.5"}}, ("0.2.5 is not known",)),
        ({"container_runtime_cri_dockerd": {**CRI_DOCKERD, "version": "0.5.0"}}, ("0.5.0", "0.3, 0.4")),
        ({"container_runtime_cri_dockerd": {"version": "0.3.16"}}, ("needs version, url and sha256",)),
        (
            {"container_runtime_engine": "containerd", "container_runtime_cri_dockerd": CRI_DOCKERD},
            ("needs docker",),
        ),
        (
            {"container_runtime_registry_mirrors": {"registry.test": [{"url": "https://mirror.test"}]}},
            ("only docker.io, not registry.test",),
        ),
        (
            {
                "container_runtime_registry_mirrors": {
                    "docker.io": [{"url": "https://a.test", "ca": "/a.pem"}]
                }
            },
            ("declare a mirror's CA in container_runtime_ca_certificates",),
        ),
        (
            {"container_runtime_registry_mirrors": {"docker.io": MIRRORS["registry.test"]}},
            ("docker takes only a mirror's url, not override_path, skip_verify",),
        ),
        (
            {
                "container_runtime_engine": "containerd",
                "container_runtime_registry_mirrors": {
                    "a.test": [{"url": "https://b.test", "capabilities": ["pull"]}]
                },
            },
            ("containerd takes only a mirror's url, skip_verify, override_path, not capabilities",),
        ),
        (
            {
                "container_runtime_registry_mirrors": {
                    "docker.io": [{"url": "https://user:secret@mirror.test"}]
                }
            },
            ("container_runtime_registry_mirrors: an address has a password",),
        ),
        (
            {
                "container_runtime_registry_mirrors": {
                    "docker.io": [{"url": "https://token@mirror.test:5000/v2"}]
                }
            },
            ("container_runtime_registry_mirrors: an address has a password",),
        ),
        ({"container_runtime_proxy": {"https": "http://a:b@proxy.test:3128"}}, ("has a password",)),
        ({"container_runtime_proxy": {"http": "proxy.test:3128"}}, ("like http://proxy.example:3128",)),
        ({"container_runtime_ca_certificates": {"../a": CA}}, ("under a name of",)),
        ({"container_runtime_ca_certificates": {"a": CA + CA}}, ("each must be one certificate",)),
        ({"container_runtime_ca_certificates": {"a": "/etc/ssl/a.pem"}}, ("each must be one certificate",)),
        ({"container_runtime_layer_fetch_buffer": 1}, ("containerd 2.3",)),
        ({"container_runtime_docker_min_api_version": "1.40"}, ("Docker 29",)),
        ({"container_runtime_docker_options": {"storage-driver": "vfs"}}, ("storage-driver",)),
        (
            {"container_runtime_docker_options": {"hosts": ["tcp://127.0.0.1:2375"]}},
            ("hosts has a variable",),
        ),
        ({"container_runtime_docker_options": {"containerd": "/run/c.sock"}}, ("containerd has a variable",)),
        (
            {"container_runtime_docker_options": {"features": {"containerd-snapshotter": True}}},
            ("features.containerd-snapshotter isn't supported",),
        ),
        (
            {
                "container_runtime_docker_version": "29",
                "container_runtime_docker_options": {"features": {"containerd-snapshotter": True}},
            },
            ("features.containerd-snapshotter isn't supported",),
        ),
        (
            {"container_runtime_docker_options": {"features": {"containerd-snapshotter": "false"}}},
            ("features.containerd-snapshotter isn't supported",),
        ),
        ({"container_runtime_pause_image": "pause"}, ("registry and a tag",)),
        ({"container_runtime_pause_image": "registry.k8s.io/pause"}, ("registry and a tag",)),
        (
            {"container_runtime_repository": {"uris": ["https://packages.test"]}},
            ("uris, suites and signed_by",),
        ),
    ],
)
def test_bad_settings_are_named(variables: dict[str, Any], words: tuple[str, ...]) -> None:
    problems = value("__container_runtime_problems", **variables)
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0]
    assert set(variables) & {part.rstrip(".:,") for part in problems[0].replace(".version", "").split()}


@pytest.mark.parametrize("version", ["0.3.15", "0.3.17", "0.4.0", "0.4.3"])
def test_cri_dockerd_that_extracts_in_peace(version: str) -> None:
    settings = {"container_runtime_cri_dockerd": {**CRI_DOCKERD, "version": version}}
    assert value("__container_runtime_problems", **settings) == []


@pytest.mark.parametrize(
    ("engine", "mirror"),
    [
        ("docker", {"url": "https://mirror.test", "skip_verify": False}),
        ("containerd", MIRRORS["registry.test"][0]),
    ],
)
def test_mirrors_that_an_engine_can_use(engine: str, mirror: dict[str, Any]) -> None:
    settings = {
        "container_runtime_engine": engine,
        "container_runtime_registry_mirrors": {"docker.io": [mirror]},
    }
    assert value("__container_runtime_problems", **settings) == []


def test_proxies_and_authorities_that_are_fine() -> None:
    settings = {
        "container_runtime_proxy": {**PROXY, "http": "http://10.0.0.1:3128/"},
        "container_runtime_ca_certificates": {"company-root.1": f"\n{CA}\n"},
    }
    assert value("__container_runtime_problems", **settings) == []


def test_pause_image_of_a_registry_with_a_port() -> None:
    image = "registry.lab.test:5000/pause:3.10"
    assert value("__container_runtime_problems", container_runtime_pause_image=image) == []


def test_packages_of_the_distribution() -> None:
    extra = ["apparmor", "ca-certificates", "pigz"]
    bookworm = {"target_distribution": "debian", "target_suite": "bookworm"}
    noble = {"target_distribution": "ubuntu", "target_suite": "noble"}
    assert value("__container_runtime_packages") == ["containerd", "runc", "docker.io", "docker-cli", *extra]
    for target in (bookworm, noble):
        assert value("__container_runtime_packages", **target) == [
            "containerd",
            "runc",
            "docker.io",
            *extra,
        ]
    assert value("__container_runtime_packages", container_runtime_engine="containerd") == [
        "containerd",
        "runc",
        *extra,
    ]
    assert value("__container_runtime_repositories") == []
    assert value("__container_runtime_archives") == []


def test_packages_of_upstream_are_of_the_declared_versions() -> None:
    repository = {
        "uris": ["https://packages.test/debian"],
        "suites": ["trixie"],
        "signed_by": "/usr/share/keyrings/x.gpg",
    }
    settings = {
        "container_runtime_repository": repository,
        "container_runtime_docker_version": "29.1.5",
        "container_runtime_containerd_version": "2.2",
        "container_runtime_extra_packages": [],
    }
    assert value("__container_runtime_packages", **settings) == [
        "containerd.io=2.2.*",
        "docker-ce=5:29.1.5-*",
        "docker-ce-cli=5:29.1.5-*",
    ]
    assert value("__container_runtime_repositories", **settings) == [
        {"name": "container-runtime", **repository}
    ]


def test_cri_dockerd_is_an_archive_for_the_lock() -> None:
    archive = {"url": CRI_DOCKERD["url"], "sha256": CRI_DOCKERD["sha256"]}
    assert value("__container_runtime_archives", container_runtime_cri_dockerd=CRI_DOCKERD) == [archive]


def test_files_and_units_follow_the_engine() -> None:
    def written(**variables: Any) -> set[str]:
        return {
            Path(f["dest"]).name if "dest" in f else f["registry"]
            for f in value("__container_runtime_files", **variables)
        }

    def enabled(**variables: Any) -> dict[str, bool]:
        return {unit["name"]: unit["enabled"] for unit in value("__container_runtime_units", **variables)}

    both = {"container_runtime_engine": "containerd", "container_runtime_install": ["docker", "containerd"]}
    assert "daemon.json" not in written(container_runtime_engine="containerd")
    assert {"daemon.json", "config.toml", "registry.test"} <= written(
        **both, container_runtime_registry_mirrors=MIRRORS
    )
    assert enabled() == {"containerd.service": True, "docker.socket": True, "docker.service": True}
    assert enabled(**both) == {"containerd.service": True, "docker.socket": False, "docker.service": False}
    assert enabled(container_runtime_cri_dockerd=CRI_DOCKERD)["cri-docker.service"] is True


def test_a_file_of_mirrors_is_known_as_the_roles_own() -> None:
    """Its mark identifies a file of an earlier run on a live node; an administrator's files stay."""
    tasks = yaml.safe_load((ROLE / "tasks/configure.yml").read_text())
    (mark,) = (
        task["ansible.builtin.find"]["contains"] for task in tasks if "mirrors that this" in task["name"]
    )
    for registry, mirrors in [*MIRRORS.items(), ("none.test", [])]:
        item = {"registry": registry, "mirrors": mirrors}
        assert re.search(mark, render("hosts.toml.j2", item=item))
    ours = render("hosts.toml.j2", item={"registry": "registry.test", "mirrors": MIRRORS["registry.test"]})
    for theirs in (ours.lstrip("#\n"), ours.replace("https:", "http:"), f"# of ours\n{ours}"):
        assert not re.search(mark, theirs)


def test_every_public_variable_is_specified() -> None:
    spec = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    assert list(spec) == list(defaults)
    assert {name: option["default"] for name, option in spec.items()} == defaults
