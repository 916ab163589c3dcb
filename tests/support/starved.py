"""Makes routers never choose the second half of the experts, so that some ep rank gets no token at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from modeling.router import Router


@contextmanager
def starved() -> Iterator[None]:
    """A context in which every router of this process chooses among the first half of the experts."""

    @torch.no_grad()
    def choose(self: Any, scores_TE: Tensor) -> Tensor:
        biased_TE = scores_TE.clone() if self.bias is None else scores_TE + self.bias
        biased_TE[:, biased_TE.shape[1] // 2 :] = float("-inf")
        return biased_TE.topk(self.top_k, dim=-1).indices

    with patch.object(Router, "choose", choose):
        yield
