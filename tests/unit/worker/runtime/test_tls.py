"""The files that a rank's HTTPS is served with: unusable ones are said, and plain HTTP is no way out."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mlora_operator.certificates import LIFETIME, self_signed
from mlora_worker.runtime.tls import CannotServe, server_context

HOST = "mlora-toy-0.mlora-toy.team-a.svc"
NOW = datetime.now(UTC)


def put(folder: Path, certificate: str | None, key: str | None) -> None:
    for name, text in (("tls.crt", certificate), ("tls.key", key)):
        if text is not None:
            (folder / name).write_text(text)


GOOD, OTHER = self_signed(HOST, NOW), self_signed(HOST, NOW)


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (None, None, "No such file or directory"),
        (GOOD.certificate, None, "No such file or directory"),
        (None, GOOD.key, "No such file or directory"),
        ("", "", "not a certificate and its key as PEM"),
        ("nonsense", GOOD.key, "not a certificate and its key as PEM"),
        (GOOD.certificate, "nonsense", "not a certificate and its key as PEM"),
        (GOOD.certificate, OTHER.key, "KEY_VALUES_MISMATCH"),
    ],
)
def test_unusable_files_are_refused_with_the_reason(
    tmp_path: Path, certificate: str | None, key: str | None, words: str
) -> None:
    put(tmp_path, certificate, key)
    with pytest.raises(CannotServe) as refused:
        server_context(tmp_path, HOST)
    assert str(tmp_path / "tls.crt") in str(refused.value)
    assert words in str(refused.value)
    assert "PRIVATE" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "made", "level", "words"),
    [
        (HOST, NOW, "INFO", "connections are encrypted with the certificate "),
        (HOST, NOW - LIFETIME - timedelta(days=1), "ERROR", "will not trust the certificate in"),
        (HOST, NOW - LIFETIME - timedelta(days=1), "ERROR", "certificate has expired"),
        (HOST, NOW + timedelta(days=2), "ERROR", "not yet valid"),
        ("another.svc", NOW, "ERROR", "not valid for"),
    ],
)
def test_what_the_operator_will_say_of_a_certificate_is_said_at_the_start(
    tmp_path: Path, host: str, made: datetime, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = self_signed(host, made)
    put(tmp_path, pair.certificate, pair.key)
    with caplog.at_level(logging.INFO):
        server_context(tmp_path, HOST)
    assert [record.levelname for record in caplog.records] == [level]
    assert words in caplog.text
    assert "PRIVATE" not in caplog.text


def test_no_version_before_1_2_is_spoken(tmp_path: Path) -> None:
    put(tmp_path, GOOD.certificate, GOOD.key)
    assert server_context(tmp_path, HOST).minimum_version is ssl.TLSVersion.TLSv1_2
