"""What stands for the W&B run where there is none."""

from collections.abc import Mapping
from typing import Any


class NullRun:
    """No W&B: mode disabled, or not even an offline run could be opened."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Does nothing."""
