"""Texts and numbers that somebody means harm with, or that a careless program trips over."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

# What a forged record of the operator's log would begin with.
FORGED = "2001-01-01T00:00:00.000Z"


class Hostile:
    """``victim``: a namespace with a Secret ``keys`` and a ConfigMap ``rows``, which no object may reach."""

    def __init__(self, victim: str, random: Random) -> None:
        self._random = random
        self._texts: Sequence[str] = (
            f"../../{victim}/secrets/keys",
            f"../../{victim}/configmaps/rows",
            f"{victim}/keys",
            f"..%2f..%2f{victim}%2fsecrets%2fkeys",
            f"..%252f..%252f{victim}%252fsecrets%252fkeys",
            f"x/../../../{victim}/secrets/keys",
            f"../secrets?namespace={victim}",
            "../../../../healthz",
            "..",
            ".",
            "",
            " ",
            "/",
            "//",
            "x/",
            "?watch=true",
            "x?force=true&fieldManager=x",
            "x#y",
            "x;y=z",
            "%00",
            "\x00",
            f"x\n{FORGED} ERROR   forged",
            f"x\r\n{FORGED} ERROR   forged",
            f"x\u2028{FORGED} ERROR   forged",
            f"x\u0085{FORGED} ERROR   forged",
            "\x1b[2J\x1b]0;title\x07",
            "\u202egpj.exe",
            "\ud800",
            "\U0010ffff\ufeff\u200b",
            "ｋeys",
            "K\u0130eys",
            "{0}{name}{namespace.__class__}{host!r:>99999999}",
            "%s%n%d%(x)s",
            "$(hostname)${HOME}`id`",
            "{{ 7 * 7 }}{% for i in range(10**9) %}{% endfor %}",
            "<script>alert(1)</script>",
            "'; DROP TABLE x; --",
            "(.*)*" * 48 + ".{0,10}",
            "(a+)+$",
            "[" * 120,
            "*" * 200,
            "**/" * 60,
            "true",
            "null",
            "1e400",
            "NaN",
            "9" * 400,
            "s3://",
            "s3:///key",
            f"s3://{victim}/../../x",
            "s3://bucket/" + "a/" * 400,
            "s3://bucket/a\nb",
            "file:///etc/passwd",
            "http://127.0.0.1:1\\@s3.example.org",
            "http://[::ffff:127.0.0.1]/",
            "http://169.254.169.254/latest/meta-data/",
            "http://0x7f.1/",
            "http://user:secret@host/x",
            "http://host:99999/",
            "http://[::1",
            "https://x" + "y" * 300,
            "hf://datasets/a/b/../../c",
            "hf://../..",
            "x" * 100_000,
            "é" * 5000,
        )

    def text(self) -> str:
        one = self._random.choice(self._texts)
        match self._random.randrange(8):
            case 0:
                return one + self._random.choice(self._texts)[:4000]
            case 1:
                return (
                    self._random.choice(("s3://bucket/", "https://example.org/", "hf://datasets/a/b/")) + one
                )
            case 2:
                return "".join(chr(self._random.choice(_RANGES)()) for _ in range(self._random.randrange(40)))
            case _:
                return one

    def number(self) -> int | float:
        return self._random.choice(
            (0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 1e-320, 1e308, -1e308, 0.1, 10**15)
        )

    def value(self, kind: str) -> Any:
        """For a field of this type of JSON schema."""
        match kind:
            case "string":
                return self.text()
            case "integer":
                return int(max(min(self.number(), 2**63 - 1), -(2**63)))
            case "number":
                return self.number()
            case _:
                return self._random.random() < 0.5


_whatever = Random(0)
_RANGES = (
    lambda: _whatever.randrange(0x20),
    lambda: _whatever.randrange(0x20, 0x7F),
    lambda: _whatever.randrange(0x7F, 0x3000),
    lambda: _whatever.randrange(0x1F300, 0x1F700),
)
