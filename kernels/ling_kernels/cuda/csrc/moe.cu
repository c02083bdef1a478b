// Mixture of experts for a window: gate_up and down, by the plan that route.cu made.
//
// The plan lists the distinct experts of all rows once, in ascending order behind the shared expert, with the rows
// that chose each. An expert costs the same for one row as for sixteen, so gate_up computes all rows for every listed
// expert. It applies the router's weights too, and writes zeros for the rows that did not choose: by selection, a
// product with zero would keep an infinity. So down is one long product over the listed experts, whose sum never
// leaves the tensor cores: what a row did not choose adds exact zeros to it, which change no bit.
#include "gemm.cuh"
#include "select.cuh"

struct Experts {
  const bf16* shared;
  const bf16* routed;
  int shared_inner, inner;
  const u32* plan;
};

// Tiles of 8 gate and 8 up rows over all listed experts, the shared one first; blocks take them in turn. A tile's slot
// follows from its number; its expert is asked for one tile ahead, whether or not the plan goes that far.
struct ExpertGateUp {
  struct Place {
    int slot, within;
    u32 expert;
  };
  Experts experts;
  int width, step;

  __device__ __forceinline__ int shared_tiles() const { return (experts.shared_inner + 7) / 8; }
  __device__ __forceinline__ int tiles() const { return (experts.inner + 7) / 8; }
  __device__ __forceinline__ int first() const { return blockIdx.x; }
  __device__ __forceinline__ bool early(int tile) const { return tile < shared_tiles(); }
  __device__ __forceinline__ int end() const {
    return shared_tiles() + (int(load_activation(experts.plan)) - 1) * tiles();
  }
  __device__ __forceinline__ Place place(int tile) const {
    const int routed = tile - shared_tiles(), slot = routed / tiles();
    return routed < 0 ? Place{0, tile, 0} : Place{slot + 1, routed - slot * tiles(), 0};
  }
  __device__ __forceinline__ void ask(Place& at) const {
    at.expert = load_activation(experts.plan + PLAN_IDS + min(at.slot, MAX_SLOTS - 1));
  }
  __device__ __forceinline__ Rows rows(const Place& at, int group) const {
    const bool shared = at.slot == 0;
    const u32 stride = 2 * experts.inner * width;
    const bf16* weight = shared ? experts.shared : experts.routed + u64(at.expert) * stride;
    return gate_up_rows(weight, shared ? experts.shared_inner : experts.inner, width, at.within, group);
  }
};

template <int NT>
struct StoreExpert {
  ExpertGateUp source;
  bf16* out;
  int pitch, live;
  float limit, shared_limit;
  u32 rows, weight;  // that chose the tile's expert; the router's weight of this thread's first token

  __device__ __forceinline__ u32 weight_of(const ExpertGateUp::Place& at, u32 o) const {
    return load_activation(source.experts.plan + PLAN_WEIGHTS + at.slot * ROW_TILE + o / 8);
  }
  __device__ __forceinline__ void expect(const ExpertGateUp::Place& at) {
    rows = load_activation(source.experts.plan + PLAN_MASKS + at.slot);
    if (threadIdx.x < live * 8) weight = weight_of(at, threadIdx.x);
  }
  __device__ __forceinline__ void operator()(const ExpertGateUp::Place& at, const Sums<NT>& sums) {
    const int first = at.within * 8;
    const int inner = at.slot == 0 ? source.experts.shared_inner : source.experts.inner;
    const float most = at.slot == 0 ? shared_limit : limit;
    bf16* to = out + i64(at.slot) * ROW_TILE * pitch + first;
    for (u32 o = threadIdx.x; o < live * 8; o += blockDim.x) {
      const int token = o / 8, row = o % 8;
      if (first + row >= inner) continue;
      float value = 0.0f;
      if (rows >> token & 1) {
        const float by = __uint_as_float(o == threadIdx.x ? weight : weight_of(at, o));
        value = by * swiglu(sums.at(token, row), sums.at(token, row + 8), most);
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
  stream_tiles<NT>(source, Tokens{x, width, width, live}, Plain{}, store);
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
  for (u32 o = threadIdx.x; o < live * 16; o += blockDim.x) {
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
EXPERTS_DOWN(experts_down_8_9, 1, 9, 3)  // all slots of one row at once
EXPERTS_DOWN(experts_down_8_8, 1, 8, 4)
EXPERTS_DOWN(experts_down_16_10, 2, 10, 2)
EXPERTS_DOWN(experts_down_16_6, 2, 6, 3)
EXPERTS_DOWN(experts_down_16_5, 2, 5, 4)
