// What kernels that hold a row of activations share: eight bf16 values a thread, and sums over a block.
#pragma once
#include "arch.cuh"

// Sum over the threads of a block of full warps, by warp and then in the order of the warps; all threads get it.
__device__ __forceinline__ float block_sum(float x, float* warps) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  const int count = blockDim.x / WARP;
  float total = 0.0f;
  for (int first = 0; first < count; first += 8) {
    float some[8];  // read together, added in order
#pragma unroll
    for (int w = 0; w < 8; ++w) some[w] = first + w < count ? warps[first + w] : 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) total += some[w];
  }
  return total;
}

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low_float(words[i]), to[2 * i + 1] = high_float(words[i]);
}

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
  return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                    pack_bf16(from[6], from[7]));
}

// What is added to the residual stream: bf16 [rows, width] where parts is 0, or fp32 parts, `pitch` values from one to the
// next, that are summed in their order. at: may be null.
struct Partial {
  const void* at;
  int parts, pitch;

  // The eight values at `base` of a row, in fp32. All loads are under way before the first is used.
  __device__ __forceinline__ void read(float (&sum)[8], i64 base, bool inside) const {
    constexpr int TOGETHER = 4;
    if (parts == 0) {
      unpack(sum, load16(static_cast<const bf16*>(at) + base, inside));
      return;
    }
    const float* from = static_cast<const float*>(at) + (inside ? base : 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    for (int first = 0; first < parts; first += TOGETHER) {
      uint4 low[TOGETHER], high[TOGETHER];
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p) {
        const float* part = from + i64(min(first + p, parts - 1)) * pitch;
        low[p] = load_activations(part), high[p] = load_activations(part + 4);
      }
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p) {
        const bool there = inside && first + p < parts;
        const u32 words[8] = {low[p].x, low[p].y, low[p].z, low[p].w, high[p].x, high[p].y, high[p].z, high[p].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += there ? __uint_as_float(words[i]) : 0.0f;
      }
    }
  }
};
