// How attention in bf16 (attention_tiles.cpp) brings heads into the form that tiles.h takes.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace {

constexpr float SMALLEST = -87;  // below it an exponential is no normal number of fp32, with which processors are slow

struct Lanes {
  __m512 low, high;
};

inline __mmask16 lanes(int64_t n) { return n >= TILE_ROWS ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
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

// One row of a block's scores from its sums. Rows beyond the queries have some score or other, which is finite.
inline Lanes scores_of(const Patch& patch, const float* sums, int64_t i, int64_t j, int64_t at, __m512 scale) {
  const Lanes found = load_row(sums, at);
  if (patch.seen[i][j] == Seen::ALL || at >= patch.queries_in(i))
    return {_mm512_mul_ps(found.low, scale), _mm512_mul_ps(found.high, scale)};
  const float* added = patch.added(i * BLOCK + at, j);
  const int64_t n = patch.keys_in(j);
  const __m512 hidden = _mm512_set1_ps(HIDDEN);
  return {_mm512_fmadd_ps(found.low, scale, _mm512_mask_loadu_ps(hidden, lanes(n), added)),
          _mm512_fmadd_ps(found.high, scale, _mm512_mask_loadu_ps(hidden, lanes(n - TILE_ROWS), added + TILE_ROWS))};
}

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
