"""The stand-in for a W&B run where nothing is logged to W&B."""

from collections.abc import Mapping
from typing import Any


class NullRun:
    """A run that logs nothing: the mode is disabled, or not even an offline W&B run could be opened."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Does nothing."""
