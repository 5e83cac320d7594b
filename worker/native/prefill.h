// Attention of spans of several tokens, over pages on a CPU.
//
// Keys and values are packed once a layer into the order that the machine's matrix instructions want, and gone
// through block by block, queries of the heads that share a KV head as the rows of one product (FlashAttention-2,
// Dao 2023). The products are oneDNN's micro-kernels, so that AVX-512 and AMX machines each get their own.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kRows = 192;   // rows of one product: tokens times the heads that share a KV head
constexpr int64_t kBlock = 128;  // slots of one block of packed keys

// Keys and values of one KV head of one span, from slot `first`, in blocks that a product takes as they are:
// of bfloat16, pairs along the summed dimension lie side by side.
struct Packed {
  int64_t first, blocks, keys, values;  // the last two: where they begin in the packed memory
};

template <typename T, typename C>
void pack_block(const Layer& l, const Tensors<T>& t, const Span& span, int64_t head, int64_t first, C* keys,
                C* values) {
  constexpr int64_t pair = sizeof(C) == 2 ? 2 : 1;
  const int64_t dk = l.key_dim, dv = l.value_dim, depth = (dk + pair - 1) / pair * pair;
  const int64_t count = std::min(kBlock, span.end() - first);
  if (count < kBlock || depth != dk) {
    std::memset(keys, 0, depth * kBlock * sizeof(C));
    std::memset(values, 0, kBlock * dv * sizeof(C));
  }
  for (int64_t i = 0; i < count; ++i) {
    const T* k = t.key(l, span, first + i, head);
    const T* v = t.value(l, span, first + i, head);
    C* column = keys + i * pair;
    for (int64_t d = 0; d < dk; ++d) narrow(widen(k[d]), column[d / pair * kBlock * pair + d % pair]);
    C* line = values + i / pair * dv * pair + i % pair;
    for (int64_t d = 0; d < dv; ++d) narrow(widen(v[d]), line[d * pair]);
  }
}

#ifdef __AVX512BF16__
// Scales the logits `[low, high)` of a block's row and turns them into weights over `peak`, which grows to the
// largest of them; the others weigh nothing. In one pass after the other over vectors, five times as fast as below.
inline void soften(float* row, BFloat16* weight, int64_t low, int64_t high, float scaling, float& peak, float& sum) {
  const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 most = _mm512_set1_ps(peak), all = _mm512_setzero_ps();
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m512i at = _mm512_add_epi32(places, _mm512_set1_epi32(int(i)));
    const __mmask16 there = _mm512_cmp_epi32_mask(at, _mm512_set1_epi32(int(low)), _MM_CMPINT_NLT) &
                            _mm512_cmp_epi32_mask(at, _mm512_set1_epi32(int(high)), _MM_CMPINT_LT);
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(scaling));
    const __m512 kept = _mm512_mask_blend_ps(there, _mm512_set1_ps(kNone), x);
    most = _mm512_max_ps(kept, most);
    _mm512_storeu_ps(row + i, kept);
  }
  const float largest = _mm512_reduce_max_ps(most);
  peak = largest > peak ? largest : peak;
  // With nothing in this block so far there is no largest logit to subtract.
  const __m512 from = _mm512_set1_ps(peak == kNone ? 0.0f : peak);
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m512 e = exp_negative(_mm512_sub_ps(_mm512_loadu_ps(row + i), from));
    all = _mm512_add_ps(all, e);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + i), (__m256i)_mm512_cvtneps_pbh(e));
  }
  sum = _mm512_reduce_add_ps(all);
}
#endif

struct Work {
  int64_t span, head, first, tokens;
};

template <typename T, typename C>
void prefill_rows(const Layer& l, const Tensors<T>& t, const Span& span, const Packed& packed, const Work& w,
                  const C* memory) {
  constexpr int64_t pair = sizeof(C) == 2 ? 2 : 1;
  const int64_t dk = l.key_dim, dv = l.value_dim, depth = (dk + pair - 1) / pair * pair;
  const int64_t rows = w.tokens * l.group;
  const int64_t height = std::min((rows + 15) / 16 * 16, std::max(kRows, rows));
  std::vector<C> narrow_scratch(height * (depth + kBlock));
  std::vector<float> wide_scratch(height * (kBlock + dv + 2));
  C* q = narrow_scratch.data();
  C* weights = q + height * depth;
  float* logits = wide_scratch.data();
  float* sums = logits + height * kBlock;
  float* most = sums + height * dv;
  float* total = most + height;
  std::fill(most, most + height, kNone);
  for (int64_t r = 0; r < rows; ++r) {
    const T* source = t.query + (span.first_row + w.first + r / l.group) * t.query_row +
                      (w.head * l.group + r % l.group) * t.query_head;
    for (int64_t d = 0; d < dk; ++d) narrow(widen(source[d]), q[r * depth + d]);
  }
  const int64_t first_own = span.start + w.first, last_own = first_own + w.tokens - 1;
  const int64_t from = (l.first_slot(first_own) - packed.first) / kBlock;
  const int64_t to = (last_own - packed.first) / kBlock;
  for (int64_t b = from; b <= to; ++b) {
    const int64_t base = packed.first + b * kBlock;
    at::native::cpublas::brgemm(height, kBlock, depth, depth, kBlock, kBlock, false, q,
                                memory + packed.keys + b * depth * kBlock, logits, pair == 2);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t own = first_own + r / l.group;
      const int64_t low = std::clamp<int64_t>(l.first_slot(own) - base, 0, kBlock);
      const int64_t high = std::clamp<int64_t>(own + 1 - base, low, kBlock);
      float* row = logits + r * kBlock;
      C* weight = weights + r * kBlock;
      float peak = most[r], sum = 0.0f;
#ifdef __AVX512BF16__
      if (std::is_same_v<C, BFloat16> && l.softcap <= 0) {
        soften(row, reinterpret_cast<BFloat16*>(weight), low, high, l.scaling, peak, sum);
      } else
#endif
      {
      if (l.softcap > 0) {
        for (int64_t i = low; i < high; ++i) row[i] = l.logit(row[i]);
      } else {
#pragma omp simd
        for (int64_t i = low; i < high; ++i) row[i] *= l.scaling;
      }
#pragma omp simd reduction(max : peak)
      for (int64_t i = low; i < high; ++i) peak = row[i] > peak ? row[i] : peak;
      if (low > 0) std::fill(weight, weight + low, C(0));
      if (high < kBlock) std::fill(weight + high, weight + kBlock, C(0));
#pragma omp simd reduction(+ : sum)
      for (int64_t i = low; i < high; ++i) {
        const float e = exp_negative(row[i] - peak);
        sum += e;
        narrow(e, weight[i]);
      }
      }
      if (peak != most[r]) {
        const float shrink = most[r] == kNone ? 0.0f : exp_negative(most[r] - peak);
        total[r] *= shrink;
        float* own_sums = sums + r * dv;
#pragma omp simd
        for (int64_t d = 0; d < dv; ++d) own_sums[d] *= shrink;
        most[r] = peak;
      }
      total[r] += sum;
    }
    at::native::cpublas::brgemm(height, dv, kBlock, kBlock, dv, dv, true, weights,
                                memory + packed.values + b * kBlock * dv, sums, pair == 2);
  }
  // On AMX a thread keeps its tiles configured until told, and what runs next on it would find them so.
  at::native::cpublas::brgemm_release(pair == 2);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = t.row(l, span.first_row + w.first + r / l.group, w.head * l.group + r % l.group);
    for (int64_t d = 0; d < dv; ++d) narrow(sums[r * dv + d] / total[r], row[d]);
  }
}

template <typename T, typename C>
void prefill(const Layer& l, const Tensors<T>& t, const std::vector<Span>& spans) {
  constexpr int64_t pair = sizeof(C) == 2 ? 2 : 1;
  const int64_t depth = (l.key_dim + pair - 1) / pair * pair;
  const int64_t step = std::max<int64_t>(1, kRows / l.group);
  std::vector<Packed> packed;
  std::vector<Work> blocks, works;
  int64_t size = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& s = spans[i];
    const int64_t first = l.first_slot(s.start), count = (s.end() - first + kBlock - 1) / kBlock;
    for (int64_t head = 0; head < l.kv_heads; ++head) {
      packed.push_back({first, count, size, size + count * kBlock * depth});
      size += count * kBlock * (depth + l.value_dim);
      for (int64_t b = 0; b < count; ++b) blocks.push_back({int64_t(i), head, b, 0});
      for (int64_t at = 0; at < s.tokens; at += step)
        works.push_back({int64_t(i), head, at, std::min(step, s.tokens - at)});
    }
  }
  std::unique_ptr<C[]> memory(new C[size]);
  each_task(blocks.size(), [&](int64_t i) {
    const Work& w = blocks[i];
    const Packed& p = packed[w.span * l.kv_heads + w.head];
    pack_block<T, C>(l, t, spans[w.span], w.head, p.first + w.first * kBlock,
                     memory.get() + p.keys + w.first * kBlock * depth,
                     memory.get() + p.values + w.first * kBlock * l.value_dim);
  });
  const auto cost = [&](const Work& w) { return spans[w.span].start + w.first; };
  std::stable_sort(works.begin(), works.end(), [&](const Work& a, const Work& b) { return cost(a) > cost(b); });
  each_task(works.size(), [&](int64_t i) {
    const Work& w = works[i];
    prefill_rows<T, C>(l, t, spans[w.span], packed[w.span * l.kv_heads + w.head], w, memory.get());
  });
}

}  // namespace
