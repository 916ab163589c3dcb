"""The error that a user's mistake raises, and one-line messages for errors of the operating system and of stores."""

import errno
import os
import sys
import tempfile
from collections.abc import Sequence

from data.errors import UnreadObject
from parallel.checkpoint.errors import UnreachableStore


class UserError(Exception):
    """The user's input is wrong. ``problems`` holds one line each: key, value, rule, remedy.

    The command line prints the lines alone to stderr and exits with code 2.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems: list[str] = list(problems)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
TOO_MANY = (errno.EMFILE, errno.ENFILE)
TOO_LARGE = (errno.EFBIG,)
BAD_DISK = (errno.EIO, errno.ESTALE)
UNREACHABLE = (UnreachableStore, UnreadObject)
WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP)  # the user's mistake rather than the machine's refusal


def why_refused(error: OSError) -> str | None:
    """A one-line message with a remedy for an OSError of a known kind; None for others.

    Known are: no space, no permission, too many or too large files, a broken disk, an unusable path, no temporary
    folder, and a store or object that cannot be reached.
    """
    if isinstance(error, UNREACHABLE):
        return f"{error}; check the network or the disk, the address, and the keys that lead to it"
    remedies = {
        NO_ROOM: "free some space, or choose another disk",
        NO_RIGHT: "give this user the right to it, or choose another place",
        TOO_MANY: "raise the limit (ulimit -n), or close other programs",
        TOO_LARGE: "raise the limit (ulimit -f), or choose a disk whose file system takes larger files",
        BAD_DISK: "look after that disk, or choose another",
        WRONG_PATH: "give another path",
    }
    if error.errno == errno.ENOENT and error.filename is None and not _has_temporary_folder():
        return f"TMPDIR={os.environ.get('TMPDIR', '')}: {error.strerror}; set TMPDIR to a folder that can be written to"
    for numbers, remedy in remedies.items():
        if error.errno in numbers:
            return f"{error.filename or 'a file or stream'}: {error.strerror}; {remedy}"
    return None


def why_not_encoded(error: UnicodeEncodeError) -> str | None:
    """A one-line message with a remedy for text that the locale cannot encode; None where the locale uses UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return None
    rule = f"must be letters that this locale's encoding ({encoding}) knows; set LC_ALL=C.UTF-8, and try again"
    return f"{error.object!r} {rule}"


def _has_temporary_folder() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return False
    return True
