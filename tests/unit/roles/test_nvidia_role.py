"""The role nvidia: what it makes of the pool's sizes, what it refuses, and how it judges modules."""

from __future__ import annotations

import base64
import importlib.util
import json
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from image_builder.bake.stages.module_build import run as module_build
from image_builder.definition import engine
from image_builder.definition.evaluate import role_variables
from image_builder.definition.roles import RoleBook

REPO = Path(__file__).resolve().parents[3]
BOOK = RoleBook((REPO,))
DEBIAN = {
    "distribution": "debian",
    "suite": "bookworm",
    "components": ["main", "contrib", "non-free", "non-free-firmware"],
    "architecture": "amd64",
}
REPOSITORY = {
    "uris": ["https://archive.test/cuda"],
    "suites": ["/"],
    "signed_by": "/usr/share/keyrings/x.gpg",
}
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
V100, T4, A100, A100_SXM, H100 = (
    "Standard_NC6s_v3",
    "Standard_NC4as_T4_v3",
    "Standard_NC24ads_A100_v4",
    "Standard_ND96asr_v4",
    "Standard_ND96isr_H100_v5",
)
B200 = {"nc1_b200_v9": {"generation": "blackwell", "nvswitch": False, "infiniband": 0}}


def evaluator(**inventory: Any) -> engine.Evaluator:
    layer = BOOK.layer("gpu")
    known = {
        "image_base": DEBIAN,
        "target_booted": False,
        "target_suite": "bookworm",
        "target_architecture": "amd64",
        "image_layers": ["system", "gpu"],
        "image_secure_boot": False,
        "nvidia_driver_version": "535.261.03",
        **inventory,
    }
    return engine.Evaluator(role_variables(BOOK, layer, layer.uses[0], known))


def problems(**inventory: Any) -> list[str]:
    found = evaluator(**inventory).evaluate("{{ __nvidia_problems }}")
    assert isinstance(found, list)
    return [" ".join(str(text).split()) for text in found]


def flavour(**inventory: Any) -> str:
    return str(evaluator(**inventory).evaluate("{{ __nvidia_flavour }}")).strip()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], "open"),
        ([V100], "proprietary"),
        ([T4], "proprietary"),
        ([A100], "open"),
        ([A100, H100], "open"),
        ([T4, A100], "open"),  # both sizes work with both drivers, but prefer different ones
        ([V100, A100], "proprietary"),
        (["nc24ADS_a100_v4"], "open"),
    ],
)
def test_flavour_follows_the_sizes(sizes: list[str], expected: str) -> None:
    assert flavour(nvidia_vm_sizes=sizes) == expected


def test_lab_has_nothing_wrong() -> None:
    assert problems(nvidia_vm_sizes=[A100]) == []


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_open_modules_on_volta_are_refused() -> None:
    told = only(problems(nvidia_vm_sizes=[V100], nvidia_flavour="open"))
    assert told == f"nvidia_flavour: open modules don't work on volta ({V100})"


def test_proprietary_modules_on_blackwell_are_refused() -> None:
    told = problems(
        nvidia_vm_sizes=["nc1_b200_v9"],
        nvidia_sizes_extra=B200,
        nvidia_flavour="proprietary",
        nvidia_driver_version="580.159.04",
    )
    assert only(told).startswith("nvidia_flavour: proprietary modules don't work on blackwell")


def test_generations_that_no_modules_fit_are_refused() -> None:
    told = problems(
        nvidia_vm_sizes=[V100, "nc1_b200_v9"], nvidia_sizes_extra=B200, nvidia_driver_version="580.159.04"
    )
    assert any("no kernel modules fit all of blackwell, volta" in text for text in told)


@pytest.mark.parametrize(
    ("size", "version", "told"),
    [
        (V100, "595.71.05", "too new for volta"),
        ("nc1_b200_v9", "535.261.03", "too old for blackwell"),
    ],
)
def test_versions_that_a_generation_lacks_are_refused(size: str, version: str, told: str) -> None:
    found = only(problems(nvidia_vm_sizes=[size], nvidia_sizes_extra=B200, nvidia_driver_version=version))
    assert found.startswith(f"nvidia_driver_version: {version} is {told}")


SWITCHED = {"generation": "blackwell", "nvswitch": True, "infiniband": 8}
ALONE = {"generation": "blackwell", "nvswitch": False, "infiniband": 0}


@pytest.mark.parametrize(
    ("size", "row", "needs"),
    [
        ("nd128isr_b200_v6", SWITCHED, ["NVLSM"]),
        ("nd96isr_b300_v6", SWITCHED, ["NVLSM"]),
        ("nd128isr_ndr_gb200_v6", ALONE, ["IMEX"]),
        ("nd128isr_gb300_v6", ALONE, ["IMEX"]),
        ("nd128isr_gb300_v6", SWITCHED, ["NVLSM", "IMEX"]),
        ("nc128_rtxpro6000bse_v6", ALONE, []),
        ("nd96isr_h999_v9", {**SWITCHED, "generation": "hopper"}, []),
    ],
)
def test_sizes_that_need_what_nobody_has_run_are_refused_by_name(
    size: str, row: dict[str, Any], needs: list[str]
) -> None:
    found = problems(
        nvidia_vm_sizes=[f"Standard_{size.upper()}"],
        nvidia_sizes_extra={size: row},
        nvidia_driver_version="580.159.04",
        nvidia_repository={"uris": ["https://x"], "suites": ["/"], "signed_by": "x"},
        nvidia_fabric_manager="auto",
    )
    assert [need for text in found for need in ("NVLSM", "IMEX") if need in text] == needs
    assert all(size in text for text in found if "NVLSM" in text or "IMEX" in text)


@pytest.mark.parametrize("version", ["535", "latest", "535.261.03-1", "535.*"])
def test_part_of_a_version_is_refused(version: str) -> None:
    assert any("must be a full version" in text for text in problems(nvidia_driver_version=version))


def test_unknown_size_is_refused_with_those_that_are_known() -> None:
    told = only(problems(nvidia_vm_sizes=["Standard_NV36ads_A10_v5"]))
    assert told.startswith("nvidia_vm_sizes: nv36ads_a10_v5 is not known") and "nd96isr_h100_v5" in told


def test_secure_boot_refuses_modules_that_nobody_signs() -> None:
    assert only(problems(image_secure_boot=True)).startswith(
        "nvidia_secure_boot: the built modules are unsigned"
    )
    assert problems(image_secure_boot=True, nvidia_certificate=CERTIFICATE) == []
    assert problems(image_secure_boot=True, target_suite="noble") == []


def test_sizes_with_nvswitch_need_a_fabric_manager() -> None:
    assert only(problems(nvidia_vm_sizes=[H100])).startswith("nvidia_fabric_manager: ")
    assert problems(nvidia_vm_sizes=[H100], nvidia_repository=REPOSITORY) == []
    refused = problems(nvidia_vm_sizes=[H100], nvidia_repository=REPOSITORY, nvidia_fabric_manager="none")
    assert only(refused).endswith(f"GPUs of {H100} don't work without it")
    refused = problems(nvidia_vm_sizes=[A100], nvidia_repository=REPOSITORY, nvidia_fabric_manager="install")
    assert "fails to start" in only(refused)


def test_debian_has_the_driver_outside_main() -> None:
    assert only(problems(image_base={**DEBIAN, "components": ["main"]})).startswith(
        "nvidia_debian_components: "
    )


def test_docker_must_be_told_of_the_toolkit() -> None:
    toolkit = {
        "nvidia_container_toolkit_version": "1.20.0",
        "nvidia_container_toolkit_repository": REPOSITORY,
        "image_layers": ["system", "container_runtime", "gpu"],
        "container_runtime_engine": "docker",
    }
    assert only(problems(**toolkit)).startswith("container_runtime_docker_options: ")
    runtimes = {"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}
    assert problems(**toolkit, container_runtime_docker_options=runtimes) == []


@pytest.mark.parametrize(
    ("version", "plugin", "cdi"),
    [
        ("1.6", "io.containerd.grpc.v1.cri", False),
        ("1.7", "io.containerd.grpc.v1.cri", True),
        ("2.2", "io.containerd.cri.v1.runtime", True),
    ],
)
def test_containerd_is_told_of_cdi_where_it_knows_of_it(version: str, plugin: str, cdi: bool) -> None:
    toolkit = {
        "nvidia_container_toolkit_version": "1.20.0",
        "nvidia_container_toolkit_repository": REPOSITORY,
        "image_layers": ["system", "container_runtime", "gpu"],
        "container_runtime_engine": "containerd",
        "container_runtime_containerd_version": version,
    }
    assert problems(**toolkit) == []
    found = evaluator(**toolkit)
    assert str(found.evaluate("{{ __nvidia_containerd_plugin }}")).strip() == plugin
    assert found.evaluate("{{ __nvidia_containerd_cdi }}") is cdi
    main = f'version = 2\nroot = "/x"\n\n[plugins."{plugin}"]\n  sandbox_image = "p"\n'
    template = (REPO / "roles/nvidia/templates/containerd.toml.j2").read_text(encoding="utf-8")
    known: dict[str, Any] = {
        "__nvidia_containerd_main": {"content": base64.b64encode(main.encode()).decode()},
        "__nvidia_containerd_plugin": plugin,
        "__nvidia_containerd_cdi": cdi,
        "ansible_managed": "a test",
        "text": template,
    }
    written = tomllib.loads(str(engine.Evaluator(known).evaluate("{{ text }}")))["plugins"][plugin]
    assert written["sandbox_image"] == "p" and "nvidia" in written["containerd"]["runtimes"]
    assert ("enable_cdi" in written) is ("cdi_spec_dirs" in written) is cdi


def test_rdma_needs_open_modules() -> None:
    assert only(problems(nvidia_rdma="inbox", nvidia_vm_sizes=[V100])).startswith("nvidia_rdma: ")


def test_everything_is_named_with_the_drivers_version() -> None:
    packages = evaluator(nvidia_rdma="inbox").evaluate("{{ __nvidia_packages }}")
    assert isinstance(packages, list)
    assert packages[0] == "rdma-core" and "libcuda1=535.261.03-*" in packages
    free = {str(p) for p in packages if "=" not in str(p)}
    assert {"nvidia-modprobe", "nvidia-persistenced"} < free
    assert not [
        p for p in packages if "dkms" in str(p) or str(p).startswith(("nvidia-driver", "cuda-drivers"))
    ]


@pytest.mark.parametrize(
    ("inventory", "expected"),
    [
        ({}, ("nvidia-open-kernel-dkms=535.261.03-*", "linux-headers-cloud-amd64")),
        ({"nvidia_vm_sizes": [V100]}, ("nvidia-kernel-dkms=535.261.03-*", "linux-headers-cloud-amd64")),
        (
            {"system_kernel_package": "linux-image-6.1.0-50-cloud-amd64", "nvidia_repository": REPOSITORY},
            ("nvidia-kernel-open-dkms=535.261.03-*", "linux-headers-6.1.0-50-cloud-amd64"),
        ),
    ],
)
def test_build_is_for_the_images_kernel(inventory: dict[str, Any], expected: tuple[str, str]) -> None:
    build = evaluator(**inventory).evaluate("{{ __nvidia_build }}")
    assert isinstance(build, dict)
    assert (build["package"], build["headers"]) == expected


def test_ubuntus_modules_are_not_built() -> None:
    ubuntu = evaluator(target_suite="noble", nvidia_driver_version="580.159.04")
    assert ubuntu.evaluate("{{ __nvidia_build }}") == {}
    packages = ubuntu.evaluate("{{ __nvidia_packages }}")
    assert isinstance(packages, list)
    assert packages[:2] == [
        "linux-modules-nvidia-580-server-open-azure",  # in its kernel's version
        "nvidia-headless-no-dkms-580-server-open=580.159.04-*",
    ]
    held = ubuntu.evaluate("{{ __nvidia_held }}")
    assert isinstance(held, list) and "linux-modules-nvidia-580-server-open-azure" in held


def test_named_packages_replace_the_whole_table() -> None:
    for suite in ("noble", "trixie"):
        named = evaluator(
            target_suite=suite,
            nvidia_driver_version="580.159.04",
            nvidia_packages=["a"],
            nvidia_persistence=False,
        )
        assert named.evaluate("{{ __nvidia_packages }}") == ["a=580.159.04-*", "nvidia-modprobe"]


def test_every_size_is_of_a_known_generation() -> None:
    tables = yaml.safe_load((REPO / "roles/nvidia/vars/sizes.yml").read_text())
    for name, row in tables["__nvidia_sizes"].items():
        assert name == name.lower() and set(row) == {"generation", "nvswitch", "infiniband"}, name
        assert row["generation"] in tables["__nvidia_generations"], name
    for name, row in tables["__nvidia_generations"].items():
        assert row["prefer"] in row["flavours"], name


def test_playbook_repeats_the_other_roles_defaults() -> None:
    runtime = yaml.safe_load((REPO / "roles/container_runtime/defaults/main.yml").read_text())
    text = (REPO / "playbooks/layers/gpu.yml").read_text()
    assert f"default('{runtime['container_runtime_engine']}')" in text
    assert f"default('{runtime['container_runtime_containerd_version']}')" in text
    assert (
        evaluator(container_runtime_containerd_version="2.2").evaluate("{{ nvidia_containerd_version }}")
        == "2.2"
    )


# -- the role's own module ---------------------------------------------------------------------------------------


@cache
def library() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "nvidia_modules", REPO / "roles/nvidia/library/nvidia_modules.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIELDS = {
    "version": "535.261.03",
    "vermagic": "6.1.0-50 SMP",
    "license": "Dual MIT/GPL",
    "signer": "",
    "sha256": "0",
}
WANTED = {"driver": "535.261.03", "flavour": "open", "signed": False, "signers": []}


def test_role_and_stage_want_the_same_modules() -> None:
    assert set(library().NAMES) == set(module_build.REQUIRED)
    assert dict(module_build.LICENSES) == library().LICENSES


@pytest.mark.parametrize(
    ("fields", "wanted", "told"),
    [
        ({}, {}, []),
        ({"vermagic": "6.1.0-49 SMP"}, {}, ["nvidia is for 6.1.0-49, not 6.1.0-50"]),
        ({"version": "525.1"}, {}, ["nvidia is version 525.1, not 535.261.03"]),
        ({"license": "NVIDIA"}, {}, ["nvidia has the license 'NVIDIA', so it is not open"]),
        ({}, {"signed": True}, ["nvidia is signed by nobody, and Secure Boot would refuse it"]),
        ({"signer": "x"}, {"signed": True}, []),
        ({"signer": "x"}, {"signers": ["y"]}, ["nvidia is signed by x, not y"]),
    ],
)
def test_installed_modules_are_judged(
    fields: dict[str, str], wanted: dict[str, Any], told: list[str]
) -> None:
    assert library().problems({"nvidia": {**FIELDS, **fields}}, "6.1.0-50", {**WANTED, **wanted}) == told


def test_missing_module_is_told() -> None:
    assert library().problems({"nvidia_uvm": {}}, "6.1.0-50", WANTED) == [
        "the kernel 6.1.0-50 has no module nvidia_uvm"
    ]


def test_one_kernel_is_clear_and_two_are_not() -> None:
    assert library().chosen(["6.1.0-50"], "") == "6.1.0-50"
    for installed in ([], ["6.1.0-49", "6.1.0-50"]):
        with pytest.raises(ValueError, match="one kernel is needed"):
            library().chosen(installed, "")
    with pytest.raises(ValueError, match="one kernel is needed"):
        library().chosen(["6.1.0-49", "6.1.0-50"], "6.1.0-48")
    assert library().chosen(["6.1.0-50"], "6.1.0-48") == "6.1.0-50"
    assert library().chosen(["6.1.0-49", "6.1.0-50"], "6.1.0-50") == "6.1.0-50"


def test_a_live_nodes_kernel_is_the_running_one() -> None:
    """Ubuntu keeps the kernel of before an upgrade."""
    tasks = yaml.safe_load((REPO / "roles/nvidia/tasks/install.yml").read_text(encoding="utf-8"))
    (arguments,) = (task["nvidia_modules"] for task in tasks if "nvidia_modules" in task)
    assert arguments["booted"] == "{{ target_booted }}"


def test_leftovers_of_another_driver_and_keys_are_told(tmp_path: Path) -> None:
    assert library().leftovers(tmp_path, "535.261.03") == []
    for path in ("var/lib/dkms/nvidia/525.1.1/x", "usr/src/nvidia-535.261.03/x", "var/lib/dkms/mok.key"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert library().leftovers(tmp_path, "535.261.03") == [
        "/var/lib/dkms/nvidia/525.1.1 is of another version than 535.261.03",
        "/var/lib/dkms/mok.key would be every node's private key",
    ]


def test_files_that_differ_are_brought_and_strange_modules_are_found(tmp_path: Path) -> None:
    source, root = tmp_path / "product", tmp_path / "root"
    place = "usr/lib/modules/6.1.0-50/updates/dkms/nvidia.ko"
    (source / "files" / place).parent.mkdir(parents=True)
    (source / "files" / place).write_bytes(b"new")
    (root / place).parent.mkdir(parents=True)
    (root / place).write_bytes(b"old")
    old = root / "usr/lib/modules/6.1.0-50/kernel/nvidia-uvm.ko.xz"
    other = root / "usr/lib/modules/6.1.0-50/kernel/nvidiafb.ko.xz"
    old.parent.mkdir()
    old.touch()
    other.touch()
    assert [place for _, place in library().outdated(source, root)] == [root / place]
    assert library().strays(source, root) == [old]
    (root / place).write_bytes(b"new")
    assert library().outdated(source, root) == []


def test_record_is_written_once(tmp_path: Path) -> None:
    path, text = tmp_path / "node-agent/gpu-driver.json", json.dumps({"driver": "1"})
    assert library().write(path, text, check=True) and not path.exists()
    assert library().write(path, text, check=False) and path.stat().st_mode & 0o777 == 0o644
    assert not library().write(path, text, check=False)


def test_fields_of_a_module_are_read_as_kmod_writes_them() -> None:
    text = "filename:       /x/nvidia.ko\0version=1\0firmware=a\0firmware=b\0"
    assert library().parse(text) == {"filename": "/x/nvidia.ko", "version": "1", "firmware": "a", "": ""}
