"""The configuration of multi-token prediction: plain values, no torch."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Interval


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that predict further tokens.

    Module k of ``depth`` predicts the token k + 1 places ahead. Their losses train the model; generation does not use
    them.
    """

    noun: ClassVar[str] = "modules that predict further tokens"  # what a model with this section has, in messages

    # modules, one after another: each predicts one token further
    depth: Annotated[int, Interval(ge=1, le=64)] = field(default=1, metadata={"small": 2})
    # factor of the mean of their losses
    coefficient: Annotated[float, Interval(ge=1e-6, le=1000.0)] = field(default=0.3, metadata={"strong": 0.3})
