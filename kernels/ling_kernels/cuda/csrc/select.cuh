// A row's experts from its router logits, and the plan of a window that gate_up and down follow: a warp a row.
#pragma once
#include "arch.cuh"

constexpr int MAX_EXPERTS = 512, MAX_CHOSEN = 8;
constexpr int MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1;

// The plan in 32-bit words: number of slots; expert id and mask of rows by slot; fp32 weights [slot][ROW_TILE]. Slot
// 0 is the shared expert, with weight 1 for all rows; the others follow in ascending order of their experts.
// Where gate_up makes one row's, the number is 0 and its ids are NO_ID until they are there; ids that it does not have are
// then 0.
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

  __device__ __forceinline__ float of(int expert) const {
    const float a = load_activation(row + expert), b = load_activation(row + expert + second);
    return second != 0 ? a + b : a;
  }
};

// The instructions of a single warp are what the machine waits for here: short forms of exponential and quotient, off
// by some 1e-6 of the score, the same for every row.
__device__ __forceinline__ float router_score(float logit) {
  return quick_reciprocal(1.0f + quick_exp2(-1.4426950408889634f * logit));
}

// The two largest of what was seen.
struct Top {
  float first, second;
};
__device__ __forceinline__ Top top_of(float a, float b) { return {fmaxf(a, b), fminf(a, b)}; }
__device__ __forceinline__ Top top_of(const Top& a, const Top& b) {
  return {fmaxf(a.first, b.first), fmaxf(fminf(a.first, b.first), fmaxf(a.second, b.second))};
}
__device__ __forceinline__ Top top_of(const float (&of)[4]) {
  return top_of(top_of(of[0], of[1]), top_of(of[2], of[3]));
}

// An expert that may be chosen, as a number that is the larger, the better: its choice above, then the lower id.
__device__ __forceinline__ u64 contender(u32 key, int expert) { return u64(key) << 32 | u32(~expert); }
__device__ __forceinline__ int expert_of(u64 contender) { return int(~u32(contender)); }

constexpr int LISTED = 2 * MAX_CHOSEN;
static_assert(LISTED == WARP / 2, "two lanes for each");

// What a row's warp chooses in, in shared memory: the choice of every expert; those that are listed, and their ids.
template <int QUADS>
struct Contest {
  __align__(16) float choice[QUADS * 4 * WARP];
  u64 listed[LISTED];
  int ids[LISTED];
};
static_assert(sizeof(Contest<1>) == 512 + 192 && sizeof(Contest<4>) == 4 * 512 + 192, "as in tiles.py");

// The experts of one lane: up to QUADS times four of one group, whose lanes take turns.
template <int QUADS>
struct Share {
  const float* logits[QUADS];
  float bias[QUADS][4];  // -infinity where there is no expert
  int second, group, member, first, step, quads;
  u32 all, fellows;  // its experts, the first one in the highest bit; the lanes of its group

  // asks: whether this warp, all of it, is to choose; of the others none needs the bias.
  __device__ __forceinline__ Share(const Router& router, const Logits& from, const float* biases, bool asks = true) {
    const int lane = threadIdx.x % WARP, size = router.size(), lanes = router.lanes();
    second = from.second, group = router.group_of(lane), member = lane & (lanes - 1), step = 4 * lanes;
    first = group * size + 4 * member;
    quads = max(0, size - 4 * member + step - 1) >> (7 - router.group_bits);
    all = (1u << 4 * QUADS) - (1u << 4 * (QUADS - quads)), fellows = (ALL >> (WARP - lanes)) << (lane - member);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const int place = q < quads ? first + q * step : 0;  // of nothing: what can be read
      const float4 v = asks ? load_constant(reinterpret_cast<const float4*>(biases + place)) : make_float4(0, 0, 0, 0);
      const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[q][i] = q < quads ? values[i] : -infinity();
      logits[q] = from.row + place;
      settle_here(logits[q]);
    }
    settle_here(all), settle_here(fellows), settle_here(first), settle_here(quads);
  }

  // What each expert is chosen by: score and bias, -infinity where that is no number or there is no expert.
  __device__ __forceinline__ void choices(float (&to)[QUADS][4]) const {
    uint4 a[QUADS], b[QUADS] = {};
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      a[q] = load_activations(logits[q]);
      load_activations_into(b[q], logits[q] + second, second != 0);
    }
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const u32 parts[4][2] = {{a[q].x, b[q].x}, {a[q].y, b[q].y}, {a[q].z, b[q].z}, {a[q].w, b[q].w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float logit = __uint_as_float(parts[i][0]) + __uint_as_float(parts[i][1]);
        to[q][i] = fmaxf(router_score(logit) + bias[q][i], -infinity());  // fmaxf drops a NaN
      }
    }
  }

  // Which of this lane's experts may be chosen, as in `all`: those of the allowed groups, which have the largest sums of
  // their two best. Where these pairs are as many as a row chooses, what is worse than all of them is out.
  __device__ __forceinline__ u32 contenders(const Router& router, const float (&choice)[QUADS][4]) const {
    Top best = top_of(choice[0]);
#pragma unroll
    for (int q = 1; q < QUADS; ++q) best = top_of(best, top_of(choice[q]));
#pragma unroll 1
    for (int step = 1; step < router.lanes(); step *= 2) {
      const float first_there = __shfl_xor_sync(ALL, best.first, step);
      best = top_of(best, Top{first_there, __shfl_xor_sync(ALL, best.second, step)});
    }
    const float mine = best.first + best.second;
    int better = 0;
#pragma unroll 1
    for (int from = 0; from < router.groups(); from += 2 * router.lanes()) {  // each lane of a group asks two others
      float sum[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] = __shfl_sync(ALL, mine, (from + member + i * router.lanes()) * router.lanes());
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int other = from + member + i * router.lanes();  // past the last group it is some group again
        const bool is = (other < router.groups()) & ((sum[i] > mine) | ((sum[i] == mine) & (other < group)));
        better += __popc(__ballot_sync(ALL, is) & fellows);
      }
    }
    const bool allowed = better < router.allowed_groups;
    const float pairs = from_ordered(warp_min(allowed ? ordered(best.second) : ordered(infinity())));
    const float least = 2 * router.allowed_groups >= router.chosen ? pairs : -infinity();
    const float finite = fmaxf(least, -3.402823466e38f);  // else two infinities would have no difference
    u32 out = 0;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {  // a subtraction and a shift for each: a comparison and its bit are three
#pragma unroll
      for (int i = 0; i < 4; ++i) out = out << 1 | __float_as_uint(choice[q][i] - finite) >> 31;
    }
    if (least == -infinity()) out = 0;
    return allowed ? all & ~out : 0;
  }
};

// One warp's row: lane k's expert is the k-th best, for lanes below `chosen`; past them it is the last of these. The
// contenders, mostly some ten, two a lane at most, are listed, and two lanes count what is better than each. Of a full
// list the best stay.
template <int QUADS>
__device__ __forceinline__ int choose_expert(const Router& router, const Share<QUADS>& share, Contest<QUADS>& at) {
  const int lane = threadIdx.x % WARP, entry = lane % LISTED, half = lane / LISTED * MAX_CHOSEN;
  float choice[QUADS][4];
  share.choices(choice);
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    float4* to = reinterpret_cast<float4*>(at.choice + share.first + q * share.step);
    if (q < share.quads) *to = {choice[q][0], choice[q][1], choice[q][2], choice[q][3]};
  }
  u32 left = share.contenders(router, choice), open = __ballot_sync(ALL, left != 0);
  int listed = 0;
#pragma unroll 1
  do {
#pragma unroll 1
    while (open != 0 && listed < LISTED) {
      const int to = listed + __popc(open & ((1u << lane) - 1));
      const u32 bit = 31 - __clz(left | 1), which = 4 * QUADS - 1 - bit;
      const int id = share.first + int(which / 4 * share.step + which % 4);
      const bool fits = to < LISTED;
      if (fits && left != 0) at.ids[to] = id;
      left &= fits ? ~(1u << bit) : ALL;
      listed = min(LISTED, listed + __popc(open));
      open = __ballot_sync(ALL, left != 0);
    }
    __syncwarp();
    u64 mine = contender(0, 0);
    if (entry < listed) mine = contender(ordered(at.choice[at.ids[entry]]), at.ids[entry]);
    if (lane < LISTED) at.listed[lane] = mine;
    __syncwarp();
    u32 above = 0;  // bits, for of a sum each step would await the one before
#pragma unroll
    for (int i = 0; i < MAX_CHOSEN; ++i) above |= at.listed[half + i] > mine ? 1u << i : 0u;
    int better = __popc(above);
    better += __shfl_xor_sync(ALL, better, LISTED);
    if (lane < LISTED && better < MAX_CHOSEN) at.ids[better] = expert_of(mine);
    __syncwarp();
    listed = MAX_CHOSEN;
  } while (open != 0);
  return at.ids[min(lane, router.chosen - 1)];
}

// The weight of each lane's expert, by its logit: its share of the scores of the row's chosen ones, times the scale.
__device__ __forceinline__ float router_weight(const Router& router, float logit) {
  const float score = threadIdx.x % WARP < router.chosen ? router_score(logit) : 0.0f;
  float total = score;
#pragma unroll
  for (int step = 1; step < MAX_CHOSEN; step *= 2) total += __shfl_xor_sync(ALL, total, step);
  return score * quick_reciprocal(total + 1e-20f) * router.scale;
}

// A lane of a row's plan: its expert, or past all others from lane `chosen` on.
struct Pick {
  int expert;

  __device__ __forceinline__ Pick(int of_lane, int chosen)
      : expert(int(threadIdx.x % WARP) < chosen ? of_lane : MAX_EXPERTS) {}
  // How many of the row's experts have a lower id.
  __device__ __forceinline__ int below() const {
    int count = 0;
#pragma unroll
    for (int k = 0; k < MAX_CHOSEN; ++k) count += __shfl_sync(ALL, expert, k) < expert;
    return count;
  }
};

// Rows that chose an expert, as a mask for each expert, and a bit for each expert that any row chose; none at the end.
// Cleared before the wait, for more than one row.
struct Chosen {
  u32 rows[MAX_EXPERTS], experts[MAX_EXPERTS / WARP + 1];

  __device__ __forceinline__ void clear() {
    for (int e = threadIdx.x; e < MAX_EXPERTS; e += blockDim.x) rows[e] = 0;
    if (threadIdx.x <= MAX_EXPERTS / WARP) experts[threadIdx.x] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add(int expert, int row) {
    atomicOr(&rows[expert], 1u << row);
    atomicOr(&experts[expert / WARP], 1u << expert % WARP);
  }
  // How many of the chosen experts have a lower id, which may be MAX_EXPERTS. Asked by whole warps.
  __device__ __forceinline__ int below(int expert) const {
    static_assert(MAX_EXPERTS / WARP == 16, "four steps add up the words below a lane's");
    const int lane = threadIdx.x % WARP;
    int count = lane > 0 && lane <= 16 ? __popc(experts[lane - 1]) : 0;
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const int before = __shfl_up_sync(ALL, count, step);
      count += lane >= step ? before : 0;
    }
    return __shfl_sync(ALL, count, expert / WARP) + __popc(experts[expert / WARP] & ((1u << expert % WARP) - 1));
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

// This warp's row in the plan of `live` rows, a warp each. weigh: the weight of each lane's expert, worked out beside its
// slot: both are little but waiting. Returns it.
template <class Weigh>
__device__ __forceinline__ float write_plan(Chosen& shared, u32* plan, int live, const Pick& pick, const Weigh& weigh) {
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const bool picks = pick.expert < MAX_EXPERTS;
  int slot = 1;
  u32 rows = 1;
  float weight;
  if (live == 1) {
    weight = weigh();
    slot += pick.below();
    if (!picks && lane < MAX_CHOSEN) plan[PLAN_IDS + 1 + lane] = 0;
  } else {
    if (picks) shared.add(pick.expert, row);
    __syncthreads();
    weight = weigh();
    slot += shared.below(pick.expert);
    if (picks) rows = shared.rows[pick.expert];
  }
  if (picks) {
    plan[PLAN_IDS + slot] = u32(pick.expert), plan[PLAN_MASKS + slot] = rows;
    plan[PLAN_WEIGHTS + slot * ROW_TILE + row] = __float_as_uint(weight);
  }
  if (threadIdx.x == WARP - 1) plan[0] = u32(slot);  // this lane's slot comes after all
  return weight;
}
