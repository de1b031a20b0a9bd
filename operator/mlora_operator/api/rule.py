"""One rule that a schema alone cannot say, in CEL and in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """``cel`` and ``holds`` (on the JSON value with its defaults) are about the value at ``path``. ``new_alone``: an object
    that was stored before there was this rule may break it, and the operator understands it all the same."""

    path: Path
    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    new_alone: bool = False

    def to_cel(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``; a rule about a change forbids."""
        reason = "FieldValueForbidden" if "oldSelf" in self.cel else "FieldValueInvalid"
        return {"rule": self.cel, "message": self.message, "reason": reason}
