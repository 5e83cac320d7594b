// Attention over pages on a CPU: float32 and bfloat16, causal and sliding windows, grouped queries, a softcap.

#pragma once

#include "decode.h"
#include "prefill.h"

namespace {

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

}  // namespace
