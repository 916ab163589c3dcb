"""What becomes of a shard's documents as they are read: kept, empty, or too bad to be read, by reason."""

from collections.abc import Callable
from dataclasses import dataclass, field

from data.errors import DataError, refuse

EMPTY = "empty"
NOT_TEXT = "HTML or other content that is no plain text"  # of a WARC file
NAMED = 5  # bad documents that are named


@dataclass
class Tally:
    """Counts of one shard: the documents it has are those kept and those dropped, by reason."""

    max_bad_share: float  # of the documents, those that may be left out because they cannot be read
    n_documents: int = 0  # that were come to, whatever became of them
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> documents
    n_bad: int = 0  # of the dropped, those that could not be read
    named: list[str] = field(default_factory=list)  # the first bad ones: where each is, and what is wrong with it

    def drop(self, reason: str) -> None:
        """Counts a document that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def bad(self, reason: str, error: Callable[[], DataError]) -> None:
        """Leaves a document out that cannot be read; raises ``error()`` where none may be left out."""
        if not self.max_bad_share:
            raise error()
        if len(self.named) < NAMED:
            self.named += error().problems
        self.n_bad += 1
        self.drop(reason)

    def take(self, dropped: dict[str, int], named: list[str]) -> None:
        """Counts the documents that a cleaned shard has lost; its bad ones were few enough when it was cleaned."""
        self.n_documents += sum(dropped.values())
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.named += named

    def check(self, key: str) -> None:
        """Raises DataError where more documents of the shard are bad than may be."""
        if self.n_bad > self.max_bad_share * self.n_documents:
            found = (
                f"{key}.max_bad_share={self.max_bad_share}: {self.n_bad} of {self.n_documents} documents cannot be read"
            )
            raise refuse(
                f"{found}, the first one: {self.named[0]}", "and more may not be left out", "raise it, or mend them"
            )
