"""``python -m mlora_operator``: the operator of a cluster. ``MLORA_SETTINGS`` names its settings file."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import kopf

from mlora_operator import handlers, kopf_reading
from mlora_operator.logs import configure_logging
from mlora_operator.reconcile.loop import utc_now
from mlora_operator.settings import Settings, SettingsError, load_settings

SETTINGS_VARIABLE = "MLORA_SETTINGS"
EXIT_SETTINGS = 2


async def operate(settings: Settings, now: Callable[[], datetime] = utc_now) -> None:
    """Run until SIGTERM or SIGINT."""
    kopf_reading.install()
    scope = {"namespaces": settings.namespaces} if settings.namespaces else {"clusterwide": True}
    await kopf.operator(
        memo=handlers.Runtime(settings, now), settings=handlers.kopf_settings(), standalone=True, **scope
    )


def main() -> int:
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        print(f"{SETTINGS_VARIABLE} must name the settings file", file=sys.stderr)
        return EXIT_SETTINGS
    try:
        settings = load_settings(Path(path))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return EXIT_SETTINGS
    configure_logging(settings.log)
    gc.freeze()  # modules and classes stay for good: some 300,000 objects that no collection need look at
    asyncio.run(operate(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
