// The one small-M matrix product: weights [N, K] row-major times at most 16 rows x [16, K], both bf16, fp32 sums.
//
// Weights are the 16-row operand of the tensor-core instruction, tokens its 8 columns. A warp takes 32 values of K at
// a time: lane (g, t) loads the 16 bytes at k0 + 8t of weight rows g and g+8 and of token g. The instruction wants
// other k's in those registers, but a sum over k may be permuted as long as both operands are permuted alike:
// registers 0, 1 of each 16 bytes feed a first instruction, 2, 3 a second. So weights go from memory straight into
// fragments.
//
// Kernels around it say __launch_bounds__(512, 1): without the 1 the assembler saves registers by waiting for one
// load after the other (seen in the machine code of sm_90, also for loads that the source issues together).
//
// The warps of a block take chunks of K in turn; their sums meet in shared memory in the order of the warps. How many
// warps there are follows from the shape and the GPU, never from the number of rows: a row's bits are its own.
#pragma once
#include "arch.cuh"

constexpr int CHUNK = 32;  // values of K that a warp takes at a time: 1 KB of weights
constexpr int DEPTH = 4;   // chunks that each warp keeps in flight
constexpr int PITCH = 20;  // floats from token to token in the warps' sums: no bank conflicts when they are written

// This lane's two weight rows. Rows past the end of a matrix are its first one again: loads stay unconditional, and
// what becomes of them is never stored. The same holds for tokens past the live ones.
struct Rows {
  const bf16* low;
  const bf16* high;
};

struct Chunk {
  uint4 low, high;
};

// The lane's values of k up to k + 7. Past the width it is the row's beginning: load_tokens gives zeros there.
__device__ __forceinline__ void load_chunk(Chunk& to, const Rows& rows, int k, int width, bool live) {
  const int at = k < width ? k : 0;
  load_weights_into(to.low, rows.low + at, live);
  load_weights_into(to.high, rows.high + at, live);
}

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

// No factor on the tokens.
struct Plain {
  static constexpr bool SCALED = false;
  __device__ __forceinline__ void prepare() const {}
  __device__ __forceinline__ float of(int, int) const { return 1.0f; }
};

// Walk this block's tiles. Source: first(), step, width (of a weight row), early(tile): may its weights be loaded
// before the wait; end(): called after the wait; rows(tile, g). WRAP: a weight row is several parts side by side,
// each as wide as the tokens rounded up to a chunk, and each meets the same tokens. Epilogue: operator()(tile, Sums)
// by all threads after a barrier, finish() at the end. Shared memory: sums_of.
template <int NT, bool WRAP, class Source, class Factor, class Epilogue>
__device__ __forceinline__ void stream_tiles(
    const Source& source, const Tokens& tokens, const Factor& factor, Epilogue& epilogue) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int group = lane / 4, column = lane % 4 * 8;
  const int chunks = (source.width + CHUNK - 1) / CHUNK;
  const int batches = (chunks + warps * DEPTH - 1) / (warps * DEPTH);
  int tile = source.first();
  Chunk ring[DEPTH];
  Rows rows;
  const bool early = source.early(tile);
  if (early) {
    rows = source.rows(tile, group);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) load_chunk(ring[s], rows, (s * warps + warp) * CHUNK + column, source.width, true);
  }
  wait_for_producer();
  let_next_start();
  const int end = source.end();
  if (!early && tile < end) {
    rows = source.rows(tile, group);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) load_chunk(ring[s], rows, (s * warps + warp) * CHUNK + column, source.width, true);
  }
  factor.prepare();
  float sums[NT][4] = {};
  for (int parity = 0; tile < end; parity ^= 1) {
    for (int batch = 0; batch < batches; ++batch) {
      uint4 x[DEPTH][NT];
#pragma unroll
      for (int s = 0; s < DEPTH; ++s) {
        int chunk = (batch * DEPTH + s) * warps + warp;
        if constexpr (WRAP) {
          const int once = (tokens.width + CHUNK - 1) / CHUNK;
          chunk = chunk < chunks ? chunk % once : once;  // past the weights: zeros
        }
        load_tokens(x[s], tokens, chunk * CHUNK + column);
      }
      const bool last = batch + 1 == batches;
      const bool more = !last || tile + source.step < end;
      if (last && more) rows = source.rows(tile + source.step, group);
      const int ahead = last ? 0 : batch + 1;
#pragma unroll
      for (int s = 0; s < DEPTH; ++s) {
        if constexpr (Factor::SCALED) {
          float fresh[NT][4] = {};
          multiply(fresh, ring[s], x[s]);
          const int k = ((batch * DEPTH + s) * warps + warp) * CHUNK;
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] += factor.of(n * 8 + lane % 4 * 2 + i % 2, k) * fresh[n][i];
          }
        } else {
          multiply(sums, ring[s], x[s]);
        }
        load_chunk(ring[s], rows, ((ahead * DEPTH + s) * warps + warp) * CHUNK + column, source.width, more);
      }
    }
    Sums<NT> all = {sums_of<NT>(reinterpret_cast<float*>(shared), parity)};
    all.put(warp, sums);
    __syncthreads();
    epilogue(tile, all);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    }
    tile += source.step;
  }
  epilogue.finish();
}

// Tiles of 16 rows of one matrix [n, width]; block b has tiles b * per up to (b + 1) * per.
struct Matrix {
  const bf16* weight;
  int n, width, per;
  static constexpr int step = 1;

  __device__ __forceinline__ int first() const { return blockIdx.x * per; }
  __device__ __forceinline__ int end() const { return min((n + 15) / 16, first() + per); }
  __device__ __forceinline__ bool early(int) const { return true; }
  __device__ __forceinline__ const bf16* row(int at) const { return weight + i64(at < n ? at : 0) * width; }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    return {row(tile * 16 + group), row(tile * 16 + group + 8)};
  }
};

// Eight gate rows and the eight matching up rows of gate_up [2 inner, width] make a tile: SwiGLU needs both at once,
// and tiles of half the bytes balance better over the machine than 16 + 16.
__device__ __forceinline__ Rows gate_up_rows(const bf16* weight, int inner, int width, int tile, int group) {
  const int at = tile * 8 + group < inner ? tile * 8 + group : 0;
  return {weight + i64(at) * width, weight + (i64(inner) + at) * width};
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
