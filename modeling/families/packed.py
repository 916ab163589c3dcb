"""Weights that the files of transformers arrange otherwise than Roundtable.

A tensor of the files may join several weights, or be transposed, or have its rows in another order or one more dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

from modeling.config import ModelConfig


def one_group(config: ModelConfig) -> int:
    """One group: the parts follow one another whole."""
    return 1


def head_groups(config: ModelConfig) -> int:
    """One group for each query head: all parts' rows of a head lie together."""
    return config.n_heads


def kv_head_groups(config: ModelConfig) -> int:
    """One group for each key-value head: all parts' rows of a head lie together."""
    return config.n_kv_heads


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tensor of the files that joins our weights ``parts`` along their rows (their outputs).

    The rows are in ``groups`` equal groups, each with its share of every part, in the order of ``parts``. In a stack of
    experts that is so for each expert. ``transposed``: the files have (in, out). ``in_pairs``: each group is a head,
    and of its channels that are rotated the files have (2c, 2c + 1) where ours are (c, c + half), the pairs that the
    rotary embedding rotates. ``as_row``: the files' tensor has one more dim of size 1 before ours; ``as_column``: after
    the rows.
    """

    name: str  # in the files, with {layer}
    parts: tuple[str, ...]  # our names, with {layer}
    groups: Callable[[ModelConfig], int] = one_group
    transposed: bool = False
    in_pairs: bool = False
    as_row: bool = False
    as_column: bool = False


def packed(
    name: str,
    *parts: str,
    groups: Callable[[ModelConfig], int] = one_group,
    transposed: bool = False,
    as_column: bool = False,
) -> dict[str, Packed]:
    """Entries of ``Family.weights`` for ``parts`` that lie in the tensor ``name`` of the files."""
    whole = Packed(name=name, parts=parts, groups=groups, transposed=transposed, as_column=as_column)
    return dict.fromkeys(parts, whole)


def turned_in_pairs(name: str, part: str, groups: Callable[[ModelConfig], int]) -> dict[str, Packed]:
    """An entry of ``Family.weights`` for a projection to heads of which the class rotates channels (2c, 2c + 1)."""
    return {part: Packed(name=name, parts=(part,), groups=groups, in_pairs=True)}
