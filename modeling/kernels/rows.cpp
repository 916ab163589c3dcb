// Norms, rotations and cross-entropies on a CPU, row after row: one pass over memory each way.
//
// Numbers are in fp32 or bf16; all is computed in fp32, in plain loops that a compiler turns into the processor's
// vectors. Bits of 16 that are no number stay so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;  // rows whose gradients by the weight are summed one after another

// Each row over its root mean square, times the weight, or one plus the weight.
template <class Number>
void norm(const Number* rows, const float* weight, Number* out, float* scales, int64_t n, int64_t width, float eps,
          bool adds_one) {
  for (int64_t row = 0; row < n; row++, rows += width, out += width) {
    const float sum = sum_of(width, [=](int64_t i, int64_t n) {
      const Vector numbers = load(rows + i, n);
      return numbers * numbers;
    });
    const float scale = scales[row] = 1 / std::sqrt(sum / width + eps);
    if (adds_one) {
      write(out, width, [=](int64_t i) { return wide(rows[i]) * scale * (1 + weight[i]); });
    } else if constexpr (sizeof(Number) == sizeof(float)) {
      write(out, width, [=](int64_t i) { return rows[i] * scale * weight[i]; });
    } else {  // rounded before the weight, as in transformers
      write(out, width, [=](int64_t i) { return wide(rows[i]) * scale; });
      write(out, width, [=](int64_t i) { return wide(out[i]) * weight[i]; });
    }
  }
}

// The gradients by the rows (unless null), and by the weight: the sums (unless null) of each BLOCK of rows.
template <class Number>
void norm_backward(const Number* grads, const Number* rows, const float* factor, const float* scales, Number* by_rows,
                   float* by_weight, int64_t n, int64_t width) {
  for (int64_t row = 0; row < n; row++, grads += width, rows += width) {
    const float scale = scales[row];
    if (by_weight) {
      float* sums = by_weight + row / BLOCK * width;
      if (row % BLOCK == 0) std::memset(sums, 0, width * sizeof(float));
#pragma omp simd
      for (int64_t i = 0; i < width; i++) sums[i] += wide(grads[i]) * (wide(rows[i]) * scale);
    }
    if (by_rows) {
      const float dot = sum_of(width, [=](int64_t i, int64_t n) {
        return load(grads + i, n) * load(factor + i, n) * (load(rows + i, n) * scale);
      });
      const float mean = dot / width;
      write(by_rows, width,
            [=](int64_t i) { return (wide(grads[i]) * factor[i] - wide(rows[i]) * scale * mean) * scale; });
      by_rows += width;
    }
  }
}

// Pairs of channels (i, R + i) turned by a token's angles, or with sign -1 turned back; later channels as they are.
// Tables are rounded to Number's precision, and repeat after n_tables tokens.
template <class Number>
void rotate(const Number* heads, const float* cosines, const float* sines, Number* out, int64_t n, int64_t n_heads,
            int64_t width, int64_t n_pairs, int64_t n_tables, float sign) {
  std::vector<float> room(2 * n_pairs);
  float *cosine = room.data(), *turn = room.data() + n_pairs;
  for (int64_t token = 0; token < n; token++) {
    const int64_t at = token % n_tables * n_pairs;
#pragma omp simd
    for (int64_t i = 0; i < n_pairs; i++) {
      cosine[i] = wide(rounded<Number>(cosines[at + i]));
      turn[i] = sign * wide(rounded<Number>(sines[at + i]));
    }
    for (int64_t head = 0; head < n_heads; head++, heads += width, out += width) {
      const Number* second = heads + n_pairs;
      write(out, n_pairs, [=](int64_t i) { return wide(heads[i]) * cosine[i] - wide(second[i]) * turn[i]; });
      write(out + n_pairs, n_pairs, [=](int64_t i) { return wide(second[i]) * cosine[i] + wide(heads[i]) * turn[i]; });
      if (2 * n_pairs < width)
        std::memcpy(out + 2 * n_pairs, heads + 2 * n_pairs, (width - 2 * n_pairs) * sizeof(Number));
    }
  }
}

constexpr int64_t SUMMED = 1024;  // exponentials that are summed in fp32; further sums are in fp64

// Each target's cross-entropy and logsumexp (both 0 where it is ignored). With writes the logits are overwritten by the
// gradient of the trained total: softmax times (1 + 2 z_loss logsumexp), minus one-hot.
template <class Number>
void cross_entropy(Number* logits, const int64_t* targets, float* losses, float* logs, int64_t n, int64_t width,
                   int64_t ignored, float z_loss, bool writes) {
  std::vector<float> room(width);
  float* exponentials = room.data();
  for (int64_t row = 0; row < n; row++, logits += width) {
    const float largest = greatest(logits, width, -INFINITY);
    double total = 0;
    for (int64_t begin = 0; begin < width; begin += SUMMED) {
      float sum = 0;
      const int64_t end = std::min(begin + SUMMED, width);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; i++) sum += exponentials[i] = exponential(wide(logits[i]) - largest);
      total += sum;
    }
    const bool counts = targets[row] != ignored;
    const float log = std::log(total) + largest;
    const float none = log * 0;  // what is no number is seen where a target is ignored, too
    losses[row] = counts ? log - wide(logits[targets[row]]) : none;
    logs[row] = counts ? log : none;
    if (!writes) continue;
    const float factor = counts ? (1 + 2 * z_loss * log) / float(total) : none;
    const float one = counts ? exponentials[targets[row]] * factor - 1 : 0;
    write(logits, width, [=](int64_t i) { return exponentials[i] * factor; });
    if (counts) logits[targets[row]] = rounded<Number>(one);
  }
}

}  // namespace

#define FOR(Number, name)                                                                                            \
  void norm_##name(const Number* rows, const float* weight, Number* out, float* scales, int64_t n, int64_t width,    \
                   float eps, int adds_one) {                                                                        \
    norm(rows, weight, out, scales, n, width, eps, adds_one != 0);                                                   \
  }                                                                                                                  \
  void norm_backward_##name(const Number* grads, const Number* rows, const float* factor, const float* scales,       \
                            Number* by_rows, float* by_weight, int64_t n, int64_t width) {                           \
    norm_backward(grads, rows, factor, scales, by_rows, by_weight, n, width);                                        \
  }                                                                                                                  \
  void rotate_##name(const Number* heads, const float* cosines, const float* sines, Number* out, int64_t n,          \
                     int64_t n_heads, int64_t width, int64_t n_pairs, int64_t n_tables, float sign) {                \
    rotate(heads, cosines, sines, out, n, n_heads, width, n_pairs, n_tables, sign);                                  \
  }                                                                                                                  \
  void cross_entropy_##name(Number* logits, const int64_t* targets, float* losses, float* logs, int64_t n,           \
                            int64_t width, int64_t ignored, float z_loss, int writes) {                              \
    cross_entropy(logits, targets, losses, logs, n, width, ignored, z_loss, writes != 0);                            \
  }

extern "C" {
FOR(float, fp32)
FOR(Bf16, bf16)
}
