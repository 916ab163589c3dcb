"""A batch between the reader and the training step: in the token file's narrow types, or as its full arrays.

Shape letters: B micro-batch, S sequence, W = S + 1 tokens of a window, F documents' parts, N = B * S.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.batch import IGNORED, PADDING, Batch
from modeling.context import Context
from modeling.transfer import to_device
from parallel.mesh import Mesh


@dataclass(frozen=True)
class HostBatch:
    """A batch's arrays as tensors, on the host unless a device made them. ``data.batch.Batch`` says what they hold."""

    tokens_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    has_padding: bool
    next_BS: Tensor | None = None  # each position's next token; None where every token is a target

    @property
    def seq_len(self) -> int:
        """Positions of a sample."""
        return self.tokens_BS.shape[1]


@dataclass(frozen=True)
class NarrowBatch:
    """A batch as it was read, on the host: windows of tokens in the token file's type, and the mask of targets.

    That takes 2 or 4 bytes a token, and one more with a mask, where the full arrays take 24. Within the step a GPU
    makes those from the windows and a short list of where documents begin.
    """

    batch: Batch
    window_BW: Tensor  # in the token file's type; 0 past a window's length
    is_target_BW: Tensor | None  # None: each token is a target

    @property
    def seq_len(self) -> int:
        """Positions of a sample."""
        return self.batch.shape[1]

    def spread(self, device: torch.device) -> HostBatch:
        """The full arrays of the batch on the device. On a CPU they are those of ``batch``; a GPU computes them."""
        return on_host(self.batch, device) if device.type == "cpu" else self.made_on(device)

    def made_on(self, device: torch.device) -> HostBatch:
        """The full arrays of the batch, computed on the device, without the host of a CUDA device waiting for it."""
        window_BW, place_3F = to_device(self.window_BW, device), to_device(torch.from_numpy(self._places()), device)
        positions_BS, documents_BS = self._numbers(place_3F)
        tokens_BS = window_BW[:, :-1].to(torch.int64)
        next_BS = self._next(window_BW, place_3F)
        is_padding = self.batch.is_padding_BS
        if is_padding is not None:
            is_padding_BS = to_device(torch.from_numpy(is_padding), device)
            fillings = ((tokens_BS, 0), (next_BS, IGNORED), (positions_BS, 0), (documents_BS, PADDING))
            for array_BS, filling in fillings:
                array_BS.masked_fill_(is_padding_BS, filling)
        has_padding = is_padding is not None
        if self.is_target_BW is None:
            return HostBatch(tokens_BS, next_BS, positions_BS, documents_BS, has_padding)
        targets_BS = next_BS.masked_fill(~to_device(self.is_target_BW, device)[:, 1:], IGNORED)
        return HostBatch(tokens_BS, targets_BS, positions_BS, documents_BS, has_padding, next_BS)

    def tell(self, context: Context) -> None:
        """Fills in the context's caches that depend on where documents lie, so that a CUDA device's host need not wait.

        The context covers whole sequences, and lies on a device.
        """
        device = context.documents_BS.device
        boundaries = self.batch.boundaries
        context.cu_seqlens = (to_device(torch.from_numpy(boundaries), device), int(np.diff(boundaries).max()))
        context.bounds = boundaries.tolist()
        if context.has_padding:
            n_positions = self.batch.shape[0] * self.seq_len
            is_padding = self.batch.is_padding_BS
            real = np.arange(n_positions) if is_padding is None else np.flatnonzero(~is_padding)
            context.valid_T = to_device(torch.from_numpy(real), device)

    def _places(self) -> np.ndarray:
        """int64 (3, F): each document part's row, its first position there, and its number within the row; sorted.

        The empty end of a window with fewer tokens counts as a part.
        """
        row_F, offset_F, _ = self.batch.fragments
        length_B = self.batch.length_B
        is_short_B = length_B <= self.seq_len
        if is_short_B.any():
            row_F = np.concatenate([row_F, np.flatnonzero(is_short_B)])
            order = np.argsort(row_F, kind="stable")
            row_F, offset_F = row_F[order], np.concatenate([offset_F, length_B[is_short_B]])[order]
        number_F = np.arange(len(row_F)) - np.flatnonzero(offset_F == 0)[row_F]
        return np.stack((row_F, offset_F, number_F))

    def _numbers(self, place_3F: Tensor) -> tuple[Tensor, Tensor]:
        """(positions_BS, documents_BS), int32, in which padding counts as part of the document before it.

        A document that begins with a window's last token, which is only a target, gets no position.
        """
        row_F, offset_F, number_F = place_3F
        start_F = row_F * self.seq_len + offset_F
        places_N = torch.arange(self.batch.shape[0] * self.seq_len, dtype=torch.int32, device=row_F.device)
        length_F = torch.cat([start_F[1:], start_F.new_full((1,), len(places_N))]) - start_F
        start_N, number_N = (
            each_F.to(torch.int32).repeat_interleave(length_F, output_size=len(places_N))
            for each_F in (start_F, number_F)
        )
        return (places_N - start_N).view(self.batch.shape), number_N.view(self.batch.shape)

    def _next(self, window_BW: Tensor, place_3F: Tensor) -> Tensor:
        """int64 (B, S): the next token of the same document, IGNORED where there is none; undefined in padding."""
        (rows, seq_len), (row_F, offset_F, _) = self.batch.shape, place_3F
        spare = rows * seq_len  # an additional place, written for rows' first fragments, before which no document ends
        next_N1 = torch.empty(spare + 1, dtype=torch.int64, device=window_BW.device)
        next_BS = next_N1[:spare].view(rows, seq_len)
        next_BS.copy_(window_BW[:, 1:])
        next_N1.scatter_(0, torch.where(offset_F > 0, row_F * seq_len + offset_F - 1, spare), IGNORED)
        return next_BS


def prepare(batch: Batch, mesh: Mesh) -> HostBatch | NarrowBatch:
    """The batch as tensors for the step, page-locked where a GPU will copy them. Any thread may call it.

    Where ranks share a sequence (cp, tp), the full arrays are made on the host, which finds the rank's part of them and
    what its contexts need to know; otherwise the batch stays narrow.
    """
    return narrow(batch, mesh.device) if mesh.cp.degree == mesh.tp.degree == 1 else on_host(batch, mesh.device)


def narrow(batch: Batch, device: torch.device) -> NarrowBatch:
    """The batch's windows and mask as tensors, page-locked for a CUDA device."""
    window_BW = _locked(torch.from_numpy(batch.window_BW), device)
    is_target_BW = None if batch.is_target_BW is None else _locked(torch.from_numpy(batch.is_target_BW), device)
    return NarrowBatch(batch, window_BW, is_target_BW)


def on_host(batch: Batch, device: torch.device) -> HostBatch:
    """The batch's full arrays as tensors. For a CUDA device they are copied into page-locked memory."""
    arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    tensors = [_locked(torch.from_numpy(array), device) for array in arrays]
    next_BS = _locked(torch.from_numpy(batch.next_BS), device) if batch.next_BS is not None else None
    return HostBatch(*tensors, has_padding=batch.has_padding, next_BS=next_BS)


def _locked(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in page-locked memory for a CUDA device; otherwise the tensor itself."""
    if device.type != "cuda":
        return tensor
    with torch.cuda.device(device):  # another thread's device would be the first one, which belongs to rank 0
        return tensor.pin_memory()
