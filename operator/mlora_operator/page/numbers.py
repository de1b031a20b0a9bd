"""Numbers of a status as the page's API gives them. Pure."""

from __future__ import annotations

from math import isfinite

from mlora_operator.page.order import TRAINING_STATES, Standing


def number(text: str | None) -> float | None:
    """Numbers stand in a status as text; somebody may have written another one by hand."""
    try:
        found = float(text) if text is not None else None
    except ValueError:
        return None
    return found if found is not None and isfinite(found) else None


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def speed(one: Standing) -> float | None:
    """Tokens per second, of a task that trains now."""
    return number(one.status.tokens_per_second) if one.state in TRAINING_STATES else None
