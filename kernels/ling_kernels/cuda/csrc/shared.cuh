// The shared expert's gate and up projections. They depend on no choice, so they are made where the memory would be idle:
// beside the router's product of one row, which waits for a norm, or beside the selection of several. Their weights are on
// the way before the wait.
#pragma once
#include "gemm.cuh"

// Rows [*, width], gate_up [2 inner, width] -> mid [*, pitch], rows of `inner` values. each: chunks of K that a warp has,
// side by side; it follows from the width and the router's warps, never from the rows.
struct SharedExpert {
  const bf16* gate_up;
  bf16* mid;
  int inner, pitch;
  float limit;
  int each, live, width;
};

// A block's tile of 8 gate and 8 up rows. x: as the router's. AHEAD: chunks that a warp asks for at once, on which no bit
// depends; ONE_TRIP: it has no more. Warps behind those that have any add zeros. Shared: warps · 8 NT · PITCH floats.
template <int NT, int AHEAD, bool ONE_TRIP, class Source>
__device__ __forceinline__ void shared_tile(Source& x, const SharedExpert& to, int tile) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, begin = warp * to.each * CHUNK;
  const int end = min(begin + to.each * CHUNK, to.width);
  int k = begin + threadIdx.x % 4 * 8, left = begin < end ? to.each : 0;
  const Rows rows = gate_up_rows(to.gate_up, to.inner, to.width, tile, group);
  Chunk w[AHEAD] = {};
  uint4 in[AHEAD][NT] = {};  // zeros stay where a lane has no values of K
  auto ask = [&] {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      const int at = k + s * CHUNK < end ? k + s * CHUNK : 0;
      load_weights_into(w[s].low, rows.low + at, s < left);
      load_weights_into(w[s].high, rows.high + at, s < left);
    }
  };
  ask();
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
  while (true) {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
      for (int n = 0; n < NT; ++n) x.take(in[s][n], token[n] + s * CHUNK, k + s * CHUNK < end);
    }
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) multiply(sums, more, w[s], in[s], zero);
    left -= AHEAD;
    if (ONE_TRIP || left <= 0) break;
    k += AHEAD * CHUNK;
    ask();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      token[n] += AHEAD * CHUNK;
#pragma unroll
      for (int s = 0; s < AHEAD; ++s) in[s][n] = make_uint4(0, 0, 0, 0);
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
    const float2 sum = all.both(place, own.up(token));
    to.mid[token * to.pitch + row] = to_bf16(swiglu(sum.x, sum.y, to.limit));
  });
}
