r"""A packing on the disk, beside the token file that it is of: PREFIX.best_fit-2048.pack, say.

    8 bytes  magic "RTPACK\0\1"
    uint64   seq_len, tokens of the file, fingerprint of its .idx, samples n, pieces p, documents, documents cut,
             tokens left out
    int64[n + 1]  the first piece of each sample, and last p
    int64[p]      the token that each piece begins with
    int32[p]      its tokens

Little-endian, and the same bytes whoever makes it. It is mapped into memory: opening it costs the same for any size.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.errors import reason_of, refuse
from data.packing import PackedBy, Packing, pack
from data.partial import written_whole
from data.tokenfile import TokenFile, fingerprint, idx_path
from data.tokenizer import PREPARE

MAGIC = b"RTPACK\x00\x01"
HEADER = struct.Struct("<8s8Q")


def pack_path(prefix: Path, seq_len: int, packed_by: PackedBy) -> Path:
    """Where the packing of PREFIX.bin lies."""
    return Path(f"{prefix}.{packed_by}-{seq_len}.pack")


def packed_by_of(config: DataConfig) -> PackedBy | None:
    """How documents are packed; None where they are laid end to end."""
    return None if config.packing == "sequential" else config.packing


def is_packed(prefix: Path, seq_len: int, packed_by: PackedBy) -> bool:
    """Whether the packing is there, of the token file as it is."""
    try:
        with pack_path(prefix, seq_len, packed_by).open("rb") as file:
            head = file.read(HEADER.size)
        return len(head) == HEADER.size and HEADER.unpack(head)[3] == fingerprint(idx_path(prefix))
    except OSError:
        return False


def missing_packings(config: DataConfig, prefixes: Iterable[Path]) -> list[Path]:
    """Those of the token files whose packing is not there; none where documents are laid end to end."""
    packed_by = packed_by_of(config)
    return [each for each in prefixes if packed_by is not None and not is_packed(each, config.seq_len, packed_by)]


def write_packing(prefix: Path, seq_len: int, packed_by: PackedBy) -> Path:
    """Packs a token file, reading its whole .idx; written whole or not at all. Returns the packing's path.

    Raises DataError where the .idx contradicts itself, or where nothing can be written beside it.
    """
    file, path = TokenFile(prefix), pack_path(prefix, seq_len, packed_by)
    packing = pack(file.all_starts(), file.n_tokens, seq_len, packed_by)
    counts = (packing.n_samples, len(packing.start_P), packing.n_documents, packing.n_cut, packing.n_left_out)
    try:
        with written_whole(path) as out:
            out.write(HEADER.pack(MAGIC, seq_len, file.n_tokens, fingerprint(idx_path(prefix)), *counts))
            for array, dtype in ((packing.first_piece, "<i8"), (packing.start_P, "<i8"), (packing.length_P, "<i4")):
                out.write(np.ascontiguousarray(array, dtype).data)
    except OSError as error:
        remedy = "free some room or mend its permissions, or set data.packing=sequential, which needs none"
        raise refuse(str(path), f"must be written, and cannot be ({reason_of(error)})", remedy) from error
    return path


def read_packing(file: TokenFile, seq_len: int, packed_by: PackedBy) -> Packing:
    """The packing of a token file, mapped. Raises DataError where it is not there, damaged, or of another file."""
    path = pack_path(file.prefix, seq_len, packed_by)
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise refuse(str(path), f"cannot be read ({reason_of(error)})", PREPARE) from error
    again = f"delete it, and {PREPARE}"
    if len(content) < HEADER.size or content[:8].tobytes() != MAGIC:
        raise refuse(str(path), "is no packing", again)
    _, length, n_tokens, mark, n, p, n_documents, n_cut, n_left_out = HEADER.unpack(content[: HEADER.size].tobytes())
    size = HEADER.size + 8 * (n + 1) + 12 * p
    if (length, len(content)) != (seq_len, size):
        raise refuse(str(path), f"has {len(content)} bytes where {n} samples of {p} pieces take {size}", again)
    if (n_tokens, mark) != (file.n_tokens, fingerprint(idx_path(file.prefix))):
        raise refuse(str(path), f"is the packing of another file than {idx_path(file.prefix)} is now", again)
    starts_at, lengths_at = HEADER.size + 8 * (n + 1), HEADER.size + 8 * (n + 1) + 8 * p
    first_piece = content[HEADER.size : starts_at].view("<i8")
    if n and (first_piece[0], first_piece[-1]) != (0, p):
        raise refuse(str(path), "must number its pieces from the first to the last one", again)
    start_P, length_P = content[starts_at:lengths_at].view("<i8"), content[lengths_at:].view("<i4")
    return Packing(np.asarray(first_piece), np.asarray(start_P), np.asarray(length_P), n_documents, n_cut, n_left_out)
