"""What the Triton kernels of the low-rank products have in common: reading the tables, dropout's bits, products."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiler takes an annotation for a name that the kernel uses, so what runs on the device has none.

from __future__ import annotations

import triton.language as tl

from mlora_worker.lora import dropout
from mlora_worker.lora import triton_rows as tables
from mlora_worker.runtime.kernel_compiler import device_function

MIX_1, MIX_2 = tl.constexpr(dropout.MIX_1), tl.constexpr(dropout.MIX_2)
MULTIPLIER = tl.constexpr(dropout.MULTIPLIER)
RANK_TILE = tl.constexpr(tables.RANK_TILE)
INPUT = tl.constexpr(tables.MEMBERS)  # the strip of the input, after those of the members
COLUMNS = tl.constexpr(tables.COLUMNS)
FIRST_ROW, END_ROW = tl.constexpr(tables.FIRST_ROW), tl.constexpr(tables.END_ROW)
RANK, SLABS = tl.constexpr(tables.RANK), tl.constexpr(tables.SLABS)
LOW, A, GRAD_A = tl.constexpr(tables.LOW), tl.constexpr(tables.A), tl.constexpr(tables.GRAD_A)
THRESHOLD, MODULE_KEY = tl.constexpr(tables.THRESHOLD), tl.constexpr(tables.MODULE_KEY)
FACTOR, STRENGTH = tl.constexpr(tables.FACTOR), tl.constexpr(tables.STRENGTH)
PARTIAL, PARTIAL_STEP = tl.constexpr(tables.PARTIAL), tl.constexpr(tables.PARTIAL_STEP)
CHUNKS, PARTIAL_B = tl.constexpr(tables.CHUNKS), tl.constexpr(tables.PARTIAL_B)
SLOT, B, GRAD_B = tl.constexpr(tables.SLOT), tl.constexpr(tables.B), tl.constexpr(tables.GRAD_B)


@device_function
def load_integer(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.int32)


@device_function
def load_offset(row, column):
    """Slabs are multiples of RANK_TILE, and so is all that is made of them."""
    return tl.multiple_of(tl.load(row + column), RANK_TILE)


@device_function
def load_real(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.int32).to(tl.float32, bitcast=True)


@device_function
def load_address(row, column, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + column)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@device_function
def load_rank(row, VECTOR: tl.constexpr):
    """VECTOR: what all ranks of the group are multiples of, so that rows of B take loads of so many elements."""
    rank = load_integer(row, RANK)
    if VECTOR > 1:
        rank = tl.multiple_of(rank, VECTOR)
    return rank


@device_function
def slab_of(rank):
    return (rank + RANK_TILE - 1) // RANK_TILE * RANK_TILE


@device_function
def rows_of_a(columns, rank, slab):
    """Rows of A that belong to columns of the low-rank activations, and which columns are not padding."""
    within = columns % slab
    return columns // slab * rank + within, within < rank


@device_function
def multiply(left, right, total, WIDEN: tl.constexpr):
    if WIDEN:  # the interpreter cannot multiply bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@device_function
def keep(values, row_keys, feature_keys, threshold):
    """``values`` [T, W] where dropout keeps them, 0 elsewhere; the bits are those of ``DropoutMask.bits``. They come from
    the product of an element's keys, so for values [W, T] the keys change places.
    """
    bits = row_keys[:, None] * feature_keys[None, :]
    bits ^= bits >> 15
    bits *= MULTIPLIER
    return tl.where((bits >> 1) < threshold, values, tl.full(values.shape, 0.0, values.dtype))


@device_function
def mix_row_keys(token_keys, row, tokens, valid):
    """[T] int32, as ``DropoutMask.row_keys``."""
    x = tl.load(token_keys + tokens, mask=valid, other=0) ^ tl.load(row + MODULE_KEY)
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    return (x >> 32).to(tl.int32) | 1


@device_function
def pick(member, v0, v1, v2, v3):
    return tl.where(member == 0, v0, tl.where(member == 1, v1, tl.where(member == 2, v2, v3)))


@device_function
def find_strip(block, n0, n1, n2, n3, W: tl.constexpr):
    """Which member's strip ``block`` lies in (``INPUT``: after the last), and its first column there."""
    e0 = (n0 + W - 1) // W
    e1 = e0 + (n1 + W - 1) // W
    e2 = e1 + (n2 + W - 1) // W
    e3 = e2 + (n3 + W - 1) // W
    member = (
        (block >= e0).to(tl.int32)
        + (block >= e1).to(tl.int32)
        + (block >= e2).to(tl.int32)
        + (block >= e3).to(tl.int32)
    )
    before = tl.where(member == INPUT, e3, pick(member, 0, e0, e1, e2))
    return member, (block - before) * W


@device_function
def find_place(table, places, place, SIZE: tl.constexpr):
    """The table's row of a tile or chunk, its first token, the ordinal within its segment, the segment's end."""
    row = table + tl.load(places + 2 * place) * COLUMNS
    ordinal = load_integer(places + 2 * place, 1)
    return row, load_integer(row, FIRST_ROW) + ordinal * SIZE, ordinal, load_integer(row, END_ROW)
