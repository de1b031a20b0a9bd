"""Bounds of what comes from outside: numbers, texts and lists of plans, reports, specs, statuses, manifests. Pure.

Every such number has a least and a greatest value in its type, every text a length, every list and mapping a number of
entries (``tests/unit/worker/test_bounds.py`` walks all types). So no reader has to ask whether a sum overflows, a loop ends
or a text fits where it is copied to. They are generous: nothing that a pipeline does comes near them.

A name or an address that is too long is refused; prose is cut (``Words``), since a long sentence is no fault.

May be imported by everything in both programs; the protocol gives these types their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field

MOST = (
    2**62
)  # of whole numbers: bytes, tokens, steps, sequence numbers. A sum of two is still a 64-bit number
MOST_REAL = 1e100  # of other numbers. A product of three is still a number
MOST_STAGES = 1024
MOST_LAYERS = 4096
MOST_WIDTH = 2**31 - 1  # of a tensor
MOST_MODULES = 2048  # linear modules of all layers together; Llama 3.1 405B has 882
MOST_PATHS = 2**18  # characters of the paths of all of them
MOST_PARTS = 12  # of such a path, between dots
MOST_TASKS = 100_000  # that one coordinator is told of
MOST_WORDS = 2048  # characters of a sentence for people
MOST_TEXT = (
    4 * 2**20
)  # characters of rows or a template that travel in a plan; a ConfigMap holds at most 1 MiB
MOST_LACKING = 64  # texts that a report asks for
MOST_KEY = 16_384  # characters of a store's key or token

Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Amount = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Whole = Annotated[int, Field(strict=True, ge=-MOST, le=MOST)]
Real = Annotated[float, Field(strict=True, ge=-MOST_REAL, le=MOST_REAL)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=MOST_REAL)]
Stage = Annotated[int, Field(strict=True, ge=0, lt=MOST_STAGES)]  # number of one
Stages = Annotated[int, Field(strict=True, ge=1, le=MOST_STAGES)]  # how many
Layer = Annotated[int, Field(strict=True, ge=0, lt=MOST_LAYERS)]
Layers = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
Width = Annotated[int, Field(strict=True, ge=1, lt=2**31)]  # of a tensor
Port = Annotated[int, Field(strict=True, ge=0, le=65_535)]

Word = Annotated[str, Field(max_length=128)]  # a uid, a device, a reason, a digest
Digest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{64}$")]  # SHA-256
Name = Annotated[str, Field(max_length=253)]  # of an object in Kubernetes, or of a base model
LongName = Annotated[str, Field(max_length=512)]  # namespace/name, path of a module
Uri = Annotated[str, Field(max_length=2048)]
LocalPath = Annotated[str, Field(max_length=4096)]  # of a local file
Text = Annotated[str, Field(max_length=MOST_TEXT)]


def at_most(entries: int) -> BeforeValidator:
    """Of a mapping: looked at before its entries are, since each wrong one makes an error of a kilobyte. Lists have
    ``fail_fast`` for that."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"must have at most {entries} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


def is_within(number: float) -> bool:
    """Whether a ``Real`` may be it; NaN and infinity may not."""
    return abs(number) <= MOST_REAL


def cut_to(most: int) -> Callable[[object], object]:
    """A validator that leaves out what is beyond ``most`` characters."""

    def cut(value: object) -> object:
        return value[:most] if isinstance(value, str) else value

    return cut


Words = Annotated[str, BeforeValidator(cut_to(MOST_WORDS)), Field(max_length=MOST_WORDS)]  # for people
