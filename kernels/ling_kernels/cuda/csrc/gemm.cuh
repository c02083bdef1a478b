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
// The warps of a block take spans of K in turn; their sums meet in shared memory in the order of the warps. How many
// warps there are follows from the shape and the GPU, never from the number of rows: a row's bits are its own.
#pragma once
#include "arch.cuh"

constexpr int CHUNK = 32;            // values of K that a warp takes at a time: 1 KB of weights
constexpr int DEPTH = 4;             // chunks that each warp keeps in flight, weights and tokens together
constexpr int SPAN = DEPTH * CHUNK;  // their values of K lie side by side: one address, the rest are constants
constexpr int PITCH = 16;            // rows of a tile, for each token in the warps' sums

// This lane's two weight rows. Rows past the end of a matrix are its first one again: loads stay unconditional, and
// what becomes of them is never stored. The same holds for tokens past the live ones.
struct Rows {
  const bf16* low;
  const bf16* high;

  __device__ __forceinline__ Rows moved(int k) const { return {low + k, high + k}; }
};

struct Chunk {
  uint4 low, high;
};

// The lane's values of k up to k + 7. Past the width it is the row's beginning: load_tokens gives zeros there.
__device__ __forceinline__ void load_chunk(Chunk& to, const Rows& rows, int k, int width) {
  const int at = k < width ? k : 0;
  load_weights_into(to.low, rows.low + at, true);
  load_weights_into(to.high, rows.high + at, true);
}

// Products go to two sums in turn, which halves the time that one waits for the other. zero: no bit of it is set, which
// the assembler cannot know. An operand's four registers have to lie side by side, and copied like this they do for all
// tokens; left to itself it copies them for each.
template <int NT>
__device__ __forceinline__ void multiply(
    float (&sums)[NT][4], float (&more)[NT][4], const Chunk& w, const uint4 (&x)[NT], u32 zero) {
  const u32 a[8] = {w.low.x | zero, w.high.x | zero, w.low.y | zero, w.high.y | zero,
                    w.low.z | zero, w.high.z | zero, w.low.w | zero, w.high.w | zero};
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_bf16(sums[n], a[0], a[1], a[2], a[3], x[n].x, x[n].y);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_bf16(more[n], a[4], a[5], a[6], a[7], x[n].z, x[n].w);
}

template <int NT>
__device__ __forceinline__ void multiply(float (&sums)[NT][4], const Chunk& w, const uint4 (&x)[NT]) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    mma_bf16(sums[n], w.low.x, w.high.x, w.low.y, w.high.y, x[n].x, x[n].y);
    mma_bf16(sums[n], w.low.z, w.high.z, w.low.w, w.high.w, x[n].z, x[n].w);
  }
}

// Tokens: the first `rows` of x [*, width], pitch values apart. ask() comes before the wait and make() after it, where a
// kernel makes its tokens itself.
struct Tokens {
  const bf16* x;
  int width, pitch, rows;

  __device__ __forceinline__ static uint4 load(const bf16* from) { return load_activations(from); }
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void make() {}
};

template <int NT, class Input>
__device__ __forceinline__ void load_tokens(uint4 (&to)[NT], const Input& tokens, int k) {
  const int group = threadIdx.x % WARP / 4;
  const bool inside = k < tokens.width;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int token = n * 8 + group;
    const bf16* from = tokens.x + (token < tokens.rows ? token : 0) * tokens.pitch + (inside ? k : 0);
    const uint4 v = Input::load(from);
    to[n] = inside ? v : make_uint4(0, 0, 0, 0);
  }
}

// What all warps summed for one tile: at(place(token, row)) adds them in the order of the warps. A warp's sums lie row by
// row, each row turned by its own even number of tokens, so that neither pairs of tokens when they are written nor 16
// rows of two tokens when they are read meet in a bank.
template <int NT>
struct Sums {
  static constexpr int TOKENS = NT * 8, SIZE = PITCH * TOKENS;
  float* all;

  __device__ __forceinline__ static u32 place(u32 token, u32 row) {
    const u32 turn = NT == 1 ? row / 4 * 2 : row / 4 * 2 + row / 2 % 2 * 8;
    return row * TOKENS + (token + turn) % TOKENS;
  }

  __device__ __forceinline__ void put(int warp, const float (&sums)[NT][4]) {
    const int lane = threadIdx.x % WARP, group = lane / 4, pair = lane % 4 * 2;
    float* to = all + warp * SIZE;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      *reinterpret_cast<float2*>(to + place(n * 8 + pair, group)) = make_float2(sums[n][0], sums[n][1]);
      *reinterpret_cast<float2*>(to + place(n * 8 + pair, group + 8)) = make_float2(sums[n][2], sums[n][3]);
    }
  }

  // Sums of up to GROUP warps are asked for before the first is added: four, or all that a block may have.
  template <int GROUP>
  __device__ __forceinline__ float add(const float* from, int warps) const {
    float part[GROUP], total = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) part[i] = i < warps ? from[i * SIZE] : 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) total += part[i];
    return total;
  }
  __device__ __forceinline__ float at(u32 place) const { return at(place, int(blockDim.x) / WARP); }
  __device__ __forceinline__ float at(u32 place, int warps) const {
    return warps <= 4 ? add<4>(all + place, warps) : add<16>(all + place, warps);
  }
  __device__ __forceinline__ float2 both(u32 place, u32 other) const {  // at the same time
    const int warps = blockDim.x / WARP;
    if (warps <= 4) return make_float2(add<4>(all + place, warps), add<4>(all + other, warps));
    return make_float2(add<16>(all + place, warps), add<16>(all + other, warps));
  }
};

// What a thread stores of a tile that has R values for each token: always the same value, of every so many tokens. Worked
// out before the wait, for behind the last barrier of a short kernel each instruction is waited for.
template <int NT, int R>
struct Own {
  int value, first, step, place;

  __device__ __forceinline__ Own() : Own(threadIdx.x, blockDim.x) {}
  // Where the tile has so many of the block's threads.
  __device__ __forceinline__ Own(u32 thread, u32 threads) : value(thread % R), first(thread / R), step(threads / R) {
    place = Sums<NT>::place(first, value);
    settle_here(value), settle_here(first), settle_here(place);
  }
  // Of the value eight further.
  __device__ __forceinline__ int up(int token) const { return Sums<NT>::place(token, value + 8); }
  // f(token, place of its sum)
  template <class F>
  __device__ __forceinline__ void each(int live, const F& f) const {
    int at = place;
#pragma unroll 1
    for (int token = first; token < live; at = Sums<NT>::place(token, value)) {
      f(token, at);
      token += step;
    }
  }
};

// Bytes of shared memory: two sets of sums, so that one barrier a tile is enough.
template <int NT>
__device__ __forceinline__ float* sums_of(float* shared, int parity) {
  return shared + parity * (blockDim.x / WARP) * Sums<NT>::SIZE;
}

// No factor on the tokens.
struct Plain {
  static constexpr bool SCALED = false;
  __device__ __forceinline__ void prepare() const {}
  __device__ __forceinline__ void ask(int) const {}
};

// Walk this block's tiles. Source: first(), step, width (of a weight row); place(tile), where that is; EARLY: its weights
// may be loaded before the wait, and if not, settle(place) comes there, and ready() after it; after the wait ask(place),
// which may load what rows(place, g) needs, and end(); ONE: there is one tile. Factor, if it is SCALED, for widths of whole
// spans: prepare() before the wait, ask(span) after it with the span's weights, then take() and of(token). Epilogue:
// expect(place) while the tile's weights are on their way; operator()(place, Sums) by all threads after a barrier;
// finish() at the end. Shared memory: sums_of.
//
// A warp has one span on its way. Right after its products are sent, so is for the next one, weights and tokens, over
// the seam between two tiles as well: all that a warp waits for is memory. A width that is not made of whole spans is
// walked span by span without that.
template <int NT, class Source, class Input, class Factor, class Epilogue>
__device__ __forceinline__ void stream_tiles(
    const Source& source, Input tokens, Factor factor, Epilogue& epilogue) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int group = lane / 4, column = lane % 4 * 8, first = warp * SPAN, hop = warps * SPAN;
  const bool ragged = source.width % SPAN != 0;
  const int width = ragged ? 0 : source.width;
  const bool busy = first < width;  // whether this warp has a span
  const u32 zero = u32(tokens.rows) / 32;  // see multiply
  Chunk w[DEPTH];
  uint4 x[DEPTH][NT];
  float sums[NT][4] = {}, more[NT][4] = {};

  int tile = source.first();
  auto now = source.place(tile);
  Rows rows;  // this lane's, where the span on its way begins, and its tokens
  const bf16* token[NT];
  auto weights = [&](int s, bool live) {
    load_weights_into(w[s].low, rows.low + s * CHUNK, live);
    load_weights_into(w[s].high, rows.high + s * CHUNK, live);
  };
  auto activations = [&](int s) {
#pragma unroll
    for (int n = 0; n < NT; ++n) x[s][n] = Input::load(token[n] + s * CHUNK);
  };
  auto first_activations = [&] {
    if (!busy) return;
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) activations(s);
    factor.ask(warp);
  };
  auto start = [&](bool live) {
    rows = source.rows(now, group).moved(first + column);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) weights(s, busy && live);
  };

  if constexpr (Source::EARLY) start(true);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int row = n * 8 + group;
    token[n] = tokens.x + (row < tokens.rows ? row : 0) * tokens.pitch + first + column;
    settle_here(token[n]);
  }

  tokens.ask();
  factor.prepare();
  if constexpr (!Source::EARLY) source.settle(now);
  wait_for_producer();
  let_next_start();
  tokens.make();
  if constexpr (!Source::EARLY) source.ready(), source.ask(now);
  const int end = source.end();
  if constexpr (!Source::EARLY) start(tile < end);
  first_activations();

  // The products of the span that is there, and for the one where rows and token point, `next`, in its place.
  auto turn = [&](int next, bool live, bool goes_on) {
    float fresh[NT][4] = {}, fresher[NT][4] = {};
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
      if constexpr (Factor::SCALED) {
        multiply(fresh, fresher, w[s], x[s], zero);
      } else {
        multiply(sums, more, w[s], x[s], zero);
      }
      if (!goes_on) continue;
      weights(s, live);
      activations(s);
    }
    if constexpr (Factor::SCALED) {
      factor.take();
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[n][i] += factor.of(n * 8 + lane % 4 * 2 + i % 2) * (fresh[n][i] + fresher[n][i]);
        }
      }
      if (goes_on) factor.ask(next);
    }
  };

  for (int parity = 0; tile < end; parity ^= 1) {
    epilogue.expect(now);
    auto next = now;
    if constexpr (!Source::ONE) {
      next = source.place(tile + source.step);
      source.ask(next);
    }
    if constexpr (!Factor::SCALED) {
      const int chunks = (source.width + CHUNK - 1) / CHUNK;
#pragma unroll 1
      for (int chunk = warp; ragged && chunk < chunks; chunk += warps) {
        load_chunk(w[0], rows.moved(-first - column), chunk * CHUNK + column, source.width);
        load_tokens(x[0], tokens, chunk * CHUNK + column);
        multiply(sums, more, w[0], x[0], zero);
      }
    }
    int k = first;
#pragma unroll 1
    for (; k + hop < width; k += hop) {
      rows = rows.moved(hop);
#pragma unroll
      for (int n = 0; n < NT; ++n) token[n] += hop;
      turn(k / SPAN + warps, true, true);
      if constexpr (!Source::EARLY && !Source::ONE) {
        // The next tile's matrix lies elsewhere: its first lines open the way (measured: 67 experts in 65 us, not 68).
        if (k == 0 && lane == 0 && tile + source.step < end) {
          const Rows after = source.rows(next, 0);
          prefetch_line(after.low), prefetch_line(after.high);
        }
      }
    }
    if constexpr (!Source::ONE) {
      rows = source.rows(next, group).moved(first + column);
#pragma unroll
      for (int n = 0; n < NT; ++n) token[n] += first - k;
    }
    if (busy) turn(warp, tile + source.step < end, !Source::ONE);

#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] += more[n][i];
    }
    Sums<NT> all = {sums_of<NT>(reinterpret_cast<float*>(shared), parity)};
    all.put(warp, sums);
    __syncthreads();
    epilogue(now, all);
    if constexpr (Source::ONE) break;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = more[n][i] = 0.0f;
    }
    now = next, tile += source.step;
  }
  epilogue.finish();
}

// `per` tiles, neighbours, for every block, and one more for the first `extra` of them.
struct Deal {
  int per, extra;

  __device__ __forceinline__ int first() const { return blockIdx.x * per + min(int(blockIdx.x), extra); }
  __device__ __forceinline__ int end(int tiles) const {
    return min(tiles, first() + per + (int(blockIdx.x) < extra ? 1 : 0));
  }
};

// Tiles of 16 rows of one matrix [n, width].
struct Matrix {
  const bf16* weight;
  int n, width;
  Deal deal;
  static constexpr int step = 1;
  static constexpr bool ONE = false, EARLY = true;

  __device__ __forceinline__ int first() const { return deal.first(); }
  __device__ __forceinline__ int end() const { return deal.end((n + 15) / 16); }
  __device__ __forceinline__ int place(int tile) const { return tile; }
  __device__ __forceinline__ void ask(int) const {}
  __device__ __forceinline__ const bf16* row(int at) const { return weight + i64(at < n ? at : 0) * width; }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    return {row(tile * 16 + group), row(tile * 16 + group + 8)};
  }
};

// Eight gate rows and the eight matching up rows of gate_up [2 inner, width] make a tile: SwiGLU needs both at once,
// and tiles of half the bytes balance better over the machine than 16 + 16.
__device__ __forceinline__ Rows gate_up_rows(const bf16* weight, int inner, int width, int tile, int group) {
  const bf16* low = weight + u32(tile * 8 + group < inner ? tile * 8 + group : 0) * u32(width);
  return {low, low + u32(inner) * u32(width)};
}

// SiLU(gate) · up; with a limit the gate is cut after SiLU from above, up on both sides.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  float activated = __fdividef(gate, 1.0f + __expf(-gate));  // short: the machine waits for it, and it becomes bf16
  if (limit > 0.0f) {
    // comparisons, not fminf: a NaN has to reach the verdict
    activated = activated > limit ? limit : activated;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return activated * up;
}
