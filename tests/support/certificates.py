"""A certificate authority for one test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificates(directory: Path, server: str, clients: list[str]) -> Path:
    """``ca.pem`` and, for each name, ``NAME.pem`` and ``NAME.key``."""
    directory.mkdir()
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _build("ca", authority_key, None, authority_key, is_authority=True)
    (directory / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for name in (server, *clients):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _build(name, key, authority, authority_key, is_authority=False)
        (directory / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (directory / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return directory


def _build(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
