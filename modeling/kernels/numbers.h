// Numbers in fp32 or bf16, computed with in fp32.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __has_builtin
#if __has_builtin(__builtin_convertvector)
#define CONVERTS_VECTORS  // a compiler that does not say so may have no such function
#endif
#endif

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;  // numbers of fp32 in a vector
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

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

// Writes n numbers ``make(i)``, rounded.
template <class Make>
inline void write(float* to, int64_t n, Make make) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) to[i] = make(i);
}
template <class Make>
inline void write(Bf16* to, int64_t n, Make make) {
  int64_t begin = 0;
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
  // One instruction for 32 numbers. It takes those below 2^-126 for zero, so these are left to a loop.
  constexpr int64_t CHUNK = 32;
  constexpr int BELOW_NORMAL = 0x20;
  for (; begin + CHUNK <= n; begin += CHUNK) {
    alignas(64) float made[CHUNK];
#pragma omp simd
    for (int64_t i = 0; i < CHUNK; i++) made[i] = make(begin + i);
    const __m512 low = _mm512_load_ps(made), high = _mm512_load_ps(made + CHUNK / 2);
    if (_mm512_fpclass_ps_mask(low, BELOW_NORMAL) | _mm512_fpclass_ps_mask(high, BELOW_NORMAL))
      for (int64_t i = 0; i < CHUNK; i++) to[begin + i] = rounded<Bf16>(made[i]);
    else
      _mm512_storeu_si512(to + begin, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
#pragma omp simd
  for (int64_t i = begin; i < n; i++) to[i] = rounded<Bf16>(make(i));
}

inline Vector load(const float* from) { return *(const Vector*)from; }
inline Vector load(const Bf16* from) {
#ifdef CONVERTS_VECTORS
  typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));
  typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));
  return (Vector)(__builtin_convertvector(*(const Halves*)from, Words) << 16);
#else
  float numbers[LANES];
#pragma omp simd
  for (int64_t i = 0; i < LANES; i++) numbers[i] = wide(from[i]);
  return load(numbers);
#endif
}

// The first n numbers, and zeros.
template <class Number>
inline Vector load(const Number* from, int64_t n) {
  if (n >= LANES) return load(from);
  Number some[LANES] = {};
  std::memcpy(some, from, n * sizeof(Number));
  return load(some);
}

template <int64_t N>
inline float total(const float* numbers) {
  if constexpr (N == 1) {
    return numbers[0];
  } else {
    float halves[N / 2];
    for (int64_t i = 0; i < N / 2; i++) halves[i] = numbers[i] + numbers[N / 2 + i];
    return total<N / 2>(halves);
  }
}

// The sum of n terms: ``terms(i, m)`` is a vector of those from i on, of which m are there, if fewer than it has.
template <class Terms>
inline float sum_of(int64_t n, Terms terms) {
  Vector sums[4] = {};  // which do not wait for each other
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int64_t each = 0; each < 4; each++) sums[each] += terms(i + each * LANES, LANES);
  for (; i < n; i += LANES) sums[0] += terms(i, n - i);
  const Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float numbers[LANES];
  std::memcpy(numbers, &sum, sizeof numbers);
  return total<LANES>(numbers);
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

// The greatest of n numbers and ``top``. What is not a number is passed over.
template <class Number>
inline float greatest(const Number* numbers, int64_t n, float top) {
  constexpr int64_t LANES = 16;  // maxima that do not wait for each other
  float tops[LANES];
  for (float& each : tops) each = top;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; lane++) {
      const float number = wide(numbers[i + lane]);
      tops[lane] = number > tops[lane] ? number : tops[lane];
    }
  for (; i < n; i++) tops[0] = wide(numbers[i]) > tops[0] ? wide(numbers[i]) : tops[0];
  for (float each : tops) top = each > top ? each : top;
  return top;
}

}  // namespace
