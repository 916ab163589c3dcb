"""The error that a user's mistake raises."""

from collections.abc import Sequence


class UserError(Exception):
    """The user's input is wrong. ``problems`` holds one line each: key, value, rule, remedy.

    The command line prints the lines alone to stderr and exits with code 2.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems: list[str] = list(problems)
