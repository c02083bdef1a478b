// The one small-M matrix product: weights [N, K] row-major times at most 16 rows x [16, K], both bf16, fp32 sums.
//
// Weights are the 16-row operand of the tensor-core instruction, tokens its 8 columns. A warp takes 32 values of K at
// a time: lane (g, t) loads the 16 bytes at k0 + 8t of weight rows g and g+8 and of token g. The instruction wants
// other k's in those registers, but a sum over k may be permuted as long as both operands are permuted alike:
// registers 0, 1 of each 16 bytes feed a first instruction, 2, 3 a second. So weights need no second layout.
//
// Most weights take the way through a ring in shared memory (stream.cuh). Here are the fragments, and loads that go
// straight to registers, for the router. Kernels around those say __launch_bounds__(512, 1): without the 1 the assembler
// saves registers by waiting for one load after the other (seen in the machine code of sm_90, also for loads that the
// source issues together).
#pragma once
#include "arch.cuh"

constexpr int CHUNK = 32;  // values of K that a warp takes at a time: 1 KB of weights
constexpr int PITCH = 20;  // floats from token to token in the warps' sums: no bank conflicts when they are written

// This lane's two weight rows. One that a tile or the matrix has not is not loaded: its registers hold anything, and
// what becomes of them is never stored. Tokens past the live ones are the first one again, and as little stored.
struct Rows {
  const bf16* low;
  const bf16* high;
  bool has_low = true, has_high = true;
};

struct Chunk {
  uint4 low, high;
};

template <int NT>
__device__ __forceinline__ void multiply(float (&sums)[NT][4], const Chunk& w, const uint4 (&x)[NT]) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    mma_bf16(sums[n], w.low.x, w.high.x, w.low.y, w.high.y, x[n].x, x[n].y);
    mma_bf16(sums[n], w.low.z, w.high.z, w.low.w, w.high.w, x[n].z, x[n].w);
  }
}

// Tokens: the first `rows` of x [*, width], pitch values apart.
struct Tokens {
  const bf16* x;
  int width, pitch, rows;
};

// The lane's values of k up to k + 7. Past the width it is the row's beginning: load_tokens gives zeros there.
__device__ __forceinline__ void load_chunk(Chunk& to, const Rows& rows, int k, int width, bool live) {
  const int at = k < width ? k : 0;
  load_weights_into(to.low, rows.low + at, live && rows.has_low);
  load_weights_into(to.high, rows.high + at, live && rows.has_high);
}

template <int NT>
__device__ __forceinline__ void load_tokens(uint4 (&to)[NT], const Tokens& tokens, int k) {
  const int group = threadIdx.x % WARP / 4;
  const bool inside = k < tokens.width;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int token = n * 8 + group;
    const bf16* from = tokens.x + (token < tokens.rows ? token : 0) * tokens.pitch + (inside ? k : 0);
    const uint4 v = load_activations(from);
    to[n] = inside ? v : make_uint4(0, 0, 0, 0);
  }
}

// What all warps summed for one tile: at(token, row) adds them in the order of the warps.
template <int NT>
struct Sums {
  float* all;

  __device__ __forceinline__ void put(int warp, const float (&sums)[NT][4]) {
    const int lane = threadIdx.x % WARP, group = lane / 4, pair = lane % 4 * 2;
    float* to = all + warp * NT * 8 * PITCH;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(n * 8 + pair + i % 2) * PITCH + group + i / 2 * 8] = sums[n][i];
    }
  }

  __device__ __forceinline__ float at(int token, int row) const {
    float total = 0.0f;
    for (int warp = 0; warp < blockDim.x / WARP; ++warp) total += all[(warp * NT * 8 + token) * PITCH + row];
    return total;
  }
};

// Bytes of shared memory: two sets of sums, so that one barrier a tile is enough.
template <int NT>
__device__ __forceinline__ float* sums_of(float* shared, int parity) {
  return shared + parity * (blockDim.x / WARP) * NT * 8 * PITCH;
}

// SiLU(gate) · up; with a limit the gate is cut after SiLU from above, up on both sides.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  float activated = silu(gate);
  if (limit > 0.0f) {
    // comparisons, not fminf: a NaN has to reach the verdict
    activated = activated > limit ? limit : activated;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return activated * up;
}
