// The shared expert's gate and up projections. They depend on no choice, so they are made while one block selects and the
// memory would be idle: their weights are on the way before the wait, all of them where a row has up to 2,560 values.
#pragma once
#include "gemm.cuh"

constexpr int SHARED_AHEAD = 5;  // chunks of K, side by side, that each of up to 16 warps asks for at once

// Rows [*, width], gate_up [2 inner, width] -> mid [*, pitch], rows of `inner` values. ahead, bytes: asked for, in as many
// pieces as there are tiles.
struct SharedExpert {
  const bf16* gate_up;
  bf16* mid;
  int inner, pitch;
  float limit;
  const u8* ahead;
  int bytes, live, width;

  __device__ __forceinline__ int tiles() const { return (inner + 7) / 8; }
};

// A block's tile of 8 gate and 8 up rows. x: as the router's. Shared: warps · 8 NT · PITCH floats.
template <int NT, class Source>
__device__ __forceinline__ void shared_tile(Source& x, const SharedExpert& to, int tile) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, group = threadIdx.x % WARP / 4;
  const int hop = warps * SHARED_AHEAD * CHUNK;
  int k = warp * SHARED_AHEAD * CHUNK + threadIdx.x % 4 * 8;
  const Rows rows = gate_up_rows(to.gate_up, to.inner, to.width, tile, group);
  Chunk w[SHARED_AHEAD];
  uint4 in[SHARED_AHEAD][NT] = {};  // zeros stay where a lane has no values of K
#pragma unroll
  for (int s = 0; s < SHARED_AHEAD; ++s) load_chunk(w[s], rows, k + s * CHUNK, to.width);
  if (threadIdx.x == 0) {
    const int piece = (to.bytes / 16 + to.tiles() - 1) / to.tiles() * 16, left = to.bytes - tile * piece;
    if (left > 0) prefetch_l2(to.ahead + tile * piece, u32(min(left, piece)));
  }
  int token[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int at = n * 8 + group;
    token[n] = (at < to.live ? at : 0) * to.width + k;
    settle_here(token[n]);
  }
  const Own<NT, 8> own;
  const int row = tile * 8 + own.value;
  const u32 zero = u32(to.live) / 32;  // see multiply
  int stored = row < to.inner ? to.live : 0;
  settle_here(stored);
  x.ask();
  let_next_start_early();
  wait_for_producer();
  x.make(1 + tile);
  float sums[NT][4] = {}, more[NT][4] = {};
  for (int done = hop;; done += hop) {
#pragma unroll
    for (int s = 0; s < SHARED_AHEAD; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) x.take(in[s][n], token[n] + s * CHUNK, k + s * CHUNK < to.width);
    }
#pragma unroll
    for (int s = 0; s < SHARED_AHEAD; ++s) multiply(sums, more, w[s], in[s], zero);
    if (done >= to.width) break;
    k += hop;
#pragma unroll
    for (int s = 0; s < SHARED_AHEAD; ++s) load_chunk(w[s], rows, k + s * CHUNK, to.width);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      token[n] += hop;
#pragma unroll
      for (int s = 0; s < SHARED_AHEAD; ++s) in[s][n] = make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] += more[n][i];
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared)};
  all.put(warp, sums);
  __syncthreads();
  own.each(stored, [&](int token, int place) {
    const float2 sum = all.at(place, own.up(token));
    to.mid[token * to.pitch + row] = to_bf16(swiglu(sum.x, sum.y, to.limit));
  });
}
