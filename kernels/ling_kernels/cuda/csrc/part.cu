// Products whose result only exchange_norm reads, which adds several parts as easily as one: their rows are few and
// long, so K is shared between blocks too. A block takes one tile of 16 rows and one part of K, and leaves fp32 sums.
// Blocks are small and many: each gets in as soon as a few of the producer's are gone, and asks for its weights.
#include "gemm.cuh"

// Rows [n, pitch]; part p has K from p · width on, the last one what is left.
struct MatrixPart {
  const bf16* weight;
  int n, pitch, width;
  static constexpr int step = 1;
  static constexpr bool ONE = true, EARLY = true;

  __device__ __forceinline__ int first() const { return blockIdx.x; }
  __device__ __forceinline__ int end() const { return blockIdx.x + 1; }
  __device__ __forceinline__ int place(int tile) const { return tile; }
  __device__ __forceinline__ void ask(int) const {}
  __device__ __forceinline__ const bf16* row(int at) const { return weight + i64(at < n ? at : 0) * pitch; }
  __device__ __forceinline__ Rows rows(int tile, int group) const {
    return {row(tile * 16 + group), row(tile * 16 + group + 8)};
  }
};

// out [parts, rows, n] fp32, this block's part and tile; `live` rows.
template <int NT>
struct StorePart {
  float* out;
  int n, live, begin;
  Own<NT, 16> own;

  __device__ __forceinline__ StorePart(float* out, int rows, int live, int n) : out(out), n(n) {
    const int row = blockIdx.x * 16 + own.value;
    this->live = row < n ? live : 0, begin = blockIdx.y * rows * n + row;
    settle_here(this->live), settle_here(begin);
  }
  __device__ __forceinline__ void expect(int) {}
  __device__ __forceinline__ void operator()(int, const Sums<NT>& sums) {
    own.each(live, [&](int token, int at) { out[begin + token * n] = sums.at(at); });
  }
  __device__ __forceinline__ void finish() {}
};

constexpr int HEAD_SLICES = 8;  // of KDA's heads, each with its sum of squares

// 1 / rms of each (token, head), for the output of KDA that still lacks its norm: a head's 128 values of K share it,
// so it can wait until they are summed. sums [ROW_TILE, heads, HEAD_SLICES] fp32. from: head of the part's first span. A
// lane adds one token's slices, asked for with the span's tokens, and gives the result to those that have its products.
// LOOKS: they may still be coming.
template <bool LOOKS>
struct HeadNorm {
  static constexpr bool SCALED = true;
  const float* sums;
  int heads, live, from;
  float eps;
  const float* own;
  uint4 low, high;
  float factor;

  __device__ __forceinline__ void prepare() {
    const int token = threadIdx.x % ROW_TILE;
    own = sums + ((token < live ? token : 0) * heads + from) * HEAD_SLICES;
    settle_here(own);
  }
  __device__ __forceinline__ void ask(int span) {
    static_assert(SPAN == 128, "a warp's span is a head");
    const float* from = own + span * HEAD_SLICES;
    if constexpr (!LOOKS) {
      low = load_activations(from), high = load_activations(from + 4);
      return;
    }
    do low = look16(from), high = look16(from + 4);
    while (any_blank(low) | any_blank(high));
  }
  __device__ __forceinline__ void take() {
    const u32 slices[HEAD_SLICES] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < HEAD_SLICES; ++s) total += __uint_as_float(slices[s]);
    factor = rsqrtf(total / 128.0f + eps);
  }
  __device__ __forceinline__ float of(int token) const { return __shfl_sync(ALL, factor, token); }
};

template <int NT, class Input = Tokens, class Factor>
__device__ __forceinline__ void linear_part(
    const bf16* x, const bf16* w, float* out, const Factor& factor, int rows, int live, int n, int k, int part) {
  const int first = blockIdx.y * part, width = min(part, k - first);
  StorePart<NT> store(out, rows, live, n);
  stream_tiles<NT>(MatrixPart{w + first, n, k, width}, Input{x + first, width, k, live}, factor, store);
}

// x [rows, k], w [n, k] -> out [parts, rows, n] fp32, `live` rows of each. part: values of K in a part, a multiple of a
// warp's span. Grid: ceil(n / 16), parts. Block: up to four warps; BLOCKS of them on a multiprocessor. Shared: 2 · warps ·
// 8 NT · PITCH floats. _look: for x that is looked for.
#define LINEAR_PART(NAME, NT, BLOCKS, INPUT)                                                                        \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) NAME(                                                   \
      const bf16* x, const bf16* w, float* out, int rows, int live, int n, int k, int part) {                       \
    linear_part<NT, INPUT>(x, w, out, Plain{}, rows, live, n, k, part);                                             \
  }
LINEAR_PART(linear_part_8, 1, 5, Tokens)
LINEAR_PART(linear_part_16, 2, 4, Tokens)
LINEAR_PART(linear_part_8_look, 1, 5, TokensToCome)
LINEAR_PART(linear_part_16_look, 2, 4, TokensToCome)

// The same for x that lacks its norm by heads of 128: sums [ROW_TILE, k / 128, HEAD_SLICES]. _look: for x and sums that
// are looked for.
#define LINEAR_PART_NORMED(NAME, NT, BLOCKS, INPUT)                                                                 \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) NAME(                                                   \
      const bf16* x, const bf16* w, float* out, const float* sums, float eps, int rows, int live, int n, int k,     \
      int part) {                                                                                                   \
    const HeadNorm<INPUT::LOOKS> norm = {sums, k / 128, live, int(blockIdx.y) * part / 128, eps};                   \
    linear_part<NT, INPUT>(x, w, out, norm, rows, live, n, k, part);                                                \
  }
LINEAR_PART_NORMED(linear_part_normed_8, 1, 5, Tokens)
LINEAR_PART_NORMED(linear_part_normed_16, 2, 4, Tokens)
LINEAR_PART_NORMED(linear_part_normed_8_look, 1, 5, TokensToCome)
LINEAR_PART_NORMED(linear_part_normed_16_look, 2, 4, TokensToCome)
