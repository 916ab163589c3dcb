"""A trained model from what the user names: a run directory, or one checkpoint's directory."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.run_dir import CHECKPOINTS, CONFIG
from modeling.decoder import Decoder, build_decoder
from parallel.checkpoint.manifest import MANIFEST, DamagedCheckpoint
from parallel.checkpoint.read import Checkpoint, open_checkpoint
from parallel.checkpoint.write import BUFFER, list_checkpoints


@dataclass
class Trained:
    """An opened checkpoint and the config of the run that wrote it."""

    checkpoint: Checkpoint
    config: RunConfig

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder; None for a run on token files that named none."""
        return self.checkpoint.tokenizer

    def read(self, name: str) -> Tensor:
        """One logical tensor, weight or buffer, whole: fp32 on the CPU."""
        kind = BUFFER if name in self.checkpoint.names(BUFFER) else "weight"
        return self.checkpoint.read(name, kind)


def open_trained(path: Path) -> Trained:
    """Opens ``path``: a checkpoint's directory, or a run directory, of which the latest good checkpoint is taken.

    Nothing is changed: a damaged checkpoint stays where it is, and is named on stderr where an older one takes its
    place. Raises UserError where there is no good one.
    """
    if not path.is_dir():
        raise UserError([f"CHECKPOINT={path} is not a folder; give a run directory, or one of its checkpoints/step-N"])
    if (path / MANIFEST).is_file():
        run, candidates = path.absolute().parent.parent, [path]
    else:
        run, candidates = path, list_checkpoints(path / CHECKPOINTS)
    if candidates and not (run / CONFIG).is_file():
        raise UserError([f"CHECKPOINT={path} must lie in a run directory, and {run / CONFIG} is missing; put it back"])
    damaged = []
    for directory in reversed(candidates):
        try:
            checkpoint = open_checkpoint(directory)
        except DamagedCheckpoint as error:
            damaged.append(f"CHECKPOINT={directory} is damaged ({error}); give another one, or train on to write one")
            continue
        for line in damaged:
            print(f"{line}; taking {directory.name}", file=sys.stderr)
        return Trained(checkpoint, load_config(run / CONFIG))
    raise UserError(damaged or [f"CHECKPOINT={path} holds no checkpoint; give a run directory with checkpoints/step-N"])


def load_decoder(trained: Trained, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """The whole model in evaluation mode on one device; router biases stay fp32."""
    with torch.device("meta"):
        model = build_decoder(trained.config.model)
    state = {name: trained.read(name).to(device, dtype) for name, _ in model.named_parameters()}
    state |= {name: trained.read(name).to(device) for name, _ in model.named_buffers()}
    if trained.config.model.tie_embeddings:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()
