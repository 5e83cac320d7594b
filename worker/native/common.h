// What all CPU kernels share: numbers, the spans of a step, pages, threads.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

using at::BFloat16;
constexpr float kNone = -std::numeric_limits<float>::infinity();

__attribute__((always_inline)) inline float widen(float x) { return x; }
__attribute__((always_inline)) inline float widen(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
__attribute__((always_inline)) inline void narrow(float x, float& out) { out = x; }
__attribute__((always_inline)) inline void narrow(float x, BFloat16& out) {  // to nearest, ties to even; never called with a NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.x = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The same for any number: a NaN stays one.
__attribute__((always_inline)) inline void narrow_any(float x, float& out) { out = x; }
__attribute__((always_inline)) inline void narrow_any(float x, BFloat16& out) {
  narrow(x, out);
  out.x = x == x ? out.x : uint16_t(0x7fc0);
}

// e**x for x <= 0, relative error 2e-7; written so that the compiler vectorises it.
__attribute__((always_inline)) inline float exp_negative(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float t = clamped * 1.44269504088896341f;
  const float shifted = t + 12582912.0f;  // 1.5 * 2**23: rounds to an integer
  const float f = t - (shifted - 12582912.0f);
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const int32_t n = bits - 0x4b400000;
  float p = 1.5403530393381609e-4f;
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910071e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  const int32_t scale_bits = (n + 127) << 23;
  float scale;
  std::memcpy(&scale, &scale_bits, sizeof scale);
  return x < -87.0f ? 0.0f : p * scale;
}

#ifdef __AVX512BF16__
// The same for sixteen numbers; of two numbers one of which is none, max returns the second.
__attribute__((always_inline)) inline __m512 exp_negative(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 p = _mm512_set1_ps(1.5403530393381609e-4f);
  for (const float c : {1.3333558146428443e-3f, 9.6181291076284772e-3f, 5.5504108664821580e-2f,
                        2.4022650695910071e-1f, 6.9314718055994531e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), p, whole);
}
#endif

struct Span {
  int64_t first_row, tokens, start, pages;  // `pages`: where its pages begin in the table
  int64_t end() const { return start + tokens; }
};

struct Layer {
  int64_t kv_heads, group, key_dim, value_dim, page_tokens, window;
  float scaling, softcap;
  int64_t first_slot(int64_t own) const { return window > 0 ? std::max<int64_t>(0, own - window + 1) : 0; }
  float logit(float product) const {
    const float x = product * scaling;
    return softcap > 0 ? softcap * std::tanh(x / softcap) : x;
  }
};

template <typename T>
struct Tensors {
  const T *query, *keys, *values;
  T* out;
  int64_t query_row, query_head;  // strides
  const int64_t* table;
  const T* key(const Layer& l, const Span& s, int64_t slot, int64_t head) const {
    const int64_t page = table[s.pages + slot / l.page_tokens];
    return keys + ((page * l.page_tokens + slot % l.page_tokens) * l.kv_heads + head) * l.key_dim;
  }
  const T* value(const Layer& l, const Span& s, int64_t slot, int64_t head) const {
    const int64_t page = table[s.pages + slot / l.page_tokens];
    return values + ((page * l.page_tokens + slot % l.page_tokens) * l.kv_heads + head) * l.value_dim;
  }
  T* row(const Layer& l, int64_t token, int64_t query_head_index) const {
    return out + (token * l.kv_heads * l.group + query_head_index) * l.value_dim;
  }
};

// Lets all threads take tasks from one heap, so that uneven ones even out.
template <typename F>
void each_task(int64_t tasks, const F& run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) run(task);
  });
}

}  // namespace
