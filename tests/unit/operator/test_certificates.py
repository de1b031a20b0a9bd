"""The certificate that the operator makes for a coordinator."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from mlora_operator.certificates import CLOCKS_APART, LIFETIME, self_signed

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOST = f"mlora-{'m' * 46}-0.mlora-{'m' * 46}.{'n' * 63}.svc"  # the longest


def test_it_is_of_one_name_for_a_time_and_signed_by_itself() -> None:
    pair = self_signed(HOST, NOW)
    certificate = x509.load_pem_x509_certificate(pair.certificate.encode())
    assert (certificate.not_valid_before_utc, certificate.not_valid_after_utc) == (
        NOW - CLOCKS_APART,
        NOW + LIFETIME,
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(HOST)]
    certificate.verify_directly_issued_by(certificate)
    key = load_pem_private_key(pair.key.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert (key.curve.name, key.public_key()) == ("secp256r1", certificate.public_key())


def test_it_signs_nothing_else() -> None:
    certificate = x509.load_pem_x509_certificate(self_signed(HOST, NOW).certificate.encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_each_has_a_key_of_its_own_that_no_text_of_it_shows() -> None:
    one, other = self_signed(HOST, NOW), self_signed(HOST, NOW)
    assert one.key != other.key
    assert "PRIVATE" not in repr(one)
