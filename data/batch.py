"""What the data package hands to a training step.

Shape letters: B samples of the batch, S positions of a sample.
"""

from dataclasses import dataclass

import numpy as np

IGNORED = -100  # a target that does not count; torch's cross_entropy ignores it by default
PADDING = -1  # the document number of a position that holds no token


@dataclass(frozen=True)
class Batch:
    """Packed samples as numpy arrays, all of shape [B, S].

    A position whose target is ``IGNORED`` but whose document is not ``PADDING`` is a real token (the last of its
    document, or of its shard): it is routed and attended to, it only predicts nothing.
    """

    tokens_BS: np.ndarray  # int64: input token ids; 0 in padding
    targets_BS: np.ndarray  # int64: the next token of the same document; IGNORED where there is none
    positions_BS: np.ndarray  # int32: position within the document's part that lies in this sample; 0 in padding
    documents_BS: np.ndarray  # int32: 0, 1, 2... number of the document within the sample; PADDING in padding
