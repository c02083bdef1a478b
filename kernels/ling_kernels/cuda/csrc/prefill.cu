// What surrounds a prefill chunk's grouped expert products: rows sorted by expert, SwiGLU, and the sum for each row.
#include "arch.cuh"

constexpr int SORT_WARPS = 32;

// Block e puts the rows that chose expert e behind those of all lower experts, in the order of the rows: the same
// order always, without an atomic. experts [count] -> order [count]: which choice lies at a place; place [count]: its
// inverse; ends [experts]. Grid: experts. Block: 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    prefill_sort(const i64* experts, int* order, int* place, int* ends, int count) {
  __shared__ int lower[SORT_WARPS], equal[SORT_WARPS];
  wait_for_producer();
  let_next_start();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, own = blockIdx.x;
  const int part = (count + SORT_WARPS * WARP - 1) / (SORT_WARPS * WARP) * WARP;  // choices that a warp looks at
  const int first = warp * part, last = min(first + part, count);
  int less = 0, same = 0;
  for (int i = first + lane; i < first + part; i += WARP) {
    const int expert = i < last ? int(experts[i]) : own + 1;
    less += __popc(__ballot_sync(ALL, expert < own));
    same += __popc(__ballot_sync(ALL, expert == own));
  }
  if (lane == 0) lower[warp] = less, equal[warp] = same;
  __syncthreads();
  int at = 0, end = 0;
  for (int w = 0; w < SORT_WARPS; ++w) {
    at += lower[w] + (w < warp ? equal[w] : 0);
    end += lower[w] + equal[w];
  }
  if (threadIdx.x == 0) ends[own] = end;
  for (int i = first + lane; i < first + part; i += WARP) {
    const bool mine = i < last && int(experts[i]) == own;
    const u32 found = __ballot_sync(ALL, mine);
    if (mine) {
      const int to = at + __popc(found & ((1u << lane) - 1));
      order[to] = i;
      place[i] = to;
    }
    at += __popc(found);
  }
}

// out[i] = x[order[i] / chosen], rows of `width` values. Grid: places. Block: any.
extern "C" __global__ void prefill_gather(const bf16* x, const int* order, bf16* out, int chosen, int width) {
  wait_for_producer();
  let_next_start();
  const bf16* from = x + i64(order[blockIdx.x] / chosen) * width;
  bf16* to = out + i64(blockIdx.x) * width;
  for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
    *reinterpret_cast<uint4*>(to + at) = load16(from + at);
  }
}

// x [places, 2 inner], gates then ups -> out [places, inner]: SwiGLU, times weights[order[i]] where there are weights.
// Grid: places. Block: any.
extern "C" __global__ void prefill_swiglu(
    const bf16* x, const float* weights, const int* order, bf16* out, int inner, float limit) {
  wait_for_producer();
  let_next_start();
  const bf16* gates = x + i64(blockIdx.x) * 2 * inner;
  const float factor = weights != nullptr ? weights[order[blockIdx.x]] : 1.0f;
  for (int at = threadIdx.x * 8; at < inner; at += blockDim.x * 8) {
    const uint4 g = load16(gates + at), u = load16(gates + inner + at);
    const u32 gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
    u32 made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = silu(low_float(gate[i])), high = silu(high_float(gate[i]));
      float low_up = low_float(up[i]), high_up = high_float(up[i]);
      if (limit > 0.0f) {
        low = fminf(low, limit), high = fminf(high, limit);
        low_up = fminf(fmaxf(low_up, -limit), limit), high_up = fminf(fmaxf(high_up, -limit), limit);
      }
      made[i] = pack_bf16(low * low_up * factor, high * high_up * factor);
    }
    *reinterpret_cast<uint4*>(out + i64(blockIdx.x) * inner + at) = make_uint4(made[0], made[1], made[2], made[3]);
  }
}

// out[row] = shared[row] + the row's `chosen` places of x, in the order of its choices, in fp32. Grid: rows.
extern "C" __global__ void prefill_sum(
    const bf16* x, const int* place, const bf16* shared, bf16* out, int chosen, int width) {
  wait_for_producer();
  let_next_start();
  const int* places = place + i64(blockIdx.x) * chosen;
  for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
    float sum[8] = {};
    for (int k = 0; k <= chosen; ++k) {
      const bf16* from = k < chosen ? x + i64(places[k]) * width : shared + i64(blockIdx.x) * width;
      const uint4 v = load16(from + at);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[2 * i] += low_float(words[i]), sum[2 * i + 1] += high_float(words[i]);
    }
    *reinterpret_cast<uint4*>(out + i64(blockIdx.x) * width + at) =
        make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                   pack_bf16(sum[6], sum[7]));
  }
}
