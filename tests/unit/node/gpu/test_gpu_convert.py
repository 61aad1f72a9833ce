"""nvidia-smi's output is converted back to the answers that it was given."""

from __future__ import annotations

import pytest

from image_builder.node.decode import decode
from image_builder.node.gpu.model import Gpu, Process
from tests.data.gpu.convert import convert

TEXT = """
==============NVSMI LOG==============

Timestamp                                 : Fri Jun 21 02:03:08 2024
Driver Version                            : 535.183.01

Attached GPUs                             : 8
GPU 00000000:53:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    Serial Number                         : N/A
    GPU UUID                              : GPU-566e6f65-c38e-b12f-4824-6944218668b9
    PCI
        Device Id                         : 0x233010DE
        Bus Id                            : 00000000:53:00.0
        GPU Link Info
            Link Width
                Current                   : 16x
    Clocks Event Reasons
        Idle                              : Not Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Active
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 1
            SRAM Uncorrectable SEC-DED    : 2
            DRAM Uncorrectable            : 4
        Aggregate
            Double Bit
                Device Memory             : 8
                Total                     : 9
    Temperature
        GPU T.Limit Temp                  : 50 C
        GPU Slowdown T.Limit Temp         : -2 C
    Processes
        Process ID                        : 7
            Type                          : C
            Name                          : /usr/bin/python
            Used GPU Memory               : 5 MiB
        Process ID                        : 8
            Type                          : G
            Name                          : Xorg
            Used GPU Memory               : 6 MiB
        Process ID                        : 9
            Type                          : C
            Name                          : x
            Used GPU Memory               : N/A
"""


@pytest.fixture
def gpu() -> Gpu:
    recording = convert(TEXT, "here")
    assert (recording["driver"], recording["attached"], recording["pci_devices"]) == (
        "535.183.01",
        8,
        ["2330"],
    )
    return decode(Gpu, recording["gpus"][0])


def test_counts_are_sums(gpu: Gpu) -> None:
    assert (gpu.ecc_volatile_uncorrected_sram, gpu.ecc_volatile_uncorrected_dram) == (3, 4)
    assert (gpu.ecc_volatile_uncorrected, gpu.ecc_aggregate_uncorrected) == (7, 9)
    assert gpu.ecc_aggregate_uncorrected_dram == 8


def test_bits_and_numbers(gpu: Gpu) -> None:
    assert (gpu.throttle, gpu.pcie_width, gpu.temperature_margin_c, gpu.persistence) == (0x88, 16, 52, True)


def test_what_is_not_there_is_told_apart(gpu: Gpu) -> None:
    assert gpu.serial is None and gpu.missing["serial"] == "not-supported"
    assert gpu.vbios is None and gpu.missing["vbios"] == "not recorded"


def test_compute_processes(gpu: Gpu) -> None:
    assert gpu.processes == (Process(7, 5 << 20, "python"), Process(9, None, "x"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"index": "0"}, 'index must be an integer, not "0"'),
        ({"index": True}, "index must be an integer"),
        ({}, "index is missing"),
        ({"index": 0, "temperature": 1}, "temperature is not a known key"),
        ({"index": 0, "nvlinks": [1]}, "nvlinks.0. must be true or false"),
        ({"index": 0, "processes": {}}, "processes must be a list"),
        ([], "the document must be an object"),
    ],
)
def test_a_recording_that_is_none(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode(Gpu, value)
