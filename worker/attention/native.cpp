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
constexpr int64_t kChunk = 128;       // least slots of a chunk of a decoding sequence

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
  const bool alike = l.key_dim == l.value_dim;
  const auto step = alike && l.key_dim == 64    ? decode_chunk<T, 4>
                    : alike && l.key_dim == 128 ? decode_chunk<T, 8>
                                                : decode_chunk<T, 0>;
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
  TORCH_CHECK(std::max(keys.size(3), values.size(3)) <= 16 * kMostLanes);
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
