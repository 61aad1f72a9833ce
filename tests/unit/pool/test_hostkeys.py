"""Files of host keys, and host certificates: what is trusted, byte by byte."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from image_builder.definition.connection import Hop
from image_builder.errors import UsageError
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import (
    CertificateAuthority,
    FirstUse,
    HostKeyError,
    HostKeys,
    Pinned,
    Verifier,
    check_certificate,
    known_as,
    openssh_options,
    parse,
)

NOW = 1_800_000_000
NAME = "host-1"


def line(key: forms.SSHPublicKeyTypes) -> str:
    return key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()


def blob(text: str) -> bytes:
    return base64.b64decode(text.split()[1])


def host(name: str = NAME, vm_id: str = "") -> Host:
    return Host(name=name, address="192.0.2.1", pool="p", scale_set="s", vm_size="z", image="i", vm_id=vm_id)


AUTHORITY = Ed25519PrivateKey.generate()
KEY = Ed25519PrivateKey.generate().public_key()
OTHER = Ed25519PrivateKey.generate().public_key()
MAY_SIGN = [blob(line(AUTHORITY.public_key()))]


def builder() -> forms.SSHCertificateBuilder:
    return (
        forms.SSHCertificateBuilder()
        .public_key(KEY)
        .type(forms.SSHCertificateType.HOST)
        .key_id(b"")
        .valid_after(NOW - 60)
        .valid_before(NOW + 60)
    )


def certificate(builder: forms.SSHCertificateBuilder) -> bytes:
    return blob(builder.sign(AUTHORITY).public_bytes().decode())


GOOD = certificate(builder().valid_principals([b"another", NAME.encode()]))


def test_certificate_gives_the_key_that_it_is_for() -> None:
    assert check_certificate(GOOD, MAY_SIGN, NAME, NOW) == blob(line(KEY))


def test_no_byte_of_a_certificate_can_be_another() -> None:
    for place in range(len(GOOD)):
        for bit in (0x01, 0x80):
            changed = bytearray(GOOD)
            changed[place] ^= bit
            with pytest.raises(HostKeyError):
                check_certificate(bytes(changed), MAY_SIGN, NAME, NOW)


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_certificate_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(HostKeyError):
        check_certificate(GOOD[:length], MAY_SIGN, NAME, NOW)
    with pytest.raises(HostKeyError):
        check_certificate(GOOD + GOOD[:length] + b"x", MAY_SIGN, NAME, NOW)


@pytest.mark.parametrize(
    ("builder", "why"),
    [
        (builder().valid_principals([b"host-2"]), "for host-2, not for host-1"),
        (builder().valid_principals([b"host-*"]), "not for host-1"),
        (builder().valid_for_all_principals(), "for no host"),  # type: ignore[no-untyped-call]
        (
            builder().valid_principals([NAME.encode()]).add_critical_option(b"force-command", b"x"),
            "critical options",
        ),
    ],
    ids=["another", "pattern", "none", "option"],
)
def test_certificate_that_says_something_else_is_refused(
    builder: forms.SSHCertificateBuilder, why: str
) -> None:
    with pytest.raises(HostKeyError, match=why):
        check_certificate(certificate(builder), MAY_SIGN, NAME, NOW)


def test_certificate_of_a_user_is_refused() -> None:
    builder = (
        forms.SSHCertificateBuilder()
        .public_key(KEY)
        .type(forms.SSHCertificateType.USER)
        .valid_principals([NAME.encode()])
        .valid_after(NOW - 60)
        .valid_before(NOW + 60)
    )
    with pytest.raises(HostKeyError, match="user's certificate"):
        check_certificate(certificate(builder), MAY_SIGN, NAME, NOW)


@pytest.mark.parametrize(("now", "valid"), [(-61, False), (-60, True), (59, True), (60, False)])
def test_time_of_a_certificate_has_sharp_edges(now: int, valid: bool) -> None:
    if valid:
        assert check_certificate(GOOD, MAY_SIGN, NAME, NOW + now)
        return
    with pytest.raises(HostKeyError, match="not valid now"):
        check_certificate(GOOD, MAY_SIGN, NAME, NOW + now)


def test_plain_key_is_no_certificate() -> None:
    with pytest.raises(HostKeyError, match="without a certificate"):
        check_certificate(blob(line(KEY)), [*MAY_SIGN, blob(line(KEY))], NAME, NOW)


def test_authority_must_be_named() -> None:
    with pytest.raises(HostKeyError, match="may not sign"):
        check_certificate(GOOD, [blob(line(OTHER))], NAME, NOW)


def test_all_lines_that_are_wrong_are_told_at_once() -> None:
    text = "\n".join(
        [
            "# a comment",
            f"good {line(KEY)} a comment",
            "@trusted * ssh-ed25519 AAAA",
            "alone",
            f"|1|aGFzaA==|aGFzaA== {line(KEY)}",
            f"!not,host {line(KEY)}",
            f"host ssh-rsa {line(KEY).split()[1]}",
            "host ssh-ed25519 not/base64!",
            f"host-? {line(KEY)}",
        ]
    )
    with pytest.raises(UsageError) as caught:
        parse(text, "keys")
    assert [problem.split(": ")[0] for problem in caught.value.message.split("\n")] == [
        f"keys:{n}" for n in range(3, 10)
    ]


def keys(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (Pinned, f"@cert-authority * {line(KEY)}\n", "cert-authority"),
        (FirstUse, f"@cert-authority * {line(KEY)}\n", "cert-authority"),
        (CertificateAuthority, f"host {line(KEY)}\n", "pinned"),
        (CertificateAuthority, "", "no @cert-authority line"),
    ],
    ids=["pinned", "first use", "authority", "empty"],
)
def test_file_of_another_kind_is_refused(
    tmp_path: Path, kind: type[Pinned] | type[FirstUse] | type[CertificateAuthority], text: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        Verifier(kind(keys(tmp_path / "keys", text)))


@pytest.mark.parametrize("kind", [Pinned, CertificateAuthority])
def test_file_must_be_there(tmp_path: Path, kind: type[Pinned] | type[CertificateAuthority]) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Verifier(kind(tmp_path / "keys"))


def test_pinned_key_is_asked_for_by_its_kind_and_held_to(tmp_path: Path) -> None:
    curve = generate_private_key(SECP256R1()).public_key()
    verifier = Verifier(Pinned(keys(tmp_path / "keys", f"host-1 {line(curve)}\nhost-2 {line(OTHER)}\n")))
    assert verifier.algorithms(host()) == ("ecdsa-sha2-nistp256",)
    verifier.check(host(), blob(line(curve)))
    for wrong in (KEY, OTHER):
        with pytest.raises(HostKeyError, match="known is SHA256:"):
            verifier.check(host(), blob(line(wrong)))
    with pytest.raises(HostKeyError, match="no key is pinned for host-3"):
        verifier.algorithms(host("host-3"))
    verifier.check(host("host-2"), blob(line(OTHER)))


def test_machine_with_another_id_is_another_host(tmp_path: Path) -> None:
    verifier = Verifier(Pinned(keys(tmp_path / "keys", f"AAAA-1 {line(KEY)}\n")))
    verifier.check(host(vm_id="aaaa-1"), blob(line(KEY)))
    with pytest.raises(HostKeyError):
        verifier.algorithms(host(vm_id="aaaa-2"))


def test_revoked_key_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    text = f"host-1 {line(KEY)}\n@revoked host-? {line(KEY)}\n"
    for kind in (Pinned, FirstUse):
        with pytest.raises(HostKeyError, match="revoked"):
            Verifier(kind(keys(tmp_path / "keys", text))).check(host(), blob(line(KEY)))


def test_first_key_is_in_the_file_when_it_is_accepted_and_no_other_after_it(tmp_path: Path) -> None:
    source = FirstUse(tmp_path / "new" / "keys")
    Verifier(source).check(host(), blob(line(KEY)))
    assert source.path.read_text() == f"host-1 {line(KEY)}\n"
    assert source.path.stat().st_mode & 0o777 == 0o600
    for verifier in (Verifier(source), Verifier(Pinned(source.path))):
        verifier.check(host(), blob(line(KEY)))
        with pytest.raises(HostKeyError):
            verifier.check(host(), blob(line(OTHER)))
    assert source.path.read_text() == f"host-1 {line(KEY)}\n"


def test_what_another_process_learnt_meanwhile_holds(tmp_path: Path) -> None:
    first, other = (Verifier(FirstUse(tmp_path / "keys")) for _ in range(2))
    first.check(host(), blob(line(KEY)))
    with pytest.raises(HostKeyError, match="known is"):
        other.check(host(), blob(line(OTHER)))
    other.check(host("host-2"), blob(line(OTHER)))
    first.check(host("host-2"), blob(line(OTHER)))
    assert (tmp_path / "keys").read_text() == f"host-1 {line(KEY)}\nhost-2 {line(OTHER)}\n"


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_line_that_a_crash_cut_counts_for_nothing(tmp_path: Path, cut: int) -> None:
    whole = f"host-1 {line(KEY)}\n"
    path = keys(tmp_path / "keys", whole + f"host-2 {line(OTHER)}\n"[:-cut])
    verifier = Verifier(FirstUse(path))
    verifier.check(host("host-2"), blob(line(KEY)))
    assert path.read_text() == whole + f"host-2 {line(KEY)}\n"


@pytest.mark.parametrize("name", ["a,b", "*", "a b", "[a]", "!a", "-a", "@revoked"])
def test_name_that_would_mean_something_else_in_the_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="can't be a name of host keys"):
        known_as(host(name))


def test_openssh_is_held_to_the_same_file() -> None:
    sources: list[HostKeys] = [
        Pinned(Path("/k k")),
        CertificateAuthority(Path("/k k")),
        FirstUse(Path("/k k")),
    ]
    for source in sources:
        options = openssh_options(source, host(vm_id="AB"))
        assert (options["HostKeyAlias"], options["UserKnownHostsFile"]) == ("ab", '"/k k"')
        assert options["StrictHostKeyChecking"] == "yes"


def test_a_bastion_is_known_by_its_address() -> None:
    assert known_as(Hop(address="Bastion.example", port=2222)) == "bastion.example"
