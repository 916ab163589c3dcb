"""The names of documents, SOURCE/FILE:NUMBER.

SOURCE is the source's name in metrics, FILE the token file's name, and NUMBER the document's in the file, from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import refuse
from data.tokenfile import TokenFile

AS_SHOWN = "give one as `roundtable data show` prints it"


@dataclass(frozen=True)
class Place:
    """The tokens [first, stop) of a token file, in one document."""

    file: int
    document: int
    first: int
    stop: int


@dataclass(frozen=True)
class DocumentNames:
    """The names of all documents of some token files."""

    sources: Sequence[str]  # their names in metrics
    files: Sequence[TokenFile]
    file_sources: Sequence[int]  # the number of each file's source

    def of_file(self, file: int) -> str:
        """The file's name, SOURCE/FILE."""
        return f"{self.sources[self.file_sources[file]]}/{self.files[file].prefix.name}"

    def of_document(self, file: int, document: int) -> str:
        """The document's name, SOURCE/FILE:NUMBER."""
        return f"{self.of_file(file)}:{document}"

    def find(self, name: str, key: str) -> Place:
        """The whole document with this name, or with the name PREFIX:NUMBER where PREFIX is a token file's path.

        ``key`` is the option or key by which the user gave the name. Raises DataError where there is no such document.
        """
        of_file, colon, number = name.rpartition(":")
        files = [
            file for file in range(len(self.files)) if of_file in (self.of_file(file), str(self.files[file].prefix))
        ]
        if not colon or not files:
            known = ", ".join(self.of_file(file) for file in range(min(3, len(self.files))))
            more = ", ..." if len(self.files) > 3 else ""
            raise refuse(f"{key}={name}", f"must be FILE:NUMBER with FILE one of {known}{more}", AS_SHOWN)
        n_documents = self.files[files[0]].n_documents
        if not (number.isascii() and number.isdigit() and len(number) < 20 and int(number) < n_documents):
            rule = f"must end in a number from 0 to {n_documents - 1}, since {of_file} holds {n_documents} documents"
            raise refuse(f"{key}={name}", rule, AS_SHOWN)
        return Place(files[0], int(number), *self.files[files[0]].document_range(int(number)))
