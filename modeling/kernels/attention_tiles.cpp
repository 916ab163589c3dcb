// Attention in bf16 on a processor that multiplies it (tiles.h), both passes.
//
// Scores, weights and their gradients are in fp32 until they are a factor of a product, which is in bf16.
//
// Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C channels, W channels in whole blocks.
#include "attention_tiles.h"

namespace {

// The softmax of 32 queries so far: their greatest scores, the sums of weights, and weighted values in blocks.
struct Softmax {
  float *tops, *sums, *out;

  // Takes the keys of a patch. ``q`` are these queries' left panels; scores and weights have room for KEYS.
  void take(const Patch& patch, int64_t i, const Bf16* q, const Bf16* k, const Bf16* v, float* scores, Bf16* weights,
            float scale, int64_t width) {
    const Range keys = patch.keys_of(i);
    if (keys.size() <= 0) return;
    const __m512 nothing = _mm512_set1_ps(HIDDEN), factor = _mm512_set1_ps(scale);
    __m512 greatest[BLOCK], totals[BLOCK];
    std::fill_n(greatest, BLOCK, nothing);
    std::fill_n(totals, BLOCK, _mm512_setzero_ps());
    for (int64_t j = keys.first; j < keys.end; j++) {
      if (patch.seen[i][j] == Seen::NOTHING) continue;
      float* block = scores + j * BLOCK_SUMS;
      product(block, q, k + j * BLOCK * width, width / BLOCK);
      for (int64_t row = 0; row < BLOCK; row++) {
        const Lanes found = scores_of(patch, block, i, j, row, factor);
        greatest[row] = _mm512_max_ps(greatest[row], _mm512_max_ps(found.low, found.high));
        store_row(block, row, found);
      }
    }
    alignas(64) float kept[BLOCK], less[BLOCK];  // factors of what was summed before; what scores are taken from
    for (int64_t row = 0; row < BLOCK; row++) less[row] = _mm512_reduce_max_ps(greatest[row]);
    for (int64_t half = 0; half < BLOCK; half += TILE_ROWS) {
      const __m512 before = _mm512_load_ps(tops + half), now = _mm512_max_ps(before, _mm512_load_ps(less + half));
      const __mmask16 sees_nothing = _mm512_cmp_ps_mask(now, nothing, _CMP_EQ_OQ);
      const __m512 top = _mm512_mask_mov_ps(now, sees_nothing, _mm512_setzero_ps());
      _mm512_store_ps(kept + half, weight(_mm512_sub_ps(before, top)));
      _mm512_store_ps(less + half, top);
      _mm512_store_ps(tops + half, now);
    }
    for (int64_t j = keys.first; j < keys.end; j++) {
      if (patch.seen[i][j] == Seen::NOTHING) {
        std::memset(weights + j * STEP, 0, STEP * sizeof(Bf16));
        continue;
      }
      for (int64_t row = 0; row < BLOCK; row++) {
        const Lanes found = load_row(scores + j * BLOCK_SUMS, row);
        const __m512 top = _mm512_set1_ps(less[row]);
        const __m512 low = weight(_mm512_sub_ps(found.low, top)), high = weight(_mm512_sub_ps(found.high, top));
        totals[row] = _mm512_add_ps(totals[row], _mm512_add_ps(low, high));
        store(left_place(weights, row, 0) + j * STEP, narrow(low, high));
      }
    }
    bool is_kept = true;
    for (int64_t row = 0; row < BLOCK; row++) {
      is_kept &= kept[row] == 1;
      sums[row] = sums[row] * kept[row] + _mm512_reduce_add_ps(totals[row]);
    }
    for (int64_t c = 0; c < width; c += BLOCK) {
      float* block = out + c * BLOCK;
      for (int64_t row = 0; row < BLOCK && !is_kept; row++) {
        const Lanes found = load_row(block, row);
        const __m512 by = _mm512_set1_ps(kept[row]);
        store_row(block, row, {_mm512_mul_ps(found.low, by), _mm512_mul_ps(found.high, by)});
      }
      add_product(block, weights + keys.first * STEP, v + c * KEYS + keys.first * STEP, keys.size());
    }
  }
};

// Writes n rows of sums that lie in blocks (32, W), each times its factor.
void store_tokens(const float* sums, const float* factors, Bf16* to, int64_t stride, int64_t n, int64_t n_channels) {
  for (int64_t c = 0; c < n_channels; c += BLOCK)
    for (int64_t row = 0; row < n; row++) {
      const Lanes found = load_row(sums + c * BLOCK, row);
      const __m512 by = _mm512_set1_ps(factors[row]);
      store(to + row * stride + c, narrow(_mm512_mul_ps(found.low, by), _mm512_mul_ps(found.high, by)), n_channels - c);
    }
}

size_t forward_bytes(const Attention& all) {
  const int64_t W = all.width();
  return 2 * (HEADS * QUERIES * W + 2 * KEYS * W + KEYS * BLOCK) +
         4 * (HEADS * QUERIES * (W + 2) + KEYS * BLOCK) + 1024;
}

void forward_of(const Attention& all, int64_t row, int64_t kv_head, Room room) {
  const int64_t C = all.n_channels, W = all.width();
  Bf16* q = room.take<Bf16>(HEADS * QUERIES * W);
  Bf16* k = room.take<Bf16>(KEYS * W);
  Bf16* v = room.take<Bf16>(KEYS * W);
  Bf16* weights = room.take<Bf16>(KEYS * BLOCK);
  float* scores = room.take<float>(KEYS * BLOCK);
  float* out = room.take<float>(HEADS * QUERIES * W);
  float* tops = room.take<float>(HEADS * QUERIES);
  float* sums = room.take<float>(HEADS * QUERIES);
  each_group(all, row, kv_head, [&](const Piece& piece, int64_t query, int64_t n, int64_t head, int64_t n_heads) {
    for (int64_t each = 0; each < n_heads; each++) {
      pack_tokens(q + each * QUERIES * W, all.q.at<Bf16>(row, query, head + each), all.q.of_token, n, C, W);
      std::fill_n(tops + each * QUERIES, QUERIES, all.sinks ? all.sinks[head + each] : HIDDEN);
      std::fill_n(sums + each * QUERIES, QUERIES, all.sinks ? 1.0f : 0.0f);
      std::fill_n(out + each * QUERIES * W, blocks_of(n) * BLOCK * W, 0.0f);
    }
    const auto prepare = [&](const Patch& patch) {
      pack_columns(k, all.k.at<Bf16>(row, patch.key, kv_head), all.k.of_token, patch.n_keys, C, W);
      pack_inner(v, all.v.at<Bf16>(row, patch.key, kv_head), all.v.of_token, patch.n_keys, C);
    };
    const auto compute = [&](const Patch& patch, int64_t each) {
      for (int64_t i = 0; i < patch.query_blocks(); i++) {
        const int64_t at = each * QUERIES + i * BLOCK;
        Softmax{tops + at, sums + at, out + at * W}.take(patch, i, q + at * W, k, v, scores, weights, all.scale, W);
      }
    };
    each_patch(piece, row, query, n, head, n_heads, prepare, compute, [](const Patch&) {});
    for (int64_t each = 0; each < n_heads; each++) {
      float* lse = all.lse_at(row, query, head + each);
      for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t at = each * QUERIES + first, n_rows = std::min(BLOCK, n - first);
        float factors[BLOCK];
        for (int64_t i = 0; i < n_rows; i++) {
          const bool sees_nothing = sums[at + i] == 0;
          factors[i] = sees_nothing ? 0 : 1 / sums[at + i];
          lse[first + i] = sees_nothing ? HIDDEN : tops[at + i] + std::log(sums[at + i]);
        }
        Bf16* to = all.out.at<Bf16>(row, query + first, head + each);
        store_tokens(out + at * W, factors, to, all.out.of_token, n_rows, C);
      }
    }
  });
}

size_t backward_bytes(const Attention& all) {
  const int64_t W = all.width();
  return 2 * (4 * HEADS * QUERIES * W + 3 * KEYS * W + 3 * QUERIES * KEYS) +
         4 * (HEADS * QUERIES * (W + 2) + 2 * KEYS * W + 2 * all.n_keys * W) + 2048;
}

// Weights and gradients by scores of a block of 32 queries and 32 keys, as factors of the products that follow.
struct Factors {
  Bf16 *weight_pairs, *grad_pairs, *grads;  // right panels along the queries; a left panel

  void make(const Patch& patch, int64_t i, int64_t j, const float* sums, const float* grad_sums, const float* lse,
            const float* means, float scale) const {
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t row = 0; row < BLOCK; row += 2) {
      Whole weights[2], grads_of[2];
      for (int64_t one = 0; one < 2; one++) {
        const int64_t at = row + one;
        const Lanes found = scores_of(patch, sums, i, j, at, factor), grad = load_row(grad_sums, at);
        const __m512 less = _mm512_set1_ps(lse[at]), mean = _mm512_set1_ps(means[at]);
        const __m512 low = weight(_mm512_sub_ps(found.low, less)), high = weight(_mm512_sub_ps(found.high, less));
        weights[one] = narrow(low, high);
        grads_of[one] = narrow(_mm512_mul_ps(_mm512_mul_ps(low, factor), _mm512_sub_ps(grad.low, mean)),
                               _mm512_mul_ps(_mm512_mul_ps(high, factor), _mm512_sub_ps(grad.high, mean)));
        store(left_place(grads, at, 0), grads_of[one]);
      }
      const Pairs by_weight = pairs(weights[0], weights[1]), by_score = pairs(grads_of[0], grads_of[1]);
      store(weight_pairs + row / 2 * BLOCK, by_weight.low);
      store(weight_pairs + row / 2 * BLOCK + TILE, by_weight.high);
      store(grad_pairs + row / 2 * BLOCK, by_score.low);
      store(grad_pairs + row / 2 * BLOCK + TILE, by_score.high);
    }
  }
  void clear() const {
    for (Bf16* each : {weight_pairs, grad_pairs, grads}) std::memset(each, 0, STEP * sizeof(Bf16));
  }
};

// Adds a block of sums (32 channels, 32 keys), transposed, to n rows.
void add_transposed(const float* sums, float* to, int64_t stride, int64_t n) {
  const auto add = [](float* at, __m512 more) { _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), more)); };
  for (int64_t half = 0; half < 2; half++) {
    const TransposedHalf rows(sums, half);
    for (int64_t row = 0; row < std::min(TILE_ROWS, n - half * TILE_ROWS); row++) {
      float* at = to + (half * TILE_ROWS + row) * stride;
      add(at, rows.first(row));
      add(at + TILE_ROWS, rows.second(row));
    }
  }
}

// Each token's product of two rows.
void products_of(float* to, const Bf16* left, int64_t left_stride, const Bf16* right, int64_t right_stride, int64_t n,
                 int64_t n_channels) {
  for (int64_t row = 0; row < n; row++) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < n_channels; c += BLOCK) {
      const Whole one = load(left + row * left_stride + c, n_channels - c);
      const Whole other = load(right + row * right_stride + c, n_channels - c);
      sum = _mm512_fmadd_ps(lower(one), lower(other), _mm512_fmadd_ps(upper(one), upper(other), sum));
    }
    to[row] = _mm512_reduce_add_ps(sum);
  }
}

// Writes rows of sums (S, W) in bf16.
void store_sums(const float* sums, Heads to, int64_t row, int64_t head, int64_t n, int64_t n_channels, int64_t width) {
  for (int64_t token = 0; token < n; token++)
    for (int64_t c = 0; c < n_channels; c += BLOCK) {
      const float* at = sums + token * width + c;
      const Whole numbers = narrow(_mm512_load_ps(at), _mm512_load_ps(at + TILE_ROWS));
      store(to.at<Bf16>(row, token, head) + c, numbers, n_channels - c);
    }
}

void backward_of(const Attention& all, int64_t row, int64_t kv_head, Room room) {
  const int64_t C = all.n_channels, W = all.width();
  alignas(64) float sums[BLOCK_SUMS], grad_sums[BLOCK_SUMS];
  float ones[BLOCK];
  std::fill_n(ones, BLOCK, 1.0f);
  Bf16* q = room.take<Bf16>(HEADS * QUERIES * W);
  Bf16* q_channels = room.take<Bf16>(HEADS * QUERIES * W);
  Bf16* grad = room.take<Bf16>(HEADS * QUERIES * W);
  Bf16* grad_channels = room.take<Bf16>(HEADS * QUERIES * W);
  Bf16* k = room.take<Bf16>(KEYS * W);
  Bf16* k_inner = room.take<Bf16>(KEYS * W);
  Bf16* v = room.take<Bf16>(KEYS * W);
  Bf16* weight_pairs = room.take<Bf16>(QUERIES * KEYS);
  Bf16* grad_pairs = room.take<Bf16>(QUERIES * KEYS);
  Bf16* grads = room.take<Bf16>(QUERIES * KEYS);
  float* dq = room.take<float>(HEADS * QUERIES * W);
  float* lse = room.take<float>(HEADS * QUERIES);
  float* means = room.take<float>(HEADS * QUERIES);
  float* dk_of = room.take<float>(KEYS * W);  // blocks (C, S) of some keys
  float* dv_of = room.take<float>(KEYS * W);
  float* dk = room.take<float>(all.n_keys * W);
  float* dv = room.take<float>(all.n_keys * W);
  std::fill_n(dk, all.n_keys * W, 0.0f);
  std::fill_n(dv, all.n_keys * W, 0.0f);
  each_group(all, row, kv_head, [&](const Piece& piece, int64_t query, int64_t n, int64_t head, int64_t n_heads) {
    std::fill_n(lse, n_heads * QUERIES, 0.0f);
    std::fill_n(means, n_heads * QUERIES, 0.0f);
    for (int64_t each = 0; each < n_heads; each++) {
      const int64_t at = each * QUERIES;
      std::fill_n(dq + at * W, blocks_of(n) * BLOCK * W, 0.0f);
      const Bf16 *q_at = all.q.at<Bf16>(row, query, head + each), *grad_at = all.grad.at<Bf16>(row, query, head + each);
      pack_tokens(q + at * W, q_at, all.q.of_token, n, C, W);
      pack_tokens(grad + at * W, grad_at, all.grad.of_token, n, C, W);
      pack_channels(q_channels + at * W, q_at, all.q.of_token, n, C);
      pack_channels(grad_channels + at * W, grad_at, all.grad.of_token, n, C);
      const Bf16* out_at = all.out.at<Bf16>(row, query, head + each);
      products_of(means + at, grad_at, all.grad.of_token, out_at, all.out.of_token, n, C);
      const float* given = all.lse_at(row, query, head + each);
      for (int64_t i = 0; i < n; i++) lse[at + i] = given[i] == HIDDEN ? 0 : given[i];
    }
    const auto prepare = [&](const Patch& patch) {
      const Bf16* keys = all.k.at<Bf16>(row, patch.key, kv_head);
      pack_columns(k, keys, all.k.of_token, patch.n_keys, C, W);
      pack_inner(k_inner, keys, all.k.of_token, patch.n_keys, C);
      pack_columns(v, all.v.at<Bf16>(row, patch.key, kv_head), all.v.of_token, patch.n_keys, C, W);
      std::fill_n(dk_of, patch.key_blocks() * BLOCK * W, 0.0f);
      std::fill_n(dv_of, patch.key_blocks() * BLOCK * W, 0.0f);
    };
    const auto compute = [&](const Patch& patch, int64_t each) {
      const int64_t head_at = each * QUERIES;
      for (int64_t i = 0; i < patch.query_blocks(); i++) {
        const int64_t at = head_at + i * BLOCK;
        const Range keys = patch.keys_of(i);
        for (int64_t j = 0; j < patch.key_blocks(); j++) {
          const int64_t pairs_at = j * QUERIES * BLOCK + i * STEP;
          const Factors made{weight_pairs + pairs_at, grad_pairs + pairs_at, grads + i * BLOCK * KEYS + j * STEP};
          if (patch.seen[i][j] == Seen::NOTHING) {
            made.clear();
            continue;
          }
          product(sums, q + at * W, k + j * BLOCK * W, W / BLOCK);
          product(grad_sums, grad + at * W, v + j * BLOCK * W, W / BLOCK);
          made.make(patch, i, j, sums, grad_sums, lse + at, means + at, all.scale);
        }
        for (int64_t c = 0; c < W && keys.size() > 0; c += BLOCK)
          add_product(dq + at * W + c * BLOCK, grads + i * BLOCK * KEYS + keys.first * STEP,
                      k_inner + c * KEYS + keys.first * STEP, keys.size());
      }
      for (int64_t j = 0; j < patch.key_blocks(); j++) {
        const Range queries = patch.queries_of(j);
        const int64_t from = queries.first * STEP;
        for (int64_t c = 0; c < W && queries.size() > 0; c += BLOCK) {
          float *dk_at = dk_of + (j * W + c) * BLOCK, *dv_at = dv_of + (j * W + c) * BLOCK;
          const int64_t left = head_at * W + c * QUERIES + from, right = j * QUERIES * BLOCK + from;
          add_product(dk_at, q_channels + left, grad_pairs + right, queries.size());
          add_product(dv_at, grad_channels + left, weight_pairs + right, queries.size());
        }
      }
    };
    const auto end = [&](const Patch& patch) {
      for (int64_t j = 0; j < patch.key_blocks(); j++)
        for (int64_t c = 0; c < W; c += BLOCK) {
          const int64_t block = (j * W + c) * BLOCK, to = (patch.key + j * BLOCK) * W + c;
          add_transposed(dk_of + block, dk + to, W, patch.n_keys - j * BLOCK);
          add_transposed(dv_of + block, dv + to, W, patch.n_keys - j * BLOCK);
        }
    };
    each_patch(piece, row, query, n, head, n_heads, prepare, compute, end);
    for (int64_t each = 0; each < n_heads; each++)
      for (int64_t first = 0; first < n; first += BLOCK)
        store_tokens(dq + (each * QUERIES + first) * W, ones, all.dq.at<Bf16>(row, query + first, head + each),
                     all.dq.of_token, std::min(BLOCK, n - first), C);
  });
  store_sums(dk, all.dk, row, kv_head, all.n_keys, C, W);
  store_sums(dv, all.dv, row, kv_head, all.n_keys, C, W);
}

template <class Pass>
int with_tiles(const Attention& all, int64_t first, int64_t n, size_t bytes, Pass pass) {
  configure_tiles();
  const int failed = each_kv_head(all, first, n, bytes, pass);
  release_tiles();
  return failed;
}

}  // namespace

extern "C" {

// Some of the B * G key-value heads of all rows: out and lse. 1: there is no memory.
int forward(const Attention* all, int64_t first, int64_t n) {
  return with_tiles(*all, first, n, forward_bytes(*all), forward_of);
}

// The same: dq, dk and dv.
int backward(const Attention* all, int64_t first, int64_t n) {
  return with_tiles(*all, first, n, backward_bytes(*all), backward_of);
}
}
