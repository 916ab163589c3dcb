// Attention in fp32, both passes, with the processor's own vectors. Heads in bf16 are widened.
//
// Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C channels, W channels in whole blocks.
#include "attention.h"
#include "numbers.h"
#include "vectors.h"

namespace {

// n rows of a tensor's tokens, in fp32, as rows of W numbers; channels beyond the last are zero.
template <class Number>
void take_rows(float* to, const Heads& from, int64_t row, int64_t token, int64_t head, int64_t n,
               const Attention& all) {
  const int64_t C = all.n_channels, W = all.width();
  for (int64_t i = 0; i < n; i++) {
    const Number* at = from.at<Number>(row, token + i, head);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) to[i * W + c] = wide(at[c]);
    std::fill_n(to + i * W + C, W - C, 0.0f);
  }
}

// The same transposed, in blocks of BLOCK tokens (W, BLOCK); tokens beyond the last are zero.
template <class Number>
void take_columns(float* to, const Heads& from, int64_t row, int64_t token, int64_t head, int64_t n,
                  const Attention& all) {
  const int64_t C = all.n_channels, W = all.width();
  for (int64_t i = 0; i < blocks_of(n) * BLOCK; i++) {
    float* column = to + i / BLOCK * BLOCK * W + i % BLOCK;
    const Number* at = i < n ? from.at<Number>(row, token + i, head) : nullptr;
    for (int64_t c = 0; c < C; c++) column[c * BLOCK] = at ? wide(at[c]) : 0;
    for (int64_t c = C; c < W; c++) column[c * BLOCK] = 0;
  }
}

template <class Number>
void write_row(const float* from, Number* to, float factor, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; c++) to[c] = rounded<Number>(from[c] * factor);
}

// Scores of a block of queries and the keys that any of them sees, from their products; a row has KEYS numbers.
void add_masks(float* scores, const Patch& patch, int64_t i, Range keys, float scale) {
  for (int64_t q = 0; q < patch.queries_in(i); q++)
    for (int64_t j = keys.first; j < keys.end; j++) {
      float* at = scores + q * KEYS + j * BLOCK;
      const int64_t n = patch.keys_in(j);
      if (patch.seen[i][j] == Seen::NOTHING) {
        std::fill_n(at, n, HIDDEN);
      } else if (patch.seen[i][j] == Seen::ALL) {
#pragma omp simd
        for (int64_t k = 0; k < n; k++) at[k] *= scale;
      } else {
        const float* added = patch.added(i * BLOCK + q, j);
#pragma omp simd
        for (int64_t k = 0; k < n; k++) at[k] = at[k] * scale + added[k];
      }
    }
}

// Products of a block of queries with the keys that any of them sees, into rows of KEYS numbers.
void multiply_keys(float* out, const float* left, const float* columns, const Patch& patch, int64_t i, Range keys,
                   int64_t width) {
  for (int64_t j = keys.first; j < keys.end; j++)
    if (patch.seen[i][j] != Seen::NOTHING)
      product<false>(out + j * BLOCK, KEYS, Left{left, width, 1}, columns + j * BLOCK * width, BLOCK,
                     patch.queries_in(i), width, BLOCK);
}

inline int64_t end_of(const Patch& patch, Range keys) { return std::min(keys.end * BLOCK, patch.n_keys); }

// Takes the keys of a patch into the softmax of a block of queries: their greatest scores, the sums of weights, and
// weighted values (n, W).
void attend(const Patch& patch, int64_t i, const float* q, const float* k, const float* v, float* scores, float scale,
            int64_t width, float* tops, float* sums, float* out) {
  const Range keys = patch.keys_of(i);
  if (keys.size() <= 0) return;
  const int64_t first = keys.first * BLOCK, end = end_of(patch, keys);
  multiply_keys(scores, q, k, patch, i, keys, width);
  add_masks(scores, patch, i, keys, scale);
  for (int64_t row = 0; row < patch.queries_in(i); row++) {
    float* at = scores + row * KEYS;
    const float top = greatest(at + first, end - first, tops[row]);
    const float less = top == HIDDEN ? 0 : top, kept = exponential(tops[row] - less);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t key = first; key < end; key++) sum += at[key] = exponential(at[key] - less);
    sums[row] = sums[row] * kept + sum;
    tops[row] = top;
    if (kept == 1) continue;
#pragma omp simd
    for (int64_t c = 0; c < width; c++) out[row * width + c] *= kept;
  }
  product<true>(out, width, Left{scores + first, KEYS, 1}, v + first * width, width, patch.queries_in(i), end - first,
                width);
}

size_t forward_bytes(const Attention& all) {
  return 4 * (2 * HEADS * QUERIES * all.width() + 2 * KEYS * all.width() + BLOCK * KEYS + 2 * HEADS * QUERIES) + 1024;
}

template <class Number>
void forward_of(const Attention& all, int64_t row, int64_t kv_head, Room room) {
  const int64_t C = all.n_channels, W = all.width();
  float* q = room.take<float>(HEADS * QUERIES * W);
  float* out = room.take<float>(HEADS * QUERIES * W);
  float* k = room.take<float>(KEYS * W);  // columns
  float* v = room.take<float>(KEYS * W);
  float* scores = room.take<float>(BLOCK * KEYS);
  float* tops = room.take<float>(HEADS * QUERIES);
  float* sums = room.take<float>(HEADS * QUERIES);
  each_group(all, row, kv_head, [&](const Piece& piece, int64_t query, int64_t n, int64_t head, int64_t n_heads) {
    for (int64_t each = 0; each < n_heads; each++) {
      const int64_t at = each * QUERIES;
      take_rows<Number>(q + at * W, all.q, row, query, head + each, n, all);
      std::fill_n(tops + at, n, all.sinks ? all.sinks[head + each] : HIDDEN);
      std::fill_n(sums + at, n, all.sinks ? 1.0f : 0.0f);
      std::fill_n(out + at * W, n * W, 0.0f);
    }
    const auto prepare = [&](const Patch& patch) {
      take_columns<Number>(k, all.k, row, patch.key, kv_head, patch.n_keys, all);
      take_rows<Number>(v, all.v, row, patch.key, kv_head, patch.n_keys, all);
    };
    const auto compute = [&](const Patch& patch, int64_t each) {
      for (int64_t i = 0; i < patch.query_blocks(); i++) {
        const int64_t at = each * QUERIES + i * BLOCK;
        attend(patch, i, q + at * W, k, v, scores, all.scale, W, tops + at, sums + at, out + at * W);
      }
    };
    each_patch(piece, row, query, n, head, n_heads, prepare, compute, [](const Patch&) {});
    for (int64_t each = 0; each < n_heads; each++)
      for (int64_t i = 0; i < n; i++) {
        const int64_t at = each * QUERIES + i;
        const bool sees_nothing = sums[at] == 0;
        all.lse_at(row, query + i, head + each)[0] = sees_nothing ? HIDDEN : tops[at] + std::log(sums[at]);
        write_row(out + at * W, all.out.at<Number>(row, query + i, head + each), sees_nothing ? 0 : 1 / sums[at], C);
      }
  });
}

size_t backward_bytes(const Attention& all) {
  const int64_t W = all.width();
  return 4 * (3 * HEADS * QUERIES * W + 3 * KEYS * W + 2 * QUERIES * KEYS + 2 * HEADS * QUERIES + 2 * all.n_keys * W) +
         2048;
}

// Weights of a block of queries and the gradients by its scores, times the scale, from scores and products of
// gradients and values: all in rows of KEYS numbers, in place. What is hidden is zero.
void make_factors(const Patch& patch, int64_t i, Range keys, float* scores, float* grads, const float* lse,
                  const float* means, float scale) {
  const int64_t first = keys.first * BLOCK, end = end_of(patch, keys);
  for (int64_t row = 0; row < patch.queries_in(i); row++) {
    float *weights = scores + row * KEYS, *grad = grads + row * KEYS;
    const float less = lse[row], mean = means[row];
#pragma omp simd
    for (int64_t key = first; key < end; key++) {
      weights[key] = exponential(weights[key] - less);
      grad[key] = weights[key] * (grad[key] - mean) * scale;
    }
    for (int64_t j = keys.first; j < keys.end; j++)
      if (patch.seen[i][j] == Seen::NOTHING) std::fill_n(grad + j * BLOCK, patch.keys_in(j), 0.0f);
  }
}

template <class Number>
void backward_of(const Attention& all, int64_t row, int64_t kv_head, Room room) {
  const int64_t C = all.n_channels, W = all.width();
  float* q = room.take<float>(HEADS * QUERIES * W);
  float* grad = room.take<float>(HEADS * QUERIES * W);
  float* dq = room.take<float>(HEADS * QUERIES * W);
  float* k = room.take<float>(KEYS * W);
  float* k_columns = room.take<float>(KEYS * W);
  float* v_columns = room.take<float>(KEYS * W);
  float* scores = room.take<float>(QUERIES * KEYS);
  float* grads = room.take<float>(QUERIES * KEYS);
  float* lse = room.take<float>(HEADS * QUERIES);
  float* means = room.take<float>(HEADS * QUERIES);
  float* dk = room.take<float>(all.n_keys * W);
  float* dv = room.take<float>(all.n_keys * W);
  std::fill_n(dk, all.n_keys * W, 0.0f);
  std::fill_n(dv, all.n_keys * W, 0.0f);
  each_group(all, row, kv_head, [&](const Piece& piece, int64_t query, int64_t n, int64_t head, int64_t n_heads) {
    for (int64_t each = 0; each < n_heads; each++) {
      const int64_t at = each * QUERIES;
      take_rows<Number>(q + at * W, all.q, row, query, head + each, n, all);
      take_rows<Number>(grad + at * W, all.grad, row, query, head + each, n, all);
      std::fill_n(dq + at * W, n * W, 0.0f);
      for (int64_t i = 0; i < n; i++) {
        const float given = all.lse_at(row, query + i, head + each)[0];
        lse[at + i] = given == HIDDEN ? 0 : given;
        const Number* out = all.out.at<Number>(row, query + i, head + each);
        const float* grad_at = grad + (at + i) * W;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += grad_at[c] * wide(out[c]);
        means[at + i] = sum;
      }
    }
    const auto prepare = [&](const Patch& patch) {
      take_rows<Number>(k, all.k, row, patch.key, kv_head, patch.n_keys, all);
      take_columns<Number>(k_columns, all.k, row, patch.key, kv_head, patch.n_keys, all);
      take_columns<Number>(v_columns, all.v, row, patch.key, kv_head, patch.n_keys, all);
    };
    const auto compute = [&](const Patch& patch, int64_t each) {
      const int64_t head_at = each * QUERIES;
      for (int64_t i = 0; i < patch.query_blocks(); i++) {
        const int64_t at = head_at + i * BLOCK;
        const Range keys = patch.keys_of(i);
        if (keys.size() <= 0) continue;
        const int64_t first = keys.first * BLOCK;
        float *scores_at = scores + i * BLOCK * KEYS, *grads_at = grads + i * BLOCK * KEYS;
        multiply_keys(scores_at, q + at * W, k_columns, patch, i, keys, W);
        multiply_keys(grads_at, grad + at * W, v_columns, patch, i, keys, W);
        add_masks(scores_at, patch, i, keys, all.scale);
        make_factors(patch, i, keys, scores_at, grads_at, lse + at, means + at, all.scale);
        product<true>(dq + at * W, W, Left{grads_at + first, KEYS, 1}, k + first * W, W, patch.queries_in(i),
                      end_of(patch, keys) - first, W);
      }
      for (int64_t j = 0; j < patch.key_blocks(); j++)
        for (int64_t i = 0; i < patch.query_blocks(); i++) {
          if (patch.seen[i][j] == Seen::NOTHING) continue;
          const int64_t at = i * BLOCK * KEYS + j * BLOCK, to = (patch.key + j * BLOCK) * W;
          const int64_t from = (head_at + i * BLOCK) * W;
          product<true>(dk + to, W, Left{grads + at, 1, KEYS}, q + from, W, patch.keys_in(j), patch.queries_in(i), W);
          product<true>(dv + to, W, Left{scores + at, 1, KEYS}, grad + from, W, patch.keys_in(j), patch.queries_in(i),
                        W);
        }
    };
    each_patch(piece, row, query, n, head, n_heads, prepare, compute, [](const Patch&) {});
    for (int64_t each = 0; each < n_heads; each++)
      for (int64_t i = 0; i < n; i++)
        write_row(dq + (each * QUERIES + i) * W, all.dq.at<Number>(row, query + i, head + each), 1.0f, C);
  });
  for (int64_t token = 0; token < all.n_keys; token++) {
    write_row(dk + token * W, all.dk.at<Number>(row, token, kv_head), 1.0f, C);
    write_row(dv + token * W, all.dv.at<Number>(row, token, kv_head), 1.0f, C);
  }
}

}  // namespace

#define FOR(Number, name)                                                              \
  int forward_##name(const Attention* all, int64_t first, int64_t n) {                 \
    return each_kv_head(*all, first, n, forward_bytes(*all), forward_of<Number>);      \
  }                                                                                    \
  int backward_##name(const Attention* all, int64_t first, int64_t n) {                \
    return each_kv_head(*all, first, n, backward_bytes(*all), backward_of<Number>);    \
  }

extern "C" {

// As in attention_tiles.cpp, of fp32 or bf16.
FOR(float, fp32)
FOR(Bf16, bf16)
}
