// Projections, the dense MLP's first half and the language-model head.
#include "gemm.cuh"
#include "norm.cuh"

template <int NT>
struct StoreRows {
  bf16* out;
  int n, live;
  Own<NT, 16> own;

  __device__ __forceinline__ void expect(int) {}
  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    const int row = tile * 16 + own.value;
    own.each(row < n ? live : 0, [&](int token, int at) { out[token * n + row] = to_bf16(sums.at(at)); });
  }
  __device__ __forceinline__ void finish() {}
};

template <int NT>
struct StoreSwiglu {
  bf16* out;
  int inner, live;
  float limit;
  Own<NT, 8> own;

  __device__ __forceinline__ void expect(int) {}
  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    const int row = tile * 8 + own.value;
    own.each(row < inner ? live : 0, [&](int token, int at) {
      const float2 sum = sums.both(at, own.up(token));
      out[token * inner + row] = to_bf16(swiglu(sum.x, sum.y, limit));
    });
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
    for (u32 o = threadIdx.x; o < live * 16; o += blockDim.x) best[o] = -infinity(), best_id[o] = n;
  }

  __device__ __forceinline__ void expect(int) {}
  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    for (u32 o = threadIdx.x; o < live * 16; o += blockDim.x) {
      const int token = o / 16, row = tile * 16 + o % 16;
      if (row >= n) continue;
      const float logit = sums.at(Sums<NT>::place(token, o % 16));
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

// Rows gate and up of one dense MLP.
struct GateUp {
  const bf16* weight;
  int inner, width;
  Deal deal;
  static constexpr int step = 1;
  static constexpr bool ONE = false, EARLY = true;

  __device__ __forceinline__ int first() const { return deal.first(); }
  __device__ __forceinline__ int end() const { return deal.end((inner + 7) / 8); }
  __device__ __forceinline__ int place(int tile) const { return tile; }
  __device__ __forceinline__ void ask(int) const {}
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    return gate_up_rows(weight, inner, width, tile, group);
  }
};

template <int NT>
__device__ __forceinline__ void linear(
    const bf16* x, const bf16* w, bf16* out, int live, int n, int k, Deal deal) {
  StoreRows<NT> store = {out, n, live};
  stream_tiles<NT>(Matrix{w, n, k, deal}, Tokens{x, k, k, live}, Plain{}, store);
}

// One row that every block makes for itself.
struct NormedRow : Tokens {
  RowToNorm made;

  __device__ __forceinline__ static uint4 load(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void ask() { made.ask(); }
  __device__ __forceinline__ void make() { made.make(blockIdx.x); }
};

template <int NT>
__device__ __forceinline__ void mlp_gate_up(
    const bf16* x, const bf16* w, bf16* out, float limit, int live, int inner, int k, Deal deal) {
  StoreSwiglu<NT> store = {out, inner, live, limit};
  stream_tiles<NT>(GateUp{w, inner, k, deal}, Tokens{x, k, k, live}, Plain{}, store);
}

template <int NT>
__device__ __forceinline__ void head(
    const bf16* x, const bf16* w, float* out, float* values, int* ids, int live, int n, int k, int per) {
  __shared__ float best[ROW_TILE * 16];
  __shared__ int best_id[ROW_TILE * 16];
  StoreLogits<NT> store = {out, values, ids, n, live, best, best_id};
  store.begin();
  stream_tiles<NT>(Matrix{w, n, k, {per, 0}}, Tokens{x, k, k, live}, Plain{}, store);
}

// x [*, k], w [n, k] -> out [*, n]; `live` rows. Grid: see Deal. Shared: 2 · warps · 8 NT · PITCH floats.
#define LINEAR(NAME, NT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, bf16* out, int live, int n, int k, int per, int extra) {                      \
    linear<NT>(x, w, out, live, n, k, {per, extra});                                                              \
  }
LINEAR(linear_8, 1)
LINEAR(linear_16, 2)

// The same for one row that exchange_norm's arguments make: x_out and h are written, too. Grid: ceil(n / 16). Shared: behind
// the sums the row, k + 8 values.
extern "C" __global__ void __launch_bounds__(512, 1) linear_normed(
    const void* partial, int parts, int pitch, const bf16* x, const bf16* weight, bf16* x_out, bf16* h, int k, float eps,
    const bf16* w, bf16* out, int n) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) float warps[WARP];
  let_next_start_early();  // MLA's queries wait for their weights longer than for this kernel
  bf16* row = reinterpret_cast<bf16*>(sums_of<1>(reinterpret_cast<float*>(shared), 2));
  const RowToNorm made = {{partial, parts, pitch}, x, weight, x_out, h, k, eps, row, warps};
  StoreRows<1> store = {out, n, 1};
  stream_tiles<1>(Matrix{w, n, k, {1, 0}}, NormedRow{{row, k, k, 1}, made}, Plain{}, store);
}

// x [*, k], w [2 inner, k] rows gate‖up -> out [*, inner]. Grid: see Deal.
#define MLP_GATE_UP(NAME, NT)                                                                                     \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, bf16* out, float limit, int live, int inner, int k, int per, int extra) {     \
    mlp_gate_up<NT>(x, w, out, limit, live, inner, k, {per, extra});                                              \
  }
MLP_GATE_UP(mlp_gate_up_8, 1)
MLP_GATE_UP(mlp_gate_up_16, 2)

// x [*, k], w [n, k] -> out [*, n] fp32, and each block's best: values, ids [blocks, ROW_TILE].
#define HEAD(NAME, NT)                                                                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, float* out, float* values, int* ids, int live, int n, int k, int per) {       \
    head<NT>(x, w, out, values, ids, live, n, k, per);                                                            \
  }
HEAD(head_8, 1)
HEAD(head_16, 2)
