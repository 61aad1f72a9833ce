"""The kernels, assembled by NVIDIA's own assembler for every target that a pool may have; nothing is run.

ptxas is the one from nvidia-cuda-nvcc-cu12: CUDA 12.8 and 12.9 support all targets from sm_70 to sm_120.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from image_builder.node.gpu.smoke import reference, tensor
from tests.bench.first_contact.worker import FAULT

pytestmark = pytest.mark.root

KERNELS = Path(reference.__file__).with_name("kernels")
TARGETS = ("70", "75", "80", "86", "89", "90", "100", "103", "120")
SUITABLE = {
    "base": TARGETS,
    "memory": TARGETS,
    "tc_sm70": ("70", "75"),
    "tc_sm80": TARGETS[2:],
}


@pytest.fixture(scope="module")
def ptxas() -> Path:
    files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    return next(Path(str(file.locate())) for file in files if file.name == "ptxas")


def _assemble(ptxas: Path, text: Path, target: str, target_file: Path) -> subprocess.CompletedProcess[str]:
    argv: list[str | Path] = [
        ptxas,
        "--verbose",
        "--gpu-name",
        f"sm_{target}",
        "--output-file",
        target_file,
        text,
    ]
    return subprocess.run(argv, capture_output=True, text=True)


def test_all_kernels_are_among_those_that_are_assembled() -> None:
    assert {path.stem for path in KERNELS.iterdir()} == set(SUITABLE)
    cases = {case.module for case in (*reference.CASES, *tensor.cases((9, 0)), *tensor.cases((7, 0)))}
    assert cases | {"memory"} == set(SUITABLE)


@pytest.mark.parametrize("module", SUITABLE)
def test_a_module_is_assembled_for_every_target(module: str, ptxas: Path, tmp_path: Path) -> None:
    text = KERNELS / f"{module}.ptx"
    entries = len(re.findall(r"\.visible \.entry", text.read_text()))
    for target in SUITABLE[module]:
        binary = tmp_path / f"{module}.sm_{target}.cubin"
        done = _assemble(ptxas, text, target, binary)
        assert done.returncode == 0, f"sm_{target}: {done.stderr}"
        assert binary.read_bytes()[:4] == b"\x7fELF"
        # Registers for four blocks of 256 threads on each SM, with no spills.
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
        assert len(registers) == entries and max(registers) <= 64, done.stderr
        assert "warning" not in done.stderr
        assert not re.search(r"[1-9]\d* bytes spill", done.stderr), done.stderr


def test_the_kernel_that_provokes_xids_is_assembled(ptxas: Path, tmp_path: Path) -> None:
    text = tmp_path / "fault.ptx"
    text.write_bytes(FAULT.rstrip(b"\0"))
    for target in TARGETS:
        done = _assemble(ptxas, text, target, tmp_path / f"fault.sm_{target}.cubin")
        assert (done.returncode, "warning" in done.stderr) == (0, False), f"sm_{target}: {done.stderr}"


@pytest.mark.parametrize(
    ("module", "original", "put"),
    [
        ("base", "mad.lo.u32 %a, %lo, 0x9E3779B1, %hi;", "mad.lo.u32 %a, %lo, 0x9E3779B1, %nothing;"),
        ("base", "shf.l.wrap.b32", "shf.sideways.b32"),
        ("base", ".param .u64 records,", ""),
        ("memory", "red.global.min.u64", "red.global.min.f16"),
        ("memory", "bra FILL;", "bra NOWHERE;"),
        ("tc_sm80", ".target sm_80", ".target sm_70"),
        ("tc_sm80", "m16n8k16.row.col.f32", "m16n8k17.row.col.f32"),
    ],
)
def test_a_broken_kernel_is_not_assembled(
    module: str, original: str, put: str, ptxas: Path, tmp_path: Path
) -> None:
    text = (KERNELS / f"{module}.ptx").read_text()
    assert original in text
    broken = tmp_path / "broken.ptx"
    broken.write_text(text.replace(original, put, 1))
    done = _assemble(ptxas, broken, "90", tmp_path / "broken.cubin")
    assert done.returncode != 0 and not (tmp_path / "broken.cubin").exists()


def test_tensor_kernels_of_ampere_are_not_for_volta(ptxas: Path, tmp_path: Path) -> None:
    done = _assemble(ptxas, KERNELS / "tc_sm80.ptx", "70", tmp_path / "made.cubin")
    assert done.returncode != 0
