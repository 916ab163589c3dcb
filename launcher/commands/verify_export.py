"""`roundtable export --verify`: whether transformers computes the same logits from the export as Roundtable."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import reason_of
from launcher.commands.trained import Trained, load_decoder, refusing_spoiled_weights
from launcher.console import tell
from modeling.context import Context
from modeling.dtypes import DTYPES
from modeling.families.family import family_of
from modeling.families.weights import hf_template

TOLERANCE = 2e-5  # for logits of standard deviation 1, in fp32: the same operations in another order
MOST_ROUNDING = 1e-2  # of that deviation: where rounding changes more, a wrong tensor could not be told from it
ROWS, LENGTH = 8, 16  # of random tokens


class DifferentExport(Exception):
    """Transformers does not compute the checkpoint's model from the folder; the message continues the folder's name."""


def check_export(folder: Path, trained: Trained, dtype: str) -> None:
    """Raises DifferentExport where transformers cannot load ``folder``, or its logits are not Roundtable's.

    Both models compute in fp32, with weights rounded to ``dtype``, and are in memory together. Where two experts'
    scores are equal but for rounding, the two sides may choose different experts, so one row of ROWS may differ in a
    model with experts. Where more differ, the weights may amplify rounding, so transformers' model computes in fp64
    too, alone in memory: Roundtable's logits may then be twice as far from those as transformers' own fp32 logits are,
    which a line tells. Raises UserError where Roundtable's own logits are not finite.
    """
    model = trained.config.model
    length = min(LENGTH, trained.config.data.seq_len)
    tokens_BS = torch.randint(model.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))
    passed_over = [f"model.layers.{layer}." for layer in model.mtp_layers]
    with torch.no_grad():
        theirs_BSV = their_logits(folder, tokens_BS, passed_over)
        ours_BSV = our_logits(trained, tokens_BS, dtype)
    if not ours_BSV.isfinite().all():
        with refusing_spoiled_weights(trained):
            raise FloatingPointError("its logits are NaN or infinite")
    most_rows, scale = 0 if model.moe is None else 1, max(1.0, float(ours_BSV.std()))
    differences_B, tolerance = row_differences(theirs_BSV, ours_BSV), TOLERANCE * scale
    beyond, compared = n_beyond(differences_B, tolerance), ""
    if beyond > most_rows and theirs_BSV.isfinite().all():
        with torch.no_grad():
            exact_BSV = their_logits(folder, tokens_BS, passed_over, torch.float64)
        in_fp32, first = float(differences_B.max()), tolerance
        own = float(row_differences(theirs_BSV, exact_BSV).sort().values[-1 - most_rows])
        differences_B = row_differences(ours_BSV, exact_BSV)
        tolerance = max(tolerance, min(2 * own, MOST_ROUNDING * scale))
        beyond = n_beyond(differences_B, tolerance)
        compared = f", from transformers in fp64, where its own fp32 differs by {own:.2g}"
        if beyond <= most_rows:
            largest = float(differences_B.sort().values[-1 - most_rows])
            tell(
                f"these weights amplify rounding: logits differ from those of transformers in fp32 by up to "
                f"{in_fp32:.2g}, more than {first:.2g}, but from those in fp64 by {largest:.2g}, where its own fp32 "
                f"differs from them by {own:.2g}"
            )
    if beyond > most_rows:
        largest = float(differences_B.max())
        raise DifferentExport(
            f"gives different logits in transformers and in Roundtable: those of {beyond} of {ROWS} rows of tokens "
            f"differ by up to {largest:.2g}, more than {tolerance:.2g}{compared}"
        )


def row_differences(logits_BSV: Tensor, others_BSV: Tensor) -> Tensor:
    """The largest difference between two models' logits in each row (B), in fp64."""
    return (logits_BSV.double() - others_BSV.double()).abs().flatten(1).amax(1)


def n_beyond(differences_B: Tensor, tolerance: float) -> int:
    """The number of rows that differ by more than ``tolerance``; one with a NaN does."""
    return int((~(differences_B <= tolerance)).sum())


def their_logits(
    folder: Path, tokens_BS: Tensor, passed_over: Sequence[str] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Transformers' logits (B, S, V), computed in ``dtype`` from the weights as they were written.

    In fp64 its plain formulas of attention and experts are taken, since others do not know that dtype; what the class
    itself computes in fp32 stays so. Raises DifferentExport where it cannot load the folder or misses a weight. Weights
    whose names begin with one of ``passed_over`` may be unknown to the class.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
        theirs, info = loaded
        if dtype == torch.float64:
            theirs.set_attn_implementation("eager")
            theirs.set_experts_implementation("eager")
        logits_BSV = theirs.eval()(tokens_BS, use_cache=False).logits
    except Exception as error:  # what is wrong with files makes the libraries raise anything
        raise DifferentExport(f"cannot be loaded by transformers ({reason_of(error)})") from error
    finally:
        logging.set_verbosity(verbosity)
    told = sorted(str(name) for names in info.values() for name in names)
    wrong = [name for name in told if not name.startswith(tuple(passed_over))]
    if wrong:
        raise DifferentExport(f"has weights that transformers misses or does not know: {', '.join(wrong[:5])}")
    return logits_BSV


def our_logits(trained: Trained, tokens_BS: Tensor, dtype: str) -> Tensor:
    """Roundtable's fp32 logits (B, S, V), each row a document of its own, from weights rounded to ``dtype``."""
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    ours, config = load_decoder(trained, "cpu", DTYPES[dtype]).float(), trained.config.model
    for name, weight in ours.named_parameters():
        if hf_template(config, name).endswith(family_of(config.family).in_fp32):
            weight.copy_(trained.read(name))
    return ours(tokens_BS, Context(positions_BS, torch.zeros_like(positions_BS))).logits_BSV
