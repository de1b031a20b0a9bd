"""Under which name this program was called: ``mlora``, or as a plugin of kubectl."""

from __future__ import annotations

import sys
from pathlib import Path

PLUGIN = "kubectl-mlora"  # kubectl finds it in the PATH by this name


def program() -> str:
    """As the user types it."""
    return "kubectl mlora" if Path(sys.argv[0]).stem == PLUGIN else "mlora"
