// What kernels that hold a row of activations share: eight bf16 values a thread, and sums over a block.
#pragma once
#include "arch.cuh"

// Sum over the threads of a block of full warps, by warp and then in the order of the warps; all threads get it. warps:
// WARP words of shared memory, 16-byte aligned. count: of the first so many warps, where the others have zeros; 0: of all.
__device__ __forceinline__ float block_sum(float x, float* warps, int count = 0) {
  const int present = blockDim.x / WARP;
  if (threadIdx.x >= present && threadIdx.x < WARP) warps[threadIdx.x] = 0.0f;
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  if (count == 0) count = present;
  float total = 0.0f;
  int first = 0;
#pragma unroll 1
  do {  // read together, added in order
    const float4 a = *reinterpret_cast<const float4*>(warps + first);
    const float4 b = *reinterpret_cast<const float4*>(warps + first + 4);
    const float some[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 8; ++w) total += some[w];
    first += 8;
  } while (first < count);
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

// RMSNorm(row) · weight of a row of which each thread `inside` the width has eight values: its bits follow from the width
// alone, whatever other threads the block has. each: 1 / width. warps, count: as for block_sum.
__device__ __forceinline__ uint4 normed(
    float (&value)[8], bool inside, const uint4& weight, float each, float eps, float* warps, int count = 0) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += value[i] * value[i];
  const float factor = rsqrtf(block_sum(inside ? squares : 0.0f, warps, count) * each + eps);
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
  static constexpr int TOGETHER = 4;

  // Where a thread's eight values lie in the first parts: settled before the wait, which their loads come right after.
  struct Places {
    const float* part[TOGETHER];
  };
  __device__ __forceinline__ const float* place(int part, i64 base) const {
    return static_cast<const float*>(at) + base + i64(min(part, parts - 1)) * pitch;
  }
  __device__ __forceinline__ Places places(i64 base, bool inside) const {
    Places to;
#pragma unroll
    for (int p = 0; p < TOGETHER; ++p) {
      to.part[p] = place(p, inside ? base : 0);
      settle_here(to.part[p]);
    }
    return to;
  }

  // Adds the next `count` parts. All loads are under way before the first is used: also where there are fewer, for the
  // assembler sends a load no sooner than the branch that needs it.
  __device__ __forceinline__ static void add(float (&sum)[8], const Places& from, int count) {
    uint4 low[TOGETHER], high[TOGETHER];
#pragma unroll
    for (int p = 0; p < TOGETHER; ++p) low[p] = load_activations(from.part[p]), high[p] = load_activations(from.part[p] + 4);
    if (count < TOGETHER) {
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p) {
        const bool there = p < count;
        low[p] = there ? low[p] : make_uint4(0, 0, 0, 0), high[p] = there ? high[p] : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int p = 0; p < TOGETHER; ++p) {
      const u32 words[8] = {low[p].x, low[p].y, low[p].z, low[p].w, high[p].x, high[p].y, high[p].z, high[p].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += __uint_as_float(words[i]);
    }
  }

  // The eight values at `base` of a row, in fp32; anything past the width.
  __device__ __forceinline__ void read(float (&sum)[8], const Places& first, i64 base, bool inside) const {
    if (parts == 0) {
      unpack(sum, load16(static_cast<const bf16*>(at) + base, inside));
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    add(sum, first, parts);
#pragma unroll 1
    for (int done = TOGETHER; done < parts; done += TOGETHER) {
      Places next;
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p) next.part[p] = place(done + p, inside ? base : 0);
      add(sum, next, parts - done);
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
  Partial::Places places;

  __device__ __forceinline__ bool inside() const { return threadIdx.x * 8 < k; }

  __device__ __forceinline__ void ask() {
    scale = load_weights(weight + threadIdx.x * 8, inside());
    old = make_uint4(0, 0, 0, 0);
    if (inside()) old = load_settled16(x + threadIdx.x * 8);
    each = 1.0f / float(k);
    settle_here(each);
    places = partial.places(threadIdx.x * 8, inside());
    if (threadIdx.x == 0) *reinterpret_cast<uint4*>(row + k) = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void make(int block) {
    const int at = threadIdx.x * 8;
    float add[8], value[8];
    partial.read(add, places, at, inside());
    unpack(value, old);
    const uint4 total = added(value, add);
    const uint4 out = normed(value, inside(), scale, each, eps, warps, (k + 255) / 256);
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
  __device__ __forceinline__ void take(uint4& to, int offset, bool inside) const { to = at(inside ? offset : k); }
};
