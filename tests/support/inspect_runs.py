"""Run directories to inspect: small models that were never trained, with a tokenizer of bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from byte_tokenizer import save_byte_tokenizer
from data.config import DataConfig, SourceConfig
from data.prepare import prepare
from data.tokenizer import load_origin, save_tokenizer
from launcher.config.tree import RunConfig, TrainConfig
from modeling.config import FamilyName
from modeling.decoder import Decoder
from saved_runs import save_run
from small_models import build, example_config

VOCAB = 257
# Text with HTML and a script, terminal escapes, line separators, right-to-left marks and a figure's math markup.
HOSTILE = (
    "</script><script>window.stolen=1</script><img src=x onerror=stolen=1>\x1b[31m\x07\0\u2028\u202e&quot;$\\frac$ é"
)


def inspectable(
    folder: Path,
    family: FamilyName = "qwen3_moe",
    *,
    sources: bool = False,
    name: str = "run",
    run_dir: str | None = None,
    **changes: Any,
) -> tuple[Path, Decoder]:
    """A run directory with a checkpoint of step 5, and its model; the weights are those of initialization.

    ``sources``: the run has two prepared data sources, with held-out text. ``changes`` are those of the family's small
    model config.
    """
    data = DataConfig(seq_len=32)
    if sources:
        draw = np.random.default_rng(0)
        for source, letters in (("words", "abcdefgh "), ("digits", "0123456789")):
            (folder / source).mkdir()
            for number in range(40):
                text = "".join(draw.choice(list(letters), int(draw.integers(20, 60))))
                (folder / source / f"{number:02}.txt").write_text(text)
        (folder / "origin").mkdir()
        save_byte_tokenizer(folder / "origin")
        data = replace(
            data,
            sources=tuple(SourceConfig(path=str(folder / source)) for source in ("words", "digits")),
            token_dir=str(folder / "tokens"),
            tokenizer=str(folder / "origin"),
            heldout_fraction=0.3,
        )
        prepare(data, vocab_size=VOCAB)
    config = RunConfig(
        name=name,
        run_dir=run_dir,
        model=example_config(family, vocab_size=VOCAB, **changes),
        data=data,
        train=TrainConfig(precision="fp32", micro_batch_size=2),
    )
    model = build(config.model, 1).eval()
    run, origin = folder / "run", folder / "origin"
    run.mkdir()
    if not origin.is_dir():
        origin.mkdir()
        save_byte_tokenizer(origin)
    loaded = load_origin(str(origin))

    def save_in(tokenizer: Path) -> None:
        tokenizer.rmdir()  # save_tokenizer leaves a folder that exists as it is
        save_tokenizer(loaded, tokenizer)

    save_run(run, config, model, 5, save_in)
    return run, model
