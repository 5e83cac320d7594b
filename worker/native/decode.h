// Attention of spans of one token, over pages on a CPU.
//
// Pages are read in place, once, with an online softmax; a long sequence is cut into chunks so that all threads
// have work. The rules are in `worker/attention/protocol.py`; masks and scores are not for here.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kChunk = 128;  // least slots of a chunk of a decoding sequence

struct Chunk {
  int64_t span, first, last;
};

// Sixteen lanes, as wide as the machine has them: GCC and Clang cut them to size.
using Lanes = float __attribute__((vector_size(64)));
using Lanes16 = uint16_t __attribute__((vector_size(32)));
using Lanes32 = uint32_t __attribute__((vector_size(64)));

inline Lanes load(const float* p) {
  Lanes out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline Lanes load(const BFloat16* p) {
  Lanes16 half;
  std::memcpy(&half, p, sizeof half);
  return (Lanes)(__builtin_convertvector(half, Lanes32) << 16);
}
template <typename T>
inline Lanes load(const T* p, int64_t count) {  // fewer than sixteen, zeros after them
  T padded[16] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
inline float total(Lanes x) {
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
  Eight eight[2];
  std::memcpy(eight, &x, sizeof x);
  const Eight e = eight[0] + eight[1];
  Four four[2];
  std::memcpy(four, &e, sizeof e);
  const Four f = four[0] + four[1];
  return (f[0] + f[1]) + (f[2] + f[3]);
}

template <typename T>
inline void fetch(const T* p, int64_t count) {
  for (int64_t at = 0; at < count * int64_t(sizeof(T)); at += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + at, 0, 2);
}

constexpr int64_t kStep = 16;  // slots that decode takes at once
constexpr int64_t kMostLanes = 32;

// One chunk, all heads, so that a page is read from end to end. `state` gets, for each query head, the largest
// logit, the sum and `value_dim` sums. `N` is the lanes of a head where the compiler is to know it, else 0.
template <typename T, int N>
void decode_chunk(const Layer& l, const Tensors<T>& t, const Span& span, const Chunk& c, float* state) {
  const int64_t dk = l.key_dim, dv = l.value_dim, width = dv + 2, heads = l.kv_heads * l.group;
  const int64_t nk = N ? N : (dk + 15) / 16, nv = N ? N : (dv + 15) / 16;
  const int64_t tail_k = N ? 0 : dk % 16, tail_v = N ? 0 : dv % 16;
  const auto read = [](const auto* p, int64_t n, int64_t tail, Lanes* out) {
    for (int64_t j = 0; j < n; ++j) out[j] = tail && j == n - 1 ? load(p + j * 16, tail) : load(p + j * 16);
  };
  // Heads that share a KV head take its keys and values from here, widened once.
  Lanes q[kMostLanes], sums[kMostLanes], wide_keys[kStep * kMostLanes], wide_values[kStep * kMostLanes];
  float logits[kStep];
  for (int64_t h = 0; h < heads; ++h) {
    state[h * width] = kNone;
    std::fill(state + h * width + 1, state + (h + 1) * width, 0.0f);
  }
  const T* query = t.query + span.first_row * t.query_row;
  for (int64_t slot = c.first, count; slot < c.last; slot += count) {
    count = std::min({c.last - slot, l.page_tokens - slot % l.page_tokens, kStep});
    if (slot + count < c.last) {
      fetch(t.key(l, span, slot + count, 0), l.kv_heads * dk * count);
      fetch(t.value(l, span, slot + count, 0), l.kv_heads * dv * count);
    }
    for (int64_t h = 0; h < heads; ++h) {
      if (h % l.group == 0) {
        const T* keys = t.key(l, span, slot, h / l.group);
        const T* values = t.value(l, span, slot, h / l.group);
        for (int64_t i = 0; i < count; ++i) {
          read(keys + i * l.kv_heads * dk, nk, tail_k, wide_keys + i * nk);
          read(values + i * l.kv_heads * dv, nv, tail_v, wide_values + i * nv);
        }
      }
      read(query + h * t.query_head, nk, tail_k, q);
      for (int64_t i = 0; i < count; ++i) {
        Lanes sum = q[0] * wide_keys[i * nk];
        for (int64_t j = 1; j < nk; ++j) sum += q[j] * wide_keys[i * nk + j];
        logits[i] = total(sum);
      }
      float* own = state + h * width;
      float most = own[0];
      for (int64_t i = 0; i < count; ++i) {
        logits[i] = l.logit(logits[i]);
        most = logits[i] > most ? logits[i] : most;
      }
      const float shrink = own[0] == kNone ? 0.0f : exp_negative(own[0] - most);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; ++i) {
        logits[i] = exp_negative(logits[i] - most);
        sum += logits[i];
      }
      own[0] = most;
      own[1] = own[1] * shrink + sum;
      read(own + 2, nv, tail_v, sums);
      for (int64_t j = 0; j < nv; ++j) sums[j] *= shrink;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < nv; ++j) sums[j] += logits[i] * wide_values[i * nv + j];
      std::memcpy(own + 2, sums, dv * sizeof(float));
    }
  }
}

#ifdef __AVX512BF16__
// Sums the lanes of each of sixteen vectors: lane `i` of the result is the total of `x[i]`.
inline __m512 totals(__m512* x) {
  for (int i = 0; i < 8; ++i)
    x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));
  for (int i = 0; i < 4; ++i)
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x[i]), _mm512_castps_pd(x[i + 4]))),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x[i]), _mm512_castps_pd(x[i + 4]))));
  for (int i = 0; i < 2; ++i)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 2], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 2], 0xdd));
  const __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15), sum);
}

inline __m512 capped(__m512 x, float softcap) {
  for (int i = 0; i < 16; ++i) x[i] = softcap * std::tanh(x[i] / softcap);
  return x;
}

template <int N>
struct PairHead {
  float most;
  __m512 sum, sums[2 * N];  // of each 32 dimensions, the even groups of four first
};

// Adds the values of `count` slots.
template <int N>
inline void add_values(const BFloat16* values, int64_t row, int64_t count, __m512 weights, PairHead<N>& own) {
  alignas(32) uint32_t two[kStep / 2];
  _mm256_store_si256(reinterpret_cast<__m256i*>(two), (__m256i)_mm512_cvtneps_pbh(weights));
  __m512 sums[2 * N];  // the compiler keeps these in registers
  for (int j = 0; j < 2 * N; ++j) sums[j] = own.sums[j];
  for (int64_t i = 0; i < count; i += 2) {
    const __m512bh weight = (__m512bh)_mm512_set1_epi32(int(two[i / 2]));
    const BFloat16 *first = values + i * row, *second = i + 1 < count ? first + row : first;
    for (int j = 0; j < N; ++j) {
      const __m512i a = _mm512_loadu_si512(first + j * 32), b = _mm512_loadu_si512(second + j * 32);
      sums[2 * j] = _mm512_dpbf16_ps(sums[2 * j], (__m512bh)_mm512_unpacklo_epi16(a, b), weight);
      sums[2 * j + 1] = _mm512_dpbf16_ps(sums[2 * j + 1], (__m512bh)_mm512_unpackhi_epi16(a, b), weight);
    }
  }
  for (int j = 0; j < 2 * N; ++j) own.sums[j] = sums[j];
}

// The same for bfloat16 where the machine multiplies it by pairs: keys and values stay as they are, and weights
// are rounded to bfloat16 as in prefill. `N` is the vectors of a head. Half as fast again.
template <int N>
void decode_chunk_pairs(const Layer& l, const Tensors<BFloat16>& t, const Span& span, const Chunk& c, float* state) {
  const int64_t dim = N * 32, heads = l.kv_heads * l.group, row = l.kv_heads * dim, width = dim + 2;
  const auto pairs = [](const BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); };
  thread_local std::vector<PairHead<N>> kept;
  kept.assign(heads, PairHead<N>{kNone, {}, {}});
  const BFloat16* query = t.query + span.first_row * t.query_row;
  for (int64_t slot = c.first, count; slot < c.last; slot += count) {
    count = std::min({c.last - slot, l.page_tokens - slot % l.page_tokens, kStep});
    if (slot + count < c.last) {
      fetch(t.key(l, span, slot + count, 0), row * count);
      fetch(t.value(l, span, slot + count, 0), row * count);
    }
    const BFloat16 *page_keys = t.key(l, span, slot, 0), *page_values = t.value(l, span, slot, 0);
    const __mmask16 there = __mmask16((1u << count) - 1);
    for (int64_t h = 0; h < heads; ++h) {
      const BFloat16* keys = page_keys + h / l.group * dim;
      __m512bh q[N];
      for (int j = 0; j < N; ++j) q[j] = pairs(query + h * t.query_head + j * 32);
      __m512 products[kStep];
      for (int64_t i = 0; i < kStep; ++i) {
        const BFloat16* key = keys + (i < count ? i : 0) * row;
        products[i] = _mm512_dpbf16_ps(_mm512_setzero_ps(), pairs(key), q[0]);
        for (int j = 1; j < N; ++j) products[i] = _mm512_dpbf16_ps(products[i], pairs(key + j * 32), q[j]);
      }
      __m512 logits = _mm512_mul_ps(totals(products), _mm512_set1_ps(l.scaling));
      if (l.softcap > 0) logits = capped(logits, l.softcap);
      logits = _mm512_mask_blend_ps(there, _mm512_set1_ps(kNone), logits);
      PairHead<N>& own = kept[h];
      // Seldom after the first slots: what follows need not wait for the largest logit.
      if (_mm512_cmp_ps_mask(logits, _mm512_set1_ps(own.most), _CMP_GT_OQ)) [[unlikely]] {
        const float most = _mm512_reduce_max_ps(logits);
        const __m512 shrink = _mm512_set1_ps(own.most == kNone ? 0.0f : exp_negative(own.most - most));
        own.sum = _mm512_mul_ps(own.sum, shrink);
        for (__m512& sum : own.sums) sum = _mm512_mul_ps(sum, shrink);
        own.most = most;
      }
      const __m512 weights = exp_negative(_mm512_sub_ps(logits, _mm512_set1_ps(own.most)));
      own.sum = _mm512_add_ps(own.sum, weights);
      add_values<N>(page_values + h / l.group * dim, row, count, weights, own);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* own = state + h * width;
    own[0] = kept[h].most;
    own[1] = _mm512_reduce_add_ps(kept[h].sum);
    for (int j = 0; j < 2 * N; ++j)
      for (int i = 0; i < 16; ++i) own[2 + j / 2 * 32 + i / 4 * 8 + j % 2 * 4 + i % 4] = kept[h].sums[j][i];
  }
}
#endif

// Returns what computes a chunk: the fastest that this machine and these heads allow.
template <typename T>
auto chunk_function(const Layer& l) {
  const bool alike = l.key_dim == l.value_dim;
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (alike && l.key_dim == 32) return decode_chunk_pairs<1>;
    if (alike && l.key_dim == 64) return decode_chunk_pairs<2>;
    if (alike && l.key_dim == 96) return decode_chunk_pairs<3>;
    if (alike && l.key_dim == 128) return decode_chunk_pairs<4>;
    if (alike && l.key_dim == 256) return decode_chunk_pairs<8>;
  }
#endif
  return alike && l.key_dim == 64    ? decode_chunk<T, 4>
         : alike && l.key_dim == 128 ? decode_chunk<T, 8>
                                     : decode_chunk<T, 0>;
}

// Adds the chunks of a sequence up and writes its outputs.
template <typename T>
void decode_finish(const Layer& l, const Tensors<T>& t, const Span& span, int64_t chunks, float* states) {
  const int64_t width = l.value_dim + 2, heads = l.kv_heads * l.group;
  for (int64_t h = 0; h < heads; ++h) {
    float most = kNone;
    for (int64_t c = 0; c < chunks; ++c) most = std::max(most, states[(c * heads + h) * width]);
    float* sums = states + h * width;
    float all = 0.0f;
    for (int64_t c = 0; c < chunks; ++c) {
      const float* other = states + (c * heads + h) * width;
      const float shrink = exp_negative(other[0] - most);
      all += other[1] * shrink;
      for (int64_t d = 2; d < width; ++d) sums[d] = (c ? sums[d] : 0.0f) + other[d] * shrink;
    }
    T* row = t.row(l, span.first_row, h);
    for (int64_t d = 0; d < l.value_dim; ++d) narrow(sums[2 + d] / all, row[d]);
  }
}

template <typename T>
void decode(const Layer& l, const Tensors<T>& t, const std::vector<Span>& spans) {
  int64_t slots = 0;
  for (const Span& s : spans) slots += s.end() - l.first_slot(s.start);
  const int64_t least = std::max(kChunk, slots / (4 * at::get_num_threads()));
  std::vector<Chunk> chunks;
  std::vector<int64_t> begin;
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t first = l.first_slot(spans[i].start), count = spans[i].end() - first;
    const int64_t parts = std::max<int64_t>(1, count / least);
    begin.push_back(chunks.size());
    for (int64_t p = 0; p < parts; ++p)
      chunks.push_back({int64_t(i), first + count * p / parts, first + count * (p + 1) / parts});
  }
  begin.push_back(chunks.size());
  const auto step = chunk_function<T>(l);
  const int64_t size = l.kv_heads * l.group * (l.value_dim + 2);
  std::unique_ptr<float[]> states(new float[chunks.size() * size]);
  each_task(chunks.size(), [&](int64_t i) {
    const Chunk& c = chunks[i];
    step(l, t, spans[c.span], c, states.get() + i * size);
    if (begin[c.span + 1] - begin[c.span] == 1) decode_finish(l, t, spans[c.span], 1, states.get() + i * size);
  });
  for (size_t i = 0; i < spans.size(); ++i)
    if (begin[i + 1] - begin[i] > 1)
      decode_finish(l, t, spans[i], begin[i + 1] - begin[i], states.get() + begin[i] * size);
}

}  // namespace
