"""Simulates all ranks of a large job without processes: each one's mesh, and what it owns of a model."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from launcher.config.load import load_config
from modeling.config import ModelConfig
from modeling.logical import LogicalTensor, is_entry, logical_tensors
from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.cuts import Owned, merge, pack
from parallel.checkpoint.manifest import BUFFER, WEIGHT, Manifest
from parallel.layout import layout_of
from parallel.mesh import AXES, Axis, Degrees, Mesh
from parallel.pipeline.config import OneFOneB
from parallel.pipeline.stages import pipeline_parts
from parallel.zero.fragments import even_share

MODELS = Path(__file__).parents[2] / "configs" / "models"
STATES = ("exp_avg", "exp_avg_sq")  # optimizer states of AdamW
SCALARS = {"consumed": 0, "skipped": [], "tokens": 0, "updates": 0, "loss_scaler": {}, "heldout": None}


def deepseek_v3(n_layers: int | None = None) -> ModelConfig:
    """The config of DeepSeek-V3 (671 billion parameters), or with only its first ``n_layers`` layers."""
    config = load_config(MODELS / "deepseek-v3.yaml", []).model
    return config if n_layers is None else replace(config, n_layers=n_layers)


def meshes(degrees: Degrees) -> Iterator[Mesh]:
    """Each rank's mesh, in order of the ranks, without process groups."""
    places: list[dict[str, Axis]] = [{} for _ in range(degrees.world_size)]
    for name in AXES:
        for line in degrees.lines(name):
            for position, rank in enumerate(line):
                places[rank][name] = Axis(position, len(line), line, None)
    for rank, axes in enumerate(places):
        yield Mesh(
            rank=rank, world_size=degrees.world_size, device=torch.device("cpu"), control=None, neighbours={}, **axes
        )


class Job:
    """A model's tensors in a job of given degrees and ZeRO stage."""

    def __init__(self, config: ModelConfig, degrees: Degrees, zero: int) -> None:
        self.config, self.degrees, self.zero = config, degrees, zero
        self.tensors = logical_tensors(config)
        self.layout = layout_of(config)
        parts = pipeline_parts(config, OneFOneB(), degrees.pp) if degrees.pp > 1 else [None]
        self.names = [[name for name, tensor in self.tensors.items() if holds(part, name, tensor)] for part in parts]

    def owned(self, mesh: Mesh) -> list[Owned]:
        """What a rank owns: even shares of each weight (ZeRO 0 and 3), or of the flat tensors of groups (1 and 2)."""
        kinds = (WEIGHT, *STATES)
        names = self.names[mesh.pp.rank]
        weights = [name for name in names if not self.tensors[name].is_buffer and self.layout[name].is_owner(mesh)]
        of_rank = self.shares if self.zero in (0, 3) else self.flat_shares
        found = [Owned(kinds, name, held, first, numel) for name, held, first, numel in of_rank(mesh, weights)]
        if mesh.replicas.rank == 0 and mesh.tp.rank == 0:
            buffers = [name for name in names if self.tensors[name].is_buffer]
            boxes = [whole(self.tensors[name].shape) for name in buffers]
            found += [Owned((BUFFER,), name, box, 0, box.numel) for name, box in zip(buffers, boxes, strict=True)]
        return found

    def shares(self, mesh: Mesh, names: list[str]) -> Iterator[tuple[str, Box, int, int]]:
        """(name, box held, first element, number of elements) of the rank's even share of each weight.

        The shares are those of ``Zero3.share_of`` and ``Replicated.share_of``.
        """
        for name in names:
            place = self.layout[name]
            held = place.held_box(mesh)
            first, numel = even_share(held.numel, place.replicas(mesh))
            if numel > 0:
                yield name, held, first, numel

    def flat_shares(self, mesh: Mesh, names: list[str]) -> Iterator[tuple[str, Box, int, int]]:
        """(name, box held, first element, number of elements) of the rank's share of DeepSpeed's flat tensors.

        There is a flat tensor for experts and one for other weights, each with and without weight decay.
        """
        groups: dict[tuple[bool, bool], list[tuple[str, Box]]] = {}
        for name in names:
            place = self.layout[name]
            groups.setdefault((place.is_expert, len(place.shape) > 1), []).append((name, place.held_box(mesh)))
        for members in groups.values():
            start, size = even_share(sum(held.numel for _, held in members), self.layout[members[0][0]].replicas(mesh))
            begin = 0
            for name, held in members:
                first, last = max(start, begin), min(start + size, begin + held.numel)
                if first < last:
                    yield name, held, first - begin, last - first
                begin += held.numel

    def manifest(self) -> tuple[Manifest, int]:
        """The manifest that a save would write, and the bytes that all ranks send to rank 0 for it."""
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        packed = [pack(self.owned(mesh), shapes) for mesh in meshes(self.degrees)]
        kinds = {kind: [n for n, t in self.tensors.items() if not t.is_buffer] for kind in (WEIGHT, *STATES)}
        kinds[BUFFER] = [name for name, tensor in self.tensors.items() if tensor.is_buffer]
        cuts = merge(packed, shapes)
        shards = [f"shard-{rank:05d}.safetensors" for rank in range(self.degrees.world_size)]
        size = 4 * (1 + len(STATES)) * sum(map(prod, shapes.values()))
        files: dict[str, dict[str, Any]] = {shard: {"bytes": size, "xxh3_128": "0" * 32} for shard in shards}
        found = Manifest(1, dict(SCALARS), shapes, kinds, [], files, shards, cuts)
        return found, sum(len(each.table) for each in packed)


def holds(part: Any, name: str, tensor: LogicalTensor) -> bool:
    """Whether the stage ``part`` holds the tensor; None: there is only one stage."""
    if part is None:
        return True
    if tensor.layer is not None:
        return tensor.layer in part.layers
    return part.has_embedding if is_entry(name) else part.has_head
