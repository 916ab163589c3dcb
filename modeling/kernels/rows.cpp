// Norms, rotations and cross-entropies on a CPU, row after row: one pass over memory each way.
//
// Numbers are in fp32 or bf16; all is computed in fp32, in plain loops that a compiler turns into the processor's
// vectors. Bits of 16 that are no number stay so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Bf16 {
  uint16_t bits;
};

inline float wide(float number) { return number; }
inline float wide(Bf16 number) {
  const uint32_t bits = uint32_t(number.bits) << 16;
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

template <class Number>
Number rounded(float number);
template <>
inline float rounded<float>(float number) {
  return number;
}
template <>
inline Bf16 rounded<Bf16>(float number) {  // to the nearest, and of two to the even one
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return {uint16_t(number != number ? quiet : nearest)};
}

constexpr int64_t BLOCK = 256;  // rows whose gradients by the weight are summed one after another

// Each row over its root mean square, times the weight, or one plus the weight.
template <class Number>
void norm(const Number* rows, const float* weight, Number* out, float* scales, int64_t n, int64_t width, float eps,
          bool adds_one) {
  for (int64_t row = 0; row < n; row++, rows += width, out += width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += wide(rows[i]) * wide(rows[i]);
    const float scale = scales[row] = 1 / std::sqrt(sum / width + eps);
    if (adds_one) {
#pragma omp simd
      for (int64_t i = 0; i < width; i++) out[i] = rounded<Number>(wide(rows[i]) * scale * (1 + weight[i]));
    } else {  // rounded before the weight, as in transformers
#pragma omp simd
      for (int64_t i = 0; i < width; i++)
        out[i] = rounded<Number>(wide(rounded<Number>(wide(rows[i]) * scale)) * weight[i]);
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
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < width; i++) dot += wide(grads[i]) * factor[i] * (wide(rows[i]) * scale);
      const float mean = dot / width;
#pragma omp simd
      for (int64_t i = 0; i < width; i++)
        by_rows[i] = rounded<Number>((wide(grads[i]) * factor[i] - wide(rows[i]) * scale * mean) * scale);
      by_rows += width;
    }
  }
}

// Pairs of channels (i, R + i) turned by a token's angles, or with sign -1 turned back; later channels as they are.
// Tables repeat after n_tables tokens.
template <class Number>
void rotate(const Number* heads, const Number* cosines, const Number* sines, Number* out, int64_t n, int64_t n_heads,
            int64_t width, int64_t n_pairs, int64_t n_tables, float sign) {
  for (int64_t token = 0; token < n; token++) {
    const Number* cosine = cosines + token % n_tables * n_pairs;
    const Number* sine = sines + token % n_tables * n_pairs;
    for (int64_t head = 0; head < n_heads; head++, heads += width, out += width) {
#pragma omp simd
      for (int64_t i = 0; i < n_pairs; i++) {
        const float first = wide(heads[i]), second = wide(heads[n_pairs + i]), turn = sign * wide(sine[i]);
        out[i] = rounded<Number>(first * wide(cosine[i]) - second * turn);
        out[n_pairs + i] = rounded<Number>(second * wide(cosine[i]) + first * turn);
      }
      std::memcpy(out + 2 * n_pairs, heads + 2 * n_pairs, (width - 2 * n_pairs) * sizeof(Number));
    }
  }
}

// exp(x) for x <= 0, to two units in the last place: 2^whole times the Taylor polynomial of the rest. What is less than
// 2^-126 is 0.
inline float exponential(float x) {
  x = x < -104.0f ? -104.0f : x;  // what is not a number stays so
  const float whole = x * 1.44269504088896341f + 12582912.0f - 12582912.0f;  // rounded: such sums have no fraction
  const float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  float sum = 1.0f / 720;
  for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + term;
  const int32_t exponent = int32_t(whole) + 127;
  const uint32_t bits = exponent > 0 ? uint32_t(exponent) << 23 : 0;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
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
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) largest = std::max(largest, wide(logits[i]));
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
#pragma omp simd
    for (int64_t i = 0; i < width; i++) logits[i] = rounded<Number>(exponentials[i] * factor);
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
  void rotate_##name(const Number* heads, const Number* cosines, const Number* sines, Number* out, int64_t n,        \
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
