"""The weights in a model folder's files: matched with the model by name, shape and dtype, then read in fp32 blocks."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import torch
from torch import Tensor

from launcher.errors import UserError
from launcher.importing.folder import AGAIN, MOST_PROBLEMS, ModelFolder, Stored, cut
from modeling.config import ModelConfig
from modeling.families.family import family_of
from modeling.families.text_model import is_text, without_images
from modeling.families.weights import HFPart, copies_of, hf_parts, hf_template, itself
from modeling.logical import logical_parameters, logical_shapes, logical_tensors
from parallel.checkpoint.safetensors_stream import ELEMENT_BYTES_OF, NotSafetensors, read_into
from parallel.checkpoint.schema import shorten

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BLOCK_ELEMENTS = 1 << 20  # elements of one read
MOST_OVERREAD = 2  # reading in pieces may read at most so many times the bytes of the whole
# Buffers in older files, which transformers ignores as well: rotary frequencies and causal masks.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(bias|masked_bias)$")


@dataclass(frozen=True)
class Part:
    """The place of a logical tensor, or of one expert of a stack, within one tensor of the files."""

    hf: HFPart
    stored: Stored

    @property
    def view(self) -> Tensor:
        """A view on the files' tensor that covers this part: shape, strides and offset, on the meta device."""
        return self.hf.view(torch.empty(self.stored.shape, device="meta"))

    @property
    def numel(self) -> int:
        """The number of this part's elements."""
        return self.view.numel()


@dataclass(frozen=True)
class Weights:
    """Where each logical tensor of a model lies in a folder's files, after names, shapes and dtypes were checked."""

    folder: ModelFolder
    config: ModelConfig
    parts: Mapping[str, list[Part]]  # logical name -> the parts that it consists of, in order

    @property
    def elements(self) -> int:
        """The number of elements of all logical tensors."""
        return sum(part.numel for parts in self.parts.values() for part in parts)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the trained weights (F32, BF16, F16), those of the most elements first."""
        counts: Counter[str] = Counter()
        for name in logical_parameters(self.config):
            for part in self.parts[name]:
                counts[part.stored.dtype] += part.numel
        return [dtype for dtype, _ in counts.most_common()]

    def blocks(self, name: str, on_bytes: Callable[[int], None] = lambda _: None) -> Iterator[Tensor]:
        """The elements of one logical tensor in order, in flat fp32 blocks; ``on_bytes`` gets the bytes of each block.

        Raises UserError at a value that is not finite, and where a file has changed since its header was read.
        """
        for part in self.parts[name]:
            for block in read_blocks(self.folder, part):
                on_bytes(block.numel() * ELEMENT_BYTES_OF[part.stored.dtype])
                if not block.isfinite().all():
                    rule = "must hold finite numbers, and holds NaN or infinity"
                    raise UserError([f"{self.folder.path / part.stored.file}: {part.hf.name} {rule}; {AGAIN}"])
                yield block


def read_blocks(folder: ModelFolder, part: Part) -> Iterator[Tensor]:
    """The elements of one part in order, in flat fp32 blocks. Raises UserError where the file has changed."""
    stored, size = part.stored, ELEMENT_BYTES_OF[part.stored.dtype]
    try:
        with folder.files.open(stored.file) as file:
            for view in readable(part.view):
                raw = bytearray(span(view) * size)
                file.seek(stored.start + view.storage_offset() * size)
                read_into(file, memoryview(raw))
                values = torch.frombuffer(raw, dtype=DTYPES[stored.dtype])
                yield values.as_strided(view.shape, view.stride(), 0).float().flatten().contiguous()
    except (NotSafetensors, FileNotFoundError):
        rule = "must not change while it is read, and has"
        raise UserError([f"{folder.path / stored.file} {rule}; try again"]) from None


def readable(view: Tensor) -> Iterator[Tensor]:
    """Views of a part's elements, in order, each to be read in one piece.

    Contiguous elements are read in blocks. Where reading a matrix row by row would read nearly all of it each time, as
    it is stored transposed, the whole matrix is one piece.
    """
    if view.numel() == 0:
        return
    if view.is_contiguous():
        flat = view.as_strided((view.numel(),), (1,))
        yield from flat.split(BLOCK_ELEMENTS)
    elif span(view) <= BLOCK_ELEMENTS or span(view[0]) * len(view) > MOST_OVERREAD * span(view):
        yield view
    else:
        for each in view:
            yield from readable(each)


def span(view: Tensor) -> int:
    """The number of elements in memory from a view's first to its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def has_mtp(config: ModelConfig, folder: ModelFolder) -> bool:
    """Whether the files hold any weight of the config's multi-token prediction modules."""
    names = {
        part.name for name in logical_shapes(config) if _is_further(config, name) for part in hf_parts(config, name)
    }
    return not names.isdisjoint(folder.tensors)


def _is_further(config: ModelConfig, name: str) -> bool:
    return logical_tensors(config)[name].layer in config.mtp_layers


def match_weights(config: ModelConfig, folder: ModelFolder, *, passes_over_further: bool = False) -> Weights:
    """Each logical tensor's place in the files. Raises UserError with every name, shape and dtype that does not fit.

    With ``passes_over_further``, layers beyond the model's last, which are multi-token prediction modules, are ignored.
    """
    folder = with_prefix(config, with_text_names(config, folder))
    missing = list(islice(missing_lines(config, folder), MOST_PROBLEMS + 1))
    if len(missing) > MOST_PROBLEMS:
        raise UserError([*missing[:MOST_PROBLEMS], "and more such problems"])
    parts = {
        name: [Part(hf, folder.tensors[hf.name]) for hf in parts_in(config, folder, name) if hf.name in folder.tensors]
        for name in logical_shapes(config)
    }
    used = {part.hf.name for each in parts.values() for part in each}
    used |= {copy for name in parts for copy in copies_of(config, name)}
    unread = unread_lines(config, folder, used, passes_over_further=passes_over_further)
    problems = [*missing, *unfit_lines(config, folder), *unread]
    if problems:
        raise UserError(cut(problems))
    weights = Weights(folder, config, parts)
    check_tied_head(config, weights)
    check_copies(config, weights)
    return weights


def with_prefix(config: ModelConfig, folder: ModelFolder) -> ModelFolder:
    """The folder with tensors under the names that transformers' class with a head uses.

    Files saved from the class without a head lack the prefix of these names, which is then added.
    """
    prefix, head = family_of(config.family).prefix, hf_template(config, "head.weight")
    if not prefix or any(name.startswith(prefix) for name in folder.tensors):
        return folder
    named = {name if name == head else prefix + name: stored for name, stored in folder.tensors.items()}
    return replace(folder, tensors=named)


def with_text_names(config: ModelConfig, folder: ModelFolder) -> ModelFolder:
    """The folder with its tensors under the names of the text model, where it has those of one with images."""
    family = family_of(config.family)
    named = {without_images(family, name): stored for name, stored in folder.tensors.items()}
    if len(named) < len(folder.tensors):
        twice = next(
            name for name in folder.tensors if is_text(family, name) and without_images(family, name) in folder.tensors
        )
        told = f"{folder.path / folder.tensors[twice].file}: {twice}"
        raise UserError([f"{told} is also there as {without_images(family, twice)}; remove one of them"])
    return replace(folder, tensors=named)


def parts_in(config: ModelConfig, folder: ModelFolder, name: str) -> list[HFPart]:
    """The files' tensors of which logical tensor ``name`` consists.

    A tied embedding may be stored as the head, and all experts of a layer in one tensor.
    """
    parts, head = hf_parts(config, name), tied_head(config)
    if parts[0].name not in folder.tensors:
        stacked = hf_parts(config, name, stacked=True)
        if stacked[0].name in folder.tensors:
            return stacked
    if name == "embed.weight" and parts[0].name not in folder.tensors and head in folder.tensors:
        return [replace(parts[0], name=head)]
    return parts


def wanted_tensors(config: ModelConfig, folder: ModelFolder) -> Iterator[HFPart]:
    """Each tensor that the files must hold, once."""
    for name in logical_shapes(config):
        for part in {part.name: part for part in parts_in(config, folder, name)}.values():
            if part.names[0] == name:  # the first of those that share it
                yield part


def missing_lines(config: ModelConfig, folder: ModelFolder) -> Iterator[str]:
    """A line for each tensor of the model that no file has."""
    for part in wanted_tensors(config, folder):
        if part.name not in folder.tensors:
            yield f"HF_DIR={folder.path} must hold {part.name} [{_show(part.shape)}], and no file does; {AGAIN}"


def unfit_lines(config: ModelConfig, folder: ModelFolder) -> Iterator[str]:
    """A line for each tensor whose shape differs from that of config.json's model, or whose dtype cannot be read."""
    for part in wanted_tensors(config, folder):
        stored = folder.tensors.get(part.name)
        if stored is None:
            continue
        told = f"{folder.path / stored.file}: {part.name}"
        if stored.shape != part.shape:
            yield f"{told} must be [{_show(part.shape)}] by config.json, and is [{_show(stored.shape)}]; {AGAIN}"
        if stored.dtype not in DTYPES:
            rule = f"must be {', '.join(DTYPES)}, and is {shorten(stored.dtype)}"
            yield f"{told} {rule}; convert the model to one of these"


def unread_lines(
    config: ModelConfig, folder: ModelFolder, used: set[str], *, passes_over_further: bool
) -> Iterator[str]:
    """A line for each tensor of the files that the model does not have; those of a layer beyond the last share one."""
    beyond: Counter[int] = Counter()
    before_number = hf_template(config, "layers.0.attention.o.weight").partition("0")[0]
    numbered = re.compile(rf"{re.escape(before_number)}(\d{{1,9}})\.")
    unread = re.compile(family_of(config.family).unread or "(?!)")
    for name, stored in sorted(folder.tensors.items()):
        layer = numbered.match(name)
        if name in used or IGNORED.search(name) or unread.search(name) or name == tied_head(config):
            continue
        if layer is not None and int(layer[1]) >= config.n_layers:
            beyond[int(layer[1])] += not passes_over_further
        else:
            yield f"{folder.path / stored.file}: {name} is no tensor of this model, and would not be read; remove it"
    key = next(key for key, ours in family_of(config.family).keys.items() if ours == "n_layers")
    for number, count in sorted((+beyond).items()):
        yield (
            f"HF_DIR={folder.path} holds {before_number}{number} ({count:,} tensors), and {key}="
            f"{config.n_layers}; a module that predicts further tokens is not read: give --drop-mtp, or remove its "
            "tensors"
        )


def tied_head(config: ModelConfig) -> str | None:
    """The files' name of a head that is tied to the embedding, which they need not hold; None where it is not tied."""
    return hf_template(config, "head.weight") if config.tie_embeddings else None


def check_tied_head(config: ModelConfig, weights: Weights) -> None:
    """Raises UserError where the files hold a head though it is tied, and it differs from the embedding.

    transformers would then warn, and compute with both, untied.
    """
    name = tied_head(config)
    stored = weights.folder.tensors.get(name) if name is not None else None
    if name is None or stored is None:
        return
    (embedding,) = weights.parts["embed.weight"]
    if embedding.hf.name == name:  # the files hold the head alone, which is read as the embedding
        return
    if not is_copy(weights, name, "embed.weight"):
        rule = f"must be equal to {embedding.hf.name}, since config.json has tie_word_embeddings=true, and is not"
        remedy = "set tie_word_embeddings=false there, or remove the tensor"
        raise UserError([f"{weights.folder.path / stored.file}: {name} {rule}; {remedy}"])


def check_copies(config: ModelConfig, weights: Weights) -> None:
    """Raises UserError where a multi-token prediction module has an embedding or head that differs from the model's."""
    tensors = weights.folder.tensors
    for name in weights.parts:
        for copy in copies_of(config, name):
            if copy in tensors and not is_copy(weights, copy, name):
                told = (
                    f"{weights.folder.path / tensors[copy].file}: {copy} must be equal to {hf_template(config, name)}"
                )
                raise UserError([f"{told}, which the model computes with, and is not; give --drop-mtp"])


def is_copy(weights: Weights, copy: str, name: str) -> bool:
    """Whether the files' tensor ``copy`` holds the same values as the logical tensor ``name``."""
    stored, (part,) = weights.folder.tensors[copy], weights.parts[name]
    if stored.shape != part.stored.shape or stored.dtype not in DTYPES:
        return False
    again = Part(HFPart(copy, stored.shape, itself, (name,)), stored)
    blocks = zip_longest(read_blocks(weights.folder, again), weights.blocks(name))
    return all(torch.equal(one, other) for one, other in blocks)


def _show(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
