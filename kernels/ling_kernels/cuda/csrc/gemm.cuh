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
// The warps of a block take batches of K in turn, DEPTH chunks side by side; their sums meet in shared memory in the order of the warps. How many
// warps there are follows from the shape and the GPU, never from the number of rows: a row's bits are its own.
#pragma once
#include "arch.cuh"

constexpr int CHUNK = 32;  // values of K that a warp takes at a time: 1 KB of weights
constexpr int DEPTH = 4;   // chunks that each warp keeps in flight
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

// A warp's batch of DEPTH chunks side by side. EXACT: rows are whole batches wide, so a batch lies in the row or past
// it, and its chunks have constant distances.
template <bool EXACT>
struct Batch {
  int first, width;  // this lane's first k; width of a row

  // The batch's place in a row; past the width the row's beginning.
  __device__ __forceinline__ int place() const { return first < width ? first : 0; }
  __device__ __forceinline__ void weights(Chunk& to, const Rows& rows, int s, bool live) const {
    if constexpr (EXACT) {
      load_weights_into(to.low, rows.low + place() + s * CHUNK, live && rows.has_low);
      load_weights_into(to.high, rows.high + place() + s * CHUNK, live && rows.has_high);
    } else {
      load_chunk(to, rows, first + s * CHUNK, width, live);
    }
  }
  template <int NT>
  __device__ __forceinline__ void load(uint4 (&to)[NT], const Tokens& tokens, int s) const {
    if constexpr (EXACT) {
      const int group = threadIdx.x % WARP / 4;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int token = n * 8 + group;
        const bf16* row = tokens.x + (token < tokens.rows ? token : 0) * tokens.pitch;
        to[n] = load_activations(row + place() + s * CHUNK);
        if (first >= width) to[n] = make_uint4(0, 0, 0, 0);
      }
    } else {
      load_tokens(to, tokens, first + s * CHUNK);
    }
  }
};

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

// Walk this block's tiles. Source: first(), end(), width (of a weight row), rows(tile, g), and ask_rest(columns): ask L2
// for what the ring does not take of the first tile, which has `columns` of each row, and for more. Epilogue:
// operator()(tile, Sums) by all threads after a barrier, finish() at the end. Shared memory: sums_of.
template <int NT, bool EXACT, class Source, class Factor, class Epilogue>
__device__ __forceinline__ void stream_tiles(
    const Source& source, const Tokens& tokens, const Factor& factor, Epilogue& epilogue, const Ahead& asked) {
  static_assert(EXACT || !Factor::SCALED, "a factor needs whole batches");
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int group = lane / 4, span = warps * DEPTH * CHUNK;
  const int batches = (source.width + span - 1) / span;
  auto batch_at = [&](int batch) {
    return Batch<EXACT>{batch * span + warp * DEPTH * CHUNK + lane % 4 * 8, source.width};
  };
  int tile = source.first();
  const int end = source.end();
  Chunk ring[DEPTH] = {};
  Rows rows = source.rows(tile, group);
  const auto start = batch_at(0);
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) start.weights(ring[s], rows, s, true);
  if (warp == warps - 1) {
    source.ask_rest(min(source.width, span));
    ask_ahead(asked, blockIdx.x, gridDim.x);
  }
  wait_for_producer();
  let_next_start();
  uint4 x[DEPTH][NT];
#pragma unroll
  for (int s = 0; s < DEPTH; ++s) start.load(x[s], tokens, s);
  factor.prepare();
  float sums[NT][4] = {};
  bool fresh_tokens = true;
#pragma unroll 1
  for (int parity = 0; tile < end; parity ^= 1) {
#pragma unroll 1
    for (int batch = 0; batch < batches; ++batch) {
      if (batches > 1 && !fresh_tokens) {  // one batch: all tiles meet the same ones
        const auto here = batch_at(batch);
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) here.load(x[s], tokens, s);
      }
      fresh_tokens = false;
      const bool last = batch + 1 == batches;
      const bool more = !last || tile + 1 < end;
      if (last && more) rows = source.rows(tile + 1, group);
      const auto next = batch_at(last ? 0 : batch + 1);
      float fresh[NT][4] = {};
#pragma unroll
      for (int s = 0; s < DEPTH; ++s) {
        if constexpr (Factor::SCALED) {
          multiply(fresh, ring[s], x[s]);
        } else {
          multiply(sums, ring[s], x[s]);
        }
        next.weights(ring[s], rows, s, more);
      }
      if constexpr (Factor::SCALED) {
        const int k = (batch * warps + warp) * DEPTH * CHUNK;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] += factor.of(n * 8 + lane % 4 * 2 + i % 2, k) * fresh[n][i];
        }
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
    ++tile;
  }
  epilogue.finish();
}

// Tiles of `tall` rows, at most 16, of one matrix [n, width]; block b has tiles b * per up to (b + 1) * per, and asks
// for its first `asked` rows early.
struct Matrix {
  const bf16* weight;
  int n, width, per, tall, asked;

  __device__ __forceinline__ int first() const { return blockIdx.x * per; }
  __device__ __forceinline__ int end() const { return min((n + tall - 1) / tall, first() + per); }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    const int low = tile * tall + group, high = low + 8;
    const bf16* from = weight + i64(low) * width;
    return {from, from + 8 * i64(width), group < tall && low < n, group + 8 < tall && high < n};
  }
  __device__ __forceinline__ void ask_rest(int columns) const {
    const int start = first() * tall;
    for (int r = threadIdx.x % WARP; r < asked && start + r < n; r += WARP) {
      const int from = r < tall ? columns : 0;
      if (from < width) prefetch_l2(weight + i64(start + r) * width + from, u32(width - from) * 2);
    }
  }
};

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
