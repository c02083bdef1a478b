// Router logits, selection and plan of a window, and what of its experts depends on no choice.
#include "router.cuh"
#include "select.cuh"
#include "shared.cuh"

// router_part. asked: bytes that selection reads early, asked for. Grid: ceil(n / 16), parts. Shared: warps · 8 NT ·
// PITCH floats.
#define ROUTER(NAME, NT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, float* out, int live, int n, int k, int width, const u8* asked, int bytes) {  \
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) prefetch_l2(asked, u32(bytes));                               \
    GivenRows rows = {x};                                                                                         \
    router_part<NT>(rows, w, out, live, n, k, width);                                                             \
  }
ROUTER(router_8, 1)
ROUTER(router_16, 2)

// The same for one row that gate_up is to select for: the plan is cleared, and the blocks behind those of the product have
// the shared expert's tiles. A warp has up to DEPTH of a tile's chunks for each part of K, all on their way at once.
template <int PARTS, class Source>
__device__ __forceinline__ void router_one(
    Source& x, const bf16* w, float* out, int n, int k, int width, const u8* asked, int bytes, u32* plan,
    const SharedExpert& expert) {
  const int behind = int(blockIdx.x) - (n + 15) / 16;
  if (behind >= 0) return shared_tile<1, PARTS * DEPTH, true>(x, expert, behind * PARTS + blockIdx.y);
  const bool first = blockIdx.x + blockIdx.y == 0;
  if (first && threadIdx.x == 0) prefetch_l2(asked, u32(bytes));
  router_part<1>(x, w, out, 1, n, k, width);
  if (first) clear_plan(plan);
}

#define ROUTER_ROW(NAME, PARTS)                                                                                   \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, int k, const bf16* w, float* out, int n, int width, const u8* asked, int bytes, u32* plan,   \
      const bf16* gate_up, bf16* mid, int inner, int pitch, float limit, int each) {                              \
    GivenRows row = {x};                                                                                          \
    const SharedExpert expert = {gate_up, mid, inner, pitch, limit, each, 1, k};                                  \
    router_one<PARTS>(row, w, out, n, k, width, asked, bytes, plan, expert);                                      \
  }
ROUTER_ROW(router_row_1, 1)
ROUTER_ROW(router_row_2, 2)

// The same for a row that exchange_norm's arguments make: x_out and h are written, too. For one part of K: with the
// chunks of two under way and the parts of the sum no registers are left (measured: no gain). Shared: behind the warps'
// sums the row, k + 8 values.
extern "C" __global__ void __launch_bounds__(512, 1) router_normed(
    const void* partial, int parts, int part_pitch, const bf16* x, const bf16* weight, bf16* x_out, bf16* h, int k,
    float eps, const bf16* w, float* out, int n, int width, const u8* asked, int bytes, u32* plan, const bf16* gate_up,
    bf16* mid, int inner, int pitch, float limit, int each) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) float warps[WARP];
  bf16* row = reinterpret_cast<bf16*>(shared + blockDim.x / WARP * Sums<1>::SIZE * sizeof(float));
  RowToNorm made = {{partial, parts, part_pitch}, x, weight, x_out, h, k, eps, row, warps};
  const SharedExpert expert = {gate_up, mid, inner, pitch, limit, each, 1, k};
  router_one<1>(made, w, out, n, k, width, asked, bytes, plan, expert);
}

template <int QUADS>
__device__ __forceinline__ void select_row(
    const Router& router, const float* logits, int second, const float* bias, i64* experts, float* weights, u32* plan,
    int live, Chosen& chosen) {
  DYNAMIC_SHARED(shared);
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const Logits own = {logits + (row < live ? row : 0) * router.experts, second};
  const Share<QUADS> share(router, own, bias);
  if (live > 1) chosen.clear();
  let_next_start_early();  // gate_up touches nothing before its own wait
  wait_for_producer();
  if (row >= live) return;
  const int expert = choose_expert(router, share, reinterpret_cast<Contest<QUADS>*>(shared)[row]);
  const float logit = own.of(expert);
  begin_plan(plan, live, row);  // while the logit is on its way
  const Pick pick(expert, router.chosen);
  const float weight = write_plan(chosen, plan, live, pick, [&] { return router_weight(router, logit); });
  if (lane < router.chosen) experts[row * router.chosen + lane] = expert, weights[row * router.chosen + lane] = weight;
}

// logits [parts, ROW_TILE, experts] fp32 and bias, both 16-byte aligned, groups of a multiple of four experts ->
// experts [*, chosen], weights [*, chosen], plan. second: floats from the first part to the second, 0 with one. Grid:
// 1, and a block for each of the shared expert's tiles (see shared.cuh). Block: a warp a row at least. Shared: warps · 8
// NT · PITCH floats, and a Contest a row at least.
#define ROUTE_SELECT(NAME, NT)                                                                                    \
  extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP, 1) NAME(                                           \
      const float* logits, const float* bias, i64* experts, float* weights, u32* plan, int num_experts,           \
      int groups, int allowed_groups, int chosen, float scale, int second, const bf16* x, int live, int width,    \
      const bf16* gate_up, bf16* mid, int inner, int pitch, float limit, int each) {                              \
    if (blockIdx.x > 0) {                                                                                         \
      GivenRows rows = {x};                                                                                       \
      const SharedExpert expert = {gate_up, mid, inner, pitch, limit, each, live, width};                         \
      return shared_tile<NT, DEPTH, false>(rows, expert, blockIdx.x - 1);                                         \
    }                                                                                                             \
    __shared__ Chosen shared;                                                                                     \
    const Router router = {num_experts, __ffs(groups) - 1, allowed_groups, chosen, scale};                        \
    if (num_experts <= 4 * WARP) {                                                                                \
      select_row<1>(router, logits, second, bias, experts, weights, plan, live, shared);                          \
    } else if (num_experts <= 8 * WARP) {                                                                         \
      select_row<2>(router, logits, second, bias, experts, weights, plan, live, shared);                          \
    } else {                                                                                                      \
      select_row<4>(router, logits, second, bias, experts, weights, plan, live, shared);                          \
    }                                                                                                             \
  }
ROUTE_SELECT(route_select_8, 1)
ROUTE_SELECT(route_select_16, 2)

__device__ __forceinline__ void plan_rows(const i64* experts, const float* weights, u32* plan, int chosen, int live) {
  __shared__ Chosen shared;
  const int row = threadIdx.x / WARP, at = row * chosen + min(int(threadIdx.x) % WARP, chosen - 1);
  if (live > 1) shared.clear();
  let_next_start_early();
  wait_for_producer();
  if (row >= live) return;
  begin_plan(plan, live, row);
  const float weight = weights[at];
  write_plan(shared, plan, live, Pick(int(experts[at]), chosen), [&] { return weight; });
}

// The same from choices that were made elsewhere.
#define ROUTE_PLAN(NAME, NT)                                                                                      \
  extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP, 1) NAME(                                           \
      const i64* experts, const float* weights, u32* plan, int chosen, const bf16* x, int live, int width,        \
      const bf16* gate_up, bf16* mid, int inner, int pitch, float limit, int each) {                              \
    if (blockIdx.x == 0) return plan_rows(experts, weights, plan, chosen, live);                                  \
    GivenRows rows = {x};                                                                                         \
    const SharedExpert expert = {gate_up, mid, inner, pitch, limit, each, live, width};                           \
    shared_tile<NT, DEPTH, false>(rows, expert, blockIdx.x - 1);                                                  \
  }
ROUTE_PLAN(route_plan_8, 1)
ROUTE_PLAN(route_plan_16, 2)

template <int QUADS>
__device__ __forceinline__ void choose_row(
    const Router& router, const float* logits, const float* bias, i64* experts, float* weights, int rows) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + warp;
  const Logits own = {logits + i64(row < rows ? row : 0) * router.experts, 0};
  const Share<QUADS> share(router, own, bias);
  wait_for_producer();
  let_next_start();
  if (row >= rows) return;
  const int expert = choose_expert(router, share, reinterpret_cast<Contest<QUADS>*>(shared)[warp]);
  const float weight = router_weight(router, own.of(expert));
  const i64 to = i64(row) * router.chosen + lane;
  if (lane < router.chosen) experts[to] = expert, weights[to] = weight;
}

// The choices of a prefill chunk, each as a window's: logits [rows, experts] -> experts, weights [rows, chosen]. Grid: rows by
// the warps of a block. Shared: a Contest a warp.
extern "C" __global__ void __launch_bounds__(256) prefill_choose(
    const float* logits, const float* bias, i64* experts, float* weights, int num_experts, int groups,
    int allowed_groups, int chosen, float scale, int rows) {
  const Router router = {num_experts, __ffs(groups) - 1, allowed_groups, chosen, scale};
  if (num_experts <= 4 * WARP) {
    choose_row<1>(router, logits, bias, experts, weights, rows);
  } else if (num_experts <= 8 * WARP) {
    choose_row<2>(router, logits, bias, experts, weights, rows);
  } else {
    choose_row<4>(router, logits, bias, experts, weights, rows);
  }
}
