// Projections, the dense MLP's first half and the language-model head.
#include "gemm.cuh"

template <int NT>
struct StoreRows {
  bf16* out;
  int n, live, tall;

  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    for (int o = threadIdx.x; o < live * 16; o += blockDim.x) {
      const int token = o / 16, row = tile * tall + o % 16;
      if (o % 16 < tall && row < n) out[i64(token) * n + row] = to_bf16(sums.at(token, o % 16));
    }
  }
  __device__ __forceinline__ void finish() {}
};

template <int NT>
struct StoreSwiglu {
  bf16* out;
  int inner, live, tall;
  float limit;

  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    for (int o = threadIdx.x; o < live * 8; o += blockDim.x) {
      const int token = o / 8, row = tile * tall + o % 8;
      const float value = swiglu(sums.at(token, o % 8), sums.at(token, o % 8 + 8), limit);
      if (o % 8 < tall && row < inner) out[token * inner + row] = to_bf16(value);
    }
  }
  __device__ __forceinline__ void finish() {}
};

// fp32 logits, and the best of the rows that this block saw for each token. Equal: the lower id.
template <int NT>
struct StoreLogits {
  float* out;
  float* values;  // [blocks, ROW_TILE]
  int* ids;
  int n, live;
  float* best;  // shared, [ROW_TILE][16]: entry o always belongs to the same thread
  int* best_id;

  __device__ __forceinline__ void begin() {
    for (int o = threadIdx.x; o < live * 16; o += blockDim.x) best[o] = -infinity(), best_id[o] = n;
  }

  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    for (int o = threadIdx.x; o < live * 16; o += blockDim.x) {
      const int token = o / 16, row = tile * 16 + o % 16;
      if (row >= n) continue;
      const float logit = sums.at(token, o % 16);
      out[i64(token) * n + row] = logit;
      if (!(fabsf(logit) < infinity())) best[o] = not_a_number();  // comparisons with it are false: it stays
      if (logit > best[o]) best[o] = logit, best_id[o] = row;
    }
  }

  __device__ __forceinline__ void finish() {
    __syncthreads();
    for (int token = threadIdx.x; token < live; token += blockDim.x) {
      float value = best[token * 16];
      int id = best_id[token * 16];
      for (int r = 1; r < 16; ++r) {
        const float other = best[token * 16 + r];
        const int other_id = best_id[token * 16 + r];
        if (other != other) value = not_a_number();
        if (other > value || (other == value && other_id < id)) value = other, id = other_id;
      }
      values[blockIdx.x * ROW_TILE + token] = value;
      ids[blockIdx.x * ROW_TILE + token] = id;
    }
  }
};

// 1 / rms of each (token, head), for the output of KDA that still lacks its norm: a head's 128 values of K share it, and
// are a warp's batch, so it can wait until they are summed. sums [ROW_TILE, heads, slices] fp32: sums of squares of each slice of a head.
struct HeadNorm {
  static constexpr bool SCALED = true;
  const float* sums;
  int heads, slices, live;
  float eps;
  float* factors;  // shared, [heads][ROW_TILE]

  __device__ __forceinline__ void prepare() const {
    for (int o = threadIdx.x; o < heads * ROW_TILE; o += blockDim.x) {
      const int head = o / ROW_TILE, token = o % ROW_TILE;
      float total = 0.0f;
      if (token < live) {
        for (int s = 0; s < slices; ++s) total += sums[(token * heads + head) * slices + s];
      }
      factors[o] = 1.0f / sqrtf(total / 128.0f + eps);
    }
    __syncthreads();
  }
  __device__ __forceinline__ float of(int token, int k) const {
    const int head = k / 128;
    return head < heads ? factors[head * ROW_TILE + token] : 0.0f;
  }
};

// Tiles of `tall` rows of gate, at most 8, and the matching ones of up, of one dense MLP; otherwise as Matrix.
struct GateUp {
  const bf16* weight;
  int inner, width, per, tall, asked;

  __device__ __forceinline__ int first() const { return blockIdx.x * per; }
  __device__ __forceinline__ int end() const { return min((inner + tall - 1) / tall, first() + per); }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    const int at = tile * tall + group;
    const bool has = group < tall && at < inner;
    return {weight + i64(at) * width, weight + (i64(inner) + at) * width, has, has};
  }
  __device__ __forceinline__ void ask_rest(int columns) const {
    const int start = first() * tall;
    for (int r = threadIdx.x % WARP; r < asked && start + r < inner; r += WARP) {
      const int from = r < tall ? columns : 0;
      const bf16* gate = weight + i64(start + r) * width + from;
      if (from < width) prefetch_l2(gate, u32(width - from) * 2);
      if (from < width) prefetch_l2(gate + i64(inner) * width, u32(width - from) * 2);
    }
  }
};

constexpr int MAX_HEADS = 64;
static_assert(DEPTH * CHUNK == 128, "a batch is a head");

// Rows of whole batches, as all published models have them, take fewer instructions.
template <int NT, class Source, class Epilogue>
__device__ __forceinline__ void stream(
    const Source& source, const bf16* x, int live, Epilogue& store, const Ahead& ahead) {
  const Tokens tokens = {x, source.width, source.width, live};
  if (source.width % (DEPTH * CHUNK) == 0) {
    stream_tiles<NT, true>(source, tokens, Plain{}, store, ahead);
  } else {
    stream_tiles<NT, false>(source, tokens, Plain{}, store, ahead);
  }
}

// How a matrix is dealt out: tiles of `tall` rows, `per` of them a block, which asks for its first `asked` rows early.
#define DEAL int per, int tall, int asked

template <int NT>
__device__ __forceinline__ void linear(
    const bf16* x, const bf16* w, bf16* out, int live, int n, int k, DEAL, const Ahead& ahead) {
  StoreRows<NT> store = {out, n, live, tall};
  stream<NT>(Matrix{w, n, k, per, tall, asked}, x, live, store, ahead);
}

template <int NT>
__device__ __forceinline__ void linear_normed(
    const bf16* x, const bf16* w, bf16* out, const float* sums, int slices, float eps, int live, int n, int k, DEAL,
    const Ahead& ahead) {
  __shared__ float factors[MAX_HEADS * ROW_TILE];
  StoreRows<NT> store = {out, n, live, tall};
  const HeadNorm norm = {sums, k / 128, slices, live, eps, factors};
  stream_tiles<NT, true>(Matrix{w, n, k, per, tall, asked}, Tokens{x, k, k, live}, norm, store, ahead);
}

template <int NT>
__device__ __forceinline__ void mlp_gate_up(
    const bf16* x, const bf16* w, bf16* out, float limit, int live, int inner, int k, DEAL, const Ahead& ahead) {
  StoreSwiglu<NT> store = {out, inner, live, tall, limit};
  stream<NT>(GateUp{w, inner, k, per, tall, asked}, x, live, store, ahead);
}

template <int NT>
__device__ __forceinline__ void head(
    const bf16* x, const bf16* w, float* out, float* values, int* ids, int live, int n, int k, DEAL,
    const Ahead& ahead) {
  __shared__ float best[ROW_TILE * 16];
  __shared__ int best_id[ROW_TILE * 16];
  StoreLogits<NT> store = {out, values, ids, n, live, best, best_id};
  store.begin();
  stream<NT>(Matrix{w, n, k, per, tall, asked}, x, live, store, ahead);
}

// x [*, k], w [n, k] -> out [*, n]; `live` rows. Grid: ceil(n / tall / per). Shared: 2 · warps · 8 NT · PITCH floats.
#define LINEAR(NAME, NT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, bf16* out, int live, int n, int k, DEAL, Ahead ahead) {                       \
    linear<NT>(x, w, out, live, n, k, per, tall, asked, ahead);                                                   \
  }
LINEAR(linear_8, 1)
LINEAR(linear_16, 2)

// The same for x that lacks its norm by heads of 128: sums [ROW_TILE, k / 128, slices].
#define LINEAR_NORMED(NAME, NT)                                                                                   \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, bf16* out, const float* sums, int slices, float eps, int live, int n, int k,  \
      DEAL, Ahead ahead) {                                                                                        \
    linear_normed<NT>(x, w, out, sums, slices, eps, live, n, k, per, tall, asked, ahead);                         \
  }
LINEAR_NORMED(linear_normed_8, 1)
LINEAR_NORMED(linear_normed_16, 2)

// x [*, k], w [2 inner, k] rows gate‖up -> out [*, inner]. Grid: ceil(inner / tall / per).
#define MLP_GATE_UP(NAME, NT)                                                                                     \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, bf16* out, float limit, int live, int inner, int k, DEAL, Ahead ahead) {      \
    mlp_gate_up<NT>(x, w, out, limit, live, inner, k, per, tall, asked, ahead);                                   \
  }
MLP_GATE_UP(mlp_gate_up_8, 1)
MLP_GATE_UP(mlp_gate_up_16, 2)

// x [*, k], w [n, k] -> out [*, n] fp32, and each block's best: values, ids [blocks, ROW_TILE]. tall: 16.
#define HEAD(NAME, NT)                                                                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, float* out, float* values, int* ids, int live, int n, int k, DEAL,            \
      Ahead ahead) {                                                                                              \
    head<NT>(x, w, out, values, ids, live, n, k, per, tall, asked, ahead);                                        \
  }
HEAD(head_8, 1)
HEAD(head_16, 2)
