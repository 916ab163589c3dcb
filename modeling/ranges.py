"""Number types with ranges that several config sections share: plain values, no torch."""

from typing import Annotated

from annotated_types import Interval

Layer = Annotated[int, Interval(ge=0, le=9_999)]  # the number of a layer
Count = Annotated[int, Interval(ge=1, le=2**16)]
Width = Annotated[int, Interval(ge=1, le=2**24)]
Coefficient = Annotated[float, Interval(ge=0, le=1000.0)]
