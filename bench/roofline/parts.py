"""The parts of one optimizer step of several adapters over one frozen base in bfloat16. Pure.

Each part has its arithmetic (two operations per multiply and add), the bytes that it must move through the device's memory,
and its kernels. Reading and writing count wherever a kernel ends: what the next kernel reads has been written. Values have
two bytes, gradients of adapters and moments four.

``fused``: with a norm, the product behind an activation, and the rotation as one kernel each in either direction, and the
update of all adapters as two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.gpu.shapes import SHAPES as MEASURED
from bench.roofline.devices import Device

VALUE, WIDE = 2, 4  # bytes
CHUNK_LOGITS = 128 * 2**20  # that exist at once, ``stream/footprint.py``
LOW_RANK_PAD = 16  # columns of a rank, ``lora/triton_tables.py``


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's kind."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """``config``: in the words of ``config.json``."""
        return cls(
            config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], config["num_attention_heads"],
            config["num_key_value_heads"], config["head_dim"], config["vocab_size"],
        )  # fmt: skip

    @property
    def groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Linear modules of a layer that read one input: its size, and their outputs' sizes."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        return (
            (self.hidden, (queries, keys, keys)),
            (queries, (self.hidden,)),
            (self.hidden, (self.intermediate, self.intermediate)),
            (self.intermediate, (self.hidden,)),
        )

    @property
    def linear_weights(self) -> int:
        """Of all layers; the head is not one of them."""
        return self.layers * sum(size * sum(outputs) for size, outputs in self.groups)


SHAPES = {
    **{name: Shape.of(MEASURED[name]) for name in ("1b", "8b")},
    "70b": Shape(8192, 28_672, 80, 64, 8, 128, 128_256),  # Llama-3-70B
}


@dataclass(frozen=True, slots=True)
class Work:
    """What one step trains: ``rows`` of ``length`` tokens, for ``tasks`` adapters of ``rank`` on all linear modules."""

    rows: int
    length: int
    supervised: float  # share of the tokens
    tasks: int
    rank: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    flops: float
    bytes: float
    launches: int

    def seconds(self, device: Device, matrix: float, memory: float) -> float:
        """The longer of its arithmetic and its traffic, at these shares of the device's peaks."""
        return max(self.flops / (device.flops * matrix), self.bytes / (device.bandwidth * memory))


def parts(shape: Shape, work: Work, *, fused: bool) -> tuple[Part, ...]:
    makers: tuple[Callable[[Shape, Work], Part], ...] = (
        base_products,
        head_and_loss,
        attention,
        adapters,
        partial(norms, fused=fused),
        partial(activation, fused=fused),
        partial(rotation, fused=fused),
        residuals,
        partial(update, fused=fused),
    )
    return tuple(make(shape, work) for make in makers)


def useful_flops(shape: Shape, work: Work) -> float:
    """What the step needs, whoever does it: as ``bench/gpu/measure.py`` counts it."""
    counted = (base_products, head_and_loss, adapters)
    squares = work.rows * work.length**2
    return sum(make(shape, work).flops for make in counted) + 6 * squares * _queries(shape) * shape.layers


def base_products(shape: Shape, work: Work) -> Part:
    """Outputs and input gradients of the frozen linear modules; their weights need no gradient."""
    products = shape.layers * sum(2 * len(outputs) for _, outputs in shape.groups)
    values = shape.layers * sum(
        sum(size + 2 * output if number else 2 * size + 2 * output for number, output in enumerate(outputs))
        + size * len(outputs)
        for size, outputs in shape.groups
    )
    return Part(
        "frozen products",
        4.0 * shape.linear_weights * work.tokens,
        VALUE * (2 * shape.linear_weights + values * work.tokens),
        products,
    )


def head_and_loss(shape: Shape, work: Work) -> Part:
    """At supervised positions; logits are written once, read twice and replaced by their gradient in a chunk at a time."""
    positions = work.tokens * work.supervised
    chunks = max(1, round(positions * shape.vocabulary / CHUNK_LOGITS))
    weight = shape.vocabulary * shape.hidden
    return Part(
        "head and loss",
        4.0 * weight * positions,
        VALUE * (2 * weight * chunks + positions * (5 * shape.vocabulary + 3 * shape.hidden)),
        5 * chunks,
    )


def attention(shape: Shape, work: Work) -> Part:
    """Causal, by rows, by a kernel that keeps no scores: two products forward, five backward, each half of a square."""
    queries, keys = _queries(shape), shape.key_heads * shape.head_dim
    squares = work.rows * work.length**2
    values = (2 * queries + 2 * keys) + (4 * queries + 4 * keys)
    return Part(
        "attention",
        7.0 * squares * queries * shape.layers,
        VALUE * values * work.tokens * shape.layers,
        6 * shape.layers,
    )


def adapters(shape: Shape, work: Work) -> Part:
    """Six launches for each input group (``lora/triton_kernels.py``). Arithmetic is of matrices whose rank is padded."""
    rank = max(work.rank, LOW_RANK_PAD)
    flops = sum(6.0 * rank * (size * len(outputs) + sum(outputs)) for size, outputs in shape.groups)
    values = sum(
        size  # low
        + 2 * sum(outputs)  # added to the outputs
        + sum(outputs)  # gradient of low
        + 2 * size  # added to the input's gradient
        + sum(outputs)
        + size  # gradients of A and B
        + 5 * rank * len(outputs)
        for size, outputs in shape.groups
    )
    return Part(
        "low-rank products",
        flops * work.tokens * shape.layers,
        VALUE * values * work.tokens * shape.layers,
        6 * len(shape.groups) * shape.layers,
    )


def norms(shape: Shape, work: Work, *, fused: bool) -> Part:
    """Two a layer and the last one. As transformers writes it: widened, squared, averaged, scaled, narrowed, multiplied."""
    count = 2 * shape.layers + 1
    # Bytes of an element. Separate: 6 + 8 + 4 + 8 + 6 + 4 forward; about the same again, and sums, backward.
    moved = (VALUE * 2 + VALUE * 3) if fused else (36 + 52)
    return Part("norms", 0.0, float(moved * shape.hidden * work.tokens * count), count * (2 if fused else 17))


def activation(shape: Shape, work: Work, *, fused: bool) -> Part:
    """silu(gate) * up."""
    moved = VALUE * (3 + 5) if fused else VALUE * (2 + 3 + 6 + 3)
    return Part(
        "activation",
        0.0,
        float(moved * shape.intermediate * work.tokens * shape.layers),
        shape.layers * (2 if fused else 5),
    )


def rotation(shape: Shape, work: Work, *, fused: bool) -> Part:
    """Of q and k: two products, halves turned and joined, a sum, in both directions."""
    width = _queries(shape) + shape.key_heads * shape.head_dim
    moved = 2 * VALUE * 2 if fused else 2 * VALUE * 10
    return Part(
        "rotary embedding",
        0.0,
        float(moved * width * work.tokens * shape.layers),
        shape.layers * (2 if fused else 20),
    )


def residuals(shape: Shape, work: Work) -> Part:
    """Two a layer: a sum forward, a sum of gradients backward."""
    return Part(
        "residuals",
        0.0,
        float(2 * 2 * 3 * VALUE * shape.hidden * work.tokens * shape.layers),
        4 * shape.layers,
    )


def update(shape: Shape, work: Work, *, fused: bool) -> Part:
    """Norm, clipping, AdamW, zeroing and the copies that products read, of all adapters: passes over float32 numbers."""
    numbers = (
        work.tasks
        * shape.layers
        * sum(work.rank * (size * len(outputs) + sum(outputs)) for size, outputs in shape.groups)
    )
    passes = 9 if fused else 28
    return Part("update", 0.0, float(WIDE * passes * numbers), 2 if fused else 20 * work.tasks)


def _queries(shape: Shape) -> int:
    return shape.heads * shape.head_dim
