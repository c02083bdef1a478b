// A row's experts from its router logits, and the plan of a window that gate_up and down follow: a warp a row.
#pragma once
#include "arch.cuh"

constexpr int MAX_EXPERTS = 512, MAX_CHOSEN = 8;
constexpr int MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1;

// The plan in 32-bit words: number of slots; expert id and mask of rows by slot; fp32 weights [slot][ROW_TILE]. Slot
// 0 is the shared expert, with weight 1 for all rows; the others follow in ascending order of their experts.
// One row's number is 0 and all its ids are NO_ID until they are there; ids that it does not have are then 0.
constexpr u32 NO_ID = 0xffffffffu;
constexpr int PLAN_IDS = 4, PLAN_MASKS = PLAN_IDS + MAX_SLOTS, PLAN_WEIGHTS = PLAN_MASKS + MAX_SLOTS + 2;

// 2^group_bits groups of 2^(5 - group_bits) lanes each.
struct Router {
  int experts, group_bits, allowed_groups, chosen;
  float scale;

  __device__ __forceinline__ int groups() const { return 1 << group_bits; }
  __device__ __forceinline__ int size() const { return experts >> group_bits; }
  __device__ __forceinline__ int lanes() const { return WARP >> group_bits; }
  __device__ __forceinline__ int group_of(int lane) const { return lane >> (5 - group_bits); }
};

// Logits of one row as the router's blocks left them. second: floats to the other half of the sum, 0 where it is whole.
struct Logits {
  const float* row;
  int second;

  __device__ __forceinline__ float sum(float a, float b) const { return second != 0 ? a + b : a; }
  __device__ __forceinline__ float of(int expert) const {
    const float a = load_activation(row + expert), b = load_activation(row + expert + second);
    return sum(a, b);
  }
};

// The instructions of a single warp are what the machine waits for here: short forms of exponential and quotient, off
// by some 1e-6 of the score, the same for every row.
__device__ __forceinline__ float router_score(float logit) { return __fdividef(1.0f, 1.0f + __expf(-logit)); }

// The two largest of what was seen.
struct Top {
  float first, second;
};
__device__ __forceinline__ Top top_of(float a, float b) { return {fmaxf(a, b), fminf(a, b)}; }
__device__ __forceinline__ Top top_of(const Top& a, const Top& b) {
  return {fmaxf(a.first, b.first), fmaxf(fminf(a.first, b.first), fmaxf(a.second, b.second))};
}

// One of a lane's candidates. key: its choice in the order of unsigned integers; 0: taken, or no expert.
struct Candidate {
  u32 key;
  int expert;
};

__device__ __forceinline__ void descend(Candidate& a, Candidate& b) {
  const bool swap = b.key > a.key;  // equal ones keep their places
  const Candidate low = swap ? a : b;
  a = swap ? b : a;
  b = low;
}

// The experts of one lane: up to QUADS times four, one after the other in one group, so that ids ascend from lane to
// lane and of equal keys the lowest lane has the lowest id.
template <int QUADS>
struct Share {
  int group, first, quads;  // group, first expert, how many quads there are
  float bias[QUADS][4];

  __device__ __forceinline__ Share(const Router& router, const float* biases) {
    const int lane = threadIdx.x % WARP, size = router.size(), member = (lane & (router.lanes() - 1)) * 4 * QUADS;
    group = router.group_of(lane);
    quads = max(0, min(QUADS, (size - member) / 4));
    first = quads > 0 ? group * size + member : 0;  // of nothing: a place that can be read
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float4 v = load_settled(reinterpret_cast<const float4*>(biases + place(q)));
      bias[q][0] = v.x, bias[q][1] = v.y, bias[q][2] = v.z, bias[q][3] = v.w;
    }
  }

  __device__ __forceinline__ int place(int q) const { return q < quads ? first + 4 * q : 0; }

  // What each expert is chosen by: score and bias, -infinity where that is no number or there is no expert.
  __device__ __forceinline__ void choices(float (&to)[QUADS][4], const Logits& logits) const {
    uint4 a[QUADS], b[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      a[q] = load_activations(logits.row + place(q));
      b[q] = load_activations(logits.row + place(q) + logits.second);
    }
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const u32 parts[4][2] = {{a[q].x, b[q].x}, {a[q].y, b[q].y}, {a[q].z, b[q].z}, {a[q].w, b[q].w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float logit = logits.sum(__uint_as_float(parts[i][0]), __uint_as_float(parts[i][1]));
        const float choice = fmaxf(router_score(logit) + bias[q][i], -infinity());  // fmaxf drops a NaN
        to[q][i] = q < quads ? choice : -infinity();
      }
    }
  }

  // Whether this lane's group is among the allowed ones: those with the largest sums of their two best.
  __device__ __forceinline__ bool allowed(const Router& router, const float (&choice)[QUADS][4]) const {
    Top best = {-infinity(), -infinity()};
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      best = top_of(best, top_of(top_of(choice[q][0], choice[q][1]), top_of(choice[q][2], choice[q][3])));
    }
#pragma unroll 1
    for (int step = 1; step < router.lanes(); step *= 2) {
      const float first_there = __shfl_xor_sync(ALL, best.first, step);
      best = top_of(best, Top{first_there, __shfl_xor_sync(ALL, best.second, step)});
    }
    const float mine = best.first + best.second;
    int better = 0;
#pragma unroll 1
    for (int from = 0; from < router.groups(); from += 8) {
      float sum[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = __shfl_sync(ALL, mine, (from + i) * router.lanes());
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int other = from + i;  // past the last group it is some group again
        better += (other < router.groups()) & ((sum[i] > mine) | ((sum[i] == mine) & (other < group)));
      }
    }
    return better < router.allowed_groups;
  }
};

// One warp's row: lane k's expert is the k-th best, for lanes below `chosen`. place: MAX_CHOSEN words of shared memory.
template <int QUADS>
__device__ __forceinline__ int choose_expert(
    const Router& router, const Share<QUADS>& share, const Logits& logits, int* place) {
  const int lane = threadIdx.x % WARP;
  float choice[QUADS][4];
  share.choices(choice, logits);
  Candidate quad[QUADS][4];  // each quad in descending order
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quad[q][i] = {q < share.quads ? ordered(choice[q][i]) : 0u, share.first + 4 * q + i};
    }
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      descend(quad[q][0], quad[q][1]), descend(quad[q][2], quad[q][3]);
      descend(quad[q][1], quad[q][2]);
    }
  }
  const bool allowed = share.allowed(router, choice);
#pragma unroll
  for (int q = 0; q < QUADS; ++q) quad[q][0].key = allowed ? quad[q][0].key : 0u;  // what follows it never comes up
#pragma unroll
  for (int k = 0; k < MAX_CHOSEN; ++k) {  // those past `chosen` for nothing, but without a branch
    u32 best = quad[0][0].key;
#pragma unroll
    for (int q = 1; q < QUADS; ++q) best = max(best, quad[q][0].key);
    const u32 top = warp_max(best);
    const u32 tied = __ballot_sync(ALL, best == top);
    const bool owner = best == top && (tied & ((1u << lane) - 1)) == 0;
    bool open = owner;
    int expert = 0;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const bool taken = open && quad[q][0].key == top;
      open = open && !taken;
      expert = taken ? quad[q][0].expert : expert;
#pragma unroll
      for (int i = 0; i < 3; ++i) quad[q][i] = taken ? quad[q][i + 1] : quad[q][i];
      quad[q][3].key = taken ? 0u : quad[q][3].key;
    }
    if (owner) place[k] = expert;
  }
  __syncwarp();
  return place[lane % MAX_CHOSEN];
}

// The weight of each lane's expert, by its logit: its share of the scores of the row's chosen ones, times the scale.
__device__ __forceinline__ float router_weight(const Router& router, float logit) {
  const float score = threadIdx.x % WARP < router.chosen ? router_score(logit) : 0.0f;
  float total = score;
#pragma unroll
  for (int step = 1; step < MAX_CHOSEN; step *= 2) total += __shfl_xor_sync(ALL, total, step);
  return __fdividef(score, total + 1e-20f) * router.scale;
}

// A lane of a row's plan. expert: its own, or past all others from lane `chosen` on. below: the row's experts with a
// lower id.
struct Pick {
  int expert, below;

  __device__ __forceinline__ Pick(int of_lane, int chosen) {
    expert = threadIdx.x % WARP < chosen ? of_lane : MAX_EXPERTS;
    below = 0;
#pragma unroll
    for (int k = 0; k < MAX_CHOSEN; ++k) below += __shfl_sync(ALL, expert, k) < expert;
  }
};

// Rows that chose an expert, as a mask for each expert. Cleared before the wait, for more than one row.
struct Chosen {
  u32 rows[MAX_EXPERTS];

  __device__ __forceinline__ void clear() {
    for (int e = threadIdx.x; e < MAX_EXPERTS; e += blockDim.x) rows[e] = 0;
    __syncthreads();
  }
};

// For the words that one row's plan will have.
__device__ __forceinline__ void clear_plan(u32* plan) {
  if (threadIdx.x < MAX_CHOSEN) plan[PLAN_IDS + 1 + threadIdx.x] = NO_ID;
  if (threadIdx.x == MAX_CHOSEN) plan[0] = 0;
}

// What does not depend on the choices: the shared expert's slot, by each row's warp.
__device__ __forceinline__ void begin_plan(u32* plan, int live, int row) {
  const int lane = threadIdx.x % WARP;
  if (lane == WARP - 1) plan[PLAN_WEIGHTS + row] = __float_as_uint(1.0f);
  if (lane == 0 && row == 0) plan[PLAN_IDS] = 0, plan[PLAN_MASKS] = (1u << live) - 1;
}

// This warp's row in the plan of `live` rows, a warp each. Experts lie below 32 · words.
__device__ __forceinline__ void write_plan(
    Chosen& shared, u32* plan, int live, int words, const Pick& pick, float weight) {
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const bool picks = pick.expert < MAX_EXPERTS;
  int slot = 1 + pick.below;
  u32 rows = 1;
  if (live > 1) {
    if (picks) atomicOr(&shared.rows[pick.expert], 1u << row);
    __syncthreads();
    slot = 1;
#pragma unroll 4
    for (int word = 0; word < words; ++word) {
      const u32 listed = __ballot_sync(ALL, shared.rows[word * WARP + lane] != 0);
      const u32 lower = word * WARP > pick.expert ? 0u : (1u << pick.expert % WARP) - 1;
      slot += __popc((word + 1) * WARP <= pick.expert ? listed : listed & lower);
    }
    if (picks) rows = shared.rows[pick.expert];
  }
  if (picks) {
    plan[PLAN_IDS + slot] = u32(pick.expert), plan[PLAN_MASKS + slot] = rows;
    plan[PLAN_WEIGHTS + slot * ROW_TILE + row] = __float_as_uint(weight);
  }
  if (live == 1 && !picks && lane < MAX_CHOSEN) plan[PLAN_IDS + 1 + lane] = 0;
  if (threadIdx.x == WARP - 1) plan[0] = u32(slot);  // this lane's slot comes after all
}
