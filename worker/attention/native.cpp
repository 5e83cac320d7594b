// Attention over pages on a CPU: what `pie.worker.attention.native` compiles.
//
// Covers float32 and bfloat16, causal and sliding-window attention, grouped queries and a softcap. Does not
// cover masks and scores: those spans go to the torch backend. The rules are in `protocol.py`.
//
// Spans of one token (decode) read the pages in place, once, with an online softmax; a long sequence is cut
// into chunks so that all threads have work. Longer spans (prefill) pack keys and values into the order that
// the machine's matrix instructions want, once a layer, and then go through them block by block, queries of
// the heads that share a KV head as the rows of one product (FlashAttention-2, Dao 2023). The products are
// oneDNN's micro-kernels, so that AVX-512 and AMX machines each get their own.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

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
constexpr int64_t kRows = 192;        // rows of one product: tokens times the heads that share a KV head
constexpr int64_t kBlock = 128;       // slots of one block of packed keys
constexpr int64_t kChunk = 512;       // least slots of a chunk of a decoding sequence

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, BFloat16& out) {  // to nearest, ties to even; never called with a NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.x = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e**x for x <= 0, relative error 2e-7; written so that the compiler vectorises it.
inline float exp_negative(float x) {
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

// --- decode ------------------------------------------------------------------------------------------------

struct Chunk {
  int64_t span, head, first, last, part, parts;
};

// One chunk of one KV head. `state` gets, for each query head, the largest logit, the sum and `value_dim` sums.
template <typename T>
void decode_chunk(const Layer& l, const Tensors<T>& t, const Span& span, const Chunk& c, float* state) {
  const int64_t dk = l.key_dim, dv = l.value_dim, width = dv + 2;
  constexpr int64_t kStep = 64;
  std::vector<float> scratch(l.group * (dk + kStep) + std::max(dk, dv));
  float* q = scratch.data();
  float* logits = q + l.group * dk;
  float* wide = logits + l.group * kStep;
  for (int64_t g = 0; g < l.group; ++g) {
    const T* source = t.query + span.first_row * t.query_row + (c.head * l.group + g) * t.query_head;
    for (int64_t d = 0; d < dk; ++d) q[g * dk + d] = widen(source[d]);
    float* own = state + g * width;
    own[0] = kNone;
    std::fill(own + 1, own + width, 0.0f);
  }
  for (int64_t slot = c.first; slot < c.last;) {
    const int64_t left = std::min(c.last - slot, l.page_tokens - slot % l.page_tokens);
    const int64_t count = std::min(left, kStep);
    const T* k = t.key(l, span, slot, c.head);
    const T* v = t.value(l, span, slot, c.head);
    for (int64_t i = 0; i < count; ++i, k += l.kv_heads * dk) {
#pragma omp simd
      for (int64_t d = 0; d < dk; ++d) wide[d] = widen(k[d]);
      for (int64_t g = 0; g < l.group; ++g) {
        const float* qg = q + g * dk;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dk; ++d) sum += qg[d] * wide[d];
        logits[g * kStep + i] = l.logit(sum);
      }
    }
    for (int64_t g = 0; g < l.group; ++g) {
      float* row = logits + g * kStep;
      float* own = state + g * width;
      float most = own[0];
#pragma omp simd reduction(max : most)
      for (int64_t i = 0; i < count; ++i) most = row[i] > most ? row[i] : most;
      const float shrink = own[0] == kNone ? 0.0f : exp_negative(own[0] - most);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; ++i) {
        row[i] = exp_negative(row[i] - most);
        sum += row[i];
      }
      own[1] = own[1] * shrink + sum;
      if (own[0] != most) {
#pragma omp simd
        for (int64_t d = 0; d < dv; ++d) own[2 + d] *= shrink;
      }
      own[0] = most;
    }
    for (int64_t i = 0; i < count; ++i, v += l.kv_heads * dv) {
#pragma omp simd
      for (int64_t d = 0; d < dv; ++d) wide[d] = widen(v[d]);
      for (int64_t g = 0; g < l.group; ++g) {
        const float weight = logits[g * kStep + i];
        float* sums = state + g * width + 2;
#pragma omp simd
        for (int64_t d = 0; d < dv; ++d) sums[d] += weight * wide[d];
      }
    }
    slot += count;
  }
}

// Adds the parts of a chunked sequence up and writes the outputs of one KV head.
template <typename T>
void decode_finish(const Layer& l, const Tensors<T>& t, const Span& span, const Chunk& c, float* parts) {
  const int64_t width = l.value_dim + 2;
  for (int64_t g = 0; g < l.group; ++g) {
    float most = kNone;
    for (int64_t p = 0; p < c.parts; ++p) most = std::max(most, parts[(p * l.group + g) * width]);
    float* sums = parts + g * width;
    float total = 0.0f;
    for (int64_t p = 0; p < c.parts; ++p) {
      const float* part = parts + (p * l.group + g) * width;
      const float shrink = exp_negative(part[0] - most);
      total += part[1] * shrink;
      for (int64_t d = 2; d < width; ++d) sums[d] = (p ? sums[d] : 0.0f) + part[d] * shrink;
    }
    T* row = t.row(l, span.first_row, c.head * l.group + g);
    for (int64_t d = 0; d < l.value_dim; ++d) narrow(sums[2 + d] / total, row[d]);
  }
}

template <typename T>
void decode(const Layer& l, const Tensors<T>& t, const std::vector<Span>& spans) {
  int64_t slots = 0;
  for (const Span& s : spans) slots += s.end() - l.first_slot(s.start);
  const int64_t share = slots * l.kv_heads / (4 * at::get_num_threads()) + 1;
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t first = l.first_slot(spans[i].start), count = spans[i].end() - first;
    const int64_t parts = std::max<int64_t>(1, count / std::max(kChunk, share));
    for (int64_t head = 0; head < l.kv_heads; ++head)
      for (int64_t p = 0; p < parts; ++p)
        chunks.push_back({int64_t(i), head, first + count * p / parts, first + count * (p + 1) / parts, p, parts});
  }
  const int64_t size = l.group * (l.value_dim + 2);
  std::vector<float> states(chunks.size() * size);
  each_task(chunks.size(), [&](int64_t i) {
    const Chunk& c = chunks[i];
    decode_chunk(l, t, spans[c.span], c, states.data() + i * size);
    if (c.parts == 1) decode_finish(l, t, spans[c.span], c, states.data() + i * size);
  });
  for (size_t i = 0; i < chunks.size(); ++i)
    if (chunks[i].parts > 1 && chunks[i].part == 0)
      decode_finish(l, t, spans[chunks[i].span], chunks[i], states.data() + i * size);
}

// --- prefill -----------------------------------------------------------------------------------------------

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
      float peak = most[r];
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
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = low; i < high; ++i) {
        const float e = exp_negative(row[i] - peak);
        sum += e;
        narrow(e, weight[i]);
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
  at::native::cpublas::brgemm_release(pair == 2);
}

// --- the operator ------------------------------------------------------------------------------------------

template <typename T>
void run(const Layer& l, const Tensors<T>& t, const std::vector<Span>& one, const std::vector<Span>& more,
         bool matrix_bfloat16) {
  if (!one.empty()) decode<T>(l, t, one);
  if (more.empty()) return;
  if (std::is_same_v<T, BFloat16> && matrix_bfloat16)
    prefill<T, BFloat16>(l, t, more);
  else
    prefill<T, float>(l, t, more);
}

void attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, at::Tensor& out,
            const at::Tensor& spans, const at::Tensor& table, double scaling, int64_t window, double softcap,
            bool matrix_bfloat16) {
  TORCH_CHECK(query.dim() == 3 && query.stride(2) == 1 && keys.is_contiguous() && values.is_contiguous());
  TORCH_CHECK(out.is_contiguous() && spans.is_contiguous() && table.is_contiguous());
  TORCH_CHECK(keys.scalar_type() == query.scalar_type() && values.scalar_type() == query.scalar_type());
  const Layer layer{keys.size(2), query.size(1) / keys.size(2), keys.size(3), values.size(3), keys.size(1), window,
                    float(scaling), float(softcap)};
  std::vector<Span> one, more;
  const int64_t* s = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); ++i, s += 4) (s[1] == 1 ? one : more).push_back({s[0], s[1], s[2], s[3]});
  const auto go = [&](auto zero) {
    using T = decltype(zero);
    const Tensors<T> tensors{query.const_data_ptr<T>(), keys.const_data_ptr<T>(), values.const_data_ptr<T>(),
                             out.mutable_data_ptr<T>(), query.stride(0), query.stride(1),
                             table.const_data_ptr<int64_t>()};
    run<T>(layer, tensors, one, more, matrix_bfloat16);
  };
  if (query.scalar_type() == at::kBFloat16) {
    go(BFloat16());
  } else {
    TORCH_CHECK(query.scalar_type() == at::kFloat);
    go(0.0f);
  }
}

}  // namespace

TORCH_LIBRARY(pie, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor spans, Tensor table, "
      "float scaling, int window, float softcap, bool matrix_bfloat16) -> ()",
      &attend);
}
