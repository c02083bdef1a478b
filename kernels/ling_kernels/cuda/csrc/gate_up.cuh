// First half of the experts. A block has an equal share of all pairs of gate and up rows of the listed experts, one
// after another; a stage is up to 8 pairs by up to SPAN values of K.
#pragma once
#include "ring.cuh"
#include "select.cuh"

constexpr int PAIRS = 8;  // of gate and up rows in a tile
constexpr int TILE_ROW_BYTES = SPAN * 2 + 64, TILE_BYTES = 2 * PAIRS * TILE_ROW_BYTES;

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

// A window's rows: in shared memory where they fit, else in memory.
struct Window {
  const u8* local;  // row_bytes(width) apart, or null
  const bf16* x;    // [*, width]
  int width, live;

  template <int NT>
  __device__ __forceinline__ void load(uint4 (&to)[NT], int k) const {
    const int group = threadIdx.x % WARP / 4, at = k < width ? k : 0;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + group < live ? n * 8 + group : 0;
      to[n] = local != nullptr ? *reinterpret_cast<const uint4*>(local + token * row_bytes(width) + at * 2)
                               : load_settled16(x + i64(token) * width + at);
      if (k >= width) to[n] = make_uint4(0, 0, 0, 0);
    }
  }
};

__device__ __forceinline__ void send_pairs(Ring& ring, const GateUp& from, Pairs at) {
  const int lane = threadIdx.x % WARP, pair = lane % PAIRS, half = lane / PAIRS;
  for (; at.left > 0; at.next(from.inner)) {
    const bool mine = half < 2 && pair < at.count(from.inner);
    const i64 id = from.ids != nullptr ? from.ids[at.slot] : 0;
    const bf16* row = from.weight + ((id * 2 + half) * from.inner + at.first + pair) * from.width;
#pragma unroll 1
    for (int k = 0; k < from.width; k += SPAN) {
      ring.send(lane * TILE_ROW_BYTES, row + k, mine ? min(SPAN, from.width - k) : 0);
    }
  }
}

// epilogue(tile, its sums) by all workers. sums: two sets, so that one barrier a tile is enough.
template <int NT, class Epilogue>
__device__ __forceinline__ void multiply_pairs(
    Ring& ring, const GateUp& from, Pairs at, const Window& window, float* sums, Epilogue epilogue) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, column = lane % 4 * 8;
  for (int parity = 0; at.left > 0; parity ^= 1) {
    float part[2][NT][4] = {};
#pragma unroll 1
    for (int k = 0; k < from.width; k += SPAN) {
      const int here = min(SPAN, from.width - k);
      const u8* rows = ring.receive() + lane / 4 * TILE_ROW_BYTES;
#pragma unroll
      for (int u = 0; u < SPAN / (WORKERS * CHUNK); ++u) {
        const int first = (u * WORKERS + warp) * CHUNK;
        if (first < here) {
          // past the end of the row its beginning, which meets zeros
          const u8* own = rows + (first + column < here ? first + column : 0) * 2;
          const Chunk w = {
              *reinterpret_cast<const uint4*>(own), *reinterpret_cast<const uint4*>(own + PAIRS * TILE_ROW_BYTES)};
          uint4 in[NT];
          window.load<NT>(in, k + first + column);
          multiply(part[u], w, in);
        }
      }
      ring.release();
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) part[0][n][i] += part[1][n][i];
    }
    LiveSums<NT> all = {sums, window.live};
    all.all += parity * all.size();
    all.put(part[0]);
    named_barrier(WORKERS_BARRIER, WORKERS * WARP);
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
  __shared__ u64 barriers[2 * MAX_STAGES + 1];
  const int live = router.live, lane = threadIdx.x % WARP;
  Ring ring = {shared, barriers, depth, TILE_BYTES};
  float* sums = reinterpret_cast<float*>(shared + depth * TILE_BYTES);
  u8* tokens = reinterpret_cast<u8*>(sums + 2 * WORKERS * live * PITCH);
  u64* landed = barriers + 2 * MAX_STAGES;
  const Window window = {local ? tokens : nullptr, x, width, live};
  const GateUp first = {shared_weight, nullptr, shared_inner, width};
  const GateUp then = {routed_weight, plan.ids, inner, width};
  const Pairs own = share(shared_inner, shared_inner, 0);
  ring.make();
  if (threadIdx.x == 0) barrier_init(landed, FULL_ARRIVALS);
  barriers_ready();
  __syncthreads();

  // Before the wait: the tokens, which the kernel before the producer wrote, and this block's tile of the shared expert.
  bf16 kept = 0;
  if (sends()) {
    if (local) {
      const bool mine = lane < live;
      send_rows(landed, tokens + lane * row_bytes(width), x + i64(lane) * width, mine ? u32(width) * 2 : 0);
    }
    send_pairs(ring, first, own);
    prepare_plan(router, plan);
  } else {
    prepare_plan(router, plan);
    if (local) barrier_wait(landed, 0);
    multiply_pairs<NT>(ring, first, own, window, sums, [&](const Pairs& tile, const LiveSums<NT>& all) {
      const int token = threadIdx.x / PAIRS, row = threadIdx.x % PAIRS;
      if (token >= live) return;
      kept = to_bf16(swiglu(all.at(token, row), all.at(token, row + PAIRS), limits.shared));
    });
  }

  wait_for_producer();
  let_next_start();
  __syncthreads();
  make_plan(router, plan);
  const Pairs routed = share((plan.slots - 1) * inner, inner, 1);
  if (sends()) {
    send_pairs(ring, then, routed);
    return;
  }
  const int token = threadIdx.x / PAIRS, row = threadIdx.x % PAIRS;
  if (token < live && row < own.left) out[i64(token) * pitch + own.first + row] = kept;
  multiply_pairs<NT>(ring, then, routed, window, sums, [&](const Pairs& tile, const LiveSums<NT>& all) {
    if (token >= live || row >= tile.count(inner) || !(plan.rows[tile.slot] >> token & 1)) return;
    const float value = swiglu(all.at(token, row), all.at(token, row + PAIRS), limits.routed);
    const float weight = plan.weight(token, plan.ids[tile.slot]);
    out[i64(tile.slot * ROW_TILE + token) * pitch + tile.first + row] = to_bf16(weight * value);
  });
}
