"""`roundtable import`: making a run directory from a folder that Hugging Face transformers loads."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from data.places import nearest_existing, why_no_path
from launcher.commands.export import out_problems
from launcher.config.tree import RunConfig
from launcher.console import open_console, say, tell, text_column
from launcher.errors import UserError
from launcher.importing.config import PRECISIONS, read_model, read_text_model, run_config
from launcher.importing.folder import CONFIG_JSON, GENERATION_JSON, folder_problems, open_model, read_config_json
from launcher.importing.generation import read_generation_config
from launcher.importing.run import STEP, write_run
from launcher.importing.token_ids import TOKEN_IDS_JSON, dump_token_ids, read_token_ids
from launcher.importing.tokenizer import begins_with_bos, load_tokenizer
from launcher.importing.weights import Weights, has_mtp, match_weights
from launcher.tables import size_text
from launcher.training.run_parts import CHECKPOINTS
from modeling.families.base_keys import settings_beside
from modeling.families.family import family_of
from modeling.mtp_config import MTPConfig
from parallel.checkpoint.manifest import ELEMENT_BYTES
from parallel.checkpoint.places import is_remote, step_directory
from parallel.checkpoint.safetensors_stream import ELEMENT_BYTES_OF

PLAIN_LINE_SECONDS = 10.0  # between two lines where there is no terminal


def import_model(hf_dir: str, run_dir: str, *, drops_mtp: bool = False) -> None:
    """Writes the model of ``hf_dir``, a folder in transformers' format, to the new run directory ``run_dir``.

    The weights are widened to fp32. ``drops_mtp`` leaves out the modules of multi-token prediction; they are also left
    out, with a line, where config.json has them but the files hold none of their weights. No code of the folder is run.
    Raises UserError or DataError, before anything is created, where either folder is unusable.
    """
    source, out = Path(hf_dir), Path(run_dir)
    problems = [*folder_problems(hf_dir), *place_problems(run_dir)] or overlap_problems(source, out)
    if problems:
        raise UserError(problems)
    content = read_text_model(source, read_config_json(source))
    model, seq_len = read_model(source, content)
    if content.get("auto_map") is not None:
        names, taken = "auto_map names code of the folder's own", family_of(model.family).architecture
        tell(f"{source / CONFIG_JSON}: {names}, which is not run: the model is that of transformers' own {taken}")
    folder = open_model(source)
    for name in folder.ignored:
        tell(f"{source / name} is not one of the model's files and is not read")
    if model.mtp is not None and (drops_mtp or not has_mtp(model, folder)):
        if not drops_mtp:
            told = f"has keys of {MTPConfig.noun}, but no file holds a weight of theirs"
            tell(f"{source / CONFIG_JSON} {told}; they are left out (model.mtp=null)")
        model = replace(model, mtp=None)
    weights = match_weights(model, folder, passes_over_further=drops_mtp)
    tokenizer = load_tokenizer(source, model.vocab_size)
    generation = read_generation_config(source)
    for line in settings_beside(content, {} if generation is None else json.loads(generation)):
        tell(f"{source / CONFIG_JSON}: {line}; write them to {GENERATION_JSON} to keep them")
    kept = {} if generation is None else {GENERATION_JSON: generation}
    if tokenizer is None:
        kept[TOKEN_IDS_JSON] = dump_token_ids(read_token_ids(source, content))
    problems = room_problems(out, weights.elements)
    if problems:
        raise UserError(problems)
    copy = None if tokenizer is None else str(step_directory(out / CHECKPOINTS, STEP) / "tokenizer")
    config = run_config(model, seq_len, weights.dtypes[0], out, copy, adds_bos=begins_with_bos(tokenizer))
    with shown_progress(bytes_to_read(weights), "importing") as on_bytes:
        write_run(out, config, weights, tokenizer, kept, on_bytes)
    for line in summary(source, out, config, weights):
        say(line)


def place_problems(out: str) -> list[str]:
    """Why no run directory can be made at ``out``, one line each."""
    rule = why_no_path(out, created=True) if out and out.isprintable() else "must be a path"
    if rule is None and is_remote(out):
        rule = "must be a folder on a file system"
    if rule is None and Path(out).name in ("", ".."):
        rule = "must end in the name of a new folder"
    return [f"OUT={out} {rule}; give another path"] if rule is not None else out_problems(Path(out))


def overlap_problems(source: Path, out: Path) -> list[str]:
    """A line where ``out`` lies in ``source``, which is only read."""
    inside, real = os.path.realpath(source), os.path.realpath(out)
    if not f"{real}/".startswith(f"{inside}/"):
        return []
    return [f"OUT={out} must not be in HF_DIR={source}, which is only read; give another path"]


def room_problems(out: Path, n_elements: int) -> list[str]:
    """A line where the disk has too little space for a checkpoint of ``n_elements`` in fp32."""
    need, free = n_elements * ELEMENT_BYTES, shutil.disk_usage(nearest_existing(out.parent)).free
    if need <= free:
        return []
    told = f"OUT={out} needs {size_text(need)}, but the disk has {size_text(free)} free"
    return [f"{told}; give a path on another disk"]


def bytes_to_read(weights: Weights) -> int:
    """Bytes of all tensors in the model's files."""
    parts = (part.stored for parts in weights.parts.values() for part in parts)
    return sum(prod(stored.shape) * ELEMENT_BYTES_OF[stored.dtype] for stored in parts)


def summary(source: Path, out: Path, config: RunConfig, weights: Weights) -> Iterator[str]:
    """Two lines: what was written, and the commands that use it."""
    dtypes = " and ".join(PRECISIONS[dtype] for dtype in weights.dtypes)
    again = f" (`export --dtype {dtypes}` writes them as they were)" if len(weights.dtypes) == 1 else ""
    widened = "" if dtypes == "fp32" else f", {dtypes} widened to fp32{again}"
    lacks = "; it has no tokenizer, so it can neither generate text nor be evaluated on text"
    tokenizer = "" if config.data.tokenizer is not None else lacks
    yield f"{source} -> {out}: {config.model.family}, {weights.elements:,} weights{widened}{tokenizer}"
    made = shlex.quote(str(out))
    text = "" if config.data.tokenizer is None else f"`roundtable generate {made} --prompt ...` continues text; "
    begun = f"init_from: {out}" + (", with data.add_bos: true," if config.data.add_bos else "")
    yield f"{text}`roundtable export {made} DIR` writes it back; {begun} begins a run with these weights"


@contextmanager
def shown_progress(n_bytes: int, doing: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many more bytes were read, and shows a bar on a terminal, lines elsewhere."""
    console = open_console(stderr=True)
    if console.is_terminal:
        columns = (text_column(doing), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(doing, total=n_bytes)
            yield lambda count: progress.advance(task, count)
        return
    done, last = 0, time.monotonic()

    def show(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= PLAIN_LINE_SECONDS:
            last = time.monotonic()
            tell(f"{doing}: {done / 1e9:.1f} of {n_bytes / 1e9:.1f} GB")

    yield show
