"""Faults in how multi-token prediction finds, counts and trains further tokens. Planted by prove_faults.plant."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def find_in_chunks() -> None:
    """Further tokens are looked up within the chunks into which cp = 2 cuts a sequence, so chunks' ends have none."""
    import parallel.batch as batch

    following = batch.following

    def in_chunks(next_BS: Tensor, depth: int, *targets_BS: Tensor) -> list[tuple[Tensor, ...]]:
        each_chunk = zip(*(whole.chunk(4, dim=1) for whole in (next_BS, *targets_BS)), strict=True)
        chunks = [list(following(of_next, depth, *of_targets)) for of_next, *of_targets in each_chunk]
        return [
            tuple(torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True))
            for found in zip(*chunks, strict=True)
        ]

    batch.following = in_chunks


def predict_one_too_near() -> None:
    """A module's targets are the tokens that it gets as inputs."""
    import parallel.batch as batch
    from modeling.loss import IGNORE

    following = batch.following

    def too_near(*arguments: Any) -> list[tuple[Tensor, Tensor]]:
        return [(tokens, tokens.where(targets != IGNORE, IGNORE)) for tokens, targets in following(*arguments)]

    batch.following = too_near


def look_beyond_documents() -> None:
    """Further tokens are looked up across the borders of documents within a sample."""
    import parallel.batch as batch
    from modeling.loss import IGNORE

    def of_samples(next_BS: Tensor, depth: int, *_: Tensor) -> list[tuple[Tensor, Tensor]]:
        rolled = [torch.roll(next_BS, -k, dims=1) for k in range(depth + 1)]
        return [(rolled[k - 1].where(rolled[k - 1] != IGNORE, 0), rolled[k]) for k in range(1, depth + 1)]

    batch.following = of_samples


def count_own_targets() -> None:
    """The loss of further tokens is a mean of the ranks' means: each rank divides by its own count of targets."""
    import launcher.training.step as step

    scales = step.further_scales

    def of_own(engine: Any, dataset: Any, indices: np.ndarray) -> list[float]:
        dp = engine.mesh.dp
        mine = indices.reshape(-1, 2)[dp.rank :: dp.degree].flatten()
        return [scale / dp.degree for scale in scales(engine, dataset, mine)]

    step.further_scales = of_own
