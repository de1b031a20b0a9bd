"""Output for terminals that do not speak Unicode: what they cannot show is spelt out and ends no command."""

from __future__ import annotations

import codecs
import sys

_NAME = "mlora-spelt-out"
_LOOKALIKES = {"█": "#", "⟦": "[[", "⟧": "]]", "…": "...", "–": "-", "•": "*", "━": "-", "╸": "-", "╺": "-"}


def _spelt_out(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(
        _LOOKALIKES.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in letters
    ), error.end


def spell_out_what_cannot_be_shown() -> None:
    """For standard output and standard error of this process."""
    codecs.register_error(_NAME, _spelt_out)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a test's stream has none
        if reconfigure is not None:
            reconfigure(errors=_NAME)
