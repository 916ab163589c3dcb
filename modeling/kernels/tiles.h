// Blocks of sums by a processor that multiplies bf16, in tiles (AMX) or in vectors (AVX-512), and numbers in bf16 in
// its vectors.
//
// A tile is a register of 16 rows of 64 bytes. One instruction multiplies a tile of 16 rows of 32 numbers by a tile of
// 32 rows of 16 numbers, and adds the products to a tile of 16 x 16 sums in fp32: Intel 64 and IA-32 Architectures
// Software Developer's Manual, volume 1, chapter 18. VDPBF16PS (volume 2) does so for one row and two numbers of each
// column. With PLAIN_LOOPS plain loops take the place of these instructions, for tests.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace {

using Bf16 = uint16_t;
using Half = __m256i;   // 16 numbers in bf16
using Whole = __m512i;  // 32 numbers in bf16

constexpr int64_t TILE_ROWS = 16;        // a row has BLOCK numbers; a block of sums has four tiles of them
constexpr int64_t TILE = 512;            // numbers in a tile
constexpr int64_t STEP = 2 * TILE;       // two tiles of a factor side by side: what one step of a product takes
constexpr int64_t SUMS = 256;            // sums in a tile
constexpr int64_t BLOCK_SUMS = 4 * SUMS;

// A panel is what one block of sums takes from a factor: for each 32 of the inner dim, two tiles. In the left factor's
// tiles a row is 32 numbers along the inner dim; in the right factor's, 16 columns of two numbers along it.

#if defined(__AMX_BF16__)

inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes[tile] = 64;
    config.rows[tile] = TILE_ROWS;
  }
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// The product of two panels, which becomes a block of sums or is added to one: tiles 0 and 1 are its upper 16 rows.
template <bool ADDS>
inline void multiply(float* sums, const Bf16* left, const Bf16* right, int64_t steps) {
  if (ADDS) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + SUMS, 64);
    _tile_loadd(2, sums + 2 * SUMS, 64);
    _tile_loadd(3, sums + 3 * SUMS, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step++, left += STEP, right += STEP) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + SUMS, 64);
  _tile_stored(2, sums + 2 * SUMS, 64);
  _tile_stored(3, sums + 3 * SUMS, 64);
}

#else

inline void configure_tiles() {}
inline void release_tiles() {}

#ifndef PLAIN_LOOPS  // VDPBF16PS

constexpr int64_t ROWS = 8;  // whose sums are in registers at once

inline __m512bh factors(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair_everywhere(const Bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// As with tiles; the sums of some rows at a time stay in registers.
template <bool ADDS>
inline void multiply(float* sums, const Bf16* left, const Bf16* right, int64_t steps) {
  for (int64_t first = 0; first < BLOCK; first += ROWS) {
    float* to = sums + first / TILE_ROWS * 2 * SUMS + first % TILE_ROWS * TILE_ROWS;
    const Bf16* rows = left + first / TILE_ROWS * TILE + first % TILE_ROWS * BLOCK;
    __m512 low[ROWS], high[ROWS];
    for (int64_t row = 0; row < ROWS; row++) {
      low[row] = ADDS ? _mm512_load_ps(to + row * TILE_ROWS) : _mm512_setzero_ps();
      high[row] = ADDS ? _mm512_load_ps(to + row * TILE_ROWS + SUMS) : _mm512_setzero_ps();
    }
    for (int64_t step = 0; step < steps; step++)
      for (int64_t k = 0; k < BLOCK; k += 2) {
        const Bf16* pairs = right + step * STEP + k / 2 * BLOCK;
        const __m512bh lower = factors(pairs), upper = factors(pairs + TILE);
        for (int64_t row = 0; row < ROWS; row++) {
          const __m512bh pair = pair_everywhere(rows + step * STEP + row * BLOCK + k);
          low[row] = _mm512_dpbf16_ps(low[row], pair, lower);
          high[row] = _mm512_dpbf16_ps(high[row], pair, upper);
        }
      }
    for (int64_t row = 0; row < ROWS; row++) {
      _mm512_store_ps(to + row * TILE_ROWS, low[row]);
      _mm512_store_ps(to + row * TILE_ROWS + SUMS, high[row]);
    }
  }
}

#else

inline float wide(Bf16 number) {
  const uint32_t bits = uint32_t(number) << 16;
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

template <bool ADDS>
inline void multiply(float* sums, const Bf16* left, const Bf16* right, int64_t steps) {
  if (!ADDS) std::memset(sums, 0, BLOCK_SUMS * sizeof *sums);
  for (int64_t step = 0; step < steps; step++, left += STEP, right += STEP)
    for (int64_t tile = 0; tile < 4; tile++)
      for (int64_t row = 0; row < TILE_ROWS; row++)
        for (int64_t k = 0; k < BLOCK; k++) {
          const float factor = wide(left[tile / 2 * TILE + row * BLOCK + k]);
          const Bf16* pairs = right + tile % 2 * TILE + k / 2 * BLOCK + k % 2;
          float* to = sums + tile * SUMS + row * TILE_ROWS;
          for (int64_t column = 0; column < TILE_ROWS; column++) to[column] += factor * wide(pairs[2 * column]);
        }
}

#endif
#endif

// A product of two panels: a block of sums, or added to one.
inline void product(float* sums, const Bf16* left, const Bf16* right, int64_t steps) {
  multiply<false>(sums, left, right, steps);
}
inline void add_product(float* sums, const Bf16* left, const Bf16* right, int64_t steps) {
  multiply<true>(sums, left, right, steps);
}

inline Whole load(const Bf16* from) { return _mm512_loadu_si512(from); }
inline void store(Bf16* to, Whole numbers) { _mm512_storeu_si512(to, numbers); }
inline void stream(Bf16* to, Whole numbers) { _mm512_stream_si512((Whole*)to, numbers); }  // to a multiple of 64 bytes
inline __m512 widen(Half numbers) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16)); }
inline __m512 lower(Whole numbers) { return widen(_mm512_castsi512_si256(numbers)); }
inline __m512 upper(Whole numbers) { return widen(_mm512_extracti64x4_epi64(numbers, 1)); }
inline Half narrow(__m512 numbers) { return (Half)_mm512_cvtneps_pbh(numbers); }
inline Whole narrow(__m512 low, __m512 high) { return (Whole)_mm512_cvtne2ps_pbh(high, low); }

// exp(x), to three units in the last place for |x| < 90; 2^fraction by its Taylor polynomial.
inline __m512 exponential(__m512 x) {
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  const __m512 f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);  // x - whole * log(2)
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, whole);
}

// 1 / (1 + exp(-x)): a reciprocal to 14 bits, and one step of Newton's method. Where exp(-x) is infinite it is 0.
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 sum = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  const __m512 guess = _mm512_rcp14_ps(sum);
  const __mmask16 is_infinite = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ);
  const __m512 error = _mm512_mask_mov_ps(_mm512_fnmadd_ps(sum, guess, one), is_infinite, _mm512_setzero_ps());
  return _mm512_fmadd_ps(guess, error, guess);
}

// Two rows of 32 numbers -> pairs of their numbers, of the lower 16 columns and of the upper ones.
struct Pairs {
  Whole low, high;
};

inline Pairs pairs(Whole first, Whole second) {
  alignas(64) static const struct Places {
    uint16_t low[32], high[32];
    Places() {
      for (int column = 0; column < 16; column++) {
        low[2 * column] = column, low[2 * column + 1] = 32 + column;
        high[2 * column] = 16 + column, high[2 * column + 1] = 48 + column;
      }
    }
  } places;
  const Whole low = _mm512_load_si512(places.low), high = _mm512_load_si512(places.high);
  return {_mm512_permutex2var_epi16(first, low, second), _mm512_permutex2var_epi16(first, high, second)};
}

// Transposes 16 x 16 numbers of 32 bits.
inline void transpose(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    t[c] = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; c++) {
    rows[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    rows[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

// 16 rows of a block's transpose, the upper or the lower ones: 32 numbers each.
struct TransposedHalf {
  __m512i low[16], high[16];
  TransposedHalf(const float* sums, int64_t half) {
    for (int row = 0; row < 16; row++) {
      low[row] = _mm512_load_si512(sums + half * SUMS + row * TILE_ROWS);
      high[row] = _mm512_load_si512(sums + (2 + half) * SUMS + row * TILE_ROWS);
    }
    transpose(low);
    transpose(high);
  }
  __m512 first(int64_t row) const { return _mm512_castsi512_ps(low[row]); }
  __m512 second(int64_t row) const { return _mm512_castsi512_ps(high[row]); }
};

// Up to 32 numbers, of which n are there; the others are zero.
inline Whole load(const Bf16* from, int64_t n) {
  return n >= BLOCK ? load(from) : _mm512_maskz_loadu_epi16(n > 0 ? (1u << n) - 1 : 0, from);
}

// Where a row of left panels of ``width`` numbers begins.
inline Bf16* left_place(Bf16* panels, int64_t row, int64_t width) {
  return panels + row / BLOCK * BLOCK * width + row % BLOCK / TILE_ROWS * TILE + row % TILE_ROWS * BLOCK;
}

// Every second tile of a right panel from 16 rows of a matrix, of which n are there, which become its columns.
void pack_transposed(Bf16* to, const Bf16* matrix, int64_t stride, int64_t n, int64_t width) {
  for (int64_t k = 0; k < width; k += BLOCK, to += STEP) {
    __m512i rows[16];
    for (int row = 0; row < 16; row++)
      rows[row] = row < n ? load(matrix + row * stride + k, width - k) : _mm512_setzero_si512();
    transpose(rows);
    for (int row = 0; row < 16; row++) store(to + row * BLOCK, rows[row]);
  }
}

// A right panel from up to 32 columns of a matrix, whose rows are along the inner dim; n rows are there, of n_blocks.
void pack_pairs(Bf16* to, const Bf16* matrix, int64_t stride, int64_t n, int64_t n_blocks, int64_t n_columns) {
  for (int64_t row = 0; row < n_blocks * BLOCK; row += 2) {
    Bf16* step = to + row / BLOCK * STEP + row % BLOCK / 2 * BLOCK;
    const Whole first = load(matrix + row * stride, row < n ? n_columns : 0);
    const Whole second = load(matrix + (row + 1) * stride, row + 1 < n ? n_columns : 0);
    const Pairs made = pairs(first, second);
    store(step, made.low);
    store(step + TILE, made.high);
  }
}

// Two tiles of a left panel from pairs of 32 rows: pairs of the lower 16 columns and of the upper ones, 16 each. The
// columns become rows, and the rows the inner dim.
inline void transpose_pairs(Bf16* to, const Bf16* low, const Bf16* high) {
  for (const Bf16* from : {low, high}) {
    __m512i rows[16];
    for (int row = 0; row < 16; row++) rows[row] = load(from + row * BLOCK);
    transpose(rows);
    for (int row = 0; row < 16; row++) store(to + row * BLOCK, rows[row]);
    to += TILE;
  }
}

}  // namespace
