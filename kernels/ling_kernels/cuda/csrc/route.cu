// Router logits, selection and plan of a window.
#include "router.cuh"
#include "select.cuh"

// router_part. asked: bytes that selection reads early, asked for. Grid: ceil(n / 16), parts. Shared: warps · 8 NT ·
// PITCH floats.
#define ROUTER(NAME, NT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) NAME(                                                      \
      const bf16* x, const bf16* w, float* out, int live, int n, int k, int width, const u8* asked, int bytes) {  \
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) prefetch_l2(asked, u32(bytes));                               \
    GivenRows rows = {x};                                                                                         \
    router_part<NT>(rows, w, out, live, n, k, width);                                                                \
  }
ROUTER(router_8, 1)
ROUTER(router_16, 2)

// The same for one row that exchange_norm's arguments make: x_out and h are written, too. Shared: behind the warps' sums
// the row, k + 8 values.
extern "C" __global__ void __launch_bounds__(512, 1) router_normed(
    const void* partial, int parts, int pitch, const bf16* x, const bf16* weight, bf16* x_out, bf16* h, int k, float eps,
    const bf16* w, float* out, int n, int width, const u8* asked, int bytes) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) float warps[WARP];
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) prefetch_l2(asked, u32(bytes));
  bf16* row = reinterpret_cast<bf16*>(shared + blockDim.x / WARP * Sums<1>::SIZE * sizeof(float));
  RowToNorm made = {{partial, parts, pitch}, x, weight, x_out, h, k, eps, row, warps};
  router_part<1>(made, w, out, 1, n, k, width);
}

constexpr int ASKED_PIECE = 16384, ASKERS = 8;  // bytes that a thread asks for, threads of a block that ask

// All blocks but the first: ask for the bytes at two addresses, while the memory is idle.
__device__ __forceinline__ void ask_for(const u8* a, const u8* b, int bytes_a, int bytes_b) {
  if (threadIdx.x < ASKERS) {
    const int pieces_a = (bytes_a + ASKED_PIECE - 1) / ASKED_PIECE, piece = (blockIdx.x - 1) * ASKERS + threadIdx.x;
    const bool of_a = piece < pieces_a;
    const int offset = (of_a ? piece : piece - pieces_a) * ASKED_PIECE, left = (of_a ? bytes_a : bytes_b) - offset;
    if (left > 0) prefetch_l2((of_a ? a : b) + offset, u32(min(left, ASKED_PIECE)));
  }
  let_next_start_early();
  wait_for_producer();
}

struct Selection {
  int places[ROW_TILE][MAX_CHOSEN];
  Chosen chosen;
};

template <int QUADS>
__device__ __forceinline__ void select_row(
    const Router& router, const float* logits, int second, const float* bias, i64* experts, float* weights, u32* plan,
    Selection& shared) {
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP, live = blockDim.x / WARP;
  const Share<QUADS> share(router, bias);
  if (live > 1) shared.chosen.clear();
  let_next_start_early();  // gate_up reads the shared expert's weights alone before its own wait
  wait_for_producer();
  const Logits own = {logits + row * router.experts, second};
  const int expert = choose_expert(router, share, own, shared.places[row]);
  const float logit = own.of(expert);
  begin_plan(plan, live);  // while the logit is on its way
  const Pick pick(expert, router.chosen);
  const float weight = router_weight(router, logit);
  if (lane < router.chosen) experts[row * router.chosen + lane] = expert, weights[row * router.chosen + lane] = weight;
  write_plan(shared.chosen, plan, live, (router.experts + WARP - 1) / WARP, pick, weight);
}

// logits [parts, ROW_TILE, experts] fp32 and bias, both 16-byte aligned, groups of a multiple of four experts ->
// experts [*, chosen], weights [*, chosen], plan. second: floats from the first part to the second, 0 with one. Grid:
// 1, and a block for every ASKERS · ASKED_PIECE bytes to ask for. Block: a warp a row.
extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP) route_select(
    const float* logits, const float* bias, i64* experts, float* weights, u32* plan, int num_experts, int groups,
    int allowed_groups, int chosen, float scale, int second, const u8* ahead_a, const u8* ahead_b, int bytes_a,
    int bytes_b) {
  if (blockIdx.x > 0) return ask_for(ahead_a, ahead_b, bytes_a, bytes_b);
  __shared__ Selection shared;
  const Router router = {num_experts, __ffs(groups) - 1, allowed_groups, chosen, scale};
  if (num_experts <= 4 * WARP) {
    select_row<1>(router, logits, second, bias, experts, weights, plan, shared);
  } else if (num_experts <= 8 * WARP) {
    select_row<2>(router, logits, second, bias, experts, weights, plan, shared);
  } else {
    select_row<4>(router, logits, second, bias, experts, weights, plan, shared);
  }
}

// The plan of choices that were made elsewhere. Grid: 1. Block: a warp a row.
extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP) route_plan(
    const i64* experts, const float* weights, u32* plan, int chosen) {
  __shared__ Chosen shared;
  const int row = threadIdx.x / WARP, at = row * chosen + min(int(threadIdx.x) % WARP, chosen - 1);
  const int live = blockDim.x / WARP;
  if (live > 1) shared.clear();
  wait_for_producer();
  let_next_start();
  begin_plan(plan, live);
  write_plan(shared, plan, live, MAX_EXPERTS / WARP, Pick(int(experts[at]), chosen), weights[at]);
}
