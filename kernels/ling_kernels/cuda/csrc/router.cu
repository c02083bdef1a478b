// The router: logits of a window's rows, and the lists of what they choose for whoever asks for them.
#include "gemm.cuh"
#include "select.cuh"

constexpr int ROUTER_DEPTH = 4;  // chunks of a warp that are on their way before the wait

// x [*, k], w [n, width] -> out [ROUTER_PARTS][ROW_TILE][n] fp32: the sum over K in parts, each from blocks of its
// own, so that a product this small is one trip to memory. width: k, or parts of an fp32 weight side by side, each of k values
// rounded up to a chunk, which meet the same tokens.
template <int NT>
__device__ __forceinline__ void router(
    const bf16* x, const bf16* w, float* out, int live, int n, int k, int width) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  const int group = lane / 4, column = lane % 4 * 8;
  const int tile = blockIdx.x / ROUTER_PARTS, part = blockIdx.x % ROUTER_PARTS;
  const int chunks = (width + CHUNK - 1) / CHUNK, once = (k + CHUNK - 1) / CHUNK, per = (chunks + ROUTER_PARTS - 1) / ROUTER_PARTS;
  const int first = part * per + warp, end = min(chunks, (part + 1) * per);
  const int low = tile * 16 + group, high = low + 8;
  const Rows rows = {w + i64(low < n ? low : 0) * width, w + i64(high < n ? high : 0) * width};
  const Tokens tokens = {x, k, k, live};
  Chunk ring[ROUTER_DEPTH];
#pragma unroll
  for (int s = 0; s < ROUTER_DEPTH; ++s) {
    load_chunk(ring[s], rows, (first + s * warps) * CHUNK + column, width, first + s * warps < end);
  }
  wait_for_producer();
  let_next_start();
  float sums[NT][4] = {};
  for (int begin = first; begin < end; begin += ROUTER_DEPTH * warps) {
    uint4 in[ROUTER_DEPTH][NT];
#pragma unroll
    for (int s = 0; s < ROUTER_DEPTH; ++s) {
      load_tokens(in[s], tokens, (begin + s * warps) % once * CHUNK + column);
    }
#pragma unroll
    for (int s = 0; s < ROUTER_DEPTH; ++s) {
      if (begin + s * warps < end) multiply(sums, ring[s], in[s]);
      const int next = begin + (ROUTER_DEPTH + s) * warps;
      load_chunk(ring[s], rows, next * CHUNK + column, width, next < end);
    }
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared)};
  all.put(warp, sums);
  __syncthreads();
  for (int o = threadIdx.x; o < live * 16; o += blockDim.x) {
    const int token = o / 16, row = tile * 16 + o % 16;
    if (row < n) out[(part * ROW_TILE + token) * n + row] = all.at(token, o % 16);
  }
}

// Grid: ceil(n / 16) · ROUTER_PARTS. Shared: warps · 8 NT · PITCH floats.
#define ROUTER(NAME, NT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, float* out, int live, int n, int k, int width) {        \
    router<NT>(x, w, out, live, n, k, width);                                                       \
  }
ROUTER(router_8, 1)
ROUTER(router_16, 2)

// logits, bias -> experts [*, chosen] i64, weights [*, chosen] fp32, best first, and the same as `lists`. Grid: 1.
// Block: a warp for each row at least.
extern "C" __global__ void __launch_bounds__(512) route_select(
    const float* logits, const float* bias, i64* experts, float* weights, u32* lists, int count, int groups,
    int allowed_groups, int chosen, float scale, int live) {
  __shared__ Plan plan;
  const Router router = {logits, bias, nullptr, count, groups, allowed_groups, chosen, scale, live};
  prepare_plan(router, plan);
  __syncthreads();
  wait_for_producer();
  let_next_start();
  make_plan(router, plan);
  for (int o = threadIdx.x; o < live * MAX_CHOSEN; o += blockDim.x) {
    const int row = o / MAX_CHOSEN, k = o % MAX_CHOSEN;
    lists[o] = u32(plan.experts[row][k]);
    lists[o + LIST_WEIGHTS] = __float_as_uint(plan.weights[row][k]);
    if (k >= chosen) continue;
    experts[row * chosen + k] = plan.experts[row][k];
    weights[row * chosen + k] = plan.weights[row][k];
  }
}

// The lists of choices that were made elsewhere. Grid: 1.
extern "C" __global__ void __launch_bounds__(512) route_lists(
    const i64* experts, const float* weights, u32* lists, int chosen, int live) {
  wait_for_producer();
  let_next_start();
  for (int o = threadIdx.x; o < live * MAX_CHOSEN; o += blockDim.x) {
    const int row = o / MAX_CHOSEN, k = o % MAX_CHOSEN;
    lists[o] = k < chosen ? u32(experts[row * chosen + k]) : ALL;
    lists[o + LIST_WEIGHTS] = k < chosen ? __float_as_uint(weights[row * chosen + k]) : 0u;
  }
}
