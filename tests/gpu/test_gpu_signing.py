"""Modules are signed with one's own key by the kernel's program, and only with the key that matches the certificate.

The suite's check of signatures is shown both green and red here: no image of the tests declares both Secure Boot and
a driver.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from image_builder.bake.stages.module_build import run as module_build
from image_builder.errors import CommandError, HostError
from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import open_root
from tests.support.images import mutants
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

CHECK = "test_gpu_modules_are_signed"


def make_key(folder: Path, name: str) -> tuple[Path, str]:
    """Make a key with a certificate, as `openssl req -x509` does; return the key's file and the certificate."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.key"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return path, certificate.public_bytes(encoding).decode()


def test_modules_are_signed_by_the_certificates_key_alone(
    tmp_path: Path, worker_gpu: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root_tree = worker_gpu.object("module_root") / "product" / "tree"
    product = worker_gpu.object("module_build") / "product"
    kernel = next(product.glob("files/usr/lib/modules/*")).name
    own, certificate = make_key(tmp_path, "Ours")
    other, _ = make_key(tmp_path, "Another")

    def sign(key: Path) -> list[module_build.Module]:
        monkeypatch.setenv(module_build.KEY_VARIABLE, str(key))
        binds = module_build._signing_files(certificate, tmp_path)
        with open_root([root_tree], tmp_path / "root", binds=binds) as root:
            built, target = root.path / "var/lib/built", tmp_path / "signed"
            built.mkdir(parents=True)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for file in product.rglob("nvidia*.ko"):
                shutil.copyfile(file, built / file.name)
            module_build._sign(root, built, kernel)
            return module_build._collect(root, built, target)

    def isolated() -> int:
        once, again = sign(own), sign(own)
        assert {module.signer for module in once} == {"Ours"} and once == again
        assert module_build.problems(once, kernel, once[0].version, "open", signed=True) == []
        with pytest.raises(CommandError):
            sign(other)
        return 0

    assert run_isolated(isolated) == 0


def test_the_suites_check_sees_who_signed(
    tmp_path: Path, worker_gpu: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = worker_gpu.object("module_build") / "product"
    place = next((product / "files").glob("usr/lib/modules/*/updates/dkms"))
    kernel = place.parts[-3]
    key, certificate = make_key(tmp_path, "Ours")
    monkeypatch.setenv(module_build.KEY_VARIABLE, str(key))
    signed = tmp_path / "tree" / place.relative_to(product / "files")
    signed.mkdir(parents=True)

    def isolated() -> int:
        binds = module_build._signing_files(certificate, tmp_path)
        tree = worker_gpu.object("module_root") / "product" / "tree"
        with open_root([tree], tmp_path / "root", binds=binds) as root:
            built = root.path / "var/lib/built"
            shutil.copytree(place, built)
            module_build._sign(root, built, kernel)
            for file in built.glob("*.ko"):
                shutil.copyfile(file, signed / file.name)
        return 0

    assert run_isolated(isolated) == 0
    lowers, facts = worker_gpu.sealed()

    def outcomes(name: str, trees: Sequence[Path], signers: Sequence[str], *, mutated: bool) -> list[str]:
        recorded = json.loads(facts.read_bytes())
        recorded["variables"] |= {"image_secure_boot": True, "nvidia_signers": signers}
        declared = tmp_path / f"{name}.json"
        declared.write_text(json.dumps(recorded), encoding="utf-8")
        select = (f"test_gpu.py::{CHECK}",)
        observed = mutants.observe(trees, declared, tmp_path / name, mutated=mutated, select=select)
        return [f"{check.outcome} {check.exception}".strip() for check in observed.checks]

    red = ["failed AssertionError"]
    with_signed = (tmp_path / "tree", *lowers)
    assert outcomes("ours", with_signed, ["Ours"], mutated=False) == ["passed"]
    assert outcomes("mutated", with_signed, ["Ours"], mutated=True) == red
    assert outcomes("another", with_signed, ["Another"], mutated=False) == red
    assert outcomes("nobody", lowers, [], mutated=False) == red


def test_no_key_is_an_error_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module_build.KEY_VARIABLE, raising=False)
    with pytest.raises(HostError, match="no private key") as raised:
        module_build._signing_files("x", tmp_path)
    assert module_build.KEY_VARIABLE in str(raised.value.hint)
