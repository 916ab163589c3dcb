// The experts' SwiGLU in bf16 on a processor that multiplies it (tiles.h), both passes, one expert after another.
//
// Both factors of a product are brought into the form that tiles.h takes while they are gathered, so that products
// read memory from front to back. What follows a product (gates, their gradients, rounding to bf16) is computed while
// its block of sums is in the cache.
//
// Shape letters: T tokens, R rows (token-expert pairs), N rows of one expert, E experts, D d_model, F d_ff, I 2F. D and
// F are multiples of 32. Matrices are contiguous.
#include "experts.h"
#include "tiles.h"

namespace {

constexpr int64_t FORWARD_BYTES = 1 << 18;  // of the rows that are gathered at once, so that they stay in the cache
constexpr int64_t BACKWARD_BYTES = 1 << 20;

// The panels of gate and up together: of each 16 columns first the gate's tile, then the up's.
void pack_gate_up(Bf16* panels, const Layer<Bf16>& layer, int64_t expert) {
  const int64_t D = layer.d_model, F = layer.d_ff;
  for (int64_t f = 0; f < F; f += TILE_ROWS) {
    Bf16* panel = panels + f / TILE_ROWS * D / BLOCK * STEP;
    pack_transposed(panel, layer.gate_EFD + (expert * F + f) * D, D, TILE_ROWS, D);
    pack_transposed(panel + TILE, layer.up_EFD + (expert * F + f) * D, D, TILE_ROWS, D);
  }
}

// Left panels of rows of a matrix; rows beyond n are zero.
void gather(Bf16* panels, const Bf16* matrix, const int64_t* rows, int64_t n, int64_t n_blocks, int64_t width) {
  for (int64_t row = 0; row < n_blocks * BLOCK; row++) {
    Bf16* to = left_place(panels, row, width);
    const Bf16* from = row < n ? matrix + rows[row] * width : nullptr;
    for (int64_t k = 0; k < width; k += BLOCK, to += STEP) store(to, from ? load(from + k) : _mm512_setzero_si512());
  }
}

// Right panels of the same rows, along the inner dim: of each 32 columns one. A panel has room for most_steps. Unless
// lefts is null, their left panels, too.
void gather_pairs(Bf16* panels, Bf16* lefts, const Bf16* matrix, const int64_t* rows, int64_t n, int64_t n_blocks,
                  int64_t width, int64_t most_steps) {
  const Whole zero = _mm512_setzero_si512();
  for (int64_t row = 0; row < n_blocks * BLOCK; row += 2) {
    Bf16* to = panels + row / BLOCK * STEP + row % BLOCK / 2 * BLOCK;
    Bf16* left = lefts ? left_place(lefts, row, width) : nullptr;
    const Bf16* from = row < n ? matrix + rows[row] * width : nullptr;
    const Bf16* next = row + 1 < n ? matrix + rows[row + 1] * width : nullptr;
    for (int64_t k = 0; k < width; k += BLOCK, to += most_steps * STEP) {
      const Whole first = from ? load(from + k) : zero, second = next ? load(next + k) : zero;
      const Pairs made = pairs(first, second);
      store(to, made.low);
      store(to + TILE, made.high);
      if (left) {
        store(left + k / BLOCK * STEP, first);
        store(left + k / BLOCK * STEP + BLOCK, second);
      }
    }
  }
}

// A block of gates and ups (32 rows, 16 columns of each) in bf16: to n rows of a matrix (N, I).
inline void store_gate_up(const float* sums, Bf16* gate_up_NI, int64_t n, int64_t d_ff) {
  for (int64_t row = 0; row < std::min(n, BLOCK); row++) {
    const float* at = sums + row / TILE_ROWS * 2 * SUMS + row % TILE_ROWS * TILE_ROWS;
    _mm256_storeu_si256((Half*)(gate_up_NI + row * 2 * d_ff), narrow(_mm512_load_ps(at)));
    _mm256_storeu_si256((Half*)(gate_up_NI + row * 2 * d_ff + d_ff), narrow(_mm512_load_ps(at + SUMS)));
  }
}

// A block of sums in bf16: to n rows of a matrix, past the cache. Rows are far more than a cache holds.
inline void store_rows(const float* sums, Bf16* matrix, int64_t n, int64_t width) {
  for (int64_t row = 0; row < std::min(n, BLOCK); row++) {
    const float* at = sums + row / TILE_ROWS * 2 * SUMS + row % TILE_ROWS * TILE_ROWS;
    stream(matrix + row * width, narrow(_mm512_load_ps(at), _mm512_load_ps(at + SUMS)));
  }
}

// A block of sums in bf16, transposed.
inline void store_transposed(const float* sums, Bf16* matrix, int64_t width) {
  for (int64_t half = 0; half < 2; half++) {
    const TransposedHalf rows(sums, half);
    for (int64_t row = 0; row < TILE_ROWS; row++)
      store(matrix + (half * TILE_ROWS + row) * width, narrow(rows.first(row), rows.second(row)));
  }
}

void forward_of(const Layer<Bf16>& layer, int64_t expert, Room room, int64_t most_rows) {
  const int64_t D = layer.d_model, F = layer.d_ff;
  alignas(64) float sums[BLOCK_SUMS];
  Bf16* gate_up = room.take<Bf16>(2 * F * D);
  Bf16* down = room.take<Bf16>(F * D);
  Bf16* hidden = room.take<Bf16>(most_rows * D);
  Bf16* inner = room.take<Bf16>(most_rows * F);
  pack_gate_up(gate_up, layer, expert);
  for (int64_t d = 0; d < D; d += BLOCK) {
    const Bf16* down_DF = layer.down_EDF + (expert * D + d) * F;
    pack_transposed(down + d * F, down_DF, F, TILE_ROWS, F);
    pack_transposed(down + d * F + TILE, down_DF + TILE_ROWS * F, F, TILE_ROWS, F);
  }
  const int64_t start = layer.starts_E[expert], size = layer.sizes_E[expert];
  for (int64_t done = 0; done < size; done += most_rows) {
    const int64_t n = std::min(most_rows, size - done), n_blocks = (n + BLOCK - 1) / BLOCK;
    const Places<Bf16> places(layer, expert, done, n, nullptr);
    gather(hidden, layer.hidden_TD, layer.tokens_R + start + done, n, n_blocks, D);
    for (int64_t block = 0; block < n_blocks; block++) {
      const int64_t rows = n - block * BLOCK;
      Bf16* inner_of = inner + block * BLOCK * F;
      for (int64_t f = 0; f < F; f += TILE_ROWS) {
        product(sums, hidden + block * BLOCK * D, gate_up + f / TILE_ROWS * D / BLOCK * STEP, D / BLOCK);
        const int64_t n_kept = places.n_kept - block * BLOCK;
        if (n_kept > 0) store_gate_up(sums, places.of(block * BLOCK) + f, n_kept, F);
        for (int64_t row = 0; row < BLOCK; row++) {
          const float* at = sums + row / TILE_ROWS * 2 * SUMS + row % TILE_ROWS * TILE_ROWS;
          const __m512 gate = widen(narrow(_mm512_load_ps(at))), up = widen(narrow(_mm512_load_ps(at + SUMS)));
          Bf16* to = left_place(inner_of, row, F) + f / BLOCK * STEP + f % BLOCK;
          _mm256_storeu_si256((Half*)to, narrow(_mm512_mul_ps(_mm512_mul_ps(gate, sigmoid(gate)), up)));
        }
      }
      Bf16* out = layer.out_RD + (start + done + block * BLOCK) * D;
      for (int64_t d = 0; d < D; d += BLOCK) {
        product(sums, inner_of, down + d * F, F / BLOCK);
        store_rows(sums, out + d, rows, D);
      }
    }
  }
}

// What the backward pass makes of 32 rows and 32 of F: left factors for the gradients by weights, and by hidden states.
struct Made {
  Bf16 *inner, *grad_gate, *grad_up;  // panels of the three gradients by weights: this block's step
  Bf16* grad_gate_up;                 // the block's left panel (32 rows, I), at the step of these gates
};

inline void gates_backward(const float* sums, const Bf16* gate_up_NI, const float* weights, int64_t n, int64_t d_ff,
                           const Made& made, __m512* dots) {
  alignas(64) Bf16 paired[3][2][TILE];  // pairs of rows: inner values, gradients by gates, by ups; two halves of F
  for (int64_t row = 0; row < BLOCK; row += 2) {
    Whole found[2][3];
    for (int64_t i = 0; i < 2; i++) {
      const int64_t at = row + i;
      const bool is_real = at < n;
      const float* sum = sums + at / TILE_ROWS * 2 * SUMS + at % TILE_ROWS * TILE_ROWS;
      const Whole gates = is_real ? load(gate_up_NI + at * 2 * d_ff) : _mm512_setzero_si512();
      const Whole ups = is_real ? load(gate_up_NI + at * 2 * d_ff + d_ff) : _mm512_setzero_si512();
      const __m512 weight = _mm512_set1_ps(is_real ? weights[at] : 0.0f);
      __m512 inner[2], by_gate[2], by_up[2], dot = dots[at];
      for (int64_t half = 0; half < 2; half++) {
        const __m512 gate = half ? upper(gates) : lower(gates), up = half ? upper(ups) : lower(ups);
        const __m512 grad = _mm512_load_ps(sum + half * SUMS), share = sigmoid(gate);
        const __m512 active = _mm512_mul_ps(gate, share), value = _mm512_mul_ps(active, up);
        dot = _mm512_fmadd_ps(grad, value, dot);
        const __m512 weighted = _mm512_mul_ps(grad, weight);
        inner[half] = _mm512_mul_ps(value, weight);
        by_up[half] = _mm512_mul_ps(weighted, active);
        const __m512 slope = _mm512_fmadd_ps(_mm512_sub_ps(gate, active), share, share);  // of gate * sigmoid(gate)
        by_gate[half] = _mm512_mul_ps(_mm512_mul_ps(weighted, up), slope);
      }
      dots[at] = dot;
      found[i][0] = narrow(inner[0], inner[1]);
      found[i][1] = narrow(by_gate[0], by_gate[1]);
      found[i][2] = narrow(by_up[0], by_up[1]);
      Bf16* to = left_place(made.grad_gate_up, at, 0);
      store(to, found[i][1]);
      store(to + d_ff / BLOCK * STEP, found[i][2]);
    }
    for (int64_t each = 0; each < 3; each++) {
      const Pairs both = pairs(found[0][each], found[1][each]);
      store(paired[each][0] + row / 2 * BLOCK, both.low);
      store(paired[each][1] + row / 2 * BLOCK, both.high);
    }
  }
  Bf16* const targets[3] = {made.inner, made.grad_gate, made.grad_up};
  for (int64_t each = 0; each < 3; each++) transpose_pairs(targets[each], paired[each][0], paired[each][1]);
}

// Gates and ups (N, I) of n rows, from their left panels and the panels of both matrices.
void gates_and_ups(const Bf16* hidden, const Bf16* gate_up, Bf16* gate_up_NI, int64_t n, int64_t d_model,
                   int64_t d_ff) {
  alignas(64) float sums[BLOCK_SUMS];
  for (int64_t row = 0; row < n; row += BLOCK)
    for (int64_t f = 0; f < d_ff; f += TILE_ROWS) {
      product(sums, hidden + row * d_model, gate_up + f / TILE_ROWS * d_model / BLOCK * STEP, d_model / BLOCK);
      store_gate_up(sums, gate_up_NI + row * 2 * d_ff + f, n - row, d_ff);
    }
}

// Adds some rows' share to the gradients by down (transposed), gate and up: blocks of sums (3, D, F), first D then F.
void add_to_totals(float* totals, const Bf16* factors, const Bf16* grad_pairs, const Bf16* hidden_pairs, int64_t steps,
                   int64_t most_rows, int64_t d_model, int64_t d_ff, bool is_first) {
  for (int64_t d = 0; d < d_model; d += BLOCK)
    for (int64_t each = 0; each < 3; each++)
      for (int64_t f = 0; f < d_ff; f += BLOCK) {
        float* total = totals + (each * d_model + d) * d_ff + f * BLOCK;
        const Bf16* left = factors + (each * d_ff + f) * most_rows;
        const Bf16* right = (each == 0 ? grad_pairs : hidden_pairs) + d * most_rows;
        is_first ? product(total, left, right, steps) : add_product(total, left, right, steps);
      }
}

void store_totals(const float* totals, const Layer<Bf16>& layer, int64_t expert) {
  const int64_t D = layer.d_model, F = layer.d_ff;
  for (int64_t d = 0; d < D; d += BLOCK)
    for (int64_t f = 0; f < F; f += BLOCK) {
      const float* total = totals + d * F + f * BLOCK;
      store_transposed(total, layer.grad_down_EDF + (expert * D + d) * F + f, F);
      store_rows(total + F * D, layer.grad_gate_EFD + (expert * F + f) * D + d, BLOCK, D);
      store_rows(total + 2 * F * D, layer.grad_up_EFD + (expert * F + f) * D + d, BLOCK, D);
    }
}

void backward_of(const Layer<Bf16>& layer, int64_t expert, Room room, int64_t most_rows) {
  const int64_t D = layer.d_model, F = layer.d_ff, I = 2 * F, most_steps = most_rows / BLOCK;
  alignas(64) float sums[BLOCK_SUMS];
  __m512 dots[BLOCK];
  Bf16* by_down = room.take<Bf16>(F * D);      // right panels (D, F)
  Bf16* by_gate_up = room.take<Bf16>(I * D);   // right panels (I, D)
  float* totals = room.take<float>(3 * F * D); // blocks of the gradients by down (transposed), gate and up
  Bf16* grads = room.take<Bf16>(most_rows * D);
  Bf16* grad_pairs = room.take<Bf16>(most_rows * D);
  Bf16* hidden_pairs = room.take<Bf16>(most_rows * D);
  Bf16* factors = room.take<Bf16>(3 * most_rows * F);  // left panels (F, N) of inner values, gradients by gates, by ups
  Bf16* grad_gate_up = room.take<Bf16>(most_rows * I);
  float* weights = room.take<float>(most_rows);
  const int64_t start = layer.starts_E[expert], size = layer.sizes_E[expert];
  Bf16 *again = nullptr, *hidden = nullptr, *gate_up = nullptr;
  if (layer.n_kept_E[expert] < size) {
    again = room.take<Bf16>(most_rows * I);
    hidden = room.take<Bf16>(most_rows * D);
    gate_up = room.take<Bf16>(I * D);
    pack_gate_up(gate_up, layer, expert);
  }
  const Bf16 *gate_FD = layer.gate_EFD + expert * F * D, *up_FD = layer.up_EFD + expert * F * D;
  for (int64_t f = 0; f < F; f += BLOCK)
    pack_pairs(by_down + f * D, layer.down_EDF + expert * D * F + f, F, D, D / BLOCK, BLOCK);
  for (int64_t d = 0; d < D; d += BLOCK) {
    pack_pairs(by_gate_up + d * I, gate_FD + d, D, F, F / BLOCK, BLOCK);
    pack_pairs(by_gate_up + d * I + F / BLOCK * STEP, up_FD + d, D, F, F / BLOCK, BLOCK);
  }
  for (int64_t done = 0; done < size; done += most_rows) {
    const int64_t n = std::min(most_rows, size - done), n_blocks = (n + BLOCK - 1) / BLOCK;
    const int64_t* tokens = layer.tokens_R + start + done;
    gather_pairs(grad_pairs, grads, layer.grad_TD, tokens, n, n_blocks, D, most_steps);
    gather_pairs(hidden_pairs, hidden, layer.hidden_TD, tokens, n, n_blocks, D, most_steps);
    for (int64_t row = 0; row < n; row++) {
      const uint32_t bits = uint32_t(layer.weights_R[start + done + row]) << 16;
      std::memcpy(weights + row, &bits, 4);
    }
    const Places<Bf16> places(layer, expert, done, n, again);
    const int64_t n_kept = places.n_kept;
    if (n_kept < n) gates_and_ups(hidden + n_kept * D, gate_up, places.of(n_kept), n - n_kept, D, F);
    for (int64_t block = 0; block < n_blocks; block++) {
      const int64_t rows = n - block * BLOCK;
      Bf16* left = grad_gate_up + block * BLOCK * I;
      for (auto& dot : dots) dot = _mm512_setzero_ps();
      for (int64_t f = 0; f < F; f += BLOCK) {
        product(sums, grads + block * BLOCK * D, by_down + f * D, D / BLOCK);
        Bf16* factor = factors + f * most_rows + block * STEP;
        const Made made{factor, factor + F * most_rows, factor + 2 * F * most_rows, left + f / BLOCK * STEP};
        gates_backward(sums, places.of(block * BLOCK) + f, weights + block * BLOCK, rows, F, made, dots);
      }
      Bf16* grad_weights = layer.grad_weights_R + start + done + block * BLOCK;
      for (int64_t row = 0; row < std::min(rows, BLOCK); row++)
        grad_weights[row] = (Bf16)_mm256_extract_epi16(narrow(_mm512_set1_ps(_mm512_reduce_add_ps(dots[row]))), 0);
      Bf16* out = layer.grad_RD + (start + done + block * BLOCK) * D;
      for (int64_t d = 0; d < D; d += BLOCK) {
        product(sums, left, by_gate_up + d * I, I / BLOCK);
        store_rows(sums, out + d, rows, D);
      }
    }
    add_to_totals(totals, factors, grad_pairs, hidden_pairs, n_blocks, most_rows, D, F, done == 0);
  }
  store_totals(totals, layer, expert);
}

template <class Pass>
int with_tiles(const Layer<Bf16>& layer, const int64_t* experts, int64_t n_experts, size_t bytes, Pass pass) {
  configure_tiles();
  const int failed = each_expert(layer, experts, n_experts, bytes, pass);
  release_tiles();
  _mm_sfence();  // what was stored past the cache is seen by whoever reads it next
  return failed;
}

}  // namespace

extern "C" {

// The forward pass of some experts: out_RD, and gate_up_RI as far as it is kept. 1: there is no memory.
int forward(const Layer<Bf16>* layer, const int64_t* experts, int64_t n_experts) {
  const int64_t D = layer->d_model, F = layer->d_ff;
  const int64_t most = rows_at_once(FORWARD_BYTES, 2 * (D + F), 64, 512);
  const size_t bytes = 2 * (3 * F * D + most * (D + F)) + 1024;
  return with_tiles(*layer, experts, n_experts, bytes,
                     [&](const Layer<Bf16>& all, int64_t expert, Room room) { forward_of(all, expert, room, most); });
}

// The backward pass of some experts: all gradients. Those of experts without rows are left as they are.
int backward(const Layer<Bf16>* layer, const int64_t* experts, int64_t n_experts) {
  const int64_t D = layer->d_model, F = layer->d_ff;
  const int64_t most = rows_at_once(BACKWARD_BYTES, 6 * D + 10 * F, 256, 1024);
  const size_t bytes = 2 * (5 * F * D + most * (4 * D + 7 * F)) + 4 * (3 * F * D + most) + 2048;
  return with_tiles(*layer, experts, n_experts, bytes,
                     [&](const Layer<Bf16>& all, int64_t expert, Room room) { backward_of(all, expert, room, most); });
}
}
