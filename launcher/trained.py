"""A trained model from what the user names: a run directory, or one checkpoint's directory."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.run_dir import CONFIG, checkpoints_of
from modeling.decoder import Decoder, build_decoder
from parallel.checkpoint.folder import MANIFEST, Folder, is_remote, open_folder
from parallel.checkpoint.manifest import DamagedCheckpoint
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


def open_trained(path: Path | str) -> Trained:
    """Opens ``path``: a checkpoint's directory, or a run directory, of which the latest good checkpoint is taken.

    On an object store ``path`` is a URL: a checkpoint's, or that of the folder which checkpoint.dir named. Nothing is
    changed: a damaged checkpoint stays where it is, and is named on stderr where an older one takes its place. Raises
    UserError where there is no good one.
    """
    run, candidates = find_candidates(path)
    damaged = []
    for folder in reversed(candidates):
        try:
            checkpoint = open_checkpoint(folder)
        except DamagedCheckpoint as error:
            where = folder.location
            damaged.append(f"CHECKPOINT={where} is damaged ({error}); give another one, or train on to write one")
            continue
        for line in damaged:
            print(f"{line}; taking {folder.name}", file=sys.stderr)
        return Trained(checkpoint, config_of(checkpoint, run, path))
    raise UserError(damaged or [f"CHECKPOINT={path} holds no checkpoint; give a run directory with checkpoints/step-N"])


def find_candidates(path: Path | str) -> tuple[Path | None, list[Folder]]:
    """The run directory, if there is one, and the checkpoints that ``path`` may mean, oldest first."""
    if is_remote(path):
        folder = open_folder(path)
        if folder.size(MANIFEST) is not None:
            return None, [folder]
        return None, list_checkpoints(path)
    path = Path(path)
    if not path.is_dir():
        raise UserError([f"CHECKPOINT={path} is not a folder; give a run directory, or one of its checkpoints/step-N"])
    if (path / MANIFEST).is_file():
        return path.absolute().parent.parent, [open_folder(path)]
    return path, list_checkpoints(checkpoints_of(path))


def config_of(checkpoint: Checkpoint, run: Path | None, path: Path | str) -> RunConfig:
    """The run directory's config, or else the copy in the checkpoint, which is as old as that."""
    if run is not None and (run / CONFIG).is_file():
        return load_config(run / CONFIG)
    saved = checkpoint.attached(CONFIG)
    if saved is None:
        missing = "config.yaml" if run is None else run / CONFIG
        raise UserError([f"CHECKPOINT={path} must lie in a run directory, and {missing} is missing; put it back"])
    return load_config(saved)


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
