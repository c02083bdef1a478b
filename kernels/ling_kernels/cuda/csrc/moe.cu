// Mixture of experts for a window: selection and plan, gate_up, down. Router logits come from gemm.cu.
//
// The plan lists the distinct experts of all rows once, in ascending order behind the shared expert, with the rows
// that chose each. An expert costs the same for one row as for sixteen, so gate_up computes all rows for every listed
// expert. It applies the router's weights too, and writes zeros for the rows that did not choose: by selection, a
// product with zero would keep an infinity. So down is one long product over the listed experts, whose sum never
// leaves the tensor cores: what a row did not choose adds exact zeros to it, which change no bit.
#include "gemm.cuh"

constexpr int MAX_EXPERTS = 512, MAX_CHOSEN = 8;
constexpr int MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1;

// The plan in 32-bit words: number of slots; expert id and mask of rows by slot; fp32 weights [slot][ROW_TILE]. Slot
// 0 is the shared expert, with weight 1 for all rows.
constexpr int PLAN_IDS = 4, PLAN_MASKS = PLAN_IDS + MAX_SLOTS, PLAN_WEIGHTS = PLAN_MASKS + MAX_SLOTS + 2;

struct Choice {
  int experts[ROW_TILE][MAX_CHOSEN];
  float weights[ROW_TILE][MAX_CHOSEN];
};

struct Router {
  int experts, groups, allowed_groups, chosen;
  float scale;
};

// One warp chooses for one row. Groups lie in a power of two of lanes each, so lane l has experts group · size + sub,
// + lanes, + 2 lanes .. of group l / lanes. PER_LANE: at least experts / 32; no more than needed, since a single
// warp's instructions are what the machine waits for here.
template <int PER_LANE>
__device__ __forceinline__ void choose_experts(
    const Router& router, const float* logits, const float* bias, int row, Choice& out) {
  const int lane = threadIdx.x % WARP;
  const int lanes = WARP / router.groups, group = lane / lanes, sub = lane % lanes;
  const int size = router.experts / router.groups;
  float score[PER_LANE], choice[PER_LANE];
  float first = -infinity(), second = -infinity();
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int member = sub + i * lanes, expert = group * size + member;
    const bool inside = member < size;
    score[i] = inside ? sigmoid(logits[expert]) : 0.0f;
    choice[i] = inside ? fmaxf(score[i] + bias[expert], -infinity()) : -infinity();  // fmaxf drops a NaN
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
  for (int j = 0; j < router.groups; ++j) {
    const float other = __shfl_sync(ALL, mine, j * lanes);
    rank += other > mine || (other == mine && j < group);
  }
  u32 key[PER_LANE];  // 0: no expert, or taken; everything else is larger
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const bool inside = sub + i * lanes < size;
    key[i] = inside ? ordered(rank < router.allowed_groups ? choice[i] : -infinity()) : 0u;
  }
  for (int k = 0; k < router.chosen; ++k) {
    u32 best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (key[i] > best) best = key[i], at = i;
    }
    const u32 top = warp_max(best);
    const u32 expert = warp_min(best == top && top != 0 ? u32(group * size + sub + at * lanes) : ALL);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (key[i] != 0 && u32(group * size + sub + i * lanes) == expert) {
        key[i] = 0;
        out.experts[row][k] = int(expert);
        out.weights[row][k] = score[i];
      }
    }
  }
  __syncwarp();
  float total = 0.0f;
  for (int k = 0; k < router.chosen; ++k) total += out.weights[row][k];
  const float weight = lane < router.chosen ? out.weights[row][lane] / (total + 1e-20f) * router.scale : 0.0f;
  __syncwarp();
  if (lane < router.chosen) out.weights[row][lane] = weight;
}

// From the choices of `live` rows to the plan. Called by all MAX_EXPERTS threads, after a barrier.
__device__ __forceinline__ void write_plan(const Choice& choice, int live, int chosen, u32* plan) {
  __shared__ u32 masks[MAX_EXPERTS];
  __shared__ int slots[MAX_EXPERTS];
  __shared__ int before[MAX_EXPERTS / WARP];
  const int expert = threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int row = threadIdx.x / MAX_CHOSEN, k = threadIdx.x % MAX_CHOSEN;
  const bool picks = row < live && k < chosen;
  masks[expert] = 0;
  __syncthreads();
  if (picks) atomicOr(&masks[choice.experts[row][k]], 1u << row);
  __syncthreads();
  const u32 listed = __ballot_sync(ALL, masks[expert] != 0);
  if (lane == 0) before[warp] = __popc(listed);
  __syncthreads();
  int slot = 1 + __popc(listed & ((1u << lane) - 1));
  int total = 1;
  for (int w = 0; w < MAX_EXPERTS / WARP; ++w) {
    if (w < warp) slot += before[w];
    total += before[w];
  }
  slots[expert] = slot;
  if (masks[expert] != 0) plan[PLAN_IDS + slot] = u32(expert), plan[PLAN_MASKS + slot] = masks[expert];
  if (threadIdx.x == 0) plan[0] = u32(total), plan[PLAN_IDS] = 0, plan[PLAN_MASKS] = (1u << live) - 1;
  if (threadIdx.x < live) plan[PLAN_WEIGHTS + threadIdx.x] = __float_as_uint(1.0f);
  __syncthreads();
  if (picks) {
    const int at = PLAN_WEIGHTS + slots[choice.experts[row][k]] * ROW_TILE + row;
    plan[at] = __float_as_uint(choice.weights[row][k]);
  }
}

// logits [*, experts] fp32 -> experts [*, chosen], weights [*, chosen], plan. Grid: 1, and blocks that do nothing but
// ask for the bytes at two addresses, 16 KB a block: the memory is idle meanwhile. Block: MAX_EXPERTS threads.
extern "C" __global__ void __launch_bounds__(MAX_EXPERTS) route_select(
    const float* logits, const float* bias, i64* experts, float* weights, u32* plan, int num_experts, int groups,
    int allowed_groups, int chosen, float scale, int live, const u8* asked_a, const u8* asked_b, int bytes_a,
    int bytes_b) {
  if (blockIdx.x > 0) {
    if (threadIdx.x == 0) {
      const int per = 16384, blocks_a = (bytes_a + per - 1) / per, at = blockIdx.x - 1;
      const int offset = (at < blocks_a ? at : at - blocks_a) * per;
      const int left = (at < blocks_a ? bytes_a : bytes_b) - offset;
      if (left > 0) prefetch_l2((at < blocks_a ? asked_a : asked_b) + offset, u32(min(left, per)));
    }
    wait_for_producer();
    let_next_start();
    return;
  }
  __shared__ Choice choice;
  wait_for_producer();
  let_next_start();
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (row < live) {
    const Router router = {num_experts, groups, allowed_groups, chosen, scale};
    const float* own = logits + row * num_experts;
    if (num_experts <= 4 * WARP) {
      choose_experts<4>(router, own, bias, row, choice);
    } else if (num_experts <= 8 * WARP) {
      choose_experts<8>(router, own, bias, row, choice);
    } else {
      choose_experts<MAX_EXPERTS / WARP>(router, own, bias, row, choice);
    }
    __syncwarp();
    if (lane < chosen) {
      experts[row * chosen + lane] = choice.experts[row][lane];
      weights[row * chosen + lane] = choice.weights[row][lane];
    }
  }
  __syncthreads();
  write_plan(choice, live, chosen, plan);
}

// The plan of choices that were made elsewhere. Grid: 1. Block: MAX_EXPERTS threads.
extern "C" __global__ void __launch_bounds__(MAX_EXPERTS) route_plan(
    const i64* experts, const float* weights, u32* plan, int chosen, int live) {
  __shared__ Choice choice;
  wait_for_producer();
  let_next_start();
  const int row = threadIdx.x / MAX_CHOSEN, k = threadIdx.x % MAX_CHOSEN;
  if (row < live && k < chosen) {
    choice.experts[row][k] = int(experts[row * chosen + k]);
    choice.weights[row][k] = weights[row * chosen + k];
  }
  __syncthreads();
  write_plan(choice, live, chosen, plan);
}

struct Experts {
  const bf16* shared;
  const bf16* routed;
  int shared_inner, inner;
  const u32* plan;
};

// Tiles of 8 gate and 8 up rows over all listed experts, the shared one first; blocks take them in turn.
struct ExpertGateUp {
  Experts experts;
  int width, step;

  __device__ __forceinline__ int shared_tiles() const { return (experts.shared_inner + 7) / 8; }
  __device__ __forceinline__ int tiles() const { return (experts.inner + 7) / 8; }
  __device__ __forceinline__ int first() const { return blockIdx.x; }
  __device__ __forceinline__ bool early(int tile) const { return tile < shared_tiles(); }
  __device__ __forceinline__ int end() const { return shared_tiles() + (int(experts.plan[0]) - 1) * tiles(); }
  __device__ __forceinline__ int slot(int tile) const {
    return tile < shared_tiles() ? 0 : (tile - shared_tiles()) / tiles() + 1;
  }
  __device__ __forceinline__ int within(int tile) const {
    return tile < shared_tiles() ? tile : (tile - shared_tiles()) % tiles();
  }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    const int s = slot(tile);
    if (s == 0) return gate_up_rows(experts.shared, experts.shared_inner, width, tile, group);
    const bf16* weight = experts.routed + i64(experts.plan[PLAN_IDS + s]) * 2 * experts.inner * width;
    return gate_up_rows(weight, experts.inner, width, within(tile), group);
  }
};

template <int NT>
struct StoreExpert {
  ExpertGateUp source;
  bf16* out;
  int pitch, live;
  float limit, shared_limit;

  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    const u32* plan = source.experts.plan;
    const int slot = source.slot(tile), first = source.within(tile) * 8;
    const int inner = slot == 0 ? source.experts.shared_inner : source.experts.inner;
    const float most = slot == 0 ? shared_limit : limit;
    const u32 rows = plan[PLAN_MASKS + slot];
    bf16* to = out + i64(slot) * ROW_TILE * pitch + first;
    for (int o = threadIdx.x; o < live * 8; o += blockDim.x) {
      const int token = o / 8, row = o % 8;
      if (first + row >= inner) continue;
      float value = 0.0f;
      if (rows >> token & 1) {
        const float weight = __uint_as_float(plan[PLAN_WEIGHTS + slot * ROW_TILE + token]);
        value = weight * swiglu(sums.at(token, row), sums.at(token, row + 8), most);
      }
      to[token * pitch + row] = to_bf16(value);
    }
  }
  __device__ __forceinline__ void finish() {}
};

template <int NT>
__device__ __forceinline__ void gate_up(
    const bf16* x, const Experts& experts, bf16* out, int pitch, float limit, float shared_limit, int live, int width) {
  const ExpertGateUp source = {experts, width, int(gridDim.x)};
  StoreExpert<NT> store = {source, out, pitch, live, limit, shared_limit};
  stream_tiles<NT, false>(source, Tokens{x, width, width, live}, Plain{}, store);
}

// One part of out[token, rows of this block] = sum over slots of down[slot] · x[slot, token]. Each warp of the whole grid
// has one chunk of K, the same of every expert, and walks all experts in ascending order: which experts a warp has never
// depends on the other rows. K is shared between blocks (see part.cu), and exchange_norm adds the parts.
// AHEAD: slots whose weights and tokens a warp asks for at once.
template <int NT, int AHEAD>
__device__ __forceinline__ void down_part(
    const Experts& experts, const bf16* x, float* out, int pitch, int rows, int live, int width) {
  DYNAMIC_SHARED(shared);
  __shared__ u32 ids[MAX_SLOTS + AHEAD];
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, group = threadIdx.x % WARP / 4;
  const int k = (blockIdx.y * warps + warp) * CHUNK + threadIdx.x % 4 * 8;
  // Past the end of a matrix it is its first row, past the end of a row its beginning, which meets tokens of zero.
  const int row = blockIdx.x * 16 + group, low = row < width ? row : 0, high = row + 8 < width ? row + 8 : 0;
  const bool in_shared = k < experts.shared_inner, in_routed = k < experts.inner;
  const bf16* shared_low = experts.shared + i64(low) * experts.shared_inner + (in_shared ? k : 0);
  const bf16* routed_low = experts.routed + i64(low) * experts.inner + (in_routed ? k : 0);
  const int shared_high = (high - low) * experts.shared_inner, routed_high = (high - low) * experts.inner;
  const u32 stride = u32(width) * experts.inner;  // from expert to expert
  const bf16* tokens[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int token = n * 8 + group;
    tokens[n] = x + (token < live ? token : 0) * pitch;
  }
  const int slot_pitch = ROW_TILE * pitch, shared_k = in_shared ? k : 0, routed_k = in_routed ? k : 0;

  // The plan is settled: every block of gate_up is past its own wait, so whoever wrote the plan has finished. Its words
  // are read before their number is known.
  for (int s = threadIdx.x; s < MAX_SLOTS + AHEAD; s += blockDim.x) ids[s] = load_settled(experts.plan + PLAN_IDS + s);
  const int slots = int(load_settled(experts.plan));
  __syncthreads();
  Chunk ring[AHEAD];
  uint4 in[AHEAD][NT];
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    const bf16* from = s == 0 ? shared_low : routed_low + u64(s < slots ? ids[s] : 0) * stride;
    load_weights_into(ring[s].low, from, s < slots);
    load_weights_into(ring[s].high, from + (s == 0 ? shared_high : routed_high), s < slots);
  }
  wait_for_producer();
  let_next_start();
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4 v = load_activations(tokens[n] + (s < slots ? s : 0) * slot_pitch + (s == 0 ? shared_k : routed_k));
      in[s][n] = (s == 0 ? in_shared : in_routed) ? v : make_uint4(0, 0, 0, 0);
    }
  }
  float sums[NT][4] = {};
  for (int first = 0; first < slots; first += AHEAD) {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      if (first + s < slots) multiply(sums, ring[s], in[s]);
    }
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      const int slot = first + AHEAD + s;
      if (slot >= slots) break;
      const bf16* from = routed_low + u64(ids[slot]) * stride;
      load_weights_into(ring[s].low, from, true);
      load_weights_into(ring[s].high, from + routed_high, true);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 v = load_activations(tokens[n] + slot * slot_pitch + routed_k);
        in[s][n] = in_routed ? v : make_uint4(0, 0, 0, 0);
      }
    }
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared)};
  all.put(warp, sums);
  __syncthreads();
  float* to = out + i64(blockIdx.y) * rows * width;
  for (int o = threadIdx.x; o < live * 16; o += blockDim.x) {
    const int token = o / 16, at = blockIdx.x * 16 + o % 16;
    if (at < width) to[i64(token) * width + at] = all.at(token, o % 16);
  }
}

// x [*, width], shared [2 shared_inner, width], routed [E, 2 inner, width] -> out [slots, ROW_TILE, pitch].
// Grid: any number of blocks. Shared: 2 · warps · 8 NT · PITCH floats.
#define EXPERTS_GATE_UP(NAME, NT)                                                                                 \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* shared, const bf16* routed, const u32* plan, bf16* out, int shared_inner, int inner,\
      int pitch, float limit, float shared_limit, int live, int width) {                                          \
    gate_up<NT>(x, Experts{shared, routed, shared_inner, inner, plan}, out, pitch, limit, shared_limit, live, width);\
  }
EXPERTS_GATE_UP(experts_gate_up_8, 1)
EXPERTS_GATE_UP(experts_gate_up_16, 2)

// x as gate_up left it, shared [width, shared_inner], routed [E, width, inner] -> out [parts, rows, width] fp32, `live` rows
// of each. Grid: ceil(width / 16), parts; parts · warps chunks are at least as long as a row. Shared: warps · 8 NT · PITCH
// floats.
#define EXPERTS_DOWN(NAME, NT, AHEAD, BLOCKS)                                                                     \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) NAME(                                                 \
      const bf16* x, const bf16* shared, const bf16* routed, const u32* plan, float* out, int shared_inner,       \
      int inner, int pitch, int rows, int live, int width) {                                                      \
    down_part<NT, AHEAD>(Experts{shared, routed, shared_inner, inner, plan}, x, out, pitch, rows, live, width);   \
  }
EXPERTS_DOWN(experts_down_8, 1, 9, 3)  // all slots of one row at once
EXPERTS_DOWN(experts_down_16, 2, 6, 3)
