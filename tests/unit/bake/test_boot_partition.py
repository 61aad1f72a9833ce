"""Microsoft's certificates are the ones that Microsoft has published, by their fingerprints."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from image_builder.bake.boot_partition import FIRMWARE_AUTHORITIES

# SHA-1, by which Windows and Microsoft's pages identify certificates.
THUMBPRINTS = {
    "Microsoft Corporation UEFI CA 2011": "46def63b5ce61cf8ba0de2e6639c1019d0ed14f3",
    "Microsoft UEFI CA 2023": "b5eeb4a6706048073f0ed296e7f580a790b59eaa",
}


def test_the_certificates_are_microsofts() -> None:
    found = {}
    for name, pem in FIRMWARE_AUTHORITIES.items():
        certificate = x509.load_pem_x509_certificate(pem.encode())
        (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        assert common.value == name
        found[name] = certificate.fingerprint(hashes.SHA1()).hex()
    assert found == THUMBPRINTS
