"""What a user did wrong with the data, in words a user can act on."""


class DataError(Exception):
    """A problem that the user can mend: ``str(error)`` is one line for each problem, ready to print.

    Each line names what was found (a key with its value, or a file), the rule it breaks and the remedy.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, ...]]:
        """Pickles with its lines apart: a worker process sends its error to its parent this way."""
        return DataError, tuple(self.problems)


class UnreadObject(OSError):
    """An object at a URL that its store does not give; the message is a line, which names it. A later try may do."""


def reason_of(error: Exception) -> str:
    """A library's error in one line of at most 200 characters, to stand in ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def problem(found: str, rule: str, remedy: str) -> str:
    """One line: ``found rule; remedy``. Newlines inside (a file name may hold one) are escaped."""
    return f"{found} {rule}; {remedy}".replace("\n", "\\n")


def refuse(found: str, rule: str, remedy: str) -> DataError:
    """The error of a single problem, to be raised by the caller."""
    return DataError(problem(found, rule, remedy))
