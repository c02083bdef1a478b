// Which experts a window's rows chose: a function that every block of gate_up and of down repeats for itself, from a
// few KB of router logits. It costs less than a kernel of its own in the chain would.
#pragma once
#include "arch.cuh"

constexpr int MAX_EXPERTS = 512, MAX_CHOSEN = 8;
constexpr int MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1;

// The lists of a routing in memory, in 32-bit words: experts [ROW_TILE][MAX_CHOSEN], their weights in fp32.
constexpr int LIST_WEIGHTS = ROW_TILE * MAX_CHOSEN, LIST_WORDS = 2 * LIST_WEIGHTS;

// The router's sum over K is taken in parts by blocks of their own, and added where it is read.
constexpr int ROUTER_PARTS = 2;

// logits [ROUTER_PARTS][ROW_TILE][experts] fp32; bias [experts] fp32, a weight. Or, where `lists` is not null, what was
// chosen.
struct Router {
  const float* logits;
  const float* bias;
  const u32* lists;
  int experts, groups, allowed_groups, chosen;
  float scale;
  int live;
};

// In shared memory. Slots list the distinct experts of all rows in ascending order, behind the shared expert in slot 0.
struct Plan {
  float bias[MAX_EXPERTS];
  u32 rows_of[MAX_EXPERTS];  // which chose each expert
  u32 listed[MAX_EXPERTS / WARP];
  u32 ids[MAX_SLOTS], rows[MAX_SLOTS];  // of each slot
  int experts[ROW_TILE][MAX_CHOSEN];
  float weights[ROW_TILE][MAX_CHOSEN];
  int slots;

  // What `token` weighs expert `id` with, which it chose.
  __device__ __forceinline__ float weight(int token, u32 id) const {
    float found = 0.0f;
#pragma unroll
    for (int k = 0; k < MAX_CHOSEN; ++k) {
      if (experts[token][k] == int(id)) found = weights[token][k];
    }
    return found;
  }
};

// What is left of a lane's experts: the best key, where it is, and its score.
template <int PER_LANE>
struct Left {
  u32 key[PER_LANE];  // 0: no expert, or taken; everything else is larger
  u32 best;
  int at;

  __device__ __forceinline__ void look() {
    best = 0, at = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (key[i] > best) best = key[i], at = i;
    }
  }
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) key[i] = i == at ? 0u : key[i];
    look();
  }
};

// One warp chooses for one row. A lane has consecutive experts and a group consecutive lanes, so that of equal keys the
// lowest lane holds the lowest id. PER_LANE: at least experts / 32.
template <int PER_LANE>
__device__ __forceinline__ void choose_experts(const Router& router, int row, Plan& plan) {
  const int lane = threadIdx.x % WARP;
  const int lanes = WARP / router.groups, group = lane / lanes, sub = lane % lanes;
  const int size = router.experts / router.groups, each = (size + lanes - 1) / lanes;
  const int begin = group * size + sub * each, count = max(0, min(each, size - sub * each));
  float score[PER_LANE], choice[PER_LANE];
const float* from = router.logits + row * router.experts + begin;
  const int part = ROW_TILE * router.experts;
  if (each == PER_LANE && size == each * lanes) {  // then they begin at whole 16 bytes
    float4 parts[ROUTER_PARTS][PER_LANE / 4];
#pragma unroll
    for (int p = 0; p < ROUTER_PARTS; ++p) {
#pragma unroll
      for (int i = 0; i < PER_LANE / 4; ++i) parts[p][i] = load_settled4(from + p * part + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE / 4; ++i) {
      score[4 * i] = parts[0][i].x + parts[1][i].x, score[4 * i + 1] = parts[0][i].y + parts[1][i].y;
      score[4 * i + 2] = parts[0][i].z + parts[1][i].z, score[4 * i + 3] = parts[0][i].w + parts[1][i].w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      score[i] = i < count ? load_settled(from + i) + load_settled(from + part + i) : 0.0f;
    }
  }
  float first = -infinity(), second = -infinity();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    score[i] = __fdividef(1.0f, 1.0f + __expf(-score[i]));
    choice[i] = i < count ? fmaxf(score[i] + plan.bias[begin + i], -infinity()) : -infinity();  // fmaxf drops a NaN
    second = fmaxf(second, fminf(first, choice[i]));
    first = fmaxf(first, choice[i]);
  }
  for (int step = 1; step < lanes; step *= 2) {
    const float other_first = __shfl_xor_sync(ALL, first, step), other_second = __shfl_xor_sync(ALL, second, step);
    second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
    first = fmaxf(first, other_first);
  }
  const float mine = first + second;
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < router.groups; ++j) {
    const float other = __shfl_sync(ALL, mine, j * lanes);
    rank += other > mine || (other == mine && j < group);
  }
  Left<PER_LANE> left;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    left.key[i] = i < count ? ordered(rank < router.allowed_groups ? choice[i] : -infinity()) : 0u;
  }
  left.look();
  int expert = -1;  // lane k keeps what was chosen k-th
  float weight = 0.0f, total = 0.0f;
  for (int k = 0; k < router.chosen; ++k) {
    const int winner = __ffs(__ballot_sync(ALL, left.best == warp_max(left.best))) - 1;
    float held = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) held = i == left.at ? score[i] : held;
    const int won = __shfl_sync(ALL, begin + left.at, winner);
    const float of_it = __shfl_sync(ALL, held, winner);
    if (lane == winner) left.take();
    if (lane == k) expert = won, weight = of_it;
    total += of_it;
  }
  if (lane < MAX_CHOSEN) {
    plan.experts[row][lane] = expert;
    plan.weights[row][lane] = weight / (total + 1e-20f) * router.scale;
  }
}

__device__ __forceinline__ void take_list(const Router& router, int row, Plan& plan) {
  const int lane = threadIdx.x % WARP;
  if (lane >= MAX_CHOSEN) return;
  const u32* from = router.lists + row * MAX_CHOSEN + lane;
  plan.experts[row][lane] = lane < router.chosen ? __float_as_int(load_settled(reinterpret_cast<const float*>(from))) : -1;
  plan.weights[row][lane] = load_settled(reinterpret_cast<const float*>(from + LIST_WEIGHTS));
}

// What needs no logits: may stand before the wait. A barrier has to follow.
__device__ __forceinline__ void prepare_plan(const Router& router, Plan& plan) {
  for (int e = threadIdx.x; e < router.experts; e += blockDim.x) {
    plan.bias[e] = router.lists == nullptr ? router.bias[e] : 0.0f;
    plan.rows_of[e] = 0;
    if (e < MAX_EXPERTS / WARP) plan.listed[e] = 0;
  }
}

// Each warp chooses for the rows warp, warp + warps ..; then all threads write down the slots. Ends with a barrier.
__device__ __forceinline__ void make_plan(const Router& router, Plan& plan) {
  const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
  for (int row = threadIdx.x / WARP; row < router.live; row += warps) {
    if (router.lists != nullptr) {
      take_list(router, row, plan);
    } else if (router.experts <= 4 * WARP) {
      choose_experts<4>(router, row, plan);
    } else if (router.experts <= 8 * WARP) {
      choose_experts<8>(router, row, plan);
    } else {
      choose_experts<MAX_EXPERTS / WARP>(router, row, plan);
    }
    if (lane < router.chosen) {
      const u32 id = u32(plan.experts[row][lane]);
      atomicOr(&plan.rows_of[id], 1u << row);
      atomicOr(&plan.listed[id / WARP], 1u << id % WARP);
    }
  }
  __syncthreads();
  const int words = (router.experts + WARP - 1) / WARP;
  for (int e = threadIdx.x; e < words * WARP; e += blockDim.x) {
    const u32 word = plan.listed[e / WARP];
    int slot = 1;
    for (int w = 0; w < e / WARP; ++w) slot += __popc(plan.listed[w]);
    if (e % WARP == 0 && e / WARP == words - 1) plan.slots = slot + __popc(word);
    slot += __popc(word & ((1u << lane) - 1));
    if (word >> lane & 1) plan.ids[slot] = u32(e), plan.rows[slot] = plan.rows_of[e];
  }
  if (threadIdx.x == 0) plan.ids[0] = 0, plan.rows[0] = (1u << router.live) - 1;
  __syncthreads();
}
