// First half of the experts. A block has an equal share of all pairs of gate and up rows of the listed experts, one
// after another; a stage is up to 8 pairs.
#pragma once
#include "select.cuh"
#include "stream.cuh"

constexpr int PAIRS = 8;  // of gate and up rows in a tile

// One matrix of gate rows followed by up rows for each expert: [*, 2 inner, width].
struct GateUp {
  const bf16* weight;
  const u32* ids;  // by slot; null: there is one expert
  int inner, width;
};

// Where a block is in its pairs.
struct Pairs {
  int slot, first, left;

  __device__ __forceinline__ int count(int inner) const { return min(PAIRS, min(inner - first, left)); }
  __device__ __forceinline__ void next(int inner) {
    const int done = count(inner);
    left -= done, first += done;
    if (first == inner) first = 0, ++slot;
  }
};

// A block's share of `total` pairs.
__device__ __forceinline__ Pairs share(int total, int inner, int slot) {
  const int first = int(i64(total) * blockIdx.x / gridDim.x), end = int(i64(total) * (blockIdx.x + 1) / gridDim.x);
  return {slot + first / inner, first % inner, end - first};
}

// Floats of two sets of sums, up to whole 16 bytes.
__device__ __forceinline__ int tile_sums(int live) { return (2 * CONSUMERS * live * SUM_PITCH + 3) / 4 * 4; }

// A window's rows: in shared memory where they fit, else in memory.
struct Window {
  const bf16* local;  // `pitch` values apart, or null
  const bf16* x;      // [*, width]
  int pitch, width, live;

  template <int NT>
  __device__ __forceinline__ void load(uint4 (&to)[2][NT], int k0) const {
    const int group = threadIdx.x % WARP / 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int k = k0 + c * CHUNK;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int token = n * 8 + group < live ? n * 8 + group : 0;
        to[c][n] = make_uint4(0, 0, 0, 0);
        if (k >= width) continue;
        to[c][n] = local != nullptr ? *reinterpret_cast<const uint4*>(local + token * pitch + k)
                                    : load_settled16(x + i64(token) * width + k);
      }
    }
  }
};

__device__ __forceinline__ void send_pairs(Producer& producer, const GateUp& from, Pairs at) {
#pragma unroll 1
  for (; at.left > 0; at.next(from.inner)) {
    const i64 id = from.ids != nullptr ? uniform(from.ids[at.slot]) : 0;
    const bf16* gate = from.weight + (id * 2 * from.inner + at.first) * from.width;
    const int count = at.count(from.inner);
    producer.send_tile({gate, count, 0}, {gate + i64(from.inner) * from.width, count, PAIRS}, from.width, []() {});
  }
}

// epilogue(tile, its sums) by all consumers.
template <int NT, class Epilogue>
__device__ __forceinline__ void multiply_pairs(
    Ring& ring, const GateUp& from, Pairs at, const Window& window, float* sums, Epilogue epilogue) {
  const int group = threadIdx.x % WARP / 4;
  const Reader reader(group, group + PAIRS);
#pragma unroll 1
  for (int parity = 0; at.left > 0; parity ^= 1) {
    float own[NT][4] = {}, other[NT][4] = {};
#pragma unroll 1
    for (int k = 0; k < from.width; k += PART) {
      uint4 x[2][NT];
      window.load<NT>(x, k + reader.k);
      Chunk w[2];
      reader.take(w, ring, from.width - k);
      multiply(own, w[0], x[0]);
      multiply(other, w[1], x[1]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) own[n][i] += other[n][i];
    }
    TileSums<NT> all(sums, window.live, parity);
    all.meet(own);
    epilogue(at, all);
    at.next(from.inner);
  }
}

struct Limits {
  float routed, shared;
};

template <int NT>
__device__ __forceinline__ void gate_up(
    const bf16* x, const bf16* shared_weight, const bf16* routed_weight, const Router& router, bf16* out,
    int shared_inner, int inner, int pitch, const Limits& limits, int width, int depth, int local) {
  DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  const int live = router.live;
  Ring ring = open_ring(shared, depth, 2 * PAIRS);
  Producer producer = {ring};
  float* sums = reinterpret_cast<float*>(ring.end());
  const GateUp first = {shared_weight, nullptr, shared_inner, width}, then = {routed_weight, plan.ids, inner, width};
  const Pairs own = share(shared_inner, shared_inner, 0);
  Window window = {nullptr, x, width, width, live};

  // Before the wait: the tokens, which the kernel before the producer wrote, and this block's tile of the shared expert.
  bf16 kept = 0;
  if (is_producer()) {
    send_pairs(producer, first, own);
    prepare_plan(router, plan);
  } else {
    prepare_plan(router, plan);
    if (local) {
      const Kept<NT> tokens(x, reinterpret_cast<bf16*>(sums + tile_sums(live)), width, live);
      window.local = tokens.x, window.pitch = tokens.pitch;
    }
    multiply_pairs<NT>(ring, first, own, window, sums, [&](const Pairs& tile, const TileSums<NT>& all) {
      const int token = threadIdx.x / PAIRS, row = threadIdx.x % PAIRS;
      if (token < live) kept = to_bf16(swiglu(all.at(token, row), all.at(token, row + PAIRS), limits.shared));
    });
  }

  wait_for_producer();
  let_next_start();
  __syncthreads();
  make_plan(router, plan);
  const Pairs routed = share((plan.slots - 1) * inner, inner, 1);
  if (is_producer()) {
    send_pairs(producer, then, routed);
    return;
  }
  const int token = threadIdx.x / PAIRS, row = threadIdx.x % PAIRS;
  if (token < live && row < own.left) out[i64(token) * pitch + own.first + row] = kept;
  multiply_pairs<NT>(ring, then, routed, window, sums, [&](const Pairs& tile, const TileSums<NT>& all) {
    if (token >= live || row >= tile.count(inner) || !(plan.rows[tile.slot] >> token & 1)) return;
    const float value = swiglu(all.at(token, row), all.at(token, row + PAIRS), limits.routed);
    const float weight = plan.weight(token, plan.ids[tile.slot]);
    out[i64(tile.slot * ROW_TILE + token) * pitch + tile.first + row] = to_bf16(weight * value);
  });
}
