// The stream: weights from memory through a ring in shared memory to the tensor cores, times at most 16 rows of tokens.
//
// A block has eight consumer warps and one producer warp, and at most half of a multiprocessor, so that two kernels live
// on it at once: while one streams, the next has its ring filled. A stage of the ring is up to 16 weight rows x 512 values
// of K, each row one copy in bulk. The producer fills the ring before it waits for the kernel before, with
// whatever it may know by then, and goes on as stages become empty.
//
// Each consumer has a fixed eighth of a stage's K: 64 values, two chunks of 32. Lane (g, t) takes the 16 bytes at 8t of
// weight rows g and g+8 and of token g; a sum over k may be permuted as long as both operands are permuted alike (see
// gemm.cuh). A row's pitch in the ring makes these reads free of bank conflicts. Sums of a tile of rows stay in registers
// over all of K; then the warps' sums meet in shared memory and are added in the order of the warps. All of this follows
// from the width alone: neither the number of rows nor the GPU changes a bit.
//
// Shared memory of a block, in this order: Ring (barriers, stages), sums of a tile by warp (two sets), the
// factor's own, kept tokens.
#pragma once
#include "gemm.cuh"

constexpr int CONSUMERS = 8, CONSUMER_THREADS = CONSUMERS * WARP, STREAM_THREADS = CONSUMER_THREADS + WARP;
constexpr int PART = 512;                // values of K in a stage
constexpr int OWN = PART / CONSUMERS;    // of a consumer warp
constexpr int STAGE_PITCH = 1088;        // bytes from row to row of a stage
constexpr int RING_HEAD = 256;           // bytes of barriers
constexpr int MAX_RING = RING_HEAD / 16; // stages
constexpr int SUM_PITCH = 17;            // floats from token to token

// Two blocks with their rings on a multiprocessor, and registers for a small kernel between them (96 a thread).
#define STREAM_BOUNDS __launch_bounds__(320, 2)

__device__ __forceinline__ bool is_producer() { return uniform(threadIdx.x / WARP) == CONSUMERS; }
__device__ __forceinline__ int parts_of(int width) { return (width + PART - 1) / PART; }

// A thread's place in its walk around the ring.
struct Ring {
  u64* barriers;  // full, then empty, of each stage
  u8* stages;
  int depth, bytes;  // stages; bytes of one
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ u64* full() const { return barriers + 2 * stage; }
  __device__ __forceinline__ u64* empty() const { return barriers + 2 * stage + 1; }
  __device__ __forceinline__ u8* place() const { return stages + stage * bytes; }
  __device__ __forceinline__ u8* end() const { return stages + depth * bytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == depth) stage = 0, parity ^= 1;
  }
};

// By all threads of a block: a ring of `depth` stages (at most MAX_RING) of `rows` weight rows.
__device__ __forceinline__ Ring open_ring(u8* shared, int depth, int rows) {
  const Ring ring = {reinterpret_cast<u64*>(shared), shared + RING_HEAD, depth, rows * STAGE_PITCH};
  if (threadIdx.x < depth) {
    barrier_init(ring.barriers + 2 * threadIdx.x, FULL_ARRIVALS);
    barrier_init(ring.barriers + 2 * threadIdx.x + 1, CONSUMERS);
    barriers_ready();
  }
  __syncthreads();
  return ring;
}

// Weight rows one below the other in memory, and in a stage from row `place` on.
struct Run {
  const bf16* from;
  int rows, place;
};

// The producer's walk, by all its lanes with the same arguments. sent: stages so far; the first `ring.depth` of them wait
// for nobody.
struct Producer {
  Ring ring;
  int sent = 0;

  // A stage of two runs (the second may have no rows): `values` of K from `k` on, of rows `width` wide.
  __device__ __forceinline__ void send(const Run& one, const Run& two, int k, int values, int width) {
    barrier_wait(ring.empty(), ring.parity ^ 1);
    __syncwarp();
    const u32 bytes = u32(values) * 2;
    expect_rows(ring.full(), bytes * (one.rows + two.rows));
    send_rows(ring.full(), ring.place() + one.place * STAGE_PITCH, STAGE_PITCH, one.from + k, i64(width) * 2, bytes,
              one.rows);
    send_rows(ring.full(), ring.place() + two.place * STAGE_PITCH, STAGE_PITCH, two.from + k, i64(width) * 2, bytes,
              two.rows);
    rows_sent(ring.full());
    ring.advance();
    ++sent;
  }

  // All stages of a tile. before(): called once for each stage before it is sent.
  template <class Before>
  __device__ __forceinline__ void send_tile(const Run& one, const Run& two, int width, Before&& before) {
#pragma unroll 1
    for (int k = 0; k < width; k += PART) {
      before();
      send(one, two, k, min(PART, width - k), width);
    }
  }
};

// Where a consumer's lane reads in a stage: its two weight rows, and the first k of its chunks within a part.
struct Reader {
  int low, high;  // bytes
  int k;

  // high: the row of the stage that is the lane's upper one; a row that a tile has not may be any.
  __device__ __forceinline__ Reader(int low_row, int high_row) {
    const int warp = threadIdx.x / WARP, t = threadIdx.x % 4;
    k = warp * OWN + t * 8;
    low = low_row * STAGE_PITCH + k * 2;
    high = high_row * STAGE_PITCH + k * 2;
  }

  // Wait for the stage, take its weights, and give the stage back. width: values of K that the stage has; zeros beyond.
  __device__ __forceinline__ void take(Chunk (&w)[2], Ring& ring, int width) const {
    barrier_wait(ring.full(), ring.parity);
    const u8* from = ring.place();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      w[c].low = *reinterpret_cast<const uint4*>(from + low + c * CHUNK * 2);
      w[c].high = *reinterpret_cast<const uint4*>(from + high + c * CHUNK * 2);
    }
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(ring.empty());
    ring.advance();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (k + c * CHUNK >= width) w[c] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    }
  }
};

template <int NT>
__device__ __forceinline__ void multiply_part(float (&sums)[NT][4], const Chunk (&w)[2], const uint4 (&x)[2][NT]) {
  multiply(sums, w[0], x[0]);
  multiply(sums, w[1], x[1]);
}

// A window's rows x [*, width], of which `live` are there; tokens past them are the first one again, and never stored.
// Held in registers, for widths up to HELD parts.
template <int NT>
struct Held {
  static constexpr int HELD = NT == 1 ? 5 : 3;
  uint4 x[HELD][2][NT];
  int parts;

  __device__ __forceinline__ Held(const bf16* from, int width, int live) : parts(parts_of(width)) {
    const int group = threadIdx.x % WARP / 4, k0 = threadIdx.x / WARP * OWN + threadIdx.x % 4 * 8;
#pragma unroll
    for (int s = 0; s < HELD; ++s) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int k = s * PART + c * CHUNK + k0;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int token = n * 8 + group < live ? n * 8 + group : 0;
          x[s][c][n] = make_uint4(0, 0, 0, 0);
          if (k < width) x[s][c][n] = load_activations(from + token * width + k);
        }
      }
    }
  }

  // use(x, part) for each part of K in order.
  template <class Use>
  __device__ __forceinline__ void each(Use&& use) const {
#pragma unroll
    for (int s = 0; s < HELD; ++s) {
      if (s < parts) use(x[s], s);
    }
  }
};

// The same kept in shared memory, each consumer warp its own columns; or read where they are.
template <int NT>
struct Kept {
  const bf16* x;
  int pitch, width, live;  // pitch: values

  // Values from row to row of kept tokens: no bank conflicts.
  static __device__ __forceinline__ int pitch_of(int width) { return (width + 63) / 64 * 64 + 32; }

  // to: shared memory, or null.
  __device__ __forceinline__ Kept(const bf16* from, bf16* to, int width, int live)
      : x(from), pitch(width), width(width), live(live) {
    if (to == nullptr) return;
    const int lane = threadIdx.x % WARP, to_pitch = pitch_of(width);
#pragma unroll 1
    for (int k = threadIdx.x / WARP * OWN + lane % 8 * 8; k < width; k += PART) {
#pragma unroll 1
      for (int row = lane / 8; row < live; row += 4) copy16(to + row * to_pitch + k, from + row * width + k);
    }
    copies_commit();
    copies_wait<0>();
    __syncwarp();
    x = to, pitch = to_pitch;
  }

  template <class Use>
  __device__ __forceinline__ void each(Use&& use) const {
    const int group = threadIdx.x % WARP / 4, k0 = threadIdx.x / WARP * OWN + threadIdx.x % 4 * 8;
    const int parts = parts_of(width);
#pragma unroll 1
    for (int s = 0; s < parts; ++s) {
      uint4 in[2][NT];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int k = s * PART + c * CHUNK + k0;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int token = n * 8 + group < live ? n * 8 + group : 0;
          in[c][n] = load16(x + token * pitch + k, k < width);
        }
      }
      use(in, s);
    }
  }
};

// What all consumers summed for one tile, by parity of the tile: at(token, row) adds in the order of the warps.
template <int NT>
struct TileSums {
  float* all;
  int live;

  __device__ __forceinline__ TileSums(float* sums, int live, int parity)
      : all(sums + parity * CONSUMERS * live * SUM_PITCH), live(live) {}

  // By all consumers: what this warp summed, then a barrier. Two sets make one barrier a tile enough.
  __device__ __forceinline__ void meet(const float (&sums)[NT][4]) {
    const int lane = threadIdx.x % WARP, group = lane / 4, pair = lane % 4 * 2;
    float* to = all + threadIdx.x / WARP * live * SUM_PITCH;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * 8 + pair + i % 2;
        if (token < live) to[token * SUM_PITCH + group + i / 2 * 8] = sums[n][i];
      }
    }
    named_barrier(1, CONSUMER_THREADS);
  }

  __device__ __forceinline__ float at(int token, int row) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < CONSUMERS; ++warp) total += all[(warp * live + token) * SUM_PITCH + row];
    return total;
  }
};

// No factor on the tokens.
struct Plain {
  static constexpr bool SCALED = false;
  static __device__ __forceinline__ int floats() { return 0; }
  __device__ __forceinline__ void prepare(float*) {}
  __device__ __forceinline__ float of(int, int) const { return 1.0f; }
};

// The consumers' walk over all tiles of one width. epilogue(tile, TileSums): by all consumers after the barrier.
template <int NT, class Source, class Tokens, class Factor, class Epilogue>
__device__ __forceinline__ void consume(
    Ring ring, const Source& source, const Tokens& tokens, const Factor& factor, float* sums, int live,
    Epilogue& epilogue) {
  const int group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4 * 2;
  const Reader reader(source.low(group), source.high(group));
  const int tiles = source.tiles();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    float own[NT][4] = {};
    tokens.each([&](const uint4(&x)[2][NT], int part) {
      Chunk w[2];
      reader.take(w, ring, source.width - part * PART);
      if constexpr (Factor::SCALED) {
        float fresh[NT][4] = {};
        multiply_part(fresh, w, x);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[n][i] += factor.of(part, n * 8 + pair + i % 2) * fresh[n][i];
        }
      } else {
        multiply_part(own, w, x);
      }
    });
    TileSums<NT> all(sums, live, tile & 1);
    all.meet(own);
    epilogue(tile, all);
  }
}

// A whole kernel: one matrix product. Source: rows() of a stage, tiles() of this block, low(g) and high(g), the stage's
// rows of a lane; one(tile), two(tile), its runs; width. kept: tokens too wide for registers go to shared memory.
template <int NT, class Source, class Factor, class Epilogue>
__device__ __forceinline__ void stream_matrix(
    const Source& source, const bf16* x, int live, int depth, int kept, Factor& factor, Epilogue& epilogue,
    const Ahead& asked) {
  DYNAMIC_SHARED(shared);
  const Ring ring = open_ring(shared, depth, source.rows());
  if (is_producer()) {
    Producer producer = {ring};
    bool waited = false;
    auto meet = [&]() {  // the ring is full: now for the kernel before, as every thread must
      waited = true;
      ask_ahead(asked, blockIdx.x, gridDim.x);
      wait_for_producer();
      let_next_start();
    };
    const int tiles = source.tiles();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      producer.send_tile(source.one(tile), source.two(tile), source.width, [&]() {
        if (!waited && producer.sent == depth) meet();
      });
    }
    if (!waited) meet();
    return;
  }
  wait_for_producer();
  let_next_start();
  float* sums = reinterpret_cast<float*>(ring.end());
  float* factors = sums + (2 * CONSUMERS * live * SUM_PITCH + 3) / 4 * 4;
  constexpr bool HOLDS = NT == 1 || !Factor::SCALED;  // registers suffice for it
  if (HOLDS && parts_of(source.width) <= Held<NT>::HELD) {
    const Held<NT> tokens(x, source.width, live);
    factor.prepare(factors);
    consume<NT>(ring, source, tokens, factor, sums, live, epilogue);
  } else {
    bf16* place = kept ? reinterpret_cast<bf16*>(factors + factor.floats()) : nullptr;
    const Kept<NT> tokens(x, place, source.width, live);
    factor.prepare(factors);
    consume<NT>(ring, source, tokens, factor, sums, live, epilogue);
  }
  epilogue.finish();
}
