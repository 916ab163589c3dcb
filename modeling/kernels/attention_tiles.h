// What both passes of attention in bf16 (attention_tiles.cpp) are given, and how they bring it into the units' form.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace {

constexpr int64_t QUERIES = 128;  // whose scores are in the cache at once
constexpr int64_t KEYS = 256;
constexpr int64_t HEADS = 4;      // query heads for which keys are prepared once
constexpr float HIDDEN = -INFINITY;  // what is added to the score of a key that a query does not see
constexpr float SMALLEST = -87;      // below it an exponential is no normal number of fp32, with which processors are slow

// A tensor (B, Q or S, H or G, C): where it begins, and how many numbers apart neighbours are; channels are one.
struct Heads {
  Bf16* start;
  int64_t of_row, of_token, of_head;
  Bf16* at(int64_t row, int64_t token, int64_t head) const {
    return start + row * of_row + token * of_token + head * of_head;
  }
};

// Some rows of the batch, their queries and keys (from, to), and what is added to the scores: (B or 1, H or 1, Q, S).
struct Piece {
  int64_t rows[2], queries[2], keys[2];
  const float* mask;
  int64_t mask_of_row, mask_of_head, mask_of_query;
};

struct Attention {
  int64_t n_queries, n_keys, n_heads, n_kv_heads, n_channels, n_pieces;
  float scale;
  Heads q, k, v, out;
  float* lse;              // (B, H, Q)
  const float* sinks;      // (H,), or null
  const Piece* pieces;     // each query is in one
  Heads grad, dq, dk, dv;  // the backward pass's own
};

enum class Seen : uint8_t { NOTHING, ALL, SOME };

struct Range {
  int64_t first, end;
  int64_t size() const { return end - first; }
};

struct Lanes {
  __m512 low, high;
};

inline __mmask16 lanes(int64_t n) { return n >= TILE_ROWS ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }
inline int64_t row_place(int64_t row) { return row / TILE_ROWS * 2 * SUMS + row % TILE_ROWS * TILE_ROWS; }
inline Lanes load_row(const float* block, int64_t row) {
  return {_mm512_load_ps(block + row_place(row)), _mm512_load_ps(block + row_place(row) + SUMS)};
}
inline void store_row(float* block, int64_t row, Lanes numbers) {
  _mm512_store_ps(block + row_place(row), numbers.low);
  _mm512_store_ps(block + row_place(row) + SUMS, numbers.high);
}
inline void store(Bf16* to, Whole numbers, int64_t n) {
  _mm512_mask_storeu_epi16(to, n >= BLOCK ? 0xffffffffu : (1u << n) - 1, numbers);
}
// exp(x) where x is not positive, or NaN, which stays; zero where it would be as small as fp32's smallest numbers.
inline __m512 weight(__m512 x) {
  const __mmask16 is_there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(SMALLEST), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(is_there, exponential(_mm512_max_ps(_mm512_set1_ps(SMALLEST), x)));
}

// Some queries and keys of a piece, in blocks of 32 by 32, and which of these blocks are seen.
struct Patch {
  const Piece* piece;
  int64_t row, query, key, n_queries, n_keys;  // the batch's row; the first ones, and how many
  const float* mask;                           // of the head that is computed
  Seen seen[QUERIES / BLOCK][KEYS / BLOCK];
  bool sees_any;

  int64_t query_blocks() const { return blocks_of(n_queries); }
  int64_t key_blocks() const { return blocks_of(n_keys); }

  void look(int64_t head) {
    mask = piece->mask + (row - piece->rows[0]) * piece->mask_of_row + head * piece->mask_of_head +
           (query - piece->queries[0]) * piece->mask_of_query + key - piece->keys[0];
    sees_any = false;
    for (int64_t i = 0; i < query_blocks(); i++)
      for (int64_t j = 0; j < key_blocks(); j++) {
        seen[i][j] = seen_of(i, j);
        sees_any |= seen[i][j] != Seen::NOTHING;
      }
  }

  Seen seen_of(int64_t i, int64_t j) const {
    const int64_t n = n_keys - j * BLOCK;
    const __mmask16 is_low = lanes(n), is_high = lanes(n - TILE_ROWS);
    const __m512 nothing = _mm512_set1_ps(HIDDEN), zero = _mm512_setzero_ps();
    bool sees_any = false, sees_all = n >= BLOCK;
    for (int64_t q = i * BLOCK; q < std::min((i + 1) * BLOCK, n_queries); q++) {
      const float* at = mask + q * piece->mask_of_query + j * BLOCK;
      const __m512 low = _mm512_maskz_loadu_ps(is_low, at), high = _mm512_maskz_loadu_ps(is_high, at + TILE_ROWS);
      sees_any |= (_mm512_mask_cmp_ps_mask(is_low, low, nothing, _CMP_NEQ_UQ) |
                   _mm512_mask_cmp_ps_mask(is_high, high, nothing, _CMP_NEQ_UQ)) != 0;
      sees_all &= (_mm512_cmp_ps_mask(low, zero, _CMP_NEQ_UQ) | _mm512_cmp_ps_mask(high, zero, _CMP_NEQ_UQ)) == 0;
    }
    return !sees_any ? Seen::NOTHING : sees_all ? Seen::ALL : Seen::SOME;
  }

  // The blocks of keys from the first to the last that the queries of a block see; and the other way round.
  Range keys_of(int64_t i) const {
    Range range{0, key_blocks()};
    while (range.first < range.end && seen[i][range.first] == Seen::NOTHING) range.first++;
    while (range.first < range.end && seen[i][range.end - 1] == Seen::NOTHING) range.end--;
    return range;
  }
  Range queries_of(int64_t j) const {
    Range range{0, query_blocks()};
    while (range.first < range.end && seen[range.first][j] == Seen::NOTHING) range.first++;
    while (range.first < range.end && seen[range.end - 1][j] == Seen::NOTHING) range.end--;
    return range;
  }

  // One row of a block's scores from its sums. Rows beyond the queries have some score or other, which is finite.
  Lanes scores(const float* sums, int64_t i, int64_t j, int64_t at, __m512 scale) const {
    const Lanes found = load_row(sums, at);
    const int64_t q = i * BLOCK + at;
    if (seen[i][j] == Seen::ALL || q >= n_queries)
      return {_mm512_mul_ps(found.low, scale), _mm512_mul_ps(found.high, scale)};
    const float* added = mask + q * piece->mask_of_query + j * BLOCK;
    const int64_t n = n_keys - j * BLOCK;
    const __m512 nothing = _mm512_set1_ps(HIDDEN);
    return {_mm512_fmadd_ps(found.low, scale, _mm512_mask_loadu_ps(nothing, lanes(n), added)),
            _mm512_fmadd_ps(found.high, scale, _mm512_mask_loadu_ps(nothing, lanes(n - TILE_ROWS), added + TILE_ROWS))};
  }
};

// Left panels of n rows: a row of a tile is a token.
void pack_tokens(Bf16* to, const Bf16* tokens, int64_t stride, int64_t n, int64_t n_channels, int64_t width) {
  for (int64_t row = 0; row < blocks_of(n) * BLOCK; row++)
    for (int64_t c = 0; c < width; c += BLOCK)
      store(left_place(to, row, width) + c / BLOCK * STEP,
            load(tokens + row * stride + c, row < n ? n_channels - c : 0));
}

// Left panels of n rows, transposed: a row of a tile is a channel. Each 32 channels have room for QUERIES.
void pack_channels(Bf16* to, const Bf16* tokens, int64_t stride, int64_t n, int64_t n_channels) {
  alignas(64) Bf16 paired[STEP];
  for (int64_t c = 0; c < n_channels; c += BLOCK)
    for (int64_t row = 0; row < n; row += BLOCK) {
      pack_pairs(paired, tokens + row * stride + c, stride, n - row, 1, n_channels - c);
      transpose_pairs(to + c * QUERIES + row * BLOCK, paired, paired + TILE);
    }
}

// Right panels of n rows, which become columns: the inner dim is channels.
void pack_columns(Bf16* to, const Bf16* tokens, int64_t stride, int64_t n, int64_t n_channels, int64_t width) {
  for (int64_t row = 0; row < n; row += TILE_ROWS)
    pack_transposed(to + row / BLOCK * BLOCK * width + row % BLOCK / TILE_ROWS * TILE, tokens + row * stride, stride,
                    n - row, n_channels);
  if (n % BLOCK > 0 && n % BLOCK <= TILE_ROWS)  // the other half of the last block
    pack_transposed(to + n / BLOCK * BLOCK * width + TILE, tokens, stride, 0, n_channels);
}

// Right panels of n rows: the inner dim is tokens, columns are channels. Each 32 channels have room for KEYS.
void pack_inner(Bf16* to, const Bf16* tokens, int64_t stride, int64_t n, int64_t n_channels) {
  for (int64_t c = 0; c < n_channels; c += BLOCK)
    pack_pairs(to + c * KEYS, tokens + c, stride, n, blocks_of(n), n_channels - c);
}

}  // namespace
