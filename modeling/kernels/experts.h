// The experts' SwiGLU on a CPU: what both passes are given. One expert comes after another.
//
// Shape letters: T tokens, R rows (token-expert pairs), N rows of one expert, E experts, D d_model, F d_ff, I 2F. D and
// F are multiples of 32. Matrices are contiguous.
#pragma once

#include <algorithm>

#include "blocks.h"

namespace {

template <class Number>
struct Layer {
  int64_t d_model, d_ff;
  const Number *hidden_TD, *gate_EFD, *up_EFD, *down_EDF;
  const int64_t* tokens_R;  // each row's token
  const int64_t* starts_E;  // each expert's first row
  const int64_t* sizes_E;   // how many rows it has
  const int64_t* n_kept_E;  // of how many of its first rows gates and ups are kept: all, or whole blocks
  const int64_t* kept_E;    // its first row in gate_up_RI
  Number* gate_up_RI;       // gates and ups side by side
  Number* out_RD;           // each row's value, not weighted
  // the backward pass's own
  const Number *grad_TD, *weights_R;
  Number *grad_gate_EFD, *grad_up_EFD, *grad_down_EDF, *grad_RD, *grad_weights_R;
};

// Where the gates and ups of n rows of an expert are, from its row ``first`` on: the first n_kept of them are kept.
template <class Number>
struct Places {
  int64_t n_kept, width;
  Number *kept, *others;
  Places(const Layer<Number>& layer, int64_t expert, int64_t first, int64_t n, Number* others)
      : n_kept(std::clamp<int64_t>(layer.n_kept_E[expert] - first, 0, n)),
        width(2 * layer.d_ff),
        kept(n_kept == 0 ? nullptr : layer.gate_up_RI + (layer.kept_E[expert] + first) * width),
        others(others) {}
  Number* of(int64_t row) const { return (row < n_kept ? kept : others) + row * width; }
};

// How many rows are computed at once so that they take about ``bytes``, in whole blocks.
inline int64_t rows_at_once(int64_t bytes, int64_t bytes_of_row, int64_t least, int64_t most) {
  return std::clamp(bytes / bytes_of_row, least, most) / BLOCK * BLOCK;
}

// Calls ``pass(layer, expert, room)`` for those of some experts that have rows. 1: there is no memory.
template <class Number, class Pass>
int each_expert(const Layer<Number>& layer, const int64_t* experts, int64_t n_experts, size_t bytes, Pass pass) {
  Room room(bytes);
  if (!room.is_there()) return 1;
  for (int64_t i = 0; i < n_experts; i++)
    if (layer.sizes_E[experts[i]] > 0) pass(layer, experts[i], room);
  return 0;
}

}  // namespace
