"""Triton's compiler: whether it can work on this machine, what kernels call, and what starts them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Launch = Callable[..., None]  # kernel, grid, arguments, options


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start ``kernel`` on the device of its first argument. Who counts launches, or has no device, passes another one."""
    import torch

    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **options)


@cache
def missing_for_triton() -> str | None:
    """What is missing, or None. Triton compiles a kernel by itself, but what launches it with the machine's C compiler:
    without one the first launch fails, which is late.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler was found: install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"there is no {header}: install Python's headers"
    return None


def device_function(function: Callable[..., Any]) -> Any:
    """What kernels call. To Triton's interpreter a plain function is the same, but a jitted one costs it 2 ms a call."""
    import triton

    return function if triton.knobs.runtime.interpret else triton.jit(function)
