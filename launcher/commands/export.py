"""`roundtable export`: writing a checkpoint as a folder that Hugging Face transformers loads without custom code."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.config import SourceConfig
from data.errors import reason_of
from data.places import is_text, nearest_existing, why_not_writable
from data.tokenizer import INFO
from data.tokenizer_files import load_folder
from launcher.commands.trained import load_generation_config, load_token_ids, load_tokenizer, open_trained
from launcher.commands.verify_export import DifferentExport, check_export
from launcher.config.rules import Precision, check_export_widths
from launcher.console import tell
from launcher.errors import UserError
from launcher.importing.folder import GENERATION_JSON
from launcher.importing.tokenizer import begins_with_bos
from launcher.new_folder import new_folder
from launcher.safetensors_file import save_tensors
from modeling.config import NO_FAMILY, ModelConfig
from modeling.dtypes import DTYPES
from modeling.families.config_json import SpecialTokens, generation_config, to_config_json
from modeling.families.family import family_of
from modeling.families.weights import copies_of, to_hf
from modeling.logical import logical_shapes, logical_tensors
from modeling.mtp_config import MTPConfig
from parallel.checkpoint.local import LocalStore
from parallel.checkpoint.store import MANIFEST
from parallel.processes.stop import undoing

SHARD_BYTES = 5_000_000_000  # of one safetensors file, at most (a larger tensor gets a file of its own)


@undoing()
def export(
    checkpoint: Path | str,
    out: Path,
    dtype: Precision | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    verified: bool = False,
    keeps_mtp: bool = False,
) -> int:
    """Writes ``checkpoint`` (a run directory or one checkpoint's) to ``out`` in transformers' format; returns 0.

    ``dtype`` None keeps the fp32 master weights as they are. ``verified``: the folder is kept only if transformers
    computes the same logits from it as Roundtable; else the reason is printed and 1 is returned. ``keeps_mtp``: the
    modules of multi-token prediction are written too. Raises UserError, before anything is created, where the
    checkpoint or ``out`` is unusable, or where fp16 cannot hold a weight.
    """
    problems = out_problems(out)
    if problems:
        raise UserError(problems)
    trained = open_trained(checkpoint)
    config = trained.config
    model = config.model if keeps_mtp else replace(config.model, mtp=None)
    if keeps_mtp and model.mtp is None:
        raise UserError(
            [f"--keep-mtp needs {MTPConfig.noun}, and model.mtp=null in CHECKPOINT={checkpoint}; leave it out"]
        )
    if trained.tokenizer is not None and config.data.add_bos != begins_with_bos(load_tokenizer(trained)):
        if config.data.add_bos:
            trained_so, remedy = "with a BOS token before each document (data.add_bos=true)", "add one where"
            told = f"the model was trained {trained_so}, and the exported tokenizer adds none to a text"
        else:
            trained_so, remedy = "without a BOS token before documents (data.add_bos=false)", "remove it where"
            told = f"the model was trained {trained_so}, and the exported tokenizer adds one to each text"
        tell(f"OUT={out}: bos_token: {told}; {remedy} the export is used")
    generation = load_generation_config(trained)
    template = trained_template(config.data.sources)
    tensors = ((name, trained.read(name)) for name in logical_shapes(model))
    check = partial(check_export, trained=trained, dtype=dtype or "fp32") if verified else None
    try:
        write_export(
            tensors,
            model,
            config.data.seq_len,
            trained.tokenizer,
            out,
            dtype,
            shard_bytes,
            check=check,
            generation=generation,
            template=template,
            special=load_token_ids(trained),
        )
    except DifferentExport as error:
        tell(f"OUT={out} {error}; nothing was kept: please report it with the run's config.yaml")
        return 1
    return 0


def write_export(
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    seq_len: int,
    tokenizer: Path | None,
    out: Path,
    dtype: Precision | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path], None] | None = None,
    generation: bytes | None = None,
    template: str | None = None,
    special: SpecialTokens | None = None,
) -> None:
    """Writes the logical ``tensors`` (each once, any order) and ``tokenizer``'s files as a transformers folder.

    ``generation`` is the content of generation_config.json; None: one with the special tokens' ids. ``template``: the
    chat template; None: the tokenizer's own. ``special``: the ids of special tokens where there is no tokenizer.
    ``check`` is called with the complete folder under a hidden name; if it raises, the folder is removed. ``out`` is
    complete or absent.
    """
    if config.family == NO_FAMILY:
        told = f"model.family={NO_FAMILY} names no class of `transformers` that an export could become"
        raise UserError([f"{told}; `roundtable generate` and `eval` take the checkpoint itself"])
    problems = [*out_problems(out), *check_export_widths(config, dtype or "fp32")]
    if tokenizer is not None and not is_text(out.absolute()):
        rule = "must have a whole path of UTF-8, since libraries read the tokenizer there"
        problems.append(f"OUT={out} {rule}; choose another place")
    problems = problems or room_problems(out, config, DTYPES[dtype or "fp32"])
    if problems:
        raise UserError(problems)
    loaded: Any = None if tokenizer is None else load_folder(tokenizer, "CHECKPOINT: its tokenizer")
    special = special_tokens(loaded) if loaded is not None else special or SpecialTokens()
    with new_folder(out) as hidden:
        if tokenizer is not None:
            shutil.copytree(tokenizer, hidden, ignore=shutil.ignore_patterns(INFO), dirs_exist_ok=True)
            rewrite_tokenizer_config(hidden, loaded, template)
        torch_dtype = DTYPES[dtype or "fp32"]
        write_configs(hidden, config, seq_len, special, torch_dtype)
        if generation is not None:
            (hidden / GENERATION_JSON).write_bytes(generation)
        if tokenizer is not None and (other := other_tokenizer(hidden)) is not None:
            told = f"for model.family={config.family}, transformers' AutoTokenizer loads {other}"
            remedy = "load the tokenizer with PreTrainedTokenizerFast"
            tell(f"OUT={out}: {told}, which does not split text as tokenizer.json says; {remedy}")
        write_weights(hidden, tensors, config, torch_dtype, shard_bytes)
        if check is not None:
            check(hidden)


def out_problems(out: Path) -> list[str]:
    """Why nothing can be exported to ``out``, one line each."""
    is_empty_folder = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if (out.exists() or out.is_symlink()) and not is_empty_folder:
        return [
            f"OUT={out} exists and is not an empty folder, and nothing is overwritten; give another path or remove it"
        ]
    rule = why_not_writable(out.absolute().parent)
    held = next((each for each in out.absolute().parents if holds_checkpoints(each)), None)
    if held is not None:
        rule = f"must lie outside of {held}, where a run keeps its checkpoints, and removes old ones"
    return [f"OUT={out} {rule}; choose another place"] if rule is not None else []


def holds_checkpoints(folder: Path) -> bool:
    """Whether ``folder`` holds a run's checkpoints."""
    return any((folder / name / MANIFEST).is_file() for name in LocalStore(folder).names())


def other_tokenizer(folder: Path) -> str | None:
    """The class by which AutoTokenizer loads another tokenizer from the folder; None where it takes tokenizer.json."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        theirs = json.loads(loaded.backend_tokenizer.to_str())
    except Exception as error:  # a class that was made for other files raises anything
        return f"a class that fails on it ({reason_of(error)})"
    is_same = all(theirs[part] == ours[part] for part in ("normalizer", "pre_tokenizer"))
    is_same &= all(theirs["model"].get(part) == ours["model"].get(part) for part in ("type", "vocab", "merges"))
    return None if is_same else type(loaded).__name__


def room_problems(out: Path, config: ModelConfig, dtype: torch.dtype) -> list[str]:
    """A line where the disk has too little space for the export."""
    tensors = logical_tensors(config).items()
    need = sum(tensor.numel * (1 + len(copies_of(config, name))) for name, tensor in tensors) * dtype.itemsize
    free = shutil.disk_usage(nearest_existing(out.parent)).free
    if need <= free:
        return []
    return [
        f"OUT={out} needs {need / 2**30:.1f} GiB, but the disk has {free / 2**30:.1f} GiB free; "
        "give a path on another disk, or a smaller --dtype"
    ]


def special_tokens(loaded: Any) -> SpecialTokens:
    """The ids of a loaded tokenizer's special tokens."""
    return SpecialTokens(bos=loaded.bos_token_id, eos=loaded.eos_token_id, pad=loaded.pad_token_id)


def trained_template(sources: Iterable[SourceConfig]) -> str | None:
    """The chat template of the run's sources; None, for the tokenizer's own, where they name none or several."""
    templates = {source.chat.template for source in sources if source.chat is not None}
    if len(templates) > 1:
        tell("the run's sources have several chat templates, so the export has the tokenizer's own, if any")
    return templates.pop() if len(templates) == 1 else None


def rewrite_tokenizer_config(folder: Path, loaded: Any, template: str | None) -> None:
    """Rewrites the folder's tokenizer_config.json so that transformers 4 and 5 both load the same tokenizer from it.

    ``loaded``: the tokenizer as loaded by its own class, which may pad and truncate on the left where the general class
    does so on the right. ``template`` replaces all its chat templates; None: they stay.

    Version 4 does not know the class names of version 5, nor its key for special tokens without a name. With the
    general class both take tokenizer.json as it is; version 4 then sets add_prefix_space from tokenizer_config.json,
    and would add token type ids, which no decoder takes.
    """
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template is not None:
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if "model_specific_special_tokens" in config:
        config["extra_special_tokens"] = config.pop("model_specific_special_tokens")
    backend = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if "add_prefix_space" in (backend.get("pre_tokenizer") or {}):
        config["add_prefix_space"] = backend["pre_tokenizer"]["add_prefix_space"]
    sides = {side: getattr(loaded, side) for side in ("padding_side", "truncation_side")}
    config = {side: value for side, value in sides.items() if value != "right"} | config
    config = {"clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]} | config
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_configs(folder: Path, config: ModelConfig, seq_len: int, special: SpecialTokens, dtype: torch.dtype) -> None:
    """Writes config.json and generation_config.json."""
    dtype_name = str(dtype).removeprefix("torch.")
    for name, content in (
        ("config.json", to_config_json(config, seq_len, special, dtype_name)),
        (GENERATION_JSON, generation_config(special)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Writes safetensors files of at most ``shard_bytes``, and their index where there are several.

    The folder must hold config.json already. One shard is in memory at a time. Raises RuntimeError where a tensor is
    missing.
    """
    missing = set(logical_shapes(config))
    shards: list[list[str]] = []
    total_bytes = 0
    for shard in in_shards(hf_tensors(tensors, config, dtype, missing), shard_bytes):
        path = folder / f"shard-{len(shards)}"
        save_tensors(shard, path, metadata={"format": "pt"})
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors makes files that only their owner reads
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if missing:
        raise RuntimeError(f"tensors missing from the checkpoint: {', '.join(sorted(missing))}")
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def hf_tensors(
    tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, dtype: torch.dtype, missing: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under its transformers name, in ``dtype``; removes Roundtable's name for it from ``missing``.

    Tensors that transformers keeps in fp32, such as a router's selection bias, stay in fp32.
    """

    def struck() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            missing.remove(name)
            yield name, tensor

    in_fp32 = family_of(config.family).in_fp32
    for hf_name, tensor in to_hf(config, struck()):
        keeps_fp32 = hf_name.endswith(in_fp32)
        yield hf_name, converted(hf_name, tensor.detach(), torch.float32 if keeps_fp32 else dtype)


def converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in ``dtype``. Raises UserError where a finite element would become infinite."""
    result = tensor.to(dtype, copy=True)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        rule = f"must hold {name}, whose largest element is {largest:g}, and ends at {torch.finfo(dtype).max:g}"
        raise UserError([f"--dtype=fp16 {rule}; give --dtype bf16"])
    return result


def in_shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of at most ``shard_bytes``; a larger tensor is a group of its own."""
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard
