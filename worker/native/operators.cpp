// The operators that torch calls: shapes are checked here, and spans sorted.

#include "attention.h"
#include "layer.h"

namespace {

struct Spans {
  std::vector<Span> one, more;  // of one token, of several
};

Spans sorted(const at::Tensor& spans) {
  TORCH_CHECK(spans.is_contiguous() && spans.scalar_type() == at::kLong && spans.size(1) == 4);
  Spans out;
  const int64_t* s = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); ++i, s += 4)
    (s[1] == 1 ? out.one : out.more).push_back({s[0], s[1], s[2], s[3]});
  return out;
}

void attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, at::Tensor& out,
            const at::Tensor& spans, const at::Tensor& table, double scaling, int64_t window, double softcap,
            bool matrix_bfloat16) {
  TORCH_CHECK(query.dim() == 3 && query.stride(2) == 1 && keys.is_contiguous() && values.is_contiguous());
  TORCH_CHECK(std::max(keys.size(3), values.size(3)) <= 16 * kMostLanes);
  TORCH_CHECK(out.is_contiguous() && table.is_contiguous());
  TORCH_CHECK(keys.scalar_type() == query.scalar_type() && values.scalar_type() == query.scalar_type());
  const Layer layer{keys.size(2), query.size(1) / keys.size(2), keys.size(3), values.size(3), keys.size(1), window,
                    float(scaling), float(softcap)};
  const auto [one, more] = sorted(spans);
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

template <typename T>
const T* data(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous());
  return tensor.const_data_ptr<T>();
}
template <typename T>
const T* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}

at::Tensor decoder_layer_op(const at::Tensor& hidden, const at::Tensor& input_norm, const at::Tensor& qkv,
                            const std::optional<at::Tensor>& qkv_bias, const std::optional<at::Tensor>& query_norm,
                            const std::optional<at::Tensor>& key_norm, const at::Tensor& output,
                            const std::optional<at::Tensor>& output_bias, const at::Tensor& post_norm,
                            const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& cos,
                            const at::Tensor& sin, at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                            const at::Tensor& spans, const at::Tensor& table, double epsilon, double scaling,
                            int64_t window) {
  at::Tensor out = hidden.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  const int64_t kv_heads = keys.size(2), dim = keys.size(3), heads = qkv.size(0) - 2 * kv_heads;
  const Shape shape{hidden.numel() / hidden.size(-1), hidden.size(-1), gate_up.size(0) * gate_up.size(2) / 2,
                    float(epsilon)};
  TORCH_CHECK(heads > 0 && heads % kv_heads == 0 && qkv.size(2) == dim && values.size(3) == dim);
  TORCH_CHECK(dim % 2 == 0 && dim <= 16 * kMostLanes);
  TORCH_CHECK(slots.numel() == shape.rows && cos.numel() == shape.rows * dim && sin.numel() == shape.rows * dim);
  TORCH_CHECK(output.size(0) * output.size(2) == shape.hidden && down.size(0) * down.size(2) == shape.hidden);
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && slots.is_contiguous() && table.is_contiguous());
  const auto depth = [](const at::Tensor& weight) { return weight.size(1) * weight.size(3); };
  TORCH_CHECK(depth(qkv) == shape.hidden && depth(gate_up) == shape.hidden);
  TORCH_CHECK(depth(output) == heads * dim && depth(down) == shape.inner);
  TORCH_CHECK(input_norm.numel() == shape.hidden && post_norm.numel() == shape.hidden);
  TORCH_CHECK(!qkv_bias || qkv_bias->numel() == (heads + 2 * kv_heads) * dim);
  TORCH_CHECK(!output_bias || output_bias->numel() == shape.hidden);
  TORCH_CHECK((!query_norm || query_norm->numel() == dim) && (!key_norm || key_norm->numel() == dim));
  const Layer layer{kv_heads, heads / kv_heads, dim, dim, keys.size(1), window, float(scaling), 0.0f};
  const auto [one, more] = sorted(spans);
  const auto go = [&](auto zero) {
    using T = decltype(zero);
    const Weights<T> weights{data<T>(input_norm), data<T>(qkv), data<T>(qkv_bias), data<T>(query_norm),
                             data<T>(key_norm), data<T>(output), data<T>(output_bias), data<T>(post_norm),
                             data<T>(gate_up), data<T>(down), output.size(2), gate_up.size(2), down.size(2),
                             data<T>(cos), data<T>(sin)};
    decoder_layer<T>(shape, weights, layer, one, more, table.const_data_ptr<int64_t>(),
                     slots.const_data_ptr<int64_t>(), keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>(),
                     out.mutable_data_ptr<float>());
  };
  if (qkv.scalar_type() == at::kBFloat16) {
    go(BFloat16());
  } else {
    TORCH_CHECK(qkv.scalar_type() == at::kFloat);
    go(0.0f);
  }
  return out;
}

at::Tensor linear(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  bool to_float32) {
  const int64_t count = rows.numel() / rows.size(-1), depth = rows.size(-1), panels = weight.size(0),
                width = weight.size(2), size = panels * width;
  TORCH_CHECK(weight.size(1) * weight.size(3) == depth && (!bias || bias->numel() == size));
  auto sizes = rows.sizes().vec();
  sizes.back() = size;
  at::Tensor out = at::empty(sizes, to_float32 ? rows.options().dtype(at::kFloat) : rows.options());
  if (!count) return out;
  const int64_t height = padded(count);
  const at::Tensor source = height == count ? rows.contiguous() : at::zeros({height, depth}, rows.options());
  if (height != count) source.narrow(0, 0, count).copy_(rows.reshape({count, depth}));
  const auto go = [&](auto zero, auto out_zero) {
    using T = decltype(zero);
    using Out = decltype(out_zero);
    const T* added = data<T>(bias);
    Out* to = out.mutable_data_ptr<Out>();
    const auto finish = [&](int64_t panel, int64_t first, int64_t rows_of_it, float* product) {
      for (int64_t r = 0; r < rows_of_it; ++r)
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
          narrow_any(product[r * width + i] + (added ? widen(added[panel * width + i]) : 0.0f),
                     to[(first + r) * size + panel * width + i]);
    };
    each_panel(count, height, depth, panels, width, data<T>(source), data<T>(weight), finish);
  };
  if (rows.scalar_type() == at::kBFloat16) {
    if (to_float32)
      go(BFloat16(), 0.0f);
    else
      go(BFloat16(), BFloat16());
  } else {
    TORCH_CHECK(rows.scalar_type() == at::kFloat);
    go(0.0f, 0.0f);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(pie, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor spans, Tensor table, "
      "float scaling, int window, float softcap, bool matrix_bfloat16) -> ()",
      &attend);
  m.def(
      "decoder_layer(Tensor hidden, Tensor input_norm, Tensor qkv, Tensor? qkv_bias, Tensor? query_norm, "
      "Tensor? key_norm, Tensor output, Tensor? output_bias, Tensor post_norm, Tensor gate_up, Tensor down, "
      "Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor spans, Tensor table, "
      "float epsilon, float scaling, int window) -> Tensor",
      &decoder_layer_op);
  m.def("linear(Tensor rows, Tensor weight, Tensor? bias, bool to_float32) -> Tensor", &linear);
}
