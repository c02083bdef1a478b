// Projections, the dense MLP's first half and the language-model head.
#include "stream.cuh"

// Rows of one matrix [n, width]: block b has `per` of them from b * per on, in tiles of `tall`, at most 16.
struct Matrix {
  const bf16* weight;
  int n, width, per, tall;

  __device__ __forceinline__ int first() const { return blockIdx.x * per; }
  __device__ __forceinline__ int count() const { return min(per, n - first()); }
  __device__ __forceinline__ int tiles() const { return (count() + tall - 1) / tall; }
  __device__ __forceinline__ int rows() const { return tall; }
  __device__ __forceinline__ int low(int group) const { return min(group, tall - 1); }
  __device__ __forceinline__ int high(int group) const { return min(group + 8, tall - 1); }
  __device__ __forceinline__ Run one(int tile) const {
    return {weight + i64(first() + tile * tall) * width, min(tall, count() - tile * tall), 0};
  }
  __device__ __forceinline__ Run two(int) const { return {weight, 0, 0}; }
};

// Pairs of gate and up rows of one dense MLP, in tiles of `tall` pairs, at most 8; otherwise as Matrix.
struct GateUp {
  const bf16* weight;
  int inner, width, per, tall;

  __device__ __forceinline__ int first() const { return blockIdx.x * per; }
  __device__ __forceinline__ int count() const { return min(per, inner - first()); }
  __device__ __forceinline__ int tiles() const { return (count() + tall - 1) / tall; }
  __device__ __forceinline__ int rows() const { return 2 * tall; }
  __device__ __forceinline__ int low(int group) const { return min(group, tall - 1); }
  __device__ __forceinline__ int high(int group) const { return tall + min(group, tall - 1); }
  __device__ __forceinline__ Run one(int tile) const {
    return {weight + i64(first() + tile * tall) * width, min(tall, count() - tile * tall), 0};
  }
  __device__ __forceinline__ Run two(int tile) const {
    return {weight + (i64(inner) + first() + tile * tall) * width, min(tall, count() - tile * tall), tall};
  }
};

template <int NT>
struct StoreRows {
  const Matrix& matrix;
  bf16* out;
  int live;

  __device__ __forceinline__ void operator()(int tile, const TileSums<NT>& sums) {
    const int token = threadIdx.x / 16, r = threadIdx.x % 16, at = tile * matrix.tall + r;
    if (token >= live || r >= matrix.tall || at >= matrix.count()) return;
    out[i64(token) * matrix.n + matrix.first() + at] = to_bf16(sums.at(token, r));
  }
  __device__ __forceinline__ void finish() {}
};

template <int NT>
struct StoreSwiglu {
  const GateUp& pairs;
  bf16* out;
  int live;
  float limit;

  __device__ __forceinline__ void operator()(int tile, const TileSums<NT>& sums) {
    const int token = threadIdx.x / 8, r = threadIdx.x % 8, at = tile * pairs.tall + r;
    if (token >= live || r >= pairs.tall || at >= pairs.count()) return;
    const float value = swiglu(sums.at(token, r), sums.at(token, r + 8), limit);
    out[i64(token) * pairs.inner + pairs.first() + at] = to_bf16(value);
  }
  __device__ __forceinline__ void finish() {}
};

// fp32 logits, and the best of the rows that this block saw for each token. Equal: the lower id.
template <int NT>
struct StoreLogits {
  const Matrix& matrix;
  float* out;
  float* values;  // [blocks, ROW_TILE]
  int* ids;
  int live;
  float best = -infinity();  // of this thread's token, among the rows of its place in a tile
  int best_id = 0x7fffffff;

  __device__ __forceinline__ void operator()(int tile, const TileSums<NT>& sums) {
    const int token = threadIdx.x / 16, r = threadIdx.x % 16, at = tile * matrix.tall + r;
    if (token >= live || r >= matrix.tall || at >= matrix.count()) return;
    const int row = matrix.first() + at;
    const float logit = sums.at(token, r);
    out[i64(token) * matrix.n + row] = logit;
    if (!(fabsf(logit) < infinity())) best = not_a_number();  // comparisons with it are false: it stays
    if (logit > best) best = logit, best_id = row;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) {
      const float other = __shfl_xor_sync(ALL, best, step);
      const int other_id = __shfl_xor_sync(ALL, best_id, step);
      if (other != other) best = not_a_number();
      if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
    }
    const int token = threadIdx.x / 16;
    if (threadIdx.x % 16 != 0 || token >= live) return;
    values[blockIdx.x * ROW_TILE + token] = best;
    ids[blockIdx.x * ROW_TILE + token] = min(best_id, matrix.n);
  }
};

// 1 / rms of each (token, head), for the output of KDA that still lacks its norm: a head's 128 values of K share it, and
// a warp's part of a stage lies in one head, so it can wait until that is summed. sums [ROW_TILE, heads, slices] fp32:
// sums of squares of each slice of a head.
static_assert(128 % OWN == 0, "a warp's values of a stage are in one head");

struct HeadNorm {
  static constexpr bool SCALED = true;
  const float* sums;
  int heads, slices, live;
  float eps;
  float* factors = nullptr;  // shared, this warp's [parts][ROW_TILE]

  __device__ __forceinline__ int own() const { return parts_of(heads * 128) * ROW_TILE; }
  __device__ __forceinline__ int floats() const { return CONSUMERS * own(); }
  // Each warp for itself.
  __device__ __forceinline__ void prepare(float* shared) {
    const int warp = threadIdx.x / WARP;
    factors = shared + warp * own();
    for (int o = threadIdx.x % WARP; o < own(); o += WARP) {
      const int head = (o / ROW_TILE * PART + warp * OWN) / 128, token = o % ROW_TILE;
      float total = 0.0f;
      if (token < live && head < heads) {
        for (int s = 0; s < slices; ++s) total += sums[(token * heads + head) * slices + s];
      }
      factors[o] = 1.0f / sqrtf(total / 128.0f + eps);
    }
    __syncwarp();
  }
  __device__ __forceinline__ float of(int part, int token) const { return factors[part * ROW_TILE + token]; }
};

// How the work is dealt out, as tiles.py has it, and what is asked ahead.
#define DEAL int per, int tall, int depth, int kept, Ahead ahead

// x [*, k], w [n, k] -> out [*, n]; `live` rows. Grid: ceil(n / per).
#define LINEAR(NAME, NT)                                                                                          \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                  \
      const bf16* x, const bf16* w, bf16* out, int live, int n, int k, DEAL) {                                    \
    const Matrix matrix = {w, n, k, per, tall};                                                                   \
    StoreRows<NT> store = {matrix, out, live};                                                                    \
    Plain plain;                                                                                                  \
    stream_matrix<NT>(matrix, x, live, depth, kept, plain, store, ahead);                                         \
  }
LINEAR(linear_8, 1)
LINEAR(linear_16, 2)

// The same for x that lacks its norm by heads of 128: sums [ROW_TILE, k / 128, slices].
#define LINEAR_NORMED(NAME, NT)                                                                                   \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                  \
      const bf16* x, const bf16* w, bf16* out, const float* sums, int slices, float eps, int live, int n, int k,  \
      DEAL) {                                                                                                     \
    const Matrix matrix = {w, n, k, per, tall};                                                                   \
    StoreRows<NT> store = {matrix, out, live};                                                                    \
    HeadNorm norm = {sums, k / 128, slices, live, eps};                                                           \
    stream_matrix<NT>(matrix, x, live, depth, kept, norm, store, ahead);                                          \
  }
LINEAR_NORMED(linear_normed_8, 1)
LINEAR_NORMED(linear_normed_16, 2)

// x [*, k], w [2 inner, k] rows gate‖up -> out [*, inner]. Grid: ceil(inner / per).
#define MLP_GATE_UP(NAME, NT)                                                                                     \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                  \
      const bf16* x, const bf16* w, bf16* out, float limit, int live, int inner, int k, DEAL) {                   \
    const GateUp pairs = {w, inner, k, per, tall};                                                                \
    StoreSwiglu<NT> store = {pairs, out, live, limit};                                                            \
    Plain plain;                                                                                                  \
    stream_matrix<NT>(pairs, x, live, depth, kept, plain, store, ahead);                                          \
  }
MLP_GATE_UP(mlp_gate_up_8, 1)
MLP_GATE_UP(mlp_gate_up_16, 2)

// x [*, k], w [n, k] -> out [*, n] fp32, and each block's best: values, ids [blocks, ROW_TILE].
#define HEAD(NAME, NT)                                                                                            \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                  \
      const bf16* x, const bf16* w, float* out, float* values, int* ids, int live, int n, int k, DEAL) {          \
    const Matrix matrix = {w, n, k, per, tall};                                                                   \
    StoreLogits<NT> store = {matrix, out, values, ids, live};                                                     \
    Plain plain;                                                                                                  \
    stream_matrix<NT>(matrix, x, live, depth, kept, plain, store, ahead);                                         \
  }
HEAD(head_8, 1)
HEAD(head_16, 2)
