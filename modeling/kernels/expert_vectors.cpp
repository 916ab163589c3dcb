// The experts' SwiGLU in fp32, both passes, one expert after another, with the processor's own vectors.
//
// What an expert's products read lies in panels of 32 columns, or is small enough to stay in a core's cache.
#include "experts.h"
#include "numbers.h"
#include "vectors.h"

namespace {

constexpr int64_t FORWARD_BYTES = 1 << 18;  // of the rows that are computed at once
constexpr int64_t BACKWARD_BYTES = 1 << 20;

// Panels of a matrix (n_rows, n_columns): 32 columns of all rows, then the next 32.
void pack(float* to, const float* matrix, int64_t n_rows, int64_t n_columns) {
  for (int64_t column = 0; column < n_columns; column += BLOCK)
    for (int64_t row = 0; row < n_rows; row++, to += BLOCK)
#pragma omp simd
      for (int64_t i = 0; i < BLOCK; i++) to[i] = matrix[row * n_columns + column + i];
}

// Panels of its transpose.
void pack_transposed(float* to, const float* matrix, int64_t n_rows, int64_t n_columns) {
  for (int64_t row = 0; row < n_rows; row += BLOCK)
    for (int64_t column = 0; column < n_columns; column++, to += BLOCK)
      for (int64_t i = 0; i < BLOCK; i++) to[i] = matrix[(row + i) * n_columns + column];
}

void gather(float* to, const float* matrix, const int64_t* rows, int64_t n, int64_t width) {
  for (int64_t row = 0; row < n; row++) std::memcpy(to + row * width, matrix + rows[row] * width, width * sizeof *to);
}

// 1 / (1 + exp(-x))
inline float sigmoid(float x) {
  const float small = exponential(x < 0 ? x : -x), share = 1 / (1 + small);
  return x < 0 ? small * share : share;
}

// Gates and ups (N, I) of some rows, from their hidden states and panels of both matrices, transposed.
void gates_and_ups(float* gate_up, const float* hidden, const float* gate, const float* up, int64_t n, int64_t D,
                   int64_t F) {
  for (int64_t f = 0; f < F; f += BLOCK) {
    product<false>(gate_up + f, 2 * F, Left{hidden, D, 1}, gate + f * D, BLOCK, n, D, BLOCK);
    product<false>(gate_up + F + f, 2 * F, Left{hidden, D, 1}, up + f * D, BLOCK, n, D, BLOCK);
  }
}

size_t forward_bytes(int64_t D, int64_t F, int64_t most) { return 4 * (3 * F * D + most * (D + 3 * F)) + 1024; }

void forward_of(const Layer<float>& layer, int64_t expert, Room room, int64_t most) {
  const int64_t D = layer.d_model, F = layer.d_ff, I = 2 * F;
  float* gate = room.take<float>(F * D);
  float* up = room.take<float>(F * D);
  float* down = room.take<float>(F * D);
  float* hidden = room.take<float>(most * D);
  float* inner = room.take<float>(most * F);
  float* spare = room.take<float>(most * I);
  pack_transposed(gate, layer.gate_EFD + expert * F * D, F, D);
  pack_transposed(up, layer.up_EFD + expert * F * D, F, D);
  pack_transposed(down, layer.down_EDF + expert * F * D, D, F);
  const int64_t start = layer.starts_E[expert], size = layer.sizes_E[expert];
  for (int64_t done = 0; done < size; done += most) {
    const int64_t n = std::min(most, size - done);
    gather(hidden, layer.hidden_TD, layer.tokens_R + start + done, n, D);
    const Places<float> places(layer, expert, done, n, spare);
    const int64_t n_kept = places.n_kept;
    if (n_kept > 0) gates_and_ups(places.kept, hidden, gate, up, n_kept, D, F);
    if (n_kept < n) gates_and_ups(places.of(n_kept), hidden + n_kept * D, gate, up, n - n_kept, D, F);
    for (int64_t row = 0; row < n; row++) {
      const float *gates = places.of(row), *ups = gates + F;
      float* to = inner + row * F;
#pragma omp simd
      for (int64_t f = 0; f < F; f++) to[f] = gates[f] * sigmoid(gates[f]) * ups[f];
    }
    for (int64_t d = 0; d < D; d += BLOCK)
      product<false>(layer.out_RD + (start + done) * D + d, D, Left{inner, F, 1}, down + d * F, BLOCK, n, F, BLOCK);
  }
}

// Of one row, from its gates and ups and the gradients by inner values: weighted inner values, and gradients by gates and
// ups. Returns the gradient by its weight. Never inlined: inlined twice, for rows that are kept and for others, it would
// add up in two orders.
[[gnu::noinline]] float gates_backward(const float* gates, const float* given, float weight, float* inner,
                                       float* by_gate, int64_t F) {
  const float* ups = gates + F;
  float *by_up = by_gate + F, dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t f = 0; f < F; f++) {
    const float share = sigmoid(gates[f]), active = gates[f] * share, value = active * ups[f];
    const float weighted = given[f] * weight;
    dot += given[f] * value;
    inner[f] = value * weight;
    by_up[f] = weighted * active;
    by_gate[f] = weighted * ups[f] * ((gates[f] - active) * share + share);  // the slope of gate * sigmoid(gate)
  }
  return dot;
}

size_t backward_bytes(int64_t D, int64_t F, int64_t most) {
  return 4 * (5 * F * D + most * (2 * D + 6 * F)) + 2048;
}

void backward_of(const Layer<float>& layer, int64_t expert, Room room, int64_t most) {
  const int64_t D = layer.d_model, F = layer.d_ff, I = 2 * F;
  const int64_t start = layer.starts_E[expert], size = layer.sizes_E[expert];
  float* gate = room.take<float>(F * D);  // panels (F, D)
  float* up = room.take<float>(F * D);
  float* down = room.take<float>(F * D);  // panels (D, F)
  float* gate_columns = room.take<float>(F * D);  // panels (D, F), where gates and ups are computed again
  float* up_columns = room.take<float>(F * D);
  float* hidden = room.take<float>(most * D);
  float* grad = room.take<float>(most * D);
  float* again = room.take<float>(most * I);
  float* inner = room.take<float>(most * F);    // weighted
  float* by_inner = room.take<float>(most * F);
  float* by_gate_up = room.take<float>(most * I);
  pack(gate, layer.gate_EFD + expert * F * D, F, D);
  pack(up, layer.up_EFD + expert * F * D, F, D);
  pack(down, layer.down_EDF + expert * F * D, D, F);
  if (layer.n_kept_E[expert] < size) {
    pack_transposed(gate_columns, layer.gate_EFD + expert * F * D, F, D);
    pack_transposed(up_columns, layer.up_EFD + expert * F * D, F, D);
  }
  float* grad_gate = layer.grad_gate_EFD + expert * F * D;
  float* grad_up = layer.grad_up_EFD + expert * F * D;
  float* grad_down = layer.grad_down_EDF + expert * F * D;
  for (float* each : {grad_gate, grad_up, grad_down}) std::fill_n(each, F * D, 0.0f);
  for (int64_t done = 0; done < size; done += most) {
    const int64_t n = std::min(most, size - done), first = start + done;
    gather(hidden, layer.hidden_TD, layer.tokens_R + first, n, D);
    gather(grad, layer.grad_TD, layer.tokens_R + first, n, D);
    const Places<float> places(layer, expert, done, n, again);
    const int64_t n_kept = places.n_kept;
    if (n_kept < n)
      gates_and_ups(places.of(n_kept), hidden + n_kept * D, gate_columns, up_columns, n - n_kept, D, F);
    for (int64_t f = 0; f < F; f += BLOCK)
      product<false>(by_inner + f, F, Left{grad, D, 1}, down + f * D, BLOCK, n, D, BLOCK);
    for (int64_t row = 0; row < n; row++)
      layer.grad_weights_R[first + row] =
          gates_backward(places.of(row), by_inner + row * F, layer.weights_R[first + row], inner + row * F,
                         by_gate_up + row * I, F);
    for (int64_t d = 0; d < D; d += BLOCK) {
      float* out = layer.grad_RD + first * D + d;
      product<false>(out, D, Left{by_gate_up, I, 1}, gate + d * F, BLOCK, n, F, BLOCK);
      product<true>(out, D, Left{by_gate_up + F, I, 1}, up + d * F, BLOCK, n, F, BLOCK);
      product<true>(grad_gate + d, D, Left{by_gate_up, 1, I}, hidden + d, D, F, n, BLOCK);
      product<true>(grad_up + d, D, Left{by_gate_up + F, 1, I}, hidden + d, D, F, n, BLOCK);
    }
    for (int64_t f = 0; f < F; f += BLOCK)
      product<true>(grad_down + f, F, Left{grad, 1, D}, inner + f, F, D, n, BLOCK);
  }
}

}  // namespace

extern "C" {

// The forward pass of some experts: out_RD, and gate_up_RI as far as it is kept. 1: there is no memory.
int forward(const Layer<float>* layer, const int64_t* experts, int64_t n_experts) {
  const int64_t D = layer->d_model, F = layer->d_ff, most = rows_at_once(FORWARD_BYTES, 4 * (D + 3 * F), 32, 512);
  return each_expert(*layer, experts, n_experts, forward_bytes(D, F, most),
                     [&](const Layer<float>& all, int64_t expert, Room room) { forward_of(all, expert, room, most); });
}

// The backward pass of some experts: all gradients. Those of experts without rows are left as they are.
int backward(const Layer<float>* layer, const int64_t* experts, int64_t n_experts) {
  const int64_t D = layer->d_model, F = layer->d_ff, most = rows_at_once(BACKWARD_BYTES, 4 * (2 * D + 6 * F), 64, 512);
  return each_expert(*layer, experts, n_experts, backward_bytes(D, F, most),
                     [&](const Layer<float>& all, int64_t expert, Room room) { backward_of(all, expert, room, most); });
}
}
