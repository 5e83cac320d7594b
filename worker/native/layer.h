// A decoder layer as one operation.
//
// Covers layers of the commonest shape: x += attention(norm(x)), x += down(silu(gate(norm(x))) * up(norm(x))),
// with RMS norms, rotary positions by halves and attention over pages; which model's layers are such is for
// `pie.worker.fusing` to find out.
//
// With few rows a step is as fast as its weights are read. Each weight lies in panels of columns that one thread
// goes through from end to end, and what follows a product (rotation, writing to a page, activation, residual) is
// done on a panel while it is in the first-level cache. With many rows the same keeps some hundreds of them in the
// cache for panel after panel. What goes from layer to layer is float32, and a value is rounded only where it is
// stored: as input of a product, as query, key or value.

#pragma once

#include "attention.h"

namespace {

struct Shape {
  int64_t rows, hidden, inner;
  float epsilon;
};

template <typename T>
struct Weights {
  const T *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias, *post_norm, *gate_up, *down;
  int64_t output_width, gate_up_width, down_width;
  const T *cos, *sin;
};

// Writes each row of `from` over its root mean square, times `weight`.
template <typename T>
void rms_norm(const float* from, const T* weight, int64_t rows, int64_t size, float epsilon, T* to) {
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = from + r * size;
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
      const float factor = 1.0f / std::sqrt(squares / size + epsilon);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i)
        narrow_any(widen(weight[i]) * (x[i] * factor), to[r * size + i]);
    }
  });
}

constexpr int64_t kRowBlock = 256;  // rows of one product: with 32 columns it stays in the first-level cache

// Returns how many rows a product is given: matrix instructions take sixteen at a time.
inline int64_t padded(int64_t rows) { return rows <= 4 ? rows : (rows + 15) / 16 * 16; }

// Computes `a` `[rows, depth]` times each panel `[depth / pair, width, pair]`, some rows at a time, and hands each
// product `[count, width]`, from row `first` on, to `finish` on the thread that made it. `a` has room for `height`
// rows.
template <typename T, typename F>
void each_panel(int64_t rows, int64_t height, int64_t depth, int64_t panels, int64_t width, const T* a,
                const T* weight, const F& finish) {
  constexpr bool pairs = sizeof(T) == 2;
  const int64_t tasks = panels * ((height + kRowBlock - 1) / kRowBlock);
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    thread_local std::vector<float> product;
    const int64_t most = std::min(height, kRowBlock) * width;
    if (int64_t(product.size()) < most) product.resize(most);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t panel = task % panels, first = task / panels * kRowBlock;
      at::native::cpublas::brgemm(std::min(height - first, kRowBlock), width, depth, depth, width, width, false,
                                  a + first * depth, weight + panel * depth * width, product.data(), pairs);
      finish(panel, first, std::min(rows - first, kRowBlock), product.data());
    }
    at::native::cpublas::brgemm_release(pairs);
  });
}

// Adds each column's bias, in place.
template <typename T>
void add_bias(float* product, int64_t rows, int64_t width, const T* bias) {
  for (int64_t r = 0; r < rows; ++r)
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) product[r * width + i] += widen(bias[i]);
}

template <typename T>
void project_and_store(const Shape& shape, const Weights<T>& w, const Layer& l, int64_t height, const T* normed,
                       T* query, T* keys, T* values, const int64_t* slots) {
  const int64_t heads = l.kv_heads * l.group, dim = l.key_dim, half = dim / 2;
  const int64_t panels = heads + 2 * l.kv_heads;
  const auto finish = [&](int64_t panel, int64_t first, int64_t count, float* product) {
    if (w.qkv_bias) add_bias(product, count, dim, w.qkv_bias + panel * dim);
    const T* norm = panel < heads ? w.query_norm : panel < heads + l.kv_heads ? w.key_norm : nullptr;
    for (int64_t r = first; r < first + count; ++r) {
      float* x = product + (r - first) * dim;
      if (norm) {
        float squares = 0.0f;
        for (int64_t i = 0; i < dim; ++i) squares += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(squares / dim + shape.epsilon);
        for (int64_t i = 0; i < dim; ++i) x[i] = widen(norm[i]) * (x[i] * factor);
      }
      if (panel >= heads + l.kv_heads) {
        T* out = values + (slots[r] * l.kv_heads + panel - heads - l.kv_heads) * dim;
        for (int64_t i = 0; i < dim; ++i) narrow_any(x[i], out[i]);
        continue;
      }
      T* out = panel < heads ? query + (r * heads + panel) * dim
                             : keys + (slots[r] * l.kv_heads + panel - heads) * dim;
      const T *cos = w.cos + r * dim, *sin = w.sin + r * dim;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        narrow_any(x[i] * widen(cos[i]) - x[i + half] * widen(sin[i]), out[i]);
        narrow_any(x[i + half] * widen(cos[i + half]) + x[i] * widen(sin[i + half]), out[i + half]);
      }
    }
  };
  each_panel(shape.rows, height, shape.hidden, panels, dim, normed, w.qkv, finish);
}

// x += from @ weight, `[rows, hidden]`.
template <typename T>
void project_and_add(const Shape& shape, int64_t height, int64_t depth, const T* from, const T* weight, int64_t width,
                     const T* bias, float* x) {
  const auto finish = [&](int64_t panel, int64_t first, int64_t count, float* product) {
    if (bias) add_bias(product, count, width, bias + panel * width);
    for (int64_t r = 0; r < count; ++r) {
      float* out = x + (first + r) * shape.hidden + panel * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) out[i] += product[r * width + i];
    }
  };
  each_panel(shape.rows, height, depth, shape.hidden / width, width, from, weight, finish);
}

template <typename T>
void gate(const Shape& shape, const Weights<T>& w, int64_t height, const T* normed, T* inner) {
  const int64_t width = w.gate_up_width, half = width / 2;
  const auto finish = [&](int64_t panel, int64_t first, int64_t count, float* product) {
    for (int64_t r = 0; r < count; ++r) {
      const float *g = product + r * width, *up = g + half;
      T* out = inner + (first + r) * shape.inner + panel * half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float e = exp_negative(-std::fabs(g[i]));
        const float silu = g[i] * (g[i] >= 0 ? 1.0f : e) / (1.0f + e);
        narrow_any(silu * up[i], out[i]);
      }
    }
  };
  each_panel(shape.rows, height, shape.hidden, shape.inner / half, width, normed, w.gate_up, finish);
}

template <typename T>
void decoder_layer(const Shape& shape, const Weights<T>& w, const Layer& l, const std::vector<Span>& one,
                   const std::vector<Span>& more, const int64_t* table, const int64_t* slots, T* keys, T* values, float* x) {
  const int64_t width = l.kv_heads * l.group * l.key_dim;
  const int64_t height = padded(shape.rows);
  // What padding rows hold goes into their own products alone, which nobody reads.
  thread_local std::vector<T> scratch;
  const int64_t size = height * (shape.hidden + 2 * width + shape.inner);
  if (int64_t(scratch.size()) < size) scratch.resize(size);
  T *normed = scratch.data(), *query = normed + height * shape.hidden, *attended = query + height * width,
    *inner = attended + height * width;
  rms_norm(x, w.input_norm, shape.rows, shape.hidden, shape.epsilon, normed);
  project_and_store(shape, w, l, height, normed, query, keys, values, slots);
  run<T>(l, {query, keys, values, attended, width, l.key_dim, table}, one, more, true);
  project_and_add(shape, height, width, attended, w.output, w.output_width, w.output_bias, x);
  rms_norm(x, w.post_norm, shape.rows, shape.hidden, shape.epsilon, normed);
  gate(shape, w, height, normed, inner);
  project_and_add<T>(shape, height, shape.inner, inner, w.down, w.down_width, nullptr, x);
}

}  // namespace
