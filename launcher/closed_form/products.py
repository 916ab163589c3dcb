"""The time of matrix products on a GPU by their shape, with the tiles that its multiprocessors compute."""

import math
from dataclasses import dataclass

TILES = ((128, 256), (128, 128), (256, 128), (64, 128))  # rows and columns that one multiprocessor computes at a time
ALIGNED = 8  # tensor cores read rows in multiples of 16 bytes
UNALIGNED_SLOWER = 2.0
DEPTH = 64.0  # length of k that takes as long as a tile's start and end, on an H100
DEPTH_RATE = 989.5e12 / 132  # FLOP/s of one of its multiprocessors: a faster one computes more of k in that time


@dataclass(frozen=True)
class Product:
    """``count`` products of an m x k with a k x n matrix."""

    m: float
    n: float
    k: float
    count: float = 1.0
    sums_rows: bool = False  # k is the number of rows in memory (a weight's gradient), and m and n are row lengths

    @classmethod
    def of(cls, m: float, n: float, k: float, count: float = 1.0) -> "Product":
        """The product, with each side at least 1."""
        return cls(max(1.0, m), max(1.0, n), max(1.0, k), count)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.count <= 0

    @property
    def flops(self) -> float:
        """FLOPs: a multiplication and an addition each count as one."""
        return 2 * self.count * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Bytes of both factors and the result in 16 bits, each read or written once."""
        return 2 * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    def cast_bytes(self, forwards: float) -> float:
        """Bytes of casting inputs and gradients from 16 to 8 bits; weights are cast rarely enough to be left out."""
        return 3 * self.count * (self.m * self.k * forwards + self.m * self.n)

    def cut_bytes(self, forwards: float, *, weights_too: bool, kept_for: float | None) -> float:
        """Bytes of casting inputs, gradients and weights to 8 bits; transposes for the backward pass are read twice.

        ``weights_too``: transposes of inputs and gradients are also cast, for the weight's gradient. ``kept_for``: the
        number of micro-batches that use the same cast weights; None: each pass casts them.
        """
        weight, rows = self.count * self.k * self.n, self.count * self.m * (self.k + self.n)
        weights = weight * (3 * forwards + 5 if kept_for is None else 8 / kept_for)
        return self.cast_bytes(forwards) + weights + (5 * rows if weights_too else 0)

    def backward(self) -> tuple["Product", "Product"]:
        """The products for the gradients of the input and of the weight."""
        by_weight = Product(self.k, self.n, self.m, self.count, sums_rows=True)
        return Product(self.m, self.k, self.n, self.count), by_weight


def depth_of(peak: float, multiprocessors: int) -> float:
    """The length of k that takes as long as a tile's start and end, on a GPU of this peak in 16 bits."""
    return DEPTH * peak / multiprocessors / DEPTH_RATE


def product_seconds(one: Product, peak: float, bandwidth: float, multiprocessors: int, depth: float = DEPTH) -> float:
    """Seconds of a product: at the peak with partly filled and idle tiles, or of its bytes, whichever is longer."""
    return max(one.flops * padding(one, multiprocessors, depth) / peak, one.bytes / bandwidth)


def padding(one: Product, multiprocessors: int, depth: float = DEPTH) -> float:
    """The time with the best tiles over the product's ideal time at the peak, at least 1."""
    best = math.inf
    for rows, columns in TILES:
        tiles = math.ceil(one.m / rows) * math.ceil(one.n / columns) * one.count
        waves = math.ceil(tiles / multiprocessors)
        smaller = (
            1.0 if rows * columns >= 2**15 else 1.08 if rows * columns >= 2**14 else 1.35
        )  # fewer reuses of what is read
        best = min(best, smaller * waves * multiprocessors * rows * columns / (one.count * one.m * one.n))
    other = one.m if one.sums_rows else one.k
    unaligned = UNALIGNED_SLOWER if one.n % ALIGNED or other % ALIGNED else 1.0
    return max(1.0, best) * unaligned * (1 + depth / one.k)
