"""Weights that lie in the files of transformers otherwise than here.

Several are in one tensor, or its sides are exchanged, its rows in another order, or in one more dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

from modeling.config import ModelConfig


def one_group(config: ModelConfig) -> int:
    """The parts lie one after the other."""
    return 1


def head_groups(config: ModelConfig) -> int:
    """Each head's rows of all parts lie together."""
    return config.n_heads


def kv_head_groups(config: ModelConfig) -> int:
    """Each key-value head's rows lie together."""
    return config.n_kv_heads


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tensor of the files that is made of weights of ours, ``parts``, joined along their rows (their outputs).

    The rows are in ``groups`` equal runs, each of which has its share of every part, in the order of ``parts``. In a
    stack of experts it is so in each expert. ``transposed``: the files have (in, out). ``in_pairs``: of a part's share
    in a run the files have (2c, 2c + 1) where we have (c, c + half), the pairs that the rotary embedding turns.
    ``as_row``: the files' tensor has one more dim, of 1, before ours; ``as_column``: after the rows.
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
    """Rows for ``Family.weights``: each of ``parts`` lies in the tensor ``name`` of the files."""
    whole = Packed(name=name, parts=parts, groups=groups, transposed=transposed, as_column=as_column)
    return dict.fromkeys(parts, whole)


def turned_in_pairs(name: str, part: str, groups: Callable[[ModelConfig], int]) -> dict[str, Packed]:
    """A row for ``Family.weights``: a projection to heads of which the class turns channels (2c, 2c + 1)."""
    return {part: Packed(name=name, parts=(part,), groups=groups, in_pairs=True)}
