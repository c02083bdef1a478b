// The router's product: little of K a block, so that a warp's weights are all on their way before the wait.
#pragma once
#include "gemm.cuh"
#include "norm.cuh"

// Rows x [*, k] as an earlier kernel left them.
struct GivenRows {
  static constexpr bool PADDED = false;
  const bf16* x;

  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void make(int) {}
  __device__ __forceinline__ uint4 at(int offset) const { return load_activations(x + offset); }
  // The values at an offset, or what `to` holds where there are none.
  __device__ __forceinline__ void take(uint4& to, int offset, bool inside) const {
    load_activations_into(to, x + offset, inside);
  }
};

// The tokens of one block: k values each, `once` chunks of them.
template <int NT>
struct RouterTokens {
  int k, once, live, column, nothing;

  // Where a warp's tokens of one chunk lie: offset in x by token, and whether there are any. Past the end: zeros, which
  // `nothing` may be the place of.
  __device__ __forceinline__ bool place(int (&offset)[NT], int chunk, int end) const {
    const int form = (chunk >= once) + (chunk >= 2 * once), at = (chunk - form * once) * CHUNK + column;
    const bool inside = chunk < end && at < k;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + threadIdx.x % WARP / 4;
      offset[n] = (token < live ? token : 0) * k + (inside ? at : nothing);
      settle_here(offset[n]);
    }
    return inside;
  }
};

// x, rows [*, k], · w [n, width]^T -> out [parts, ROW_TILE, n] fp32, parts of the sum over K, one or two. width: k, or up to
// three forms of the weight side by side, each of k values rounded up to a chunk, which all meet the same tokens. A
// block has 16 rows of w and one part.
template <int NT, class Source>
__device__ __forceinline__ void router_part(
    Source& x, const bf16* w, float* out, int live, int n, int k, int width) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int column = lane % 4 * 8, chunks = (width + CHUNK - 1) / CHUNK;
  const int tile = blockIdx.x, per = (chunks + gridDim.y - 1) >> (gridDim.y - 1);
  const int first = blockIdx.y * per, end = min(chunks, first + per);
  const Rows rows = Matrix{w, n, width, {1, 0}}.rows(tile, lane / 4);
  const RouterTokens<NT> tokens = {k, (k + CHUNK - 1) / CHUNK, live, column, Source::PADDED ? k : 0};
  int chunk = first + warp;
  Chunk ring[DEPTH];
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) load_chunk(ring[s], rows, (chunk + s * warps) * CHUNK + column, width);
  int offset[DEPTH][NT];
  bool inside[DEPTH];
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) inside[s] = tokens.place(offset[s], chunk + s * warps, end);
  const Own<NT, 16> own;
  const int row = tile * 16 + own.value;
  int stored = row < n ? live : 0, begin = blockIdx.y * ROW_TILE * n + row;
  settle_here(stored), settle_here(begin);
  x.ask();
  let_next_start_early();
  wait_for_producer();
  x.make(blockIdx.x + blockIdx.y);
  float sums[DEPTH][NT][4] = {};
  while (true) {
    uint4 in[DEPTH][NT];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) in[s][n] = x.at(offset[s][n]);
    }
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) in[s][n] = Source::PADDED || inside[s] ? in[s][n] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) multiply(sums[s], ring[s], in[s]);
    chunk += warps * DEPTH;
    if (chunk - warp >= end) break;
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
      load_chunk(ring[s], rows, (chunk + s * warps) * CHUNK + column, width);
      inside[s] = tokens.place(offset[s], chunk + s * warps, end);
    }
  }
#pragma unroll
  for (int t = 0; t < NT; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][t][i] = (sums[0][t][i] + sums[1][t][i]) + (sums[2][t][i] + sums[3][t][i]);
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared)};
  all.put(warp, sums[0]);
  __syncthreads();
  own.each(stored, [&](int token, int at) { out[begin + token * n] = all.at(at); });
}
