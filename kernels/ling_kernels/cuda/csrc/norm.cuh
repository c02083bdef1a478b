// What kernels that hold a row of activations share: eight bf16 values a thread, and sums over a block.
#pragma once
#include "arch.cuh"

// Sum over the threads of a block of full warps, by warp and then in the order of the warps; all threads get it. count: of
// the first so many warps, where the others have zeros; 0: of all.
__device__ __forceinline__ float block_sum(float x, float* warps, int count = 0) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  if (count == 0) count = blockDim.x / WARP;
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

// RMSNorm(row) · weight of a row of which each thread has eight values, zeros from the width on: its bits follow from the
// width alone, whatever other threads the block has. each: 1 / width. warps: a word of shared memory for each warp, of
// which `count` have a part of the row (0: all).
__device__ __forceinline__ uint4 normed(
    float (&value)[8], const uint4& weight, float each, float eps, float* warps, int count = 0) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += value[i] * value[i];
  const float factor = rsqrtf(block_sum(squares, warps, count) * each + eps);
  float scale[8];
  unpack(scale, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] *= factor * scale[i];
  return pack(value);
}

// The residual stream where `add` comes to `value`, which becomes what the stream then holds: rounded.
__device__ __forceinline__ uint4 added(float (&value)[8], const float (&add)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] += add[i];
  const uint4 rounded = pack(value);
  unpack(value, rounded);
  return rounded;
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

// One row that is made here, in every block: sum, rounding and norm are exchange_norm's, bit by bit, and so is what may be
// read when. The first block writes it for the kernels that come after. Blocks of k / 8 threads or more.
struct RowToNorm {
  static constexpr bool PADDED = true;  // zeros lie behind it
  Partial partial;
  const bf16* x;
  const bf16* weight;
  bf16* x_out;
  bf16* h;
  int k;
  float eps;
  bf16* row;  // shared: k + 8 values, and a word for each warp
  float* warps;
  uint4 old, scale;
  float each;

  __device__ __forceinline__ bool inside() const { return threadIdx.x * 8 < k; }

  __device__ __forceinline__ void ask() {
    scale = load_weights(weight + threadIdx.x * 8, inside());
    old = make_uint4(0, 0, 0, 0);
    if (inside()) old = load_settled16(x + threadIdx.x * 8);
    each = 1.0f / float(k);
    settle_here(each);
    if (threadIdx.x == 0) *reinterpret_cast<uint4*>(row + k) = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void make(int block) {
    const int at = threadIdx.x * 8;
    float add[8], value[8];
    partial.read(add, at, inside());
    unpack(value, old);
    const uint4 total = added(value, add);
    const uint4 out = normed(value, scale, each, eps, warps, (k + 255) / 256);
    if (inside()) {
      *reinterpret_cast<uint4*>(row + at) = out;
      if (block == 0) {
        *reinterpret_cast<uint4*>(x_out + at) = total;
        *reinterpret_cast<uint4*>(h + at) = out;
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ uint4 at(int offset) const { return *reinterpret_cast<const uint4*>(row + offset); }
};
