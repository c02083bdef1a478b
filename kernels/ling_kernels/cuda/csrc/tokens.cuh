// The other operand of the small-M product (gemm.cuh): where a block's tokens come from.
#pragma once
#include "blank.cuh"

// Tokens: the first `rows` of x [*, width], pitch values apart. ask() comes before the wait and make() after it, where a
// kernel makes its tokens itself. LOOKS: they may still be coming. The first are looked for by first(), which says whether
// one has not come, and the wait comes after their products, then waited().
struct Tokens {
  static constexpr bool LOOKS = false;
  const bf16* x;
  int width, pitch, rows;

  __device__ __forceinline__ static uint4 load(const bf16* from) { return load_activations(from); }
  __device__ __forceinline__ static bool first(uint4& to, const bf16* from) {
    to = load(from);
    return false;
  }
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void make() {}
  __device__ __forceinline__ void waited() const {}
};
struct TokensToCome : Tokens {
  static constexpr bool LOOKS = true;

  __device__ __forceinline__ static bool first(uint4& to, const bf16* from) {
    to = look16(from);
    return any_blank_half(to);
  }
};

template <int NT, class Input>
__device__ __forceinline__ void load_tokens(uint4 (&to)[NT], const Input& tokens, int k) {
  const int group = threadIdx.x % WARP / 4;
  const bool inside = k < tokens.width;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int token = n * 8 + group;
    const bf16* from = tokens.x + (token < tokens.rows ? token : 0) * tokens.pitch + (inside ? k : 0);
    const uint4 v = Input::load(from);
    to[n] = inside ? v : make_uint4(0, 0, 0, 0);
  }
}
