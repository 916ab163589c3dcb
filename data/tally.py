"""Counts of a shard's documents as they are read: those kept, and those dropped, by reason."""

from collections.abc import Callable
from dataclasses import dataclass, field

from data.errors import DataError, refuse

EMPTY = "empty"
NOT_TEXT = "HTML or other content that is no plain text"  # of a WARC file
NAMED = 5  # the first bad documents of a shard, which are recorded by name


@dataclass
class Tally:
    """Counts of one shard's documents: every document is either kept, or dropped for a reason."""

    max_bad_share: float  # the share of documents that may be left out because they cannot be read
    n_documents: int = 0  # documents so far, kept or dropped
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> documents
    n_bad: int = 0  # dropped documents that could not be read
    named: list[str] = field(default_factory=list)  # for the first bad ones, a line with the place and what is wrong

    def drop(self, reason: str) -> None:
        """Counts a document that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def bad(self, reason: str, error: Callable[[], DataError]) -> None:
        """Counts a document that cannot be read, and is left out; raises ``error()`` where none may be left out."""
        if not self.max_bad_share:
            raise error()
        if len(self.named) < NAMED:
            self.named += error().problems
        self.n_bad += 1
        self.drop(reason)

    def take(self, dropped: dict[str, int], named: list[str]) -> None:
        """Adds the documents that cleaning dropped from a shard; cleaning has checked the number of bad ones."""
        self.n_documents += sum(dropped.values())
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.named += named

    def check(self, key: str) -> None:
        """Raises DataError where the share of bad documents exceeds ``max_bad_share``; ``key`` names the source."""
        if self.n_bad > self.max_bad_share * self.n_documents:
            found = (
                f"{key}.max_bad_share={self.max_bad_share}: {self.n_bad} of {self.n_documents} documents cannot be read"
            )
            raise refuse(
                f"{found}, the first one: {self.named[0]}", "and more may not be left out", "raise it, or mend them"
            )
