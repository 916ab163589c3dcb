"""The options of `roundtable inspect`, checked: parts, layers, heads, texts, and where the result is written."""

import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig, SourceConfig
from data.documents import files_to_read, read_documents
from data.places import why_no_path, why_not_writable
from data.shards import plan_shards
from launcher.commands.evaluate_text import as_options
from launcher.commands.report import check_target
from launcher.console import readable
from launcher.errors import UserError

PARTS = ("attention", "experts", "lens")
MOST_TEXTS = 8
MOST_TOKENS = 1024  # tokens of a text; its attention maps have the square of that
LONGEST_TEXT = 100_000  # characters of a text that are tokenized
MOST_CELLS = 6_000_000  # cells of all attention maps in a page: a byte each there, and an element of a list in JSON
MOST_TOP = 20
MOST_GUESSES = 2_000_000  # tokens that the lens lists over all layers, places and texts: about ten bytes each in a page
USUAL_LAYERS, USUAL_HEADS = 4, 8  # the layers and heads whose attention is shown by default
PAGE_ENDINGS = (".html", ".htm")
NUMBERS = re.compile(r"\d{1,9}(-\d{1,9})?")


@dataclass(frozen=True)
class Wishes:
    """The command line's options besides the checkpoint, not checked yet."""

    texts: Sequence[str] = ()
    files: Sequence[str] = ()
    text_key: str | None = None  # None: "text"
    show: str | None = None
    layers: str | None = None
    heads: str | None = None
    max_tokens: int = 256
    top_k: int = 5
    sequences: int | None = None
    dtype: str = "fp32"
    out: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class NamedText:
    """A text and the name under which it is shown."""

    name: str
    text: str


def argument_problems(wishes: Wishes) -> Iterator[str]:
    """One line for each option that is wrong whatever the checkpoint is."""
    if not wishes.texts and not wishes.files:
        yield 'no text is given to look at; add --text "def f(x):", or --text-file FILE'
    if any(text == "" for text in wishes.texts):
        yield '--text="" must not be empty; try --text "def f(x):"'
    if len(wishes.texts) > MOST_TEXTS:
        yield f"--text is given {len(wishes.texts)} times, and may be {MOST_TEXTS} times at most; leave some out"
    if not 1 <= wishes.max_tokens <= MOST_TOKENS:
        yield f"--max-tokens={wishes.max_tokens} must be at least 1 and at most {MOST_TOKENS}; try 256"
    if not 1 <= wishes.top_k <= MOST_TOP:
        yield f"--top-k={wishes.top_k} must be at least 1 and at most {MOST_TOP}; try 5"
    if wishes.sequences is not None and not 1 <= wishes.sequences <= 10**7:
        yield f"--sequences={wishes.sequences} must be at least 1 and at most 10^7; try 8"
    if wishes.text_key is not None and not wishes.files:
        yield f"--text-key={wishes.text_key} works with --text-file only, whose records it is of; leave it out"
    if wishes.dtype not in ("fp32", "bf16", "fp16"):
        yield f"--dtype={wishes.dtype} must be fp32, bf16 or fp16; try fp32"
    unknown = [part for part in (wishes.show or "").split(",") if part not in PARTS]
    if wishes.show is not None and unknown:
        yield f"--show={wishes.show} must name some of {', '.join(PARTS)}; try --show {','.join(PARTS)}"


def chosen_parts(wishes: Wishes, *, has_experts: bool) -> tuple[str, ...]:
    """The parts to show. Raises UserError where experts are asked for of a model that has none."""
    if wishes.show is None and wishes.sequences is None:
        return PARTS if has_experts else tuple(part for part in PARTS if part != "experts")
    parts = tuple(part for part in PARTS if part in (wishes.show or ",".join(PARTS)).split(","))
    option = f"--show={wishes.show}" if wishes.show is not None else f"--sequences={wishes.sequences}"
    if "experts" in parts and not has_experts:
        raise UserError([f"{option} asks for experts, and CHECKPOINT's model has none (model.moe=null); leave it out"])
    if "attention" not in parts:
        for name, given in (("--layers", wishes.layers), ("--heads", wishes.heads)):
            if given is not None:
                raise UserError([f"{name}={given} goes with attention, and --show leaves it out; leave it out"])
    if wishes.sequences is not None and "experts" not in parts:
        raise UserError([f"--sequences={wishes.sequences} goes with experts, and --show leaves them out; leave it out"])
    return parts


def numbers_of(option: str, value: str, count: int, noun: str) -> tuple[int, ...]:
    """The numbers that ``0,2-5`` or ``all`` names, ascending. Raises UserError where one is not below ``count``."""
    if value == "all":
        return tuple(range(count))
    pieces = value.split(",")
    if not all(NUMBERS.fullmatch(piece) for piece in pieces):
        raise UserError([f"{option}={value} must be numbers and ranges of them, as 0,2-5, or all; try {option} 0"])
    found: set[int] = set()
    for piece in pieces:
        first, _, last = piece.partition("-")
        ends = int(first), int(last or first)
        if max(ends) >= count:
            raise UserError(
                [f"{option}={value}: the model has {count} {noun}s, numbered from 0 to {count - 1}; try {option} 0"]
            )
        if ends[0] > ends[1]:
            raise UserError([f"{option}={value}: the range {piece} ends before it begins; try {ends[1]}-{ends[0]}"])
        found |= set(range(ends[0], ends[1] + 1))
    return tuple(sorted(found))


def spread(count: int, wanted: int) -> tuple[int, ...]:
    """At most ``wanted`` of the numbers below ``count``, evenly spaced, the first and the last among them."""
    if wanted >= count:
        return tuple(range(count))
    if wanted == 1:
        return (0,)
    return tuple(sorted({round(place * (count - 1) / (wanted - 1)) for place in range(wanted)}))


@dataclass(frozen=True)
class Maps:
    """The layers and heads whose attention is shown."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]


def chosen_maps(
    wishes: Wishes, n_layers: int, n_heads: int, lengths: Sequence[int], linear: Collection[int] = ()
) -> Maps:
    """The layers and heads asked for; by default some layers, evenly spaced, and the first heads, as far as they fit.

    ``lengths`` are the texts' numbers of tokens, and ``linear`` the layers with linear attention, which gives keys no
    weights. Raises UserError where more maps are asked for than a page holds, or a layer with linear attention is.
    """
    cells = sum(length * (length + 1) // 2 for length in lengths)  # of one causal map of each text
    most = max(1, MOST_CELLS // cells)
    asked = [
        None if value is None else numbers_of(option, value, count, noun)
        for option, value, count, noun in (
            ("--layers", wishes.layers, n_layers, "layer"),
            ("--heads", wishes.heads, n_heads, "head"),
        )
    ]
    mapped = [layer for layer in range(n_layers) if layer not in linear]
    if asked[0] is None:
        layers = tuple(mapped[place] for place in spread(len(mapped), max(1, min(USUAL_LAYERS, most))))
    else:
        layers = tuple(mapped) if wishes.layers == "all" else asked[0]
    without = [layer for layer in layers if layer in linear]
    if without:
        told = f"--layers={wishes.layers}: layer {without[0]} has linear attention, whose tokens have no weights"
        raise UserError([f"{told}; try --layers {mapped[0]}" if mapped else f"{told}; leave it out"])
    few = max(1, min(USUAL_HEADS, most // max(1, len(layers))))
    heads = asked[1] if asked[1] is not None else tuple(range(n_heads))[:few]
    if len(layers) * len(heads) > most:
        told = f"{len(layers)} layers x {len(heads)} heads of texts of {', '.join(map(str, lengths))} tokens"
        remedy = "name fewer --layers or --heads, or lower --max-tokens"
        raise UserError([f"{told} make more than the {MOST_CELLS:,} numbers of attention that a page holds; {remedy}"])
    return Maps(layers, heads)


def check_lens(wishes: Wishes, n_layers: int, lengths: Sequence[int]) -> None:
    """Raises UserError where the lens would list more tokens than a page holds."""
    places = (n_layers + 1) * sum(lengths)
    if places * wishes.top_k > MOST_GUESSES:
        told = f"--top-k={wishes.top_k} of {n_layers} layers and texts of {', '.join(map(str, lengths))} tokens"
        remedy = f"try --top-k {MOST_GUESSES // places}" if places <= MOST_GUESSES else "lower --max-tokens"
        raise UserError([f"{told} makes more than the {MOST_GUESSES:,} guesses that a page holds; {remedy}"])


def read_texts(wishes: Wishes) -> tuple[list[NamedText], list[str]]:
    """The texts to look at, and notes on them for the user. Raises UserError where one cannot be read."""
    found, notes, problems = [], [], []
    for number, given in enumerate(wishes.texts, 1):
        content, wrong = readable(given, "--text")
        problems += wrong
        found.append(NamedText(f"text {number}", content))
        if len(given) < 1000 and "\0" not in given and not wrong and os.path.isfile(given):
            notes.append(f"--text={given} is taken as text; the file of that name is read with --text-file")
    if problems:
        raise UserError(problems)
    for file in wishes.files:
        own = list(itertools.islice(_documents(file, wishes.text_key or "text"), MOST_TEXTS + 1))
        if not own:
            raise UserError([f"--text-file={file} holds no text; give a file with some"])
        if len(own) > MOST_TEXTS:
            notes.append(f"--text-file={file}: its first {MOST_TEXTS} documents are taken; it has more")
        name = os.path.basename(os.path.normpath(file)) or file
        many = len(own) > 1
        found += [NamedText(f"{name}: {n}" if many else name, text) for n, text in enumerate(own[:MOST_TEXTS], 1)]
    if len(found) > MOST_TEXTS:
        notes.append(f"of {len(found)} texts the first {MOST_TEXTS} are shown")
    return found[:MOST_TEXTS], notes


def _documents(file: str, text_key: str) -> Iterator[str]:
    """The documents of a text, jsonl or parquet file, or of a folder's or glob's files, as `eval --text` reads them."""
    source = SourceConfig(path=file, text_key=text_key)
    with as_options("--text-file"):
        files = files_to_read(source, "--text-file")
        for shard in plan_shards(source, files, DataConfig().shard_bytes, "--text-file"):
            yield from (text for text, _ in read_documents(source, shard, "--text-file") if text)


def checked_out(out: str | None) -> Path | None:
    """The path of the page's file, or of the folder to make; None without --out. Raises UserError if it is unusable."""
    if out is None:
        return None
    target = Path(out)
    if target.suffix.lower() in PAGE_ENDINGS:
        check_target(target)
        return target
    rule = why_no_path(out)
    if rule is None and os.path.lexists(target):
        rule = "is there already, and must be a new folder, or a file that ends in .html"
    if rule is None:
        rule = why_not_writable(target.parent)
    if rule is None and not target.parent.is_dir():
        rule = f"must lie in a folder that is there, and {target.parent} is not"
    if rule is not None:
        raise UserError([f"--out={out} {rule}; choose another place"])
    return target
