// Exchange launches: sums of activations with residual and norm, the embedding of a split vocabulary, each row's best
// candidates, and rows of logits. `mail` is the address of a Mail. The gathered_ kernels do the same from parts that
// something else has brought together.
#include "exchange.cuh"
#include "sample.cuh"

__device__ __forceinline__ RowBest RowBest::of(const u64* best, const u32* bad, const float* sums, int blocks, int first) {
  const int lane = threadIdx.x % WARP;
  u64 top = 0;
  u32 any = 0;
  for (int b = lane; b < blocks; b += WARP) {
    top = best[b] > top ? best[b] : top;
    if (bad != nullptr) any |= bad[b];
  }
  top = warp_best(top);
  any = warp_max(any);
  float total = 0.0f;
  if (sums != nullptr) {
    for (int b = lane; b < blocks; b += WARP) {
      if (best[b] != 0) total += sums[b] * expf(candidate_value(best[b]) - candidate_value(top));
    }
    total = warp_sum(total);
  }
  const u64 whole = top == 0 ? 0 : (top & ~0xffffffffull) | u32(~(candidate_id(top) + first));
  return {whole, joined(any, __float_as_uint(total))};
}

constexpr int MAX_THREADS = 512;

__device__ __forceinline__ const Mail& mail_at(i64 mail) { return *reinterpret_cast<const Mail*>(mail); }

// Grid: rows. Block: width / 8 threads, rounded up to a warp. x null: only the sum; weight null: no norm. early: let the
// next kernel start before the wait.
template <int N>
__device__ __forceinline__ void exchange_norm(i64 mail, const Partial& partial, const bf16* x, const bf16* weight,
                                              bf16* x_out, bf16* h, int width, float eps, int early) {
  __shared__ __align__(16) float warps[WARP];
  const int at = threadIdx.x * 8;
  const bool inside = at < width;
  uint4 w = load_weights(weight + at, inside && weight != nullptr);
  const i64 base = i64(blockIdx.x) * width + at;
  const Partial::Places places = partial.places(base, inside);
  uint4 before = make_uint4(0, 0, 0, 0);
  if (inside && x != nullptr) before = load_settled16(x + base);  // as in exchange_norm_row
  Swap<N> swap(mail_at(mail), blockIdx.x);
  float each = 1.0f / float(width);
  settle_here(each);
  constexpr bool KEPT = Swap<N>::KEPT;
  __shared__ uint4 stash[2][KEPT ? 1 : MAX_THREADS];
  if (!KEPT) stash[0][threadIdx.x] = before, stash[1][threadIdx.x] = w;
  if (early != 0) let_next_start_early();
  wait_for_producer();
  if (early == 0) let_next_start();
  swap.begin();
  float sum[8];
  partial.read(sum, places, base, inside);
  const uint4 own = pack(sum);  // all ranks add the same bits
  sum_row<N>(own, inside, sum, swap);
  if (!KEPT) before = stash[0][threadIdx.x], w = stash[1][threadIdx.x];
  add_and_norm(sum, inside, base, before, w, weight != nullptr, x_out, h, each, eps, warps);
  if (threadIdx.x == 0) swap.finish();
}

// x_out[row] = table[ids[row]] of a table whose rows first .. first + count are here, the others on other ranks. ids null:
// a draft block's, `anchor` and then `mask`, at positions *length and on, which are written too.
struct Named {
  const i64* ids;
  const i64* anchor;
  const i64* length;
  i64 mask;
  i64* positions;

  __device__ __forceinline__ i64 of(int row) const {
    if (ids != nullptr) return ids[row];
    if (threadIdx.x == 0) positions[row] = *length + row;
    return row == 0 ? *anchor : mask;
  }
};

template <int N>
__device__ __forceinline__ void exchange_embed(i64 mail, const Named& named, const bf16* table, int first, int count,
                                               bf16* x_out, int width) {
  const int at = threadIdx.x * 8;
  const bool inside = at < width;
  Swap<N> swap(mail_at(mail), blockIdx.x);
  wait_for_producer();
  let_next_start();
  swap.begin();
  const i64 id = named.of(blockIdx.x) - first;
  const bool here = id >= 0 && id < count;
  const uint4 own = load_weights(table + (here ? id : 0) * width + at, inside && here);
  float sum[8];
  sum_row<N>(own, inside, sum, swap);
  const uint4 none = make_uint4(0, 0, 0, 0);
  add_and_norm(sum, inside, i64(blockIdx.x) * width + at, none, none, false, x_out, nullptr, 0.0f, 0.0f, nullptr);
  if (threadIdx.x == 0) swap.finish();
}

// Grid: rows; one warp each. Candidates [rows, stride_in] of this rank, ids counted from `first`, to those of all ranks,
// one a rank, in [rows, stride_out]; the entries after them become nothing. bad and sums may be null. May be in place.
template <int N>
__device__ __forceinline__ void exchange_best(i64 mail, const u64* best, const u32* bad, const float* sums, int blocks,
                                              int first, u64* best_out, u32* bad_out, float* sums_out, int stride) {
  const int row = blockIdx.x, lane = threadIdx.x;
  Swap<N> swap(mail_at(mail), row);
  wait_for_producer();
  let_next_start();
  swap.begin();
  const RowBest own = RowBest::of(best + i64(row) * blocks, bad == nullptr ? nullptr : bad + i64(row) * blocks,
                                  sums == nullptr ? nullptr : sums + i64(row) * blocks, blocks, first);
  const int at = row * stride;
  for (int i = N + lane; i < stride; i += WARP) RowBest{0, 0}.write(best_out, bad_out, sums_out, at + i);
  __syncwarp();
  if (lane > 0) return;
  const u64 mine[2] = {own.best, own.rest};
  u64 data[N][2];
#pragma unroll
  for (int r = 0; r < N; ++r) data[r][0] = mine[0], data[r][1] = mine[1];
  swap.post(mine, 0, 1);
  swap.take(data, 0, 1);
#pragma unroll
  for (int r = 0; r < N; ++r) RowBest{data[r][0], data[r][1]}.write(best_out, bad_out, sums_out, at + r);
  swap.finish();
}

constexpr int ROWS_THREADS = 256;

// whole [rows, N * n] from every rank's part [rows, n] fp32, n a multiple of 4. Any grid that fits the mail.
template <int N>
__device__ __forceinline__ void exchange_rows(i64 mail, const float* part, float* whole, int rows, int n) {
  Swap<N> swap(mail_at(mail), blockIdx.x);
  wait_for_producer();
  let_next_start();
  swap.begin();
  const int each = n / 4, all = rows * each;
  const int step = gridDim.x * ROWS_THREADS, first = blockIdx.x * ROWS_THREADS + threadIdx.x;
  auto packets = [&](int i, u64(&own)[2]) {
    const uint4 v = load16(part + i64(i) * 4);
    own[0] = joined(v.x, v.y), own[1] = joined(v.z, v.w);
  };
  for (int i = first, round = 0; i < all; i += step, ++round) {
    u64 own[2];
    packets(i, own);
    swap.post(own, round * 2 * ROWS_THREADS + threadIdx.x, ROWS_THREADS);
  }
  for (int i = first, round = 0; i < all; i += step, ++round) {
    u64 own[2], data[N][2];
    packets(i, own);
#pragma unroll
    for (int r = 0; r < N; ++r) data[r][0] = own[0], data[r][1] = own[1];
    swap.take(data, round * 2 * ROWS_THREADS + threadIdx.x, ROWS_THREADS);
    const i64 row = i / each, column = i % each;
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const uint4 v = make_uint4(u32(data[r][0]), u32(data[r][0] >> 32), u32(data[r][1]), u32(data[r][1] >> 32));
      *reinterpret_cast<uint4*>(whole + (row * N + r) * n + column * 4) = v;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) swap.finish();
}

#define FOR_RANKS(N)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                        \
      exchange_norm_##N(i64 mail, const void* partial, int parts, int pitch, const bf16* x, const bf16* weight,       \
                        bf16* x_out, bf16* h, int width, float eps, int early) {                                      \
    exchange_norm<N>(mail, {partial, parts, pitch}, x, weight, x_out, h, width, eps, early);                          \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                        \
      exchange_embed_##N(i64 mail, const i64* ids, const i64* anchor, const i64* length, i64 mask, i64* positions,    \
                         const bf16* table, int first, int count, bf16* x_out, int width) {                           \
    exchange_embed<N>(mail, {ids, anchor, length, mask, positions}, table, first, count, x_out, width);               \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(WARP)                                                                  \
      exchange_best_##N(i64 mail, const u64* best, const u32* bad, const float* sums, int blocks, int first,          \
                        u64* best_out, u32* bad_out, float* sums_out, int stride) {                                   \
    exchange_best<N>(mail, best, bad, sums, blocks, first, best_out, bad_out, sums_out, stride);                      \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(ROWS_THREADS, 1)                                                       \
      exchange_rows_##N(i64 mail, const float* part, float* whole, int rows, int n) {                                 \
    exchange_rows<N>(mail, part, whole, rows, n);                                                                     \
  }

FOR_RANKS(2)
FOR_RANKS(4)
FOR_RANKS(8)

// ---- the same from gathered parts -------------------------------------------------------------------------------

// This rank's part of an embedding: rows that are elsewhere are zeros. Grid and block as exchange_embed.
extern "C" __global__ void embed_part(const i64* ids, const i64* anchor, const i64* length, i64 mask, i64* positions,
                                      const bf16* table, int first, int count, bf16* x_out, int width) {
  wait_for_producer();
  let_next_start();
  const int at = threadIdx.x * 8;
  const i64 id = Named{ids, anchor, length, mask, positions}.of(blockIdx.x) - first;
  const bool here = id >= 0 && id < count;
  if (at >= width) return;
  const uint4 own = load_weights(table + (here ? id : 0) * width + at, here);
  *reinterpret_cast<uint4*>(x_out + i64(blockIdx.x) * width + at) = own;
}

// parts [ranks, rows, width], the rest as exchange_norm. Grid: rows.
extern "C" __global__ void gathered_norm(const bf16* parts, int ranks, i64 pitch, const bf16* x, const bf16* weight,
                                         bf16* x_out, bf16* h, int width, float eps) {
  __shared__ __align__(16) float warps[WARP];
  const int at = threadIdx.x * 8;
  const bool inside = at < width;
  const uint4 w = load_weights(weight + at, inside && weight != nullptr);
  wait_for_producer();
  let_next_start();
  const i64 base = i64(blockIdx.x) * width + at;
  float sum[8] = {};
  for (int r = 0; r < ranks; ++r) {
    const uint4 part = load16(parts + r * pitch + base, inside);
    add_values(sum, joined(part.x, part.y), joined(part.z, part.w));
  }
  const uint4 before = load16(x + base, inside && x != nullptr);
  add_and_norm(sum, inside, base, before, w, weight != nullptr, x_out, h, 1.0f / float(width), eps, warps);
}

// Grid: rows; one warp each. This rank's best of each row, [rows, 2] words.
extern "C" __global__ void __launch_bounds__(WARP)
    best_part(const u64* best, const u32* bad, const float* sums, int blocks, int first, u64* out) {
  wait_for_producer();
  let_next_start();
  const i64 row = blockIdx.x;
  const RowBest own = RowBest::of(best + row * blocks, bad == nullptr ? nullptr : bad + row * blocks,
                                  sums == nullptr ? nullptr : sums + row * blocks, blocks, first);
  if (threadIdx.x == 0) out[row * 2] = own.best, out[row * 2 + 1] = own.rest;
}

// parts [ranks, rows, 2] to what exchange_best leaves. Grid: rows; one warp each.
extern "C" __global__ void __launch_bounds__(WARP)
    gathered_best(const u64* parts, int ranks, u64* best_out, u32* bad_out, float* sums_out, int stride) {
  wait_for_producer();
  let_next_start();
  const int row = blockIdx.x, rows = gridDim.x;
  for (int i = threadIdx.x; i < stride; i += WARP) {
    RowBest found = {0, 0};
    if (i < ranks) found = {parts[(i64(i) * rows + row) * 2], parts[(i64(i) * rows + row) * 2 + 1]};
    found.write(best_out, bad_out, sums_out, row * stride + i);
  }
}
