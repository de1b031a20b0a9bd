"""``python -m bench NAME [options]``: runs one benchmark."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench


def main() -> int:
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if module.name != "__main__"
    )
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m bench {{{','.join(names)}}} [options]", file=sys.stderr)
        return 2
    result = importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    assert isinstance(result, int)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
