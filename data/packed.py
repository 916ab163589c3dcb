r"""Files of packings, which lie beside their token files: PREFIX.best_fit-2048.pack, for example.

    8 bytes  magic "RTPACK\0\3"
    uint64   seq_len, tokens of the file, hash of samples of its .idx, samples n, pieces p, documents, documents cut,
             tokens left out, hash of its whole .idx
    int64[n + 1]  the first piece of each sample, and last p
    int64[p]      the token that each piece begins with
    int32[p]      its tokens
    uint64   hash of all that stands before it

Little-endian, and byte for byte reproducible. The file is mapped into memory, and opening it takes constant time for
any size: of a large .idx only samples spread over it are compared with their hash. The whole .idx is hashed where it is
small, and at a start where its modification time is not before the packing's.

Packings of magic "RTPACK\0\2" lack the hash at the end. Those of magic "RTPACK\0\1" lack the header's last number, too,
and hold a fingerprint of the .idx's ends, not a sampled hash.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from data.config import DataConfig, PackedBy
from data.errors import reason_of, refuse
from data.manifest import hash_file
from data.packing import Packing, pack
from data.partial import written_whole
from data.tokenfile import TokenFile, fingerprint, idx_path, sampled_hash
from data.tokenizer import PREPARE

MAGIC, SECOND_MAGIC, OLD_MAGIC = b"RTPACK\x00\x03", b"RTPACK\x00\x02", b"RTPACK\x00\x01"
HEADER, OLD_HEADER = struct.Struct("<8s9Q"), struct.Struct("<8s8Q")
OLD_NUMBERS = 8  # numbers after the old magic
TRAILER = struct.Struct("<Q")
SMALL_BYTES = 1 << 22  # an .idx of up to this size is hashed whole whenever its packing is opened: 1 ms


def pack_path(prefix: Path, seq_len: int, packed_by: PackedBy) -> Path:
    """The path of the packing of PREFIX.bin."""
    return Path(f"{prefix}.{packed_by}-{seq_len}.pack")


def packed_by_of(config: DataConfig) -> PackedBy | None:
    """The config's way of packing documents; None where they are laid end to end."""
    return None if config.packing == "sequential" else config.packing


def is_packed(prefix: Path, seq_len: int, packed_by: PackedBy) -> bool:
    """Whether the packing exists and belongs to the token file as it is now.

    Where the .idx is not older than the packing (after both were copied, for example), it is hashed whole, and the
    packing's modification time is set to now, so that the next start need not repeat it.
    """
    idx, pack = idx_path(prefix), pack_path(prefix, seq_len, packed_by)
    try:
        with pack.open("rb") as file:
            head = _numbers(file.read(HEADER.size))
        if head is None or not _fits(head, idx):
            return False
        is_settled = len(head) == OLD_NUMBERS or idx.stat().st_mtime_ns < pack.stat().st_mtime_ns
        if not is_settled and head[-1] != whole_hash(idx):
            return False
    except OSError:
        return False
    if not is_settled:
        with suppress(OSError):  # the file is another user's: the .idx is hashed again at the next start
            os.utime(pack)
    return True


def whole_hash(path: Path) -> int:
    """The first 64 bits of a file's hash."""
    return int(hash_file(path)[:16], 16)


def is_sound(path: Path) -> bool:
    """Whether a packing has the hash that it ends with. Reads the whole file; earlier versions have none, so True."""
    if path.stat().st_size < OLD_HEADER.size:
        return False
    content = np.memmap(path, np.uint8, "r")
    if content[: len(MAGIC)].tobytes() != MAGIC:
        return True
    (recorded,) = TRAILER.unpack(content[-TRAILER.size :].tobytes())
    return len(content) > HEADER.size and _hash_of(content[: -TRAILER.size].data) == recorded


def _hash_of(*parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _numbers(head: bytes) -> tuple[int, ...] | None:
    """The numbers in a packing's header; None where it is no packing."""
    form = {MAGIC: HEADER, SECOND_MAGIC: HEADER, OLD_MAGIC: OLD_HEADER}.get(head[: len(MAGIC)])
    return form.unpack(head[: form.size])[1:] if form is not None and len(head) >= form.size else None


def _fits(head: tuple[int, ...], idx: Path) -> bool:
    """Whether a packing with this header belongs to the .idx, by the hash that opening it compares."""
    if len(head) == OLD_NUMBERS:
        return head[2] == fingerprint(idx)
    if idx.stat().st_size <= SMALL_BYTES:
        return head[-1] == whole_hash(idx)
    return head[2] == sampled_hash(idx)


def missing_packings(config: DataConfig, prefixes: Iterable[Path]) -> list[Path]:
    """The token files whose packing is missing; none where documents are laid end to end."""
    packed_by = packed_by_of(config)
    return [each for each in prefixes if packed_by is not None and not is_packed(each, config.seq_len, packed_by)]


def damaged_packings(config: DataConfig, prefixes: Iterable[Path]) -> list[Path]:
    """The packings of token files whose bytes have changed since they were written. Reads all of them."""
    packed_by = packed_by_of(config)
    paths = [pack_path(each, config.seq_len, packed_by) for each in prefixes] if packed_by is not None else []
    return [path for path in paths if path.exists() and not is_sound(path)]


def write_packing(prefix: Path, seq_len: int, packed_by: PackedBy) -> Path:
    """Packs a token file, reading its whole .idx, and writes the packing atomically. Returns the packing's path.

    Raises DataError where the .idx contradicts itself, or where the packing cannot be written beside it.
    """
    file, path = TokenFile(prefix), pack_path(prefix, seq_len, packed_by)
    packing = pack(file.all_starts(), file.n_tokens, seq_len, packed_by)
    counts = (packing.n_samples, len(packing.start_P), packing.n_documents, packing.n_cut, packing.n_left_out)
    try:
        with written_whole(path) as out:
            idx = idx_path(prefix)
            head = HEADER.pack(MAGIC, seq_len, file.n_tokens, sampled_hash(idx), *counts, whole_hash(idx))
            arrays = (packing.first_piece, "<i8"), (packing.start_P, "<i8"), (packing.length_P, "<i4")
            parts = [head, *(np.ascontiguousarray(array, dtype).data for array, dtype in arrays)]
            out.writelines([*parts, TRAILER.pack(_hash_of(*parts))])
    except OSError as error:
        remedy = "free some room or mend its permissions, or set data.packing=sequential, which needs none"
        raise refuse(str(path), f"must be written, and cannot be ({reason_of(error)})", remedy) from error
    return path


def read_packing(file: TokenFile, seq_len: int, packed_by: PackedBy) -> Packing:
    """The memory-mapped packing of a token file. Raises DataError where it is missing, damaged or another file's."""
    path = pack_path(file.prefix, seq_len, packed_by)
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise refuse(str(path), f"cannot be read ({reason_of(error)})", PREPARE) from error
    again = f"delete it, and {PREPARE}"
    head = _numbers(content[: HEADER.size].tobytes())
    if head is None:
        raise refuse(str(path), "is no packing", again)
    length, n_tokens, _, n, p, n_documents, n_cut, n_left_out = head[:OLD_NUMBERS]
    begin = (HEADER if len(head) > OLD_NUMBERS else OLD_HEADER).size
    end = begin + 8 * (n + 1) + 12 * p
    size = end + TRAILER.size * (content[: len(MAGIC)].tobytes() == MAGIC)
    if (length, len(content)) != (seq_len, size):
        raise refuse(str(path), f"has {len(content)} bytes where {n} samples of {p} pieces take {size}", again)
    if n_tokens != file.n_tokens or not _fits(head, idx_path(file.prefix)):
        raise refuse(str(path), f"is the packing of another file than {idx_path(file.prefix)} is now", again)
    starts_at, lengths_at = begin + 8 * (n + 1), begin + 8 * (n + 1) + 8 * p
    first_piece = content[begin:starts_at].view("<i8")
    if n and (first_piece[0], first_piece[-1]) != (0, p):
        raise refuse(str(path), "must number its pieces from the first to the last one", again)
    start_P, length_P = content[starts_at:lengths_at].view("<i8"), content[lengths_at:end].view("<i4")
    return Packing(np.asarray(first_piece), np.asarray(start_P), np.asarray(length_P), n_documents, n_cut, n_left_out)
