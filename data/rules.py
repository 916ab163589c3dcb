"""The cheap rules of the data section, all checked at once."""

from data.config import DataConfig, SourceConfig
from data.errors import DataError, problem
from data.places import why_no_path, why_not_writable
from data.prepared import locate
from data.sources import HUGGING_FACE, expand_path, input_files, is_hugging_face, is_raw, reads_files
from data.tokenfile import is_token_file
from data.tokenizer import BYTES_AND_END
from data.without import file_problem

LEAST_WEIGHT = 1e-6


def check_data(config: DataConfig, vocab_size: int) -> list[str]:
    """One line for each rule that the data section breaks. Looks for files, but reads none of the corpus.

    A corpus that is not on this machine is not missed once its token files are there. The range of each number, which
    its field's type says, is not checked here: whoever reads a config has done so.
    """
    found = [*_check_empty(config), *_check_names(config)]
    for number, source in enumerate(config.sources):
        found += _check_source(source, f"data.sources[{number}]")
    found += _check_stages(config)
    if not found and not _is_prepared(config, vocab_size):
        found += _check_paths(config)
    trains_tokenizer = config.tokenizer is None and any(is_raw(source) for source in config.sources)
    if trains_tokenizer and vocab_size < BYTES_AND_END:
        rule = f"must be at least {BYTES_AND_END} to train a byte-level tokenizer (data.tokenizer=null)"
        found.append(problem(f"model.vocab_size={vocab_size}", rule, f"set it to {BYTES_AND_END} or more"))
    heldout = config.heldout_path
    if heldout is not None and why_no_path(heldout) is None and not is_token_file(expand_path(heldout)):
        rule = "must be the PREFIX of token files, and PREFIX.bin and PREFIX.idx do not both exist"
        found.append(problem(f"data.heldout_path={heldout!r}", rule, "check the path, or set it to null"))
    if config.without is not None and why_no_path(config.without) is None:
        found += [line for line in [file_problem(config.without)] if line is not None]
    return found


def _check_empty(config: DataConfig) -> list[str]:
    found = []
    if not config.sources:
        found.append(
            problem("data.sources=[]", "must name at least one source", "add one: sources: [{path: corpus.txt}]")
        )
    if not config.token_dir:
        found.append(problem("data.token_dir=''", "must name a folder", "set it to tokens"))
    return found


def _check_names(config: DataConfig) -> list[str]:
    """No path that no file system takes; what each should be is said elsewhere."""
    paths = {f"data.{name}": getattr(config, name) for name in ("token_dir", "tokenizer", "heldout_path", "without")}
    paths |= {f"data.sources[{number}].path": source.path for number, source in enumerate(config.sources)}
    broken = {
        key: why_no_path(path, created=key == "data.token_dir") for key, path in paths.items() if path is not None
    }
    return [problem(f"{key}={paths[key]!r}", rule, "choose another") for key, rule in broken.items() if rule]


def _check_source(source: SourceConfig, key: str) -> list[str]:
    found = []
    if is_hugging_face(source) and not source.path.removeprefix(HUGGING_FACE).strip("/"):
        remedy = "name one, e.g. hf://roneneldan/TinyStories, or a local folder: hf:///data/stories"
        found.append(problem(f"{key}.path={source.path!r}", "must name a dataset", remedy))
    if not source.path:
        found.append(problem(f"{key}.path=''", "must not be empty", "name a file, folder, glob, hf://NAME or PREFIX"))
    return found


def _check_stages(config: DataConfig) -> list[str]:
    """Stages ascend, and each has a weight for every source, of which one is above 0."""
    found, before = [], -1
    for number, stage in enumerate(config.stages):
        key, shown = f"data.stages[{number}]", "[" + ", ".join(map(str, stage.weights)) + "]"
        if len(stage.weights) != len(config.sources):
            rule = (
                f"must hold one weight for each of data.sources, {len(config.sources)}, and holds {len(stage.weights)}"
            )
            found.append(problem(f"{key}.weights={shown}", rule, "give 0 to a source that is not to be read"))
        elif not any(stage.weights):
            found.append(problem(f"{key}.weights={shown}", "must hold a weight above 0", "try 1.0 for one of them"))
        elif tiny := [weight for weight in stage.weights if 0 < weight < LEAST_WEIGHT]:
            rule = f"holds {tiny[0]}, and a weight must be 0 or at least {LEAST_WEIGHT}"
            found.append(problem(f"{key}.weights={shown}", rule, "scale them all up, or set it to 0"))
        if -(-stage.from_tokens // config.seq_len) <= before:
            rule = "must be a sequence or more after the stage before it"
            at = (before + 1) * config.seq_len
            found.append(problem(f"{key}.from_tokens={stage.from_tokens}", rule, f"try {at}, or more"))
        before = max(before, -(-stage.from_tokens // config.seq_len))
    return found


def _check_paths(config: DataConfig) -> list[str]:
    found = []
    for number, source in enumerate(config.sources):
        if reads_files(source):
            try:
                input_files(source, f"data.sources[{number}]")
            except DataError as error:
                found += error.problems
    rule = why_not_writable(config.token_dir)
    if rule is not None:
        found.append(problem(f"data.token_dir={config.token_dir!r}", rule, "name another folder"))
    return found


def _is_prepared(config: DataConfig, vocab_size: int) -> bool:
    try:
        return locate(config, vocab_size) is not None
    except DataError:  # damaged: whoever opens it says so
        return True
