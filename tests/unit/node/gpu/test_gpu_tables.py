"""The tables that ship with the agent are sound, and a typo in one is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.node.errors import NodeError
from image_builder.node.gpu import settings, sizes, xids
from image_builder.node.gpu.sizes import Floor

PACKAGE = Path(sizes.__file__).parent
TABLE = json.loads((PACKAGE / "sizes.json").read_text(encoding="utf-8"))
XIDS = json.loads((PACKAGE / "xids.json").read_text(encoding="utf-8"))
H200, A100 = "Standard_ND96isr_H200_v5", "Standard_ND96asr_v4"


def test_every_size_of_the_sources_is_there() -> None:
    table = sizes.load()
    assert {size.name for size in table.sizes.values()} == {
        *(f"Standard_NC{n}_v3" for n in ("6s", "12s", "24s", "24rs")),
        "Standard_ND40rs_v2",
        "Standard_ND40s_v2",
        *(f"Standard_NC{n}as_T4_v3" for n in (4, 8, 16, 64)),
        *(f"Standard_NC{n}ads_A100_v4" for n in (24, 48, 96)),
        "Standard_ND96asr_v4",
        "Standard_ND96amsr_A100_v4",
        "Standard_ND96ams_A100_v4",
        "Standard_NC40ads_H100_v5",
        "Standard_NC80adis_H100_v5",
        "Standard_ND96isr_H100_v5",
        "Standard_ND96is_H100_v5",
        "Standard_ND96isr_H200_v5",
        "Standard_ND96isrf_H200_v5",
        "Standard_ND96is_H200_v5",
    }


def test_the_role_that_installs_the_driver_knows_the_same_sizes(repo_root: Path) -> None:
    role = yaml.safe_load((repo_root / "roles/nvidia/vars/sizes.yml").read_text(encoding="utf-8"))
    flavours = {name: value["flavours"] for name, value in role["__nvidia_generations"].items()}
    of_the_role = {
        name: (flavours[row["generation"]], row["nvswitch"], row["infiniband"])
        for name, row in role["__nvidia_sizes"].items()
    }
    table = sizes.load()
    ours = {
        name.removeprefix("standard_"): (
            list(table.gpus[size.gpu].driver_flavours),
            size.nvswitch,
            size.infiniband_ports,
        )
        for name, size in table.sizes.items()
    }
    assert ours == of_the_role


def test_a_size_is_found_however_it_is_spelled() -> None:
    row = sizes.load().find("STANDARD_nd96ISR_h200_V5")
    assert row and row[0].name == H200 and row[1].name_pattern == "NVIDIA H200"
    assert sizes.load().find("Standard_D4s_v5") is None


def set_size(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["sizes"][name].__setitem__(key, value)


def set_gpu(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["gpus"][name].__setitem__(key, value)


def floor(value: Any, source: Any = "x") -> dict[str, Any]:
    return {"value": value, "from": source}


def drop(group: str, name: str, key: str) -> Callable[[dict[str, Any]], None]:
    return lambda table: table[group][name].__delitem__(key)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    # Mistakes from a published table.
    "H200 in MB/s": (
        set_size(H200, "hbm_floor_gbps", floor(2333000)),
        "hbm_floor_gbps must be 960 to 4800, not 2333000",
    ),
    "H200 in TB/s": (
        set_size(H200, "hbm_floor_gbps", floor(2.333)),
        "hbm_floor_gbps must be 960 to 4800, not 2.333",
    ),
    "A100 lost a digit": (set_size(A100, "hbm_floor_gbps", floor(137.5)), "hbm_floor_gbps must be 311"),
    "A100 above its peak": (
        set_size(A100, "hbm_floor_gbps", floor(1830)),
        "0.2 to 1.0 of the peak: another unit?",
    ),
    "a key for MB/s": (set_size(H200, "hbm_floor_mbps", floor(2333)), "hbm_floor_mbps is not a known key"),
    "H100 NVL over links that it hasn't": (
        set_size("Standard_NC80adis_H100_v5", "p2p_floor_gbps", floor(335)),
        "p2p_floor_gbps must be 60 to 300, not 335",
    ),
    "copies in bits": (set_size(H200, "h2d_floor_gbps", floor(384)), "h2d_floor_gbps must be"),
    "copies too slow to matter": (set_size(H200, "d2h_floor_gbps", floor(12.5)), "d2h_floor_gbps must be"),
    "peak in MB/s": (
        set_gpu("h200-sxm5-141gb", "hbm_peak_gbps", 4800000),
        "hbm_peak_gbps must be 200 to 20000, not 4800000",
    ),
    "memory in GiB": (
        set_gpu("h200-sxm5-141gb", "memory_mib", 141),
        "memory_mib must be 8000 to 600000, not 141: another unit?",
    ),
    "PCIe of another generation": (
        set_gpu("h200-sxm5-141gb", "pcie_peak_gbps", 31.5),
        "pcie_peak_gbps must be what",
    ),
    "a reference above the peak": (
        set_gpu("h200-sxm5-141gb", "mma_reference_tflops", floor(990)),
        "mma_reference_tflops must be",
    ),
    "no count": (drop("sizes", H200, "count"), "count is missing"),
    "no count at all": (set_size(H200, "count", 0), "count must be 1 to 16, not 0"),
    "a count of text": (set_size(H200, "count", "8"), 'count must be an integer, not "8"'),
    "a count that is true": (set_size(H200, "count", True), "count must be an integer, not true"),
    "no source": (set_size(H200, "hbm_floor_gbps", floor(2333, "")), "hbm_floor_gbps.from must say"),
    "a bare number": (set_size(H200, "hbm_floor_gbps", 2333), "hbm_floor_gbps must be an object, not 2333"),
    "an unknown part": (set_size(H200, "gpu", "h300"), "gpu must be one of v100"),
    "no memory peak": (drop("gpus", "t4", "hbm_peak_gbps"), "hbm_peak_gbps is missing"),
    "links that the part hasn't": (
        set_size("Standard_NC6s_v3", "nvlink_links", 6),
        "nvlink_links must be 0 to 0, not 6",
    ),
    "p2p without links": (set_size("Standard_NC24s_v3", "p2p_floor_gbps", floor(100)), "p2p_floor_gbps"),
    "an unknown flavour": (set_gpu("t4", "driver_flavours", ["nouveau"]), "driver_flavours"),
    "a pattern for anything": (set_gpu("t4", "name_pattern", ".*"), "name_pattern"),
    "another format": (lambda table: table.__setitem__("format", 2), "format must be 1, not 2"),
    "an unknown group": (lambda table: table.__setitem__("floors", {}), "floors is not a known key"),
    "no sizes": (lambda table: table.__setitem__("sizes", {}), "sizes must not be empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slip_of_the_pen_is_refused(name: str) -> None:
    change, problem = WRONG[name]
    table = copy.deepcopy(TABLE)
    change(table)
    with pytest.raises(NodeError) as caught:
        sizes.parse(table)
    assert caught.value.code == "gpu.sizes"
    assert problem in caught.value.message


def test_all_that_is_wrong_is_told_at_once() -> None:
    table = copy.deepcopy(TABLE)
    for name in ("H200 in MB/s", "memory in GiB", "no count"):
        WRONG[name][0](table)
    with pytest.raises(NodeError) as caught:
        sizes.parse(table)
    # A size without one of its keys can't be checked any further.
    assert all(word in caught.value.message for word in ("memory_mib must be", "count is missing"))


@pytest.mark.parametrize("name", TABLE["sizes"])
def test_a_floor_a_thousand_times_off_is_refused_for_each_size(name: str) -> None:
    for key, old in TABLE["sizes"][name].items():
        for factor in (1000, 0.001, 8):
            if isinstance(old, dict):
                table = copy.deepcopy(TABLE)
                table["sizes"][name][key] = floor(old["value"] * factor)
                with pytest.raises(NodeError):
                    sizes.parse(table)


def test_a_pool_has_floors_of_its_own() -> None:
    row = sizes.load().find(H200)
    assert row
    size, gpu = sizes.overridden(
        *row, {"hbm_floor_gbps": Floor(4000, "bench"), "mma_reference_tflops": Floor(500, "b")}
    )
    assert size.hbm_floor_gbps == Floor(4000, "bench")
    assert gpu.mma_reference_tflops == Floor(500, "b")


@pytest.mark.parametrize(
    "overrides",
    [
        {"hbm_floor_gbps": Floor(4_000_000, "MB/s")},
        {"hbm_floor_gbps": Floor(4.0, "TB/s")},
        {"mma_reference_tflops": Floor(5000, "x")},
    ],
)
def test_a_pools_floors_are_judged_as_the_tables(overrides: dict[str, Floor]) -> None:
    row = sizes.load().find(H200)
    assert row
    with pytest.raises(NodeError) as caught:
        sizes.overridden(*row, overrides)
    assert caught.value.code == "gpu.settings"


# -- settings ----------------------------------------------------------------------------------------------------


def test_settings() -> None:
    assert settings.parse({}) == settings.Settings()
    result = settings.parse(
        {
            "expect": "none",
            "driver_version": "535.247.01",
            "driver_flavour": "open",
            "overrides": {"hbm_floor_gbps": {"value": 2400, "from": "bench"}},
            "waived": {"pcie.link": "why"},
            "own_processes": ["x"],
            "fabric_wait_seconds": 10,
        }
    )
    assert result.overrides == {"hbm_floor_gbps": Floor(2400.0, "bench")}
    assert (result.expect, result.own_processes, result.fabric_wait_seconds) == ("none", ("x",), 10.0)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown size without a count": ({"allow_unknown_size": True}, "count is missing"),
    "count": ({"count": 0}, "count must be 1 to 16, not 0"),
    "version": ({"driver_version": "latest"}, 'driver_version must be a version, not "latest"'),
    "unknown override": (
        {"overrides": {"hbm_floor": {"value": 1, "from": "x"}}},
        "overrides.hbm_floor must be one of",
    ),
    "a waiver without a reason": ({"waived": {"pcie.link": " "}}, "waived.pcie.link needs a reason"),
    "a waiver of wrong answers": ({"waived": {"kat.int": "it's only one"}}, "can't be waived"),
    "a waiver of ECC": ({"waived": {"ecc.mode": "x"}}, "can't be waived"),
    "wait": ({"fabric_wait_seconds": 601}, "fabric_wait_seconds must be 0 to 600, not 601"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(name: str) -> None:
    value, problem = BAD_SETTINGS[name]
    with pytest.raises(NodeError) as caught:
        settings.parse(value)
    assert caught.value.code == "gpu.settings" and problem in caught.value.message


# -- Xids --------------------------------------------------------------------------------------------------------


def test_the_catalogue() -> None:
    catalogue = xids.load()
    failing = {n for n in range(1, 200) if catalogue.classify(n).before == "fail"}
    assert failing == {
        *(46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),  # RESET_GPU
        *(48, 74, *range(144, 151), 79, 54, 78, 151, 154, 167, 171, 172),
    }
    assert catalogue.classify(63).name == "IGNORE"
    assert catalogue.classify(170).name == "UNKNOWN"
    assert catalogue.classify(79).action == "replace"


def in_two_classes(table: dict[str, Any]) -> None:
    table["xids"]["IGNORE"].append(79)


def unknown_class(table: dict[str, Any]) -> None:
    table["xids"]["PANIC"] = [300]


def unknown_level(table: dict[str, Any]) -> None:
    table["classes"]["IGNORE"]["before"] = "ok"


def no_default(table: dict[str, Any]) -> None:
    del table["classes"]["UNKNOWN"]


@pytest.mark.parametrize("change", [in_two_classes, unknown_class, unknown_level, no_default])
def test_a_wrong_catalogue_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    table = copy.deepcopy(XIDS)
    change(table)
    with pytest.raises(NodeError) as caught:
        xids.parse_catalogue(table)
    assert caught.value.code == "gpu.xids"


# Kernel messages as published: the spellings differ from driver to driver.
MESSAGES = {
    "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked": (63, "0000:10:1c"),
    "NVRM: Xid (0000:03:00): 14, Channel 00000001": (14, "0000:03:00"),
    "NVRM: Xid (PCI:0002:00:00): 79, pid=1582259, name=nvc:[driver], GPU has fallen off the bus.": (
        79,
        "0002:00:00",
    ),
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.": (79, "0000:01:00"),
    "NVRM: GPU 0000:09:00.0: GPU has fallen off the bus.": (79, "0000:09:00"),
    "NVRM: GPU at PCI:0000:18:00.0 has fallen off the bus.": (79, "0000:18:00"),
    "NVRM: GPU has fallen off the bus.": (79, ""),
    "[6085126.134786] NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1": (
        154,
        "0008:01:00",
    ),
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05": None,
    # With MIG: the GPU instance, the compute instance.
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 95, pid=7062, Uncontained: LTC TAG (0x2,0x1). RST: Yes": (
        95,
        "0000:01:00",
    ),
    "NVRM: Xid (PCI:0001:00:00 GPU-I:01 GPU-CI:02): 13, pid=9, Graphics SM Warp Exception": (
        13,
        "0001:00:00",
    ),
    "NVRM: Xid (PCI:00000002:00:00.0, GPU-I:11): 94, Contained": (94, "0002:00:00"),
    "NVRM: Xid (GPU-I:05): 94, Contained": (94, ""),
    # What can't be read may be anything: it has no number, and is never nothing.
    "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636": (0, ""),
    "NVRM: Xid (PCI:0000:66:00): pid=7: 31, Channel": (0, ""),
    "NVRM: Xid (PCI:0000:66:00": (0, ""),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message(message: str) -> None:
    xid = xids.parse_message(message, 7)
    assert ((xid.number, xid.pci) if xid else None) == MESSAGES[message]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 05 (0x004505c6 0x00000000)", "NVLINK_NONFATAL"),
        ("149, NETIR_LINK_EVT  Non-Fatal   XC0 i0 Link 09 (0x0)", "NVLINK_NONFATAL"),
        ("150, pid=7, name=a, b, MSE  Nonfatal XC0 i0 Link 00 (0x0)", "NVLINK_NONFATAL"),
        ("145, RLW_RXPIPE Fatal   XC0 i0 Link 05 (0x0)", "WORKFLOW_NVLINK"),
        ("145, pid=7, name=job Nonfatal, RLW_RXPIPE Fatal XC0 (0x0)", "WORKFLOW_NVLINK"),
        ("144, SAW_MVB XC0 i0", "WORKFLOW_NVLINK"),
        ("74, NVLink Nonfatal error", "WORKFLOW_NVLINK"),
    ],
)
def test_an_nvlink_error_by_the_drivers_own_rating(line: str, name: str) -> None:
    xid = xids.parse_message(f"NVRM: Xid (PCI:0008:01:00): {line}", 7)
    assert xid and xids.load().class_of(xid).name == name


@pytest.mark.parametrize("text", ["00000001:00:00.0", "0001:00:00.0", "PCI:0001:00:00", "0001:00:00"])
def test_an_address_has_one_spelling(text: str) -> None:
    assert xids.address(text) == "0001:00:00"


BOOT = "0b2ce45c-8c3c-4d2f-8f6f-5a0d6a3f4f11"


def entry(message: Any, boot: str = BOOT, at: int = 5) -> str:
    values = {"_BOOT_ID": boot.replace("-", ""), "MESSAGE": message, "__MONOTONIC_TIMESTAMP": str(at)}
    return json.dumps(values) + "\n"


def test_the_journal_of_one_boot() -> None:
    message = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    other = "0" * 32
    text = (
        entry("other")
        + entry(message, other)
        + entry(message, at=77)
        + entry(list(message.encode()), at=78)
        + entry(None)
    )
    boot_xids = xids.parse_journal(text, BOOT)
    assert [(xid.number, xid.monotonic_us) for xid in boot_xids] == [(79, 77), (79, 78)]


@pytest.mark.parametrize("text", ["no journal here\n", "[]\n"])
def test_a_journal_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="journal|Expecting"):
        xids.parse_journal(text, BOOT)
