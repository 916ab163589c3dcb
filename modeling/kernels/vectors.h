// Matrix products in fp32 by the processor's own vectors.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

// Rows whose sums are in registers at once.
#if defined(__AVX512F__)
constexpr int64_t ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t ROWS = 6;
#else
constexpr int64_t ROWS = 4;
#endif
constexpr int64_t COLUMNS = 2 * LANES;

// A factor: how many numbers apart its rows are, and its numbers along the inner dim.
struct Left {
  const float* start;
  int64_t of_row, of_inner;
};

// The product of ROWS_HERE rows of ``left`` and COLUMNS of ``right`` (n_inner, ...), or the same added to ``out``.
template <int64_t ROWS_HERE, bool ADDS>
inline void multiply(float* out, int64_t out_stride, Left left, const float* right, int64_t right_stride,
                     int64_t n_inner) {
  Vector low[ROWS_HERE], high[ROWS_HERE];
  for (int64_t row = 0; row < ROWS_HERE; row++) low[row] = high[row] = Vector{};
  for (int64_t inner = 0; inner < n_inner; inner++) {
    const Vector first = *(const Vector*)(right + inner * right_stride);
    const Vector second = *(const Vector*)(right + inner * right_stride + LANES);
    for (int64_t row = 0; row < ROWS_HERE; row++) {
      const float factor = left.start[row * left.of_row + inner * left.of_inner];
      low[row] += factor * first;
      high[row] += factor * second;
    }
  }
  for (int64_t row = 0; row < ROWS_HERE; row++) {  // what is there is added last, so that errors of long sums are small
    Vector *to = (Vector*)(out + row * out_stride), *next = (Vector*)(out + row * out_stride + LANES);
    *to = ADDS ? *to + low[row] : low[row];
    *next = ADDS ? *next + high[row] : high[row];
  }
}

// The same for all whole ROWS_HERE from ``row`` on, which is then the first row that is left.
template <int64_t ROWS_HERE, bool ADDS>
void multiply_rows(float* out, int64_t out_stride, Left left, const float* right, int64_t right_stride, int64_t& row,
                   int64_t n_rows, int64_t n_inner) {
  for (; row + ROWS_HERE <= n_rows; row += ROWS_HERE)
    multiply<ROWS_HERE, ADDS>(out + row * out_stride, out_stride,
                              Left{left.start + row * left.of_row, left.of_row, left.of_inner}, right, right_stride,
                              n_inner);
}

constexpr int64_t INNER = 192;  // of the inner dim at once, so that COLUMNS of the right factor stay in the cache

// The product (n_rows, n_columns), or the same added to ``out``. Columns come in whole blocks.
template <bool ADDS>
void product(float* out, int64_t out_stride, Left left, const float* right, int64_t right_stride, int64_t n_rows,
             int64_t n_inner, int64_t n_columns) {
  for (int64_t column = 0; column < n_columns; column += COLUMNS)
    for (int64_t inner = 0; inner < n_inner; inner += INNER) {
      const Left part{left.start + inner * left.of_inner, left.of_row, left.of_inner};
      const float* from = right + inner * right_stride + column;
      const int64_t n = n_inner - inner < INNER ? n_inner - inner : INNER;
      int64_t row = 0;
      const auto take = [&](auto multiply_some) {
        multiply_some(out + column, out_stride, part, from, right_stride, row, n_rows, n);
      };
      if (ADDS || inner > 0) {
        take(multiply_rows<ROWS, true>);
        take(multiply_rows<2, true>);
        take(multiply_rows<1, true>);
      } else {
        take(multiply_rows<ROWS, false>);
        take(multiply_rows<2, false>);
        take(multiply_rows<1, false>);
      }
    }
}

}  // namespace
