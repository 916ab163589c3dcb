"""Reading documents from columns of parquet files, by row group, and of Arrow files, whole, with ``pyarrow``."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from data.chat import chat_of, no_chat, record_of_columns
from data.config import SourceConfig
from data.errors import DataError, reason_of, refuse
from data.lines import MEND, Expansion
from data.shards import Slice
from data.tally import Tally

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 64  # few, so that a page of equal values, stored once, is not expanded into many copies at a time
FILE_MAGIC = b"ARROW1"  # begins Arrow's file format; its stream format, which `datasets` writes, has no magic


def read_parquet(source: SourceConfig, piece: Slice, key: str, tally: Tally) -> Iterator[tuple[str | None, float]]:
    """(document, fraction of the rows read so far) of each row of a row group.

    The document is "" where it is null, and None where it is bad.
    """
    import pyarrow.parquet

    with refusing(piece.path, "parquet"), pyarrow.parquet.ParquetFile(piece.path) as file:
        names = columns_of(file.schema_arrow, source, piece.path, key)
        groups = [file.metadata.row_group(number).num_rows for number in range(piece.start + 1)]
        batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[piece.start], columns=names)
        row, before = 0, sum(groups[:-1])
        limit, n_characters = Expansion(piece.path, piece.file_bytes), 0
        for batch in batches:
            rows = batch.select(names)  # of a column "a.b" pyarrow reads column a with its field b, too
            for text in documents_of(rows, source, piece.path, before + row, key, tally):
                row, n_characters = row + 1, n_characters + len(text or "")
                yield text, row / max(row, groups[-1])
            limit.check(n_characters)


def read_arrow(source: SourceConfig, piece: Slice, key: str, tally: Tally) -> Iterator[tuple[str | None, float]]:
    """(document, 0.0) of each row of an Arrow file in the stream or the file format.

    The document is "" where it is null, and None where it is bad. The fraction read so far is not known, so it is 0.
    """
    import pyarrow.ipc

    with refusing(piece.path, "Arrow"), pyarrow.memory_map(piece.path) as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        names = columns_of(reader.schema, source, piece.path, key)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        row, n_characters, limit = 0, 0, Expansion(piece.path, piece.file_bytes)
        for batch in batches:
            batch = batch.select(names)
            check_structure(batch)
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = batch.slice(start, ROWS_AT_ONCE)
                for text in documents_of(rows, source, piece.path, row, key, tally):
                    row, n_characters = row + 1, n_characters + len(text or "")
                    yield text, 0.0
                limit.check(n_characters)


def check_structure(batch: "pyarrow.RecordBatch") -> None:
    """Raises pyarrow's error where a batch's offsets lead outside the file: pyarrow would read there all the same.

    Text that is not UTF-8 passes, and is reported with its row when it is read.
    """
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        for column in batch.columns:
            column.view(_of_bytes(column.type)).validate(full=True)


def _of_bytes(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    """The type with bytes instead of text, at any depth; both have the same buffers."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _of_bytes(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_of_bytes(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        field = kind.value_field.with_type(_of_bytes(kind.value_type))
        return pyarrow.list_(field) if types.is_list(kind) else pyarrow.large_list(field)
    if types.is_string(kind):
        return pyarrow.binary()
    if types.is_large_string(kind):
        return pyarrow.large_binary()
    return pyarrow.binary_view() if types.is_string_view(kind) else kind


def columns_of(schema: "pyarrow.Schema", source: SourceConfig, path: str, key: str) -> list[str]:
    """The columns to read. Raises DataError where they are missing, or where the text column does not hold text.

    For chats, the column with the messages or that with the completion must exist.
    """
    if source.chat is None:
        check_column(schema, source, path, key)
        return [source.text_key]
    wanted = (source.chat.messages_key, source.chat.prompt_key, source.chat.completion_key, "tools")
    found = [name for name in wanted if schema.names.count(name) == 1]
    if not {source.chat.messages_key, source.chat.completion_key} & set(found):
        raise no_chat(source.chat, schema.names, path, key)
    return found


def documents_of(
    rows: "pyarrow.RecordBatch", source: SourceConfig, path: str, first_row: int, key: str, tally: Tally
) -> Iterator[str | None]:
    """The text or chat of each row; "" where it is null or empty, None where it is bad, which ``tally`` counts."""
    if source.chat is None:
        yield from texts_of(rows.column(0), path, first_row, tally)
        return
    for number in range(rows.num_rows):
        try:
            (record,) = rows.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            why, row = f"is not UTF-8 ({reason_of(error)})", first_row + number
            tally.bad("not UTF-8", partial(refuse, f"{path}: row {row}", why, MEND))
            yield None
        else:
            yield chat_of(record_of_columns(record), source, path, key, tally)


def check_column(schema: "pyarrow.Schema", source: SourceConfig, path: str, key: str) -> None:
    """Raises DataError where the schema has no column ``text_key``, or one that holds no text."""
    from pyarrow import types

    if schema.names.count(source.text_key) != 1:
        raise no_text_key(schema.names, source, path, key)
    kind = schema.field(source.text_key).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    if not (is_text or types.is_null(value)):
        found = f"{key}.text_key={source.text_key!r}"
        raise refuse(found, f"must hold text but holds {str(kind)[:80]} in {path}", "name another column")


def no_text_key(names: list[str], source: SourceConfig, path: str, key: str) -> DataError:
    """The refusal of a record or columns with these ``names``, which lack text_key."""
    there = ", ".join(map(str, names[:20])) or "no named fields"
    found = f"{key}.text_key={source.text_key!r}"
    return refuse(
        found, f"is not in a record of {path}, which holds {there}", "set text_key to the field with the text"
    )


def texts_of(column: Any, path: str, first_row: int, tally: Tally) -> Iterator[str | None]:
    """The column's texts; "" for nulls, None for one that is not UTF-8, which ``tally`` counts by its row (from 0)."""
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError:
        return (_text_at(column, number, path, first_row + number, tally) for number in range(len(column)))
    return (text or "" for text in texts)


def _text_at(column: Any, number: int, path: str, row: int, tally: Tally) -> str | None:
    try:
        return column[number].as_py() or ""
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 ({reason_of(error)})"
        tally.bad("not UTF-8", lambda: refuse(f"{path}: row {row}", why, MEND))
        return None


@contextmanager
def refusing(path: str, form: str) -> Iterator[None]:
    """A context that turns pyarrow's errors for a broken file into a DataError that names the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, ValueError, MemoryError, OverflowError) as error:
        raise refuse(path, f"cannot be read as {form} ({reason_of(error)})", MEND) from error
