// Second half of the experts: out[token, this block's rows] = sum over slots of down[slot] · x[slot, token].
//
// One long product over the listed experts, whose sum stays in registers: a row takes part in the experts that it chose,
// and what it did not choose adds exact zeros, which change no bit. Every warp walks through all experts in ascending
// order with the same part of each one's K, so which experts it adds up never depends on the other rows. A stage of the
// ring is a slot's K of all rows of the block.
#pragma once
#include "select.cuh"
#include "stream.cuh"

constexpr int GROUP = 8;  // rows of slots that a warp asks for at once
constexpr int MAX_PAIRS = ROW_TILE * (MAX_CHOSEN + 1);

// In shared memory: slots and the rows that chose them, one after another.
struct Chosen {
  u16 first[MAX_SLOTS + 1];  // pair of each slot
  u16 pairs[MAX_PAIRS];      // slot · ROW_TILE + row

  // By the consumers, who need a barrier before they read it.
  __device__ __forceinline__ void make(const Plan& plan) {
    const int slot = threadIdx.x;
    if (slot > plan.slots) return;
    int at = 0;
#pragma unroll 8
    for (int s = 0; s < slot; ++s) at += __popc(plan.rows[s]);
    first[slot] = u16(at);
    if (slot == plan.slots) return;
    for (u32 left = plan.rows[slot]; left != 0; left &= left - 1) pairs[at++] = u16(slot * ROW_TILE + __ffs(left) - 1);
  }
};

// The rows of slots on their way to a warp, just what it multiplies: a ring of `room` pairs, each CHUNK values for every
// step of the warp through K. Lane (g, t) asks for 16 bytes of every eighth pair.
struct Arriving {
  const bf16* x;  // [slots, ROW_TILE, pitch]
  int pitch, shared_inner, inner;
  const Chosen& chosen;
  u8* own;  // this warp's room
  int room, pairs;
  int asked = 0, landed = 0;           // groups
  int next_place = 0, slot_place = 0;  // in the room: of what is asked for next, of the first pair that is needed

  __device__ __forceinline__ int within(int place) const { return place >= room ? place - room : place; }
  __device__ __forceinline__ u8* at(int place) const {
    return own + place * CHUNK * 2 + threadIdx.x % 4 * sizeof(uint4);
  }
  __device__ __forceinline__ int step_bytes() const { return room * CHUNK * 2; }

  __device__ __forceinline__ void ask() {
    const int group = threadIdx.x % WARP / 4, pair = asked * GROUP + group;
    if (pair < pairs) {
      const int row = chosen.pairs[pair], width = row < ROW_TILE ? shared_inner : inner;
      u8* to = at(within(next_place + group));
      const bf16* from = x + i64(row) * pitch;
      for (int k = int(threadIdx.x) / WARP * CHUNK + int(threadIdx.x) % 4 * 8; k < width; k += CONSUMERS * CHUNK) {
        copy16(to, from + k);
        to += step_bytes();
      }
    }
    copies_commit();
    next_place = within(next_place + GROUP);
    ++asked;
  }
  // Have the pairs from `first` up to `end`; those before them are no longer needed.
  __device__ __forceinline__ void have(int first, int end) {
    while (asked * GROUP < pairs && min((asked + 1) * GROUP, pairs) <= first / GROUP * GROUP + room) ask();
    const int needed = (end + GROUP - 1) / GROUP;
    if (needed <= landed) return;
    landed = needed;
    if (asked - needed > 1) {
      copies_wait<2>();
    } else if (asked - needed == 1) {
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncwarp();
  }
};

// Bytes from row to row of a stage: the 16 bytes that lanes (g, t) read at 16 t of row g are in different banks.
__device__ __forceinline__ int row_bytes(int values) { return (values * 2 + 127) / 128 * 128 + 64; }

// This block's rows, in TALL groups of 16, which the tensor cores multiply at once.
template <int NT, int TALL>
struct Accumulator {
  // chains of products side by side, fewer where there are more sums; the same for both NT: it is an order of addition
  static constexpr int CHAINS = TALL == 1 ? 4 : 1;
  float sums[TALL][CHAINS][NT][4] = {};

  __device__ __forceinline__ void add(int step, const Chunk (&w)[TALL], const uint4 (&in)[NT], u32 chose) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if ((chose >> n * 8 & 0xff) == 0) continue;
#pragma unroll
      for (int r = 0; r < TALL; ++r) {
        float(&one)[4] = sums[r][step * 2 % CHAINS][n];
        float(&other)[4] = sums[r][(step * 2 + 1) % CHAINS][n];
        mma_bf16(one, w[r].low.x, w[r].high.x, w[r].low.y, w[r].high.y, in[n].x, in[n].y);
        mma_bf16(other, w[r].low.z, w[r].high.z, w[r].low.w, w[r].high.w, in[n].z, in[n].w);
      }
    }
  }
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int r = 0; r < TALL; ++r) {
#pragma unroll
      for (int c = 1; c < CHAINS; ++c) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][0][n][i] += sums[r][c][n][i];
        }
      }
    }
  }
};

template <int NT, int TALL>
__device__ __forceinline__ void multiply_slots(
    Ring& ring, Arriving& tokens, const Plan& plan, int rows, int pitch, Accumulator<NT, TALL>& sums) {
  const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 8;
  int low_at[TALL], high_at[TALL];  // a lane without a row takes another's: what becomes of it is not stored
#pragma unroll
  for (int r = 0; r < TALL; ++r) {
    const int low = 16 * r + group, high = low + 8;
    low_at[r] = (low < rows ? low : 0) * pitch;
    high_at[r] = high < rows ? high * pitch : low_at[r];
  }
  u32 chose = plan.rows[0];
  int first = 0, end = tokens.chosen.first[1];
#pragma unroll 1
  for (int slot = 0; slot < plan.slots; ++slot) {
    const int values = slot == 0 ? tokens.shared_inner : tokens.inner;
    const int later = min(slot + 1, plan.slots - 1);  // looked up while this slot is multiplied
    const u32 later_chose = plan.rows[later];
    const int later_end = tokens.chosen.first[later + 1];
    tokens.have(first, end);
    const u8* mine[NT];  // this lane's tokens
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int before = __popc(chose & ((1u << (n * 8 + group)) - 1));
      mine[n] = tokens.at(tokens.within(tokens.slot_place + before));
    }
    barrier_wait(ring.full(), ring.parity);
    const u8* stage = ring.place();
#pragma unroll 1
    for (int turn = warp * CHUNK; turn < values; turn += 2 * CONSUMERS * CHUNK) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int k = turn + step * CONSUMERS * CHUNK + column;
        if (k - column >= values) continue;
        const u8* own = stage + (k < values ? k : 0) * 2;  // past the end of the row its beginning, which meets zeros
        Chunk w[TALL];
#pragma unroll
        for (int r = 0; r < TALL; ++r) {
          w[r] = {*reinterpret_cast<const uint4*>(own + low_at[r]), *reinterpret_cast<const uint4*>(own + high_at[r])};
        }
        uint4 in[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          in[n] = make_uint4(0, 0, 0, 0);
          if (k < values && (chose >> (n * 8 + group) & 1)) in[n] = *reinterpret_cast<const uint4*>(mine[n]);
          mine[n] += tokens.step_bytes();
        }
        sums.add(step, w, in, chose);
      }
    }
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(ring.empty());
    ring.advance();
    tokens.slot_place = tokens.within(tokens.slot_place + end - first);
    first = end, end = later_end, chose = later_chose;
  }
}

struct DownSizes {
  int pitch, width, rows, depth, room;  // of x; of the output; of a block; stages of the ring; pairs of tokens
};

template <int NT, int TALL>
__device__ __forceinline__ void down(
    const bf16* x, const bf16* shared_weight, const bf16* routed_weight, const Router& router, bf16* out,
    int shared_inner, int inner, const DownSizes& sizes, const Ahead& asked) {
  DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  __shared__ Chosen chosen;
  const int live = router.live, span = max(shared_inner, inner), pitch = row_bytes(span);
  const int first = blockIdx.x * sizes.rows, rows = min(sizes.rows, sizes.width - first);
  Ring ring = open_ring(shared, sizes.depth, 0);
  ring.bytes = sizes.rows * pitch;
  // The logits are settled: all blocks of gate_up are past their wait when this kernel starts, so the router's have
  // finished. So are the lists.
  prepare_plan(router, plan);
  __syncthreads();
  make_plan(router, plan);

  if (is_producer()) {
    auto send = [&](int slot) {
      const int values = slot == 0 ? shared_inner : inner;
      const bf16* from = slot == 0 ? shared_weight : routed_weight + i64(uniform(plan.ids[slot])) * sizes.width * inner;
      barrier_wait(ring.empty(), ring.parity ^ 1);
      expect_rows(ring.full(), u32(values) * 2 * rows);
      send_rows(ring.full(), ring.place(), pitch, from + i64(first) * values, i64(values) * 2, u32(values) * 2, rows);
      rows_sent(ring.full());
      ring.advance();
    };
    const int slots = uniform(plan.slots), early = min(sizes.depth, slots);
#pragma unroll 1
    for (int slot = 0; slot < early; ++slot) send(slot);
    wait_for_producer();
    let_next_start();
#pragma unroll 1
    for (int slot = early; slot < slots; ++slot) send(slot);
    ask_ahead(asked, blockIdx.x, gridDim.x);
    return;
  }
  chosen.make(plan);
  named_barrier(1, CONSUMER_THREADS);
  wait_for_producer();
  let_next_start();
  const int steps = (span + CONSUMERS * CHUNK - 1) / (CONSUMERS * CHUNK);
  float* part = reinterpret_cast<float*>(ring.end());
  u8* room = reinterpret_cast<u8*>(part + TALL * CONSUMERS * live * SUM_PITCH);
  Arriving tokens = {x, sizes.pitch, shared_inner, inner, chosen,
                     room + threadIdx.x / WARP * steps * sizes.room * CHUNK * 2, sizes.room,
                     chosen.first[plan.slots]};
  Accumulator<NT, TALL> sums;
  multiply_slots<NT, TALL>(ring, tokens, plan, rows, pitch, sums);
  sums.settle();
  TileSums<NT> low(part, live, 0), high(part, live, TALL - 1);
  low.meet(sums.sums[0][0]);
  if (TALL == 2) high.meet(sums.sums[TALL - 1][0]);
  for (int o = threadIdx.x; o < live * rows; o += CONSUMER_THREADS) {
    const int token = o / rows, row = o % rows;
    const float value = TALL == 1 || row < 16 ? low.at(token, row) : high.at(token, row - 16);
    out[i64(token) * sizes.width + first + row] = to_bf16(value);
  }
}
