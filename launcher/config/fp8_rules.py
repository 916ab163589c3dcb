"""The rule that matrix products in fp8 set for a model's widths."""

from collections.abc import Iterator

from launcher.config.tree import RunConfig
from parallel.layout import place_of


def check_fp8_widths(config: RunConfig) -> Iterator[str]:
    """One line for each width of a rank's fp8 matrices that is not a multiple of 16 bytes, as tensor cores need it."""
    if config.train.precision != "fp8" or config.parallel.tp < 1:
        return
    from modeling.kernels.cuts import UNIT  # imports torch, which checking other precisions does not need
    from modeling.logical import logical_parameters

    told: set[str] = set()
    for name, tensor in logical_parameters(config.model).items():
        if not tensor.weight.takes_8_bits or tensor.is_expert:  # experts' widths have a rule for every precision
            continue
        place = place_of(tensor.weight, tensor.shape)
        for number in (-2, -1):
            dim, size = tensor.weight.dims[number], tensor.shape[number]
            degree = config.parallel.tp if place.axis == "tp" and place.dim == len(tensor.shape) + number else 1
            if (size // degree) % UNIT and dim not in told:
                told.add(dim)
                cut = f" / parallel.tp={degree}" if degree > 1 else ""
                yield (
                    f"train.precision=fp8 needs {dim}={size}{cut} (of {name}) to be a multiple of {UNIT} (products of "
                    "8 bits take rows of 16 bytes); try train.precision=bf16"
                )
