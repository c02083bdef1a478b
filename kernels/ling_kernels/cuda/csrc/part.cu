// Products whose result only exchange_norm reads, which adds several parts as easily as one: their rows are few and
// long, so K is shared between blocks too. A block takes one tile of 16 rows and one part of K, and leaves fp32 sums.
// Blocks are small and many: each gets in as soon as a few of the producer's are gone, and asks for its weights.
#include "gemm.cuh"

// Rows [n, pitch]; part p has K from p · width on, the last one what is left.
struct MatrixPart {
  const bf16* weight;
  int n, pitch, width;
  static constexpr int step = 1;

  __device__ __forceinline__ int first() const { return blockIdx.x; }
  __device__ __forceinline__ int end() const { return blockIdx.x + 1; }
  __device__ __forceinline__ int place(int tile) const { return tile; }
  __device__ __forceinline__ bool early(int) const { return true; }
  __device__ __forceinline__ void ask(int) const {}
  __device__ __forceinline__ const bf16* row(int at) const { return weight + i64(at < n ? at : 0) * pitch; }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    return {row(tile * 16 + group), row(tile * 16 + group + 8)};
  }
};

// out [live, n] fp32 of one part.
template <int NT>
struct StorePart {
  float* out;
  int n, live;

  __device__ __forceinline__ void expect(int) {}
  __device__ __forceinline__ void operator()(int tile, const Sums<NT>& sums) {
    for (u32 o = threadIdx.x; o < live * 16; o += blockDim.x) {
      const int token = o / 16, row = tile * 16 + o % 16;
      if (row < n) out[i64(token) * n + row] = sums.at(token, o % 16);
    }
  }
  __device__ __forceinline__ void finish() {}
};

// 1 / rms of each (token, head), for the output of KDA that still lacks its norm: a head's 128 values of K share it,
// so it can wait until they are summed. sums [ROW_TILE, heads, slices] fp32: sums of squares of each slice of a head.
struct HeadNorm {
  static constexpr bool SCALED = true;
  const float* sums;
  int heads, slices, live;
  float eps;
  int from, to;    // heads of this part
  float* factors;  // shared, [to - from][ROW_TILE]

  __device__ __forceinline__ void prepare() const {
    for (int o = threadIdx.x; o < (to - from) * ROW_TILE; o += blockDim.x) {
      const int head = from + o / ROW_TILE, token = o % ROW_TILE;
      float total = 0.0f;
      if (token < live) {
        for (int s = 0; s < slices; ++s) total += sums[(token * heads + head) * slices + s];
      }
      factors[o] = rsqrtf(total / 128.0f + eps);
    }
    __syncthreads();
  }
  __device__ __forceinline__ float of(int token, int span) const {
    static_assert(SPAN == 128, "a warp's span is a head");
    return factors[span * ROW_TILE + token];
  }
};

constexpr int MAX_HEADS = 64;

template <int NT, class Factor>
__device__ __forceinline__ void linear_part(
    const bf16* x, const bf16* w, float* out, const Factor& factor, int rows, int live, int n, int k, int part) {
  const int first = blockIdx.y * part, width = min(part, k - first);
  StorePart<NT> store = {out + i64(blockIdx.y) * rows * n, n, live};
  stream_tiles<NT>(MatrixPart{w + first, n, k, width}, Tokens{x + first, width, k, live}, factor, store);
}

template <int NT>
__device__ __forceinline__ void linear_part_normed(
    const bf16* x, const bf16* w, float* out, const float* sums, int slices, float eps, int rows, int live, int n, int k,
    int part) {
  __shared__ float factors[MAX_HEADS * ROW_TILE];
  const int first = blockIdx.y * part, end = min(first + part, k);
  const HeadNorm norm = {sums, k / 128, slices, live, eps, first / 128, end / 128, factors};
  linear_part<NT>(x, w, out, norm, rows, live, n, k, part);
}

// x [rows, k], w [n, k] -> out [parts, rows, n] fp32, `live` rows of each. part: values of K in a part, a multiple of a
// warp's span. Grid: ceil(n / 16), parts. Shared: 2 · warps · 8 NT · PITCH floats.
#define LINEAR_PART(NAME, NT)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                        \
      const bf16* x, const bf16* w, float* out, int rows, int live, int n, int k, int part) {                       \
    linear_part<NT>(x, w, out, Plain{}, rows, live, n, k, part);                                                    \
  }
LINEAR_PART(linear_part_8, 1)
LINEAR_PART(linear_part_16, 2)

// The same for x that lacks its norm by heads of 128: sums [ROW_TILE, k / 128, slices].
#define LINEAR_PART_NORMED(NAME, NT)                                                                                \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                        \
      const bf16* x, const bf16* w, float* out, const float* sums, int slices, float eps, int rows, int live, int n,\
      int k, int part) {                                                                                            \
    linear_part_normed<NT>(x, w, out, sums, slices, eps, rows, live, n, k, part);                                   \
  }
LINEAR_PART_NORMED(linear_part_normed_8, 1)
LINEAR_PART_NORMED(linear_part_normed_16, 2)
