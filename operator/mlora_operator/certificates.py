"""A certificate for one pipeline's coordinator, signed by itself: nobody but who holds this very certificate trusts it."""

from __future__ import annotations

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mlora_operator.manifests.secret import CertificatePair

# The operator may make Secrets but not change them, so it cannot renew one: a certificate outlives its pipeline, and who
# wants another one deletes it (docs/operators/security.md). An early end would protect nobody: whoever could read the key
# from its Secret can read the next one, too.
LIFETIME = timedelta(days=3650)
CLOCKS_APART = timedelta(hours=1)  # machines whose clocks are so far behind trust it, too


def end_of(pem: str) -> datetime | None:
    """When the first certificate in ``pem`` ends; None where that cannot be read, which the handshake tells."""
    first, end, _ = pem.partition("-----END CERTIFICATE-----")
    try:
        return x509.load_pem_x509_certificate((first + end).encode()).not_valid_after_utc
    except (ValueError, TypeError):
        return None


def self_signed(host: str, now: datetime) -> CertificatePair:
    """A new key on P-256 and a certificate of it, for the DNS name ``host``."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The common name has 64 characters at most, which a pod's name may exceed; it is for people.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mLoRA coordinator")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    public = key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificatePair(
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )
