// What kernels that hold a row of activations share: eight bf16 values a thread, and sums over a block.
#pragma once
#include "arch.cuh"

// Sum over the threads of a block of full warps, by warp and then in the order of the warps; all threads get it.
__device__ __forceinline__ float block_sum(float x, float* warps) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < blockDim.x / WARP; ++w) total += warps[w];
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
