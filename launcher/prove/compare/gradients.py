"""The gradients that DeepSpeed is about to apply: reduced, not yet clipped, wherever its ZeRO stage keeps them."""

from torch import Tensor

from launcher.prove.compare.boxes import TensorBox, fragment_boxes
from parallel.zero.engine import Engine


def gradient_boxes(engine: Engine) -> list[TensorBox]:
    """This rank's part of the gradients, the loss scale divided out. Across ranks each element appears once.

    To be called between the last micro-batch's backward pass and the step. A fragment without a gradient gives zeros.
    """
    flats: dict[int, Tensor] = {}
    pieces = []
    for fragment in engine.fragments:
        key = id(fragment.flat)
        if key not in flats:
            flats[key] = engine.flat_gradient(fragment.flat) / engine.gradient_scale
        pieces += fragment_boxes(fragment, fragment.view(flats[key]))
    return pieces
