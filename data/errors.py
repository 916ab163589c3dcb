"""Errors about the data: a user's mistakes, each with a remedy, and objects that a store does not deliver."""


class DataError(Exception):
    """Problems that the user can fix: ``str(error)`` is one line for each problem, ready to print.

    Each line names what was found (a key with its value, or a file), the rule it breaks and the remedy.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, ...]]:
        """Pickles the separate lines, so that a worker process can send its error to its parent."""
        return DataError, tuple(self.problems)


class UnreadObject(OSError):
    """Raised where a store does not deliver an object at a URL; the message is one line that names the object.

    A later attempt may succeed.
    """


def reason_of(error: Exception) -> str:
    """A library's error message in one line of at most 200 characters, to be quoted in Roundtable's own message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def problem(found: str, rule: str, remedy: str) -> str:
    """One line: ``found rule; remedy``. Newlines inside (a file name may hold one) are escaped."""
    return f"{found} {rule}; {remedy}".replace("\n", "\\n")


def refuse(found: str, rule: str, remedy: str) -> DataError:
    """The error of a single problem, to be raised by the caller."""
    return DataError(problem(found, rule, remedy))
