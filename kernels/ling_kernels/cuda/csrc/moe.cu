// Mixture of experts for a window: gate_up of the chosen experts and down of all, by a plan. route.cu makes it, or gate_up
// itself for one row, and route.cu leaves the shared expert's gate_up too.
//
// The plan lists the distinct experts of all rows once, in ascending order behind the shared expert, with the rows
// that chose each. An expert costs the same for one row as for sixteen, so gate_up computes all rows for every listed
// expert. It applies the router's weights too, and writes zeros for the rows that did not choose: by selection, a
// product with zero would keep an infinity. So down is one long product over the listed experts, whose sum never
// leaves the tensor cores: what a row did not choose adds exact zeros to it, which change no bit.
#include "gemm.cuh"
#include "select.cuh"

// Tiles of 8 gate and 8 up rows over all chosen experts; blocks take them in turn. A tile's slot follows from its number;
// its expert is asked for one tile ahead, whether or not the plan goes that far.
struct ExpertGateUp {
  struct Place {
    int slot, within;
    const u32* id;  // the expert's, in the plan
    u32 offset;     // of this lane's gate row in an expert's weights
    u32 expert;
  };
  const bf16* routed;
  const u32* plan;
  int inner, width, step;
  static constexpr bool ONE = false, EARLY = false;

  __device__ __forceinline__ void ready() const {}
  __device__ __forceinline__ int tiles() const { return (inner + 7) / 8; }
  __device__ __forceinline__ int first() const { return blockIdx.x; }
  __device__ __forceinline__ int end() const { return (int(load_activation(plan)) - 1) * tiles(); }
  __device__ __forceinline__ Place place(int tile) const {
    Place at;
    const int before = tile / tiles();
    at.slot = before + 1, at.within = tile - before * tiles();
    const int row = at.within * 8 + threadIdx.x % WARP / 4;
    at.id = plan + PLAN_IDS + min(at.slot, MAX_SLOTS - 1), at.offset = u32(row < inner ? row : 0) * u32(width);
    settle_here(at.slot), settle_here(at.within), settle_here(at.id), settle_here(at.offset);
    return at;
  }
  // Before the wait, behind which nothing is to come before the expert's id.
  __device__ __forceinline__ void settle(const Place& at) const { settle_before_wait(at.offset | u32(u64(at.id))); }
  __device__ __forceinline__ void ask(Place& at) const { at.expert = load_activation(at.id); }
  __device__ __forceinline__ Rows rows(const Place& at, int) const {
    const u32 matrix = u32(inner) * u32(width);
    const bf16* low = routed + (u64(at.expert) * (2 * matrix) + at.offset);
    return {low, low + matrix};
  }
};

template <int NT>
struct StoreExpert {
  ExpertGateUp source;
  bf16* out;
  int pitch, live;
  float limit;
  u32 rows, weight;  // that chose the tile's expert; the router's weight of this thread's first token
  Own<NT, 8> own;

  __device__ __forceinline__ u32 weight_of(const ExpertGateUp::Place& at, int token) const {
    return load_activation(source.plan + PLAN_WEIGHTS + at.slot * ROW_TILE + token);
  }
  __device__ __forceinline__ void expect(const ExpertGateUp::Place& at) {
    rows = load_activation(source.plan + PLAN_MASKS + at.slot);
    if (own.first < live) weight = weight_of(at, own.first);
  }
  __device__ __forceinline__ void operator()(const ExpertGateUp::Place& at, const Sums<NT>& sums) {
    const int row = at.within * 8 + own.value, begin = at.slot * ROW_TILE * pitch + row;
    own.each(row < source.inner ? live : 0, [&](int token, int place) {
      const float by = __uint_as_float(token == own.first ? weight : weight_of(at, token));
      const float2 sum = sums.both(place, own.up(token));
      const float value = by * swiglu(sum.x, sum.y, limit);
      out[begin + token * pitch] = to_bf16(rows >> token & 1 ? value : 0.0f);
    });
  }
  __device__ __forceinline__ void finish() {}
};

// What the blocks of one row's gate_up know of its choice, in shared memory: the chosen experts in ascending order and
// their weights. One warp chooses: not the first of each block, for those of one multiprocessor share a scheduler.
template <int QUADS>
struct OneRow {
  Contest<QUADS> contest;
  int ids[MAX_CHOSEN];
  float weights[MAX_CHOSEN];
  int chooser;
};

// Where one row's results of the selection go, by the first block. plan: as clear_plan left it.
struct Selected {
  i64* experts;
  float* weights;
  u32* plan;
};

// One row's choice by one warp of each block, from at most 4 · QUADS · WARP experts.
template <int QUADS>
struct Choice {
  Router router;
  Logits logits;
  OneRow<QUADS>* at;
  Share<QUADS> share;
  bool mine;
  int expert, below;

  __device__ __forceinline__ Choice(
      const Router& router, const Logits& logits, const float* bias, OneRow<QUADS>* at, bool mine)
      : router(router), logits(logits), at(at), share(router, logits, bias, mine), mine(mine) {}

  // One warp of the block, another one in each block of a multiprocessor.
  __device__ __forceinline__ static bool is_chooser(OneRow<QUADS>& at) {
    const int warps = blockDim.x / WARP, slot = warp_slot();
    if (threadIdx.x == 0) at.chooser = ((slot / warps - slot) & 3) % warps;
    __syncthreads();
    return int(threadIdx.x) / WARP == at.chooser;
  }
  __device__ __forceinline__ void choose() {
    if (mine) {
      expert = choose_expert(router, share, at->contest);
      below = Pick(expert, router.chosen).below();
      if (int(threadIdx.x % WARP) < router.chosen) at->ids[below] = expert;
    }
    __syncthreads();
  }
  // While the first tile's weights are on their way.
  __device__ __forceinline__ void weigh(const Selected& to) {
    if (!mine) return;
    mine = false;
    const int lane = threadIdx.x % WARP;
    const float weight = router_weight(router, logits.of(expert));
    if (lane < router.chosen) at->weights[below] = weight;
    if (blockIdx.x > 0) return;
    if (lane < router.chosen) {
      store_volatile(to.plan + PLAN_IDS + 1 + below, u32(expert));
      to.plan[PLAN_MASKS + 1 + below] = 1, to.plan[PLAN_WEIGHTS + (1 + below) * ROW_TILE] = __float_as_uint(weight);
      to.experts[lane] = expert, to.weights[lane] = weight;
    } else if (lane < MAX_CHOSEN) {
      store_volatile(to.plan + PLAN_IDS + 1 + lane, 0);
    }
    begin_plan(to.plan, 1, 0);
    if (lane == WARP - 1) store_volatile(to.plan, u32(router.chosen + 1));
  }
};

template <int QUADS>
struct ChoosingGateUp : ExpertGateUp {
  Choice<QUADS>* choice;

  __device__ __forceinline__ void ready() const { choice->choose(); }
  __device__ __forceinline__ int end() const { return choice->router.chosen * tiles(); }
  __device__ __forceinline__ void ask(Place& at) const { at.expert = choice->at->ids[min(at.slot, MAX_CHOSEN) - 1]; }
};

template <int QUADS>
struct StoreChosen {
  ChoosingGateUp<QUADS> source;
  Selected to;
  bf16* out;
  int pitch;
  float limit;
  Own<1, 8> own;

  __device__ __forceinline__ void expect(const ExpertGateUp::Place&) {
    source.choice->weigh(to);
  }
  __device__ __forceinline__ void operator()(const ExpertGateUp::Place& at, const Sums<1>& sums) {
    const int row = at.within * 8 + own.value, begin = at.slot * ROW_TILE * pitch + row;
    own.each(row < source.inner ? 1 : 0, [&](int token, int place) {
      const float2 sum = sums.both(place, own.up(token));
      out[begin + token * pitch] = to_bf16(source.choice->at->weights[at.slot - 1] * swiglu(sum.x, sum.y, limit));
    });
  }
  __device__ __forceinline__ void finish() {}
};

struct Experts {
  const bf16* shared;
  const bf16* routed;
  int shared_inner, inner;
  const u32* plan;
};

// One part of out[token, rows of this block] = sum over slots of down[slot] · x[slot, token]. Each warp of the whole grid
// has one chunk of K, the same of every expert, and walks all experts in ascending order: which experts a warp has never
// depends on the other rows. K is shared between blocks (see part.cu), and exchange_norm adds the parts.
// AHEAD: slots whose weights and tokens a warp asks for at once. each: warps of a tile; a block has as many tiles as its
// warps suffice for, which meet the same tokens: those of nine rows are 0.6 of a tile's weights, and L1 has them then.
template <int NT, int AHEAD>
__device__ __forceinline__ void down_part(
    const Experts& experts, const bf16* x, float* out, int pitch, int rows, int live, int width, int each) {
  DYNAMIC_SHARED(shared);
  __shared__ u32 ids[MAX_SLOTS];
  __shared__ int number;
  const u32 threads = NT == 1 ? blockDim.x : each * WARP, own_tile = NT == 1 ? 0 : threadIdx.x / threads;
  const u32 thread = threadIdx.x - own_tile * threads;
  const int warp = thread / WARP, warps = threads / WARP, group = thread % WARP / 4;
  // Of several rows, blocks that read the same rows begin together (a grid of the other order: 0.7 % of a step slower).
  const int block = blockIdx.y * gridDim.x + blockIdx.x, parts = gridDim.y;
  const int part = NT == 1 ? blockIdx.y : block % parts;
  const int tile = NT == 1 ? blockIdx.x : block / parts * (blockDim.x / threads) + own_tile;

  // The plan is settled: every block of gate_up is past its own wait when down starts, so a kernel before it that wrote
  // the plan has finished. One row's may be gate_up's own, and is looked at again until it is there. One warp reads number and
  // first ids, in one trip: all warps of all blocks would queue for that line at one place of L2 (measured: 1.3 us, up to
  // 3.5). The others follow while the first slots' weights are on their way.
  constexpr int FIRST = WARP - PLAN_IDS;
  static_assert(AHEAD <= FIRST && MAX_CHOSEN < FIRST, "a lane a word");
  if (threadIdx.x < WARP) {
    const int slot = int(threadIdx.x) - PLAN_IDS;
    u32 word, all;
    bool missing;
    do {
      word = load_changing(experts.plan + threadIdx.x);
      all = __shfl_sync(ALL, word, 0);
      missing = all == 0 || (slot > 0 && slot < int(all) && word == NO_ID);
    } while (NT == 1 && live == 1 && __ballot_sync(ALL, missing) != 0);
    if (slot >= 0) ids[slot] = word;
    if (threadIdx.x == 0) number = int(all);
  }

  const int k = (part * warps + warp) * CHUNK + threadIdx.x % 4 * 8;
  // Past the end of a matrix it is its first row, past the end of a row its beginning, which meets tokens of zero.
  const int row = tile * 16 + group, low = row < width ? row : 0, high = row + 8 < width ? row + 8 : 0;
  const bool in_shared = k < experts.shared_inner, in_routed = k < experts.inner;
  const bf16* shared_low = experts.shared + i64(low) * experts.shared_inner + (in_shared ? k : 0);
  const bf16* routed_low = experts.routed + i64(low) * experts.inner + (in_routed ? k : 0);
  const int shared_high = (high - low) * experts.shared_inner, routed_high = (high - low) * experts.inner;
  const u32 stride = u32(width) * experts.inner;  // from expert to expert
  const bf16* tokens[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int token = n * 8 + group;
    tokens[n] = x + (token < live ? token : 0) * pitch + k;
  }
  const u32 slot_pitch = ROW_TILE * pitch;

  Chunk ring[AHEAD];
  uint4 in[AHEAD][NT] = {};  // zeros stay where a lane has no values of K
  load_weights_into(ring[0].low, shared_low, true);  // whatever the plan says
  load_weights_into(ring[0].high, shared_low + shared_high, true);
  __syncthreads();
  const int slots = number;
#pragma unroll
  for (int s = 1; s < AHEAD; ++s) {
    const bf16* from = routed_low + u64(s < slots ? ids[s] : 0) * stride;
    load_weights_into(ring[s].low, from, s < slots);
    load_weights_into(ring[s].high, from + routed_high, s < slots);
  }
  if (slots > FIRST) {
    for (int s = FIRST + threadIdx.x; s < slots; s += blockDim.x) ids[s] = load_settled(experts.plan + PLAN_IDS + s);
    __syncthreads();
  }
  const Own<NT, 16> own(thread, threads);
  const int at = tile * 16 + own.value;
  const int stored = at < width ? live : 0, begin = part * rows * width + at;
#pragma unroll
  for (int n = 0; n < NT; ++n) settle_here(tokens[n]);
  wait_for_producer();
  let_next_start();
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      load_activations_into(in[s][n], tokens[n] + u64(slot_pitch) * s, s < slots && (s == 0 ? in_shared : in_routed));
    }
  }
  float sums[NT][4] = {};
  for (int first = 0; first < slots; first += AHEAD) {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      if (first + s >= slots) break;
      multiply(sums, ring[s], in[s]);
      const int slot = first + AHEAD + s;
      if (slot >= slots) continue;
      const bf16* from = routed_low + u64(ids[slot]) * stride;
      load_weights_into(ring[s].low, from, true);
      load_weights_into(ring[s].high, from + routed_high, true);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        in[s][n] = make_uint4(0, 0, 0, 0);
        load_activations_into(in[s][n], tokens[n] + u64(slot_pitch) * slot, in_routed);
      }
    }
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared) + own_tile * warps * Sums<NT>::SIZE};
  all.put(warp, sums);
  __syncthreads();
  own.each(stored, [&](int token, int place) { out[begin + token * width] = all.at(place, warps); });
}

// x [*, width], routed [E, 2 inner, width] -> out [slots, ROW_TILE, pitch] from the second slot on. Grid: any number of
// blocks. Shared: 2 · warps · 8 NT · PITCH floats.
#define EXPERTS_GATE_UP(NAME, NT)                                                                                 \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* routed, const u32* plan, bf16* out, int inner, int pitch, float limit, int live, \
      int width) {                                                                                                \
    settle_here(plan);                                                                                            \
    const ExpertGateUp source = {routed, plan, inner, width, int(gridDim.x)};                                     \
    StoreExpert<NT> store = {source, out, pitch, live, limit};                                                    \
    stream_tiles<NT>(source, Tokens{x, width, width, live}, Plain{}, store);                                      \
  }
EXPERTS_GATE_UP(experts_gate_up_8, 1)
EXPERTS_GATE_UP(experts_gate_up_16, 2)

// The same for one row that is still to be selected, from at most 4 · QUADS · WARP experts; arguments as for route_select.
#define EXPERTS_CHOOSE_GATE_UP(NAME, QUADS)                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* routed, const float* logits, const float* bias, i64* experts, float* weights,    \
      u32* plan, int num_experts, int groups, int allowed_groups, int chosen, float scale, int second, bf16* out, \
      int inner, int pitch, float limit, int width) {                                                             \
    __shared__ OneRow<QUADS> row;                                                                                 \
    const Router router = {num_experts, __ffs(groups) - 1, allowed_groups, chosen, scale};                        \
    const bool mine = Choice<QUADS>::is_chooser(row);                                                             \
    Choice<QUADS> choice(router, Logits{logits, second}, bias, &row, mine);                                       \
    const ChoosingGateUp<QUADS> source = {{routed, plan, inner, width, int(gridDim.x)}, &choice};                 \
    StoreChosen<QUADS> store = {source, {experts, weights, plan}, out, pitch, limit};                             \
    stream_tiles<1>(source, Tokens{x, width, width, 1}, Plain{}, store);                                          \
  }
EXPERTS_CHOOSE_GATE_UP(experts_choose_gate_up_1, 1)
EXPERTS_CHOOSE_GATE_UP(experts_choose_gate_up_4, 4)

// x as gate_up and the plan's kernel left it, shared [width, shared_inner], routed [E, width, inner] -> out [parts, rows,
// width] fp32, `live` rows of each. each: warps of a tile, four at most; all of a block's up to 8 tokens. Grid: tiles of 16
// rows by those of a block, parts; parts · each chunks are at least as long as a row. Shared: warps · 8 NT · PITCH floats.
#define EXPERTS_DOWN(NAME, NT, AHEAD, THREADS, BLOCKS)                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                             \
      const bf16* x, const bf16* shared, const bf16* routed, const u32* plan, float* out, int shared_inner,       \
      int inner, int pitch, int rows, int live, int width, int each) {                                            \
    down_part<NT, AHEAD>(                                                                                         \
        Experts{shared, routed, shared_inner, inner, plan}, x, out, pitch, rows, live, width, each);              \
  }
EXPERTS_DOWN(experts_down_8_9, 1, 9, 128, 3)  // all slots of one row at once
EXPERTS_DOWN(experts_down_8_8, 1, 8, 128, 4)
EXPERTS_DOWN(experts_down_16_10, 2, 10, 256, 1)
EXPERTS_DOWN(experts_down_16_6, 2, 6, 384, 1)
EXPERTS_DOWN(experts_down_16_5, 2, 5, 512, 1)
