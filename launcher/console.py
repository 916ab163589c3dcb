"""All output to the terminal: control characters in names, texts and errors are printed as escapes, never executed.

Names, texts and errors come from files that somebody else has written. Control characters in them would move the
cursor, set titles or paint over lines, and rich would take brackets for markup. Only rich's own control codes are
written as they are.
"""

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import TextColumn

# Control characters but for newline and tab; characters that reverse the direction of writing; line separators that
# only some programs know; and lone surrogates, which stand for the bytes of a file name that cannot be decoded.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)

LONGEST_REFUSAL = 3000  # characters


class Unheard(Exception):
    """Output cannot be written: the pipe's reader has closed it (then ``is_closed``), or the disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.is_closed = isinstance(error, BrokenPipeError)


@contextlib.contextmanager
def _hearing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unheard(error) from None


def escaped(text: str) -> str:
    r"""The text with each control character as an escape such as ``\x1b`` or ``\u202e``; JSON keeps its meaning."""
    return _UNSAFE.sub(lambda found: _code(ord(found[0])), text)


def in_a_line(text: str) -> str:
    """The text on one line: control characters, newlines and tabs are escaped."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def refusal(text: str) -> str:
    """The text on one line, escaped, without its middle beyond LONGEST_REFUSAL: a user's value may be of any length."""
    line = in_a_line(text)
    half = LONGEST_REFUSAL // 2
    return line if len(line) <= LONGEST_REFUSAL else f"{line[:half]} ... {line[-half:]}"


def _code(number: int) -> str:
    return f"\\x{number:02x}" if number < 0x7F else f"\\u{number:04x}"


def say(text: str, *, file: TextIO | None = None, end: str = "\n", raw: bool = False) -> None:
    """Writes a line to standard output, or to ``file``, and flushes it. Raises Unheard where it cannot be written.

    ``raw`` leaves control characters as they are, for output that a program is to read. Characters that the stream's
    encoding lacks are always escaped.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # closed before the start
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    line = (text if raw else escaped(text)) + end
    with _hearing():
        stream.write(_in_encoding(line, encoding))
        stream.flush()


def _in_encoding(text: str, encoding: str) -> str:
    """The text with the characters that the encoding lacks escaped."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_heard(text: str, file: TextIO | None = None) -> bool:
    """Writes a line; returns False where it cannot be written, and then discards all further standard output."""
    try:
        say(text, file=file)
    except Unheard:
        drop_output()
        return False
    return True


def tell(text: object) -> None:
    """Writes a line, or an error's message, to standard error; does nothing where that cannot be written."""
    if sys.stderr is not None:
        with contextlib.suppress(Unheard):
            say(str(text), file=sys.stderr)


def open_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A rich console for tables, bars and live views; strings given to it are not read as markup."""
    return _Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def text_column(form: str) -> "TextColumn":
    """A text column of a progress bar; the values that are filled into ``form`` are not read as markup."""
    from rich.progress import TextColumn

    return TextColumn(form, markup=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes the text before rich measures its width."""
        return super().render_str(_in_encoding(escaped(text), self.encoding), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as rich does. Raises Unheard where the output cannot be written."""
        with _hearing():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Raises Unheard; rich calls this where the pipe's reader has closed it."""
        raise Unheard(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Escapes the segments of styled texts, which do not pass through ``render_str``."""
        return _safe(super().render(renderable, options), self.encoding)


def _safe(segments: Iterable[Segment], encoding: str) -> Iterator[Segment]:
    for segment in segments:
        yield segment if segment.control else Segment(_in_encoding(escaped(segment.text), encoding), segment.style)


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught exception as ``sys.excepthook`` does, but escaped: its message may hold a file's text."""
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def end_output() -> None:
    """Flushes standard output. Raises Unheard where it cannot be written."""
    if sys.stdout is not None:
        with _hearing():
            sys.stdout.flush()


def drop_output() -> None:
    """Redirects standard output, with its buffered text, to /dev/null, so that flushing it at exit raises nothing."""
    with contextlib.suppress(OSError, ValueError):  # a stream that a test puts in its place has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def readable(given: str, option: str) -> tuple[str, list[str]]:
    """An option's text, decoded as UTF-8 whatever the locale, and a line for its first byte that is not UTF-8, if any.

    Python hands over an argument's bytes that the locale cannot read (LC_ALL=C, or no UTF-8) as lone surrogates.
    """
    try:
        given.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(given)
        try:
            return raw.decode(), []
        except UnicodeDecodeError as error:
            found = f"its byte {error.start} is 0x{raw[error.start]:02x}"
            return "\ufffd", [f"{option} must be UTF-8, and {found}; convert it to UTF-8"]
    return given, []
