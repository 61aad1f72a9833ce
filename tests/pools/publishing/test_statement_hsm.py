"""A statement signed with a key that never leaves its HSM: SoftHSM, from the host's Debian release, through PKCS#11."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from image_builder.errors import PublishError
from image_builder.gallery.statement import verified
from tests.support.images.builds import REPO

pytestmark = [pytest.mark.root, pytest.mark.slow]

PIN = "canary-7315"
# The test's own process mustn't import either: the library's path must be in the environment at process start.
MAKE_KEY = """
import sys, pkcs11
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from pkcs11.util.ec import encode_ec_public_key, encode_named_curve_parameters
token = pkcs11.lib(sys.argv[1]).get_token(token_label="lab")
with token.open(user_pin=sys.argv[2], rw=True) as session:
    curve = {pkcs11.Attribute.EC_PARAMS: encode_named_curve_parameters("secp256r1")}
    parameters = session.create_domain_parameters(pkcs11.KeyType.EC, curve, local=True)
    public, _ = parameters.generate_keypair(id=b"\\x02", store=True)
    key = load_der_public_key(encode_ec_public_key(public))
sys.stdout.write(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())
"""
SIGN = """
import sys
from pathlib import Path
from image_builder.errors import ImageBuilderError
from image_builder.gallery.statement import sign
try:
    statement = {"_type": "https://in-toto.io/Statement/v1", "subject": []}
    sys.stdout.buffer.write(sign(statement, sys.argv[1], Path(sys.argv[2])))
except ImageBuilderError as error:
    sys.exit(f"{type(error).__name__}: {error.message}")
"""


class Hsm:
    """A token `lab` with one key, whose public part is the file ``public``."""

    def __init__(self, folder: Path) -> None:
        tree, self.public = folder / "debian", folder / "key.pub"
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=extract", "--include=softhsm2", release, tree], check=True
        )
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        requirements = Path(__file__).with_name("hsm-requirements.txt")
        pip += ["--require-hashes", "--only-binary", ":all:", "--target", str(folder / "python"), "-r"]
        subprocess.run([*pip, requirements], check=True)
        (folder / "tokens").mkdir()
        (folder / "softhsm.conf").write_text(f"directories.tokendir = {folder / 'tokens'}\n")
        module = os.fspath(tree / "usr/lib/softhsm/libsofthsm2.so")
        self.environment = {
            "PATH": os.defpath,
            "LD_LIBRARY_PATH": str(next((tree / "usr/lib").glob("*-linux-gnu"))),
            "SOFTHSM2_CONF": str(folder / "softhsm.conf"),
            "PYTHONPATH": f"{REPO}:{folder / 'python'}",
            "PYKCS11LIB": module,
        }
        util = [os.fspath(tree / "usr/bin/softhsm2-util"), "--module", module, "--init-token", "--free"]
        subprocess.run(
            [*util, "--label", "lab", "--pin", PIN, "--so-pin", PIN],
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.public.write_text(self.python(MAKE_KEY, module, PIN).stdout)

    def python(self, program: str, *argv: str | Path, pin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, *argv],
            env=self.environment | ({"IMAGE_BUILDER_SIGN_PIN": pin} if pin else {}),
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def hsm(tmp_path_factory: pytest.TempPathFactory) -> Hsm:
    return Hsm(tmp_path_factory.mktemp("hsm"))


def test_a_key_of_an_hsm_signs(hsm: Hsm, tmp_path: Path) -> None:
    done = hsm.python(SIGN, "hsm:2?label=lab", hsm.public, pin=PIN)
    assert done.returncode == 0, done.stderr
    assert verified(done.stdout.encode(), hsm.public)["subject"] == []
    other, key = tmp_path / "other.pub", tmp_path / "key.pem"
    curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(["openssl", "genpkey", *curve, "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", other], check=True)
    with pytest.raises(PublishError, match="not signed by"):
        verified(done.stdout.encode(), other)
    refused = hsm.python(SIGN, "hsm:2?label=lab", other, pin=PIN)
    assert refused.returncode == 1 and "signatures do not match" in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("key", "pin", "reason"),
    [
        ("hsm:3?label=lab", PIN, "could not find ECDSA private key"),
        ("hsm:2?label=none", PIN, "No PKCS#11 token found"),
        ("hsm:2?label=lab", "canary-0000", "PinIncorrect"),
        ("hsm:2?label=lab", "", "IMAGE_BUILDER_SIGN_PIN"),
    ],
)
def test_what_an_hsm_refuses_is_said_without_the_pin(hsm: Hsm, key: str, pin: str, reason: str) -> None:
    done = hsm.python(SIGN, key, hsm.public, pin=pin)
    assert done.returncode == 1 and done.stderr.startswith("PublishError:") and reason in done.stderr
    assert "canary" not in done.stdout + done.stderr
