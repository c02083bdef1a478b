// The router's product: little of K a block, so that a warp's weights are all on their way before the wait.
#pragma once
#include "gemm.cuh"

// The tokens of one block: k values each, `once` chunks of them.
template <int NT>
struct RouterTokens {
  int k, once, live, column;

  // Where a warp's tokens of one chunk lie: offset in x by token, and whether there are any. Past the end: zeros.
  __device__ __forceinline__ bool place(int (&offset)[NT], int chunk, int end) const {
    const int form = (chunk >= once) + (chunk >= 2 * once), at = (chunk - form * once) * CHUNK + column;
    const bool inside = chunk < end && at < k;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + threadIdx.x % WARP / 4;
      offset[n] = (token < live ? token : 0) * k + (inside ? at : 0);
      settle_here(offset[n]);
    }
    return inside;
  }
};

// x [*, k] · w [n, width]^T -> out [parts, ROW_TILE, n] fp32, parts of the sum over K, one or two. width: k, or up to
// three forms of the weight side by side, each of k values rounded up to a chunk, which all meet the same tokens. A
// block has 16 rows of w and one part.
template <int NT>
__device__ __forceinline__ void router_part(
    const bf16* x, const bf16* w, float* out, int live, int n, int k, int width) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int column = lane % 4 * 8, chunks = (width + CHUNK - 1) / CHUNK;
  const int tile = blockIdx.x, per = (chunks + gridDim.y - 1) >> (gridDim.y - 1);
  const int first = blockIdx.y * per, end = min(chunks, first + per);
  const Rows rows = Matrix{w, n, width, 1}.rows(tile, lane / 4);
  const RouterTokens<NT> tokens = {k, (k + CHUNK - 1) / CHUNK, live, column};
  int chunk = first + warp;
  Chunk ring[DEPTH];
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) load_chunk(ring[s], rows, (chunk + s * warps) * CHUNK + column, width);
  int offset[DEPTH][NT];
  bool inside[DEPTH];
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) inside[s] = tokens.place(offset[s], chunk + s * warps, end);
  let_next_start_early();
  wait_for_producer();
  float sums[DEPTH][NT][4] = {};
  while (true) {
    uint4 in[DEPTH][NT];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) in[s][n] = load_activations(x + offset[s][n]);
    }
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) in[s][n] = inside[s] ? in[s][n] : make_uint4(0, 0, 0, 0);
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
  for (int o = threadIdx.x; o < live * 16; o += blockDim.x) {
    const int token = o / 16, row = tile * 16 + o % 16;
    if (row < n) out[(blockIdx.y * ROW_TILE + token) * n + row] = all.at(token, o % 16);
  }
}
