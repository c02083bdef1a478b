// MLA in its absorbed form (ling3-model.md 4.2): projections to latent queries and cache rows, and latent sums to
// gated heads. Sizes: latent 512, rope 64, nope and value 128.
#pragma once
#include "attend.cuh"

constexpr int MLA_NOPE = 128, MLA_VALUE = 128;
constexpr int MLA_QUERY = MLA_NOPE + MLA_ROPE;  // a head's query before absorption
constexpr int MLA_SLICE = 256;                  // latent columns that a block absorbs
constexpr int MLA_SLICES = MLA_LATENT / MLA_SLICE;
constexpr int QUERY_THREADS = 384, QUERY_WARPS = QUERY_THREADS / WARP;  // a warp has 16 of a head's 192 values
constexpr int QUERY_RANK = 256;                                         // of a low-rank query, multiplied at a time
constexpr int QUERY_CHUNKS = QUERY_RANK / 32;
constexpr int MLA_THREADS = 256, MLA_WARPS = 8;
constexpr int SPARE_WARPS = QUERY_WARPS - MLA_WARPS;  // of a block that makes queries, while the others absorb

struct MlaQueryShared {
  alignas(16) bf16 up[MLA_NOPE][MLA_SLICE + 8];
  alignas(16) bf16 low[ROW_TILE][QUERY_RANK + 8];
  alignas(16) bf16 q[ROW_TILE][MLA_QUERY + 8];
};

// Where a window's queries come from: rows of `stride` that hold all heads' 192 values, or, with q_b, `rank` values that
// are normed by q_norm and multiplied by q_b [H * 192, rank].
struct MlaSource {
  const bf16* rows;
  int stride;
  const bf16* q_norm;
  const bf16* q_b;
  int rank;
  float eps;
};

// One pair of rope: values at 2i, 2i+1 turned by an angle.
__device__ __forceinline__ u32 rope_pair(float a, float b, float cosine, float sine) {
  return pack_bf16(a * cosine - b * sine, b * cosine + a * sine);
}

// 16 values of a head against QUERY_RANK columns of the low-rank query from `column` on; 8 bytes of zeros past the rank.
struct MlaQueryRows {
  uint4 low[QUERY_CHUNKS], high[QUERY_CHUNKS];

  __device__ void load(const bf16* q_b, int first, int rank, int column) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < QUERY_CHUNKS; c++) {
      const int k = column + 32 * c + 8 * t;
      const bf16* from = q_b + i64(first + g) * rank + k;
      low[c] = load_weights(from, k < rank);
      high[c] = load_weights(from + i64(8) * rank, k < rank);
    }
  }
};

// A lane's values of a low-rank query's norm, columns lane, lane + 32 ..; asked for before the wait.
struct MlaQueryNorm {
  bf16 x[QUERY_RANK / WARP];

  __device__ void load(const bf16* norm, int rank, int column) {
#pragma unroll
    for (int i = 0; i < QUERY_RANK / WARP; i++) {
      const int at = column + i * WARP + threadIdx.x % WARP;
      x[i] = at < rank ? load_settled(norm + at) : bf16(0);
    }
  }
};

// A head's queries from the low-rank ones: s.q of all live rows. weights, norm: of the first QUERY_RANK columns, on their
// way; from: this lane's first value of the warp's first row. A warp norms the same rows throughout. All values of the
// first columns are asked for before one is looked at: as a condition in the sum each had its own trip to memory.
__device__ __forceinline__ void mla_low_rank(MlaQueryRows& weights, MlaQueryNorm& norm, const MlaSource& source,
                                             const bf16* from, int head, int rows, MlaQueryShared& s) {
  constexpr int EACH = QUERY_RANK / WARP, NORMED = (ROW_TILE + QUERY_WARPS - 1) / QUERY_WARPS;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const int first = head * MLA_QUERY + 16 * warp, rank = source.rank;
  auto value = [&](int r, int at) { return at < rank ? to_float(source.rows[i64(r) * source.stride + at]) : 0.0f; };
  bf16 x[NORMED][EACH];
  float scale[NORMED];
#pragma unroll
  for (int j = 0; j < NORMED; j++) {
    const int r = warp + QUERY_WARPS * j;
    if (r >= rows) break;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[j][i] = i * WARP + lane < rank ? load_activation(from + i * WARP) : bf16(0);
    from += QUERY_WARPS * source.stride;
  }
#pragma unroll
  for (int j = 0; j < NORMED; j++) {
    const int r = warp + QUERY_WARPS * j;
    if (r >= rows) break;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum = fmaf(to_float(x[j][i]), to_float(x[j][i]), sum);
    for (int at = QUERY_RANK + lane; at < rank; at += WARP) {
      const float more = value(r, at);
      sum = fmaf(more, more, sum);
    }
    scale[j] = rsqrtf(warp_sum(sum) / rank + source.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      s.low[r][i * WARP + lane] = to_bf16(to_float(x[j][i]) * scale[j] * to_float(norm.x[i]));
    }
  }
  float acc[2][2][4] = {};  // [tokens][every other product]
  for (int column = 0; column < rank; column += QUERY_RANK) {
    if (column > 0) {
      weights.load(source.q_b, first, rank, column);
      norm.load(source.q_norm, rank, column);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < NORMED; j++) {
        const int r = warp + QUERY_WARPS * j;
        if (r >= rows) break;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const float found = value(r, column + i * WARP + lane);
          s.low[r][i * WARP + lane] = to_bf16(found * scale[j] * to_float(norm.x[i]));
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; n++) {
      if (8 * n >= rows) break;
#pragma unroll
      for (int c = 0; c < QUERY_CHUNKS; c++) {
        const uint4 x = load16(&s.low[8 * n + g][32 * c + 8 * t]), low = weights.low[c], high = weights.high[c];
        mma_bf16(acc[n][0], low.x, high.x, low.y, high.y, x.x, x.y);
        mma_bf16(acc[n][1], low.z, high.z, low.w, high.w, x.z, x.w);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s.q[8 * n + 2 * t + i % 2][16 * warp + g + i / 2 * 8] = to_bf16(acc[n][0][i] + acc[n][1][i]);
  }
}

// One row's cache entry: normed latent, then the turned key; by one warp. latent: 512 values, then the key's 64. table:
// the row's cos‖sin.
struct MlaCacheRow {
  static constexpr int EACH = MLA_LATENT / (2 * WARP);
  u32 scales[EACH];
  float cosine, sine;

  // before the wait
  __device__ void prepare(const bf16* norm, const float* table) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      scales[i] = *reinterpret_cast<const u32*>(norm + 2 * (i * WARP + lane));
    }
    cosine = load_settled(table + lane), sine = load_settled(table + MLA_ROPE / 2 + lane);
  }
  // rows may start at any element
  __device__ void write(const bf16* latent, bf16* to, float eps) const {
    const int lane = threadIdx.x % WARP;
    const bf16* from = latent + 2 * lane;
    settle_here(from);  // one address for all
    bf16 x[EACH][2], key[2];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      x[i][0] = load_activation(from + 2 * WARP * i), x[i][1] = load_activation(from + 2 * WARP * i + 1);
    }
    key[0] = load_activation(from + MLA_LATENT), key[1] = load_activation(from + MLA_LATENT + 1);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const float a = to_float(x[i][0]), b = to_float(x[i][1]);
      sum = fmaf(a, a, fmaf(b, b, sum));
    }
    const float scale = rsqrtf(warp_sum(sum) / MLA_LATENT + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const float a = to_float(x[i][0]) * scale * low_float(scales[i]), b = to_float(x[i][1]) * scale * high_float(scales[i]);
      *reinterpret_cast<u32*>(to + 2 * (i * WARP + lane)) = pack_bf16(a, b);
    }
    *reinterpret_cast<u32*>(to + MLA_LATENT + 2 * lane) = rope_pair(to_float(key[0]), to_float(key[1]), cosine, sine);
  }
};

// Where a window's cache entries come from and go.
struct MlaEntries {
  const bf16* latent;  // of the first row: latent‖key; rows lie as far apart as the queries'
  const bf16* norm;
  bf16* cache;
};

// A block's part of a window's queries: latent columns slice * MLA_SLICE .. of one head's, for all rows. While the first
// warps absorb, the spare ones of slice 0 turn the rope part; those of slice 1 write every `heads`th cache entry while the
// first low-rank queries are normed, which is as long a chain. w_uk: this head's [128, 512]. q [16, H, 576], or in tiles
// of fragments (attend_place). position: of the first row, settled.
__device__ __forceinline__ void mla_absorb(const MlaSource& source, const MlaEntries& entries, const bf16* w_uk,
                                           const float* rope, i64 position, bf16* q, bool fragments, int heads,
                                           int head, int slice, int rows, MlaQueryShared& s) {
  constexpr int PIECES = MLA_SLICE / 8, TURNS = ROW_TILE / SPARE_WARPS, COLUMNS = MLA_SLICE / MLA_WARPS;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, matrix = lane / 8;
  const bool low_rank = source.q_b != nullptr;
  MlaQueryRows weights;
  MlaQueryNorm norm;
  let_next_start_early();  // attention's keys take longer to come than what is asked for here
  if (low_rank) weights.load(source.q_b, head * MLA_QUERY + 16 * warp, source.rank, 0);
  if (low_rank) norm.load(source.q_norm, source.rank, 0);
#pragma unroll 4
  for (int i = tid; i < MLA_NOPE * PIECES; i += QUERY_THREADS) {
    const int r = i / PIECES, c = i % PIECES * 8;
    copy16(&s.up[r][c], w_uk + i64(r) * MLA_LATENT + slice * MLA_SLICE + c);
  }
  copies_commit();
  float cosine[TURNS], sine[TURNS];  // of this lane's pair, for the warps that turn the rope part
  const int turner = slice == 0 ? warp - MLA_WARPS : -1;
  const int writer = slice == 1 && warp >= MLA_WARPS ? QUERY_WARPS - 1 - warp : -1;  // the last ones norm the fewest queries
  int entry = writer >= 0 ? head + heads * writer : rows;
  MlaCacheRow row;
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int r = turner + SPARE_WARPS * i;
    if (turner < 0 || r >= rows) continue;
    cosine[i] = load_settled(rope + (position + r) * MLA_ROPE + lane);
    sine[i] = load_settled(rope + (position + r) * MLA_ROPE + MLA_ROPE / 2 + lane);
  }
  if (entry < rows) row.prepare(entries.norm, rope + (position + entry) * MLA_ROPE);
  const bf16* low = source.rows + warp * source.stride + lane;
  settle_here(low);
  wait_for_producer();
#pragma unroll 1
  while (entry < rows) {
    row.write(entries.latent + i64(entry) * source.stride, entries.cache + (position + entry) * MLA_ROW, source.eps);
    entry += heads * SPARE_WARPS;
    if (entry < rows) row.prepare(entries.norm, rope + (position + entry) * MLA_ROPE);
  }
  if (low_rank) {
    mla_low_rank(weights, norm, source, low, head, rows, s);
  } else {
    for (int i = tid; i < rows * MLA_QUERY; i += QUERY_THREADS) {
      const int r = i / MLA_QUERY, c = i % MLA_QUERY;
      s.q[r][c] = source.rows[i64(r) * source.stride + head * MLA_QUERY + c];
    }
  }
  copies_wait<0>();
  __syncthreads();
  if (warp < MLA_WARPS) {
    float acc[COLUMNS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < MLA_NOPE; k += 16) {
      u32 a[4];
      load_matrices(a, &s.q[8 * (matrix & 1) + lane % 8][k + 8 * (matrix >> 1)]);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, &s.up[k + 8 * (matrix & 1) + lane % 8][COLUMNS * warp + 8 * (n + (matrix >> 1))]);
        mma_bf16(acc[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_bf16(acc[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = lane / 4 + 8 * half;
      const int column = slice * MLA_SLICE + COLUMNS * warp + 2 * (lane % 4), query = r * heads + head;
      bf16* to = q + (fragments ? attend_place(query, column) : query * MLA_ROW + column);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        const int at = fragments ? n / 2 * ATTEND_FRAGMENT + n % 2 * 4 : 8 * n;
        if (r < rows) *reinterpret_cast<u32*>(to + at) = pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int r = turner + SPARE_WARPS * i;
    if (turner < 0 || r >= rows) continue;
    const u32 pair = *reinterpret_cast<const u32*>(&s.q[r][MLA_NOPE + 2 * lane]);
    const int column = MLA_LATENT + 2 * lane, query = r * heads + head;
    bf16* to = q + (fragments ? attend_place(query, column) : query * MLA_ROW + column);
    *reinterpret_cast<u32*>(to) = rope_pair(low_float(pair), high_float(pair), cosine[i], sine[i]);
  }
}

constexpr int MLA_OUT = 16;                              // values of a head, for MLA_WARPS warps
constexpr int MLA_CHUNKS = MLA_LATENT / 32 / MLA_WARPS;  // of 32 latent columns, for each warp

// This warp's part of MLA_OUT rows of a head's w_uv [128, 512]; asked for before the wait.
struct MlaValueRows {
  uint4 low[MLA_CHUNKS], high[MLA_CHUNKS];

  __device__ static int column(int i) {
    return (threadIdx.x / WARP % MLA_WARPS + MLA_WARPS * i) * 32 + threadIdx.x % 4 * 8;
  }
  __device__ void load(const bf16* w_uv, int first) {
    const bf16* from = w_uv + i64(first + threadIdx.x % WARP / 4) * MLA_LATENT;
#pragma unroll
    for (int i = 0; i < MLA_CHUNKS; i++) {
      low[i] = load_weights(from + column(i), true);
      high[i] = load_weights(from + 8 * MLA_LATENT + column(i), true);
    }
  }
};

template <int TILES>
struct MlaValueShared {
  float parts[TILES * MLA_WARPS][2][WARP][4];
};

// Values of one head for all rows, TILES times MLA_OUT of them by TILES * MLA_WARPS warps: w_uv times the rows' latent
// sums, times the head's gate. A thread of row `tid / (TILES * MLA_OUT)` writes value tid % (TILES * MLA_OUT) of it.
// latent(row, column): 16 bytes; out: of the first row and value, rows `width` apart; gate: this thread's row's. All rows
// are asked for before the first product: their loads and the gate's each had a trip to memory of their own.
template <int TILES, class Latent>
__device__ __forceinline__ void mla_value(const MlaValueRows& weights, const Latent& latent, bf16 gate, bf16* out, int width,
                                          int rows, MlaValueShared<TILES>& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4;
  uint4 x[2][MLA_CHUNKS];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (8 * n >= rows) break;
    const int token = 8 * n + g;
#pragma unroll
    for (int i = 0; i < MLA_CHUNKS; i++) x[n][i] = latent(token < rows ? token : 0, MlaValueRows::column(i));
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (8 * n >= rows) break;
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < MLA_CHUNKS; i++) {
      const uint4 v = x[n][i];
      mma_bf16(acc, weights.low[i].x, weights.high[i].x, weights.low[i].y, weights.high[i].y, v.x, v.y);
      mma_bf16(acc, weights.low[i].z, weights.high[i].z, weights.low[i].w, weights.high[i].w, v.z, v.w);
    }
    *reinterpret_cast<float4*>(s.parts[warp][n][lane]) = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
  const int row = tid / (TILES * MLA_OUT), value = tid % (TILES * MLA_OUT), tile = value / MLA_OUT;
  if (row >= rows) return;
  const int owner = value % 8 * 4 + row % 8 / 2, word = value % MLA_OUT / 8 * 2 + row % 2;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < MLA_WARPS; w++) sum += s.parts[tile * MLA_WARPS + w][row / 8][owner][word];
  out[i64(row) * width + value] = to_bf16(sum * sigmoid(to_float(gate)));
}

// One row: the merge and the values behind it in one kernel, a whole latent sum in each block.
constexpr int ONE_TILES = 2, ONE_OUT = ONE_TILES * MLA_OUT, ONE_THREADS = ONE_TILES * MLA_THREADS;
static_assert(ONE_THREADS == MERGE_THREADS<MLA_LATENT>, "the same threads merge and multiply");

struct MlaOneShared {
  MergeShared<MLA_LATENT> merge;
  alignas(16) bf16 latent[MLA_LATENT];
  MlaValueShared<ONE_TILES> values;
};
