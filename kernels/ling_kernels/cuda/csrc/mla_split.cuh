// Latent queries of a low-rank projection by two kernels instead of mla_query's one: the product with q_b, then the
// absorption. Each weight is read by one block only, a warp has all of its weights in registers or on their way there
// before it waits, and then asks for all of its activations at once. Sums are taken in the order of mla_query, so the
// bits are the same.
#pragma once
#include "mla.cuh"

constexpr int SPLIT_WARPS = 6, SPLIT_THREADS = SPLIT_WARPS * WARP;  // a warp has 16 rows of q_b, a block half of a head
constexpr int HEAD_TILES = MLA_QUERY / 16, FRAGMENT = 16 * 16;      // a head's tiles of 16 values by 16 rows
static_assert(HEAD_TILES % SPLIT_WARPS == 0, "no warp without rows");

// Between the two kernels a tile lies as the absorption has it in its registers: lane (g, t) finds its 16 bytes, rows g
// and g + 8 at values 2t, 2t + 1, then both at 2t + 8, 2t + 9. This is where row `row` has value `value` of a head.
__device__ __forceinline__ int split_place(int row, int value) {
  return value / 16 * FRAGMENT + row % 8 * 32 + value % 8 / 2 * 8 + row / 8 * 2 + value % 16 / 8 * 4 + value % 2;
}

struct QueryRowsShared {
  alignas(16) bf16 low[ROW_TILE][QUERY_RANK + 8];
};

// The window's low-rank queries, normed, times this block's rows of q_b. A rank of QUERY_RANK at most. out: head after head.
__device__ __forceinline__ void query_rows(const MlaSource& source, bf16* out, int rows, QueryRowsShared& s) {
  constexpr int EACH = QUERY_RANK / WARP, OWN = (ROW_TILE + SPLIT_WARPS - 1) / SPLIT_WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x * SPLIT_WARPS + warp, rank = source.rank;
  let_next_start_early();
  MlaQueryRows weights;
  MlaQueryNorm norm;
  weights.load(source.q_b, 16 * tile, rank, 0);
  norm.load(source.q_norm, rank, 0);
  const bf16* from = source.rows + warp * source.stride + lane;
  settle_here(from);
  wait_for_producer();

  auto row = [&](int j) { return warp + SPLIT_WARPS * j; };
  bf16 x[OWN][EACH];  // of the rows that this warp norms
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    if (row(j) >= rows) break;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[j][i] = i * WARP + lane < rank ? load_activation(from + i * WARP) : bf16(0);
    from += SPLIT_WARPS * source.stride;
  }
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    if (row(j) >= rows) break;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum = fmaf(to_float(x[j][i]), to_float(x[j][i]), sum);
    const float scale = rsqrtf(warp_sum(sum) / rank + source.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      s.low[row(j)][i * WARP + lane] = to_bf16(to_float(x[j][i]) * scale * to_float(norm.x[i]));
    }
  }
  __syncthreads();
  float acc[2][2][4] = {};  // [tokens][every other product]
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (8 * n >= rows) break;
#pragma unroll
    for (int c = 0; c < QUERY_CHUNKS; c++) {
      const uint4 v = load16(&s.low[8 * n + g][32 * c + 8 * t]), low = weights.low[c], high = weights.high[c];
      mma_bf16(acc[n][0], low.x, high.x, low.y, high.y, v.x, v.y);
      mma_bf16(acc[n][1], low.z, high.z, low.w, high.w, v.z, v.w);
    }
  }
  bf16* to = out + i64(tile) * FRAGMENT + split_place(2 * t, g);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      if (8 * n + 2 * t + odd >= rows) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        to[split_place(8 * n + odd, 8 * half)] = to_bf16(acc[n][0][2 * half + odd] + acc[n][1][2 * half + odd]);
      }
    }
  }
}

// A warp's part of the absorption, 32 latent columns: of each row of w_uk that a lane has in a fragment, four columns side
// by side, so the four fragments of a step are of columns i, i + 4 ..
struct AbsorbColumns {
  static constexpr int STEPS = MLA_NOPE / 16;
  u32 w[STEPS][4][2];

  // w_uk: of the warp's first column
  __device__ void load(const bf16* w_uk) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const bf16* from = w_uk + 2 * t * MLA_LATENT + 4 * g;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          const bf16* row = from + (16 * step + 8 * half + odd) * MLA_LATENT;
          const uint2 v = load_settled(reinterpret_cast<const uint2*>(row));
          w[step][odd][half] = v.x, w[step][odd + 2][half] = v.y;
        }
      }
    }
  }
  // From two columns of a row in a word to two rows of a column.
  __device__ void turn() {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) {
          u32 &low = w[step][pair][half], &high = w[step][pair + 1][half];
          const u32 even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
          low = even, high = odd;
        }
      }
    }
  }
  // tiles: this lane's part of the head's; q: of the warp's first column, rows `pitch` apart.
  __device__ void absorb(const bf16* tiles, bf16* q, int pitch, int rows) const {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    uint4 a[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) a[step] = load_activations(tiles + step * FRAGMENT);
    float acc[4][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        mma_bf16(acc[i], a[step].x, a[step].y, a[step].z, a[step].w, w[step][i][0], w[step][i][1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = g + 8 * half, at = 2 * half;
      const uint4 v = make_uint4(pack_bf16(acc[0][at], acc[1][at]), pack_bf16(acc[2][at], acc[3][at]),
                                 pack_bf16(acc[0][at + 1], acc[1][at + 1]), pack_bf16(acc[2][at + 1], acc[3][at + 1]));
      if (r < rows) *reinterpret_cast<uint4*>(q + r * pitch + 8 * t) = v;
    }
  }
};

// The rest of mla_absorb, by as many blocks and warps; here no warp meets another. tiles: this head's, from query_rows.
// stride: from row to row of the entries' source. q: of this head, rows `pitch` apart.
__device__ __forceinline__ void query_latent(const bf16* tiles, const MlaEntries& entries, int stride, float eps,
                                             const bf16* w_uk, const float* rope, const i64* positions, bf16* q,
                                             int heads, int head, int slice, int rows) {
  constexpr int TURNS = ROW_TILE / SPARE_WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pitch = heads * MLA_ROW;
  let_next_start_early();
  if (warp < MLA_WARPS) {
    const int column = slice * MLA_SLICE + warp * (MLA_SLICE / MLA_WARPS);
    AbsorbColumns columns;
    columns.load(w_uk + column);
    columns.turn();
    tiles += lane * 8, q += column;
    settle_here(tiles);
    wait_for_producer();
    columns.absorb(tiles, q, pitch, rows);
    return;
  }
  const int spare = warp - MLA_WARPS;
  const i64 position = load_settled(positions);
  rope += position * MLA_ROPE;
  if (slice == 0) {
    float cosine[TURNS], sine[TURNS];  // of this lane's pair
    u32 pair[TURNS];
    auto row = [&](int i) { return spare + SPARE_WARPS * i; };
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      if (row(i) >= rows) break;
      cosine[i] = load_settled(rope + row(i) * MLA_ROPE + lane);
      sine[i] = load_settled(rope + row(i) * MLA_ROPE + MLA_ROPE / 2 + lane);
    }
    wait_for_producer();
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      if (row(i) >= rows) break;
      pair[i] = load_activation(reinterpret_cast<const u32*>(tiles + split_place(row(i), MLA_NOPE + 2 * lane)));
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      if (row(i) >= rows) break;
      const u32 turned = rope_pair(low_float(pair[i]), high_float(pair[i]), cosine[i], sine[i]);
      *reinterpret_cast<u32*>(q + row(i) * pitch + MLA_LATENT + 2 * lane) = turned;
    }
    return;
  }
  int entry = head + heads * spare;
  MlaCacheRow row;
  if (entry < rows) row.prepare(entries.norm, rope + entry * MLA_ROPE);
  wait_for_producer();
#pragma unroll 1
  while (entry < rows) {
    row.write(entries.latent + i64(entry) * stride, entries.cache + (position + entry) * MLA_ROW, eps);
    entry += heads * SPARE_WARPS;
    if (entry < rows) row.prepare(entries.norm, rope + entry * MLA_ROPE);
  }
}
