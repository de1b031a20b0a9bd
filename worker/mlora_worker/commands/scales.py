"""Ranks and scales of an adapter's modules, as PEFT finds them in ``adapter_config.json``. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


def rank_of(config: Mapping[str, Any], module: str) -> int:
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What B A is multiplied by."""
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The first key that matches the end of the module's name."""
    own = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(own, otherwise)
