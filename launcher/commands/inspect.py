"""`roundtable inspect CHECKPOINT --text ...`: attention, routing and layer-wise predictions of a forward pass.

The checkpoint and its run are only read.
"""

import json
from typing import Any

import torch

from data.dataset import Dataset
from data.tokenizer import after_bos, check_kept, load_fast, making_tokens
from launcher.commands.trained import OTHER_CHECKPOINT, Trained, bos_id, load_decoder, naming_tokenizer, open_trained
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.inspection.asked import (
    Maps,
    Wishes,
    argument_problems,
    check_lens,
    checked_out,
    chosen_maps,
    chosen_parts,
    read_texts,
)
from launcher.inspection.experts import heldout_sources
from launcher.inspection.look import TokenText, look_at, read_tokens, with_sources
from launcher.inspection.report import build_report
from launcher.inspection.show import print_report
from launcher.inspection.write import write_out
from modeling.dtypes import DTYPES
from parallel.processes.stop import undoing

USUAL_SEQUENCES = 8  # of each source's held-out text


@undoing()
def inspect_checkpoint(path: str, wishes: Wishes) -> int:
    """Runs the model on the texts, prints a summary of what it computes inside, and writes what --out asks for.

    Returns 0, or 1 where a check fails that what is shown agrees with the model's output. Raises UserError, before
    anything is created, where an argument or the checkpoint is wrong.
    """
    problems = list(argument_problems(wishes))
    if problems:
        raise UserError(problems)
    out = checked_out(wishes.out)
    texts, notes = read_texts(wishes)
    trained = open_trained(path)
    moe = trained.config.model.moe
    parts = chosen_parts(wishes, has_experts=moe is not None)
    tokenizer, begin = open_tokenizer(path, trained), bos_id(trained)

    def encode(text: str) -> list[int]:
        with making_tokens("--text"):
            return after_bos(tokenizer.encode(text, add_special_tokens=False).ids, begin)

    tokens, more = read_tokens(texts, encode, token_limit(wishes, trained))
    notes += more
    if any(not each.ids for each in tokens):
        raise UserError([f"--text: {next(each.name for each in tokens if not each.ids)} has no token; give some text"])
    model_config = trained.config.model
    lengths = [len(each.ids) for each in tokens]
    linear = {layer for layer in range(model_config.n_layers) if model_config.is_linear_layer(layer)}
    maps = chosen_maps(wishes, model_config.n_layers, model_config.n_heads, lengths, linear)
    if "lens" in parts:
        check_lens(wishes, model_config.n_layers, lengths)
    heldout, note = heldout_sources(trained) if "experts" in parts else (None, None)
    if wishes.sequences is not None and heldout is None:
        why = note or "its run has one source"
        raise UserError([f"--sequences={wishes.sequences} needs several sources' held-out text: {why}; leave it out"])
    notes += [note] if note is not None else []
    report = look(trained, tokens, parts, maps, heldout, wishes, notes, tokenizer)
    for line in notes:
        tell(line)
    written = write_out(out, report) if out is not None else []
    if wishes.as_json:
        say(json.dumps({**report, "written": [str(each) for each in written]}))
    else:
        print_report(report)
        for each in written[:1]:
            say(str(each))
    return 0 if all(is_right(each) for each in report["checks"].values()) else 1


def is_right(check: dict[str, Any]) -> bool:
    """Whether one of the report's checks has passed."""
    return bool(check.get("right", check.get("last_layer_is_the_output")))


def open_tokenizer(path: str, trained: Trained) -> Any:
    """The checkpoint's tokenizer, which encodes text as `prepare` does. Raises UserError where it has none."""
    if trained.tokenizer is None:
        problem = f"CHECKPOINT={path} holds no tokenizer, so no text can be read"
        raise UserError([f"{problem}; set data.tokenizer and train on"])
    with naming_tokenizer(trained.checkpoint, "CHECKPOINT") as found:
        check_kept(trained.tokenizer, found, trained.config.model.vocab_size, OTHER_CHECKPOINT)
    return load_fast(trained.tokenizer)


def token_limit(wishes: Wishes, trained: Trained) -> int:
    """The most tokens of a text that are read: --max-tokens, or fewer where the learned positions are fewer."""
    rows = trained.config.model.max_positions
    return wishes.max_tokens if rows is None else min(wishes.max_tokens, rows)


def look(
    trained: Trained,
    tokens: list[TokenText],
    parts: tuple[str, ...],
    maps: Maps,
    heldout: Dataset | None,
    wishes: Wishes,
    notes: list[str],
    tokenizer: Any,
) -> dict[str, Any]:
    """The report on the texts, computed by this process on a GPU where there is one, else on the CPU."""
    config = trained.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_decoder(trained, device, DTYPES[wishes.dtype])
    n_experts = config.model.moe.n_experts if config.model.moe is not None and "experts" in parts else None
    looks = [look_at(model, each, parts, maps, wishes.top_k, n_experts) for each in tokens]
    n_sequences = wishes.sequences or USUAL_SEQUENCES
    found = with_sources(looks, n_experts, model, heldout, n_sequences, config.train.micro_batch_size)
    n_ids = tokenizer.get_vocab_size()

    def text_of(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False) if token < n_ids else f"<{token}>"

    about = {
        "checkpoint": str(trained.checkpoint.folder.location),
        "run": config.name,
        "step": trained.checkpoint.step,
        "family": config.model.family,
        "dtype": wishes.dtype,
        "device": device.type,
        "n_layers": config.model.n_layers,
        "n_heads": config.model.n_heads,
        "parts": list(parts),
        "has_sinks": config.model.sinks,
        "sequences": n_sequences if heldout is not None else None,
    }
    return build_report(found, about, notes, text_of)
