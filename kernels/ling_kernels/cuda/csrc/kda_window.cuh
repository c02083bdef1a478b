// KDA over a window: verify, which leaves the state as it is unless it knows that its only row is kept; commit, which
// replays what was kept; follow, what is left of a commit where verify has advanced the state.
#pragma once
#include "kda.cuh"

// ---- verify -----------------------------------------------------------------------------------------------------

struct KdaVerifyShared {
  KdaRow<KDA_SLICE> rows[ROW_TILE + 1];
  float o[ROW_TILE][KDA_SLICE];
  bool goes_on;  // the run, of which this is a row
};

struct KdaVerify {
  KdaSource source;
  float* state;          // [H, 128, 128]
  const bf16* conv;      // [3P, 4]
  const float* a_log;    // [H]
  const float* dt_bias;  // [P]
  const bf16* o_norm;    // [128]
  bf16* out;             // [16, P]
  float* sums;           // [16, H, KDA_SLICES]: of squares, for the projection that follows and applies the norm
  float* records;        // [16, H, KDA_RECORD]: what commit replays
  bf16* raw;             // [16, 3P]: rows that commit puts into the conv history
  int rows;
  const i64* remaining;  // of a step of one row, which it keeps unless the sequence has ended: then the state advances at
  const u8* done;        // once, by the block that has it in registers. Else null
};

// What a thread makes of the window. A warp has four channels a lane of q or of k, in rows `place`, + 4, ..; and of the
// decay in rows `fade`, + 8. A thread has one value column of row `row`: v, gate, output. All of it is asked for at once.
// Row 0's q, k, decay and v are four warps': one row is the longest of them instead of their sum.
constexpr int KDA_PLACES = KDA_WARPS / 2, KDA_ROUNDS = ROW_TILE / KDA_PLACES;

struct KdaOwn {
  int head, slice, lane, warp, part, place, fade, row, column;
  __device__ KdaOwn(int head, int slice)
      : head(head), slice(slice), lane(threadIdx.x % WARP), warp(__shfl_sync(ALL, int(threadIdx.x / WARP), 0)),
        part(warp / KDA_PLACES), place((warp + part) % KDA_PLACES), fade((warp + KDA_WARPS - 1) % KDA_WARPS),
        row((threadIdx.x / KDA_SLICE + ROW_TILE - 4) % ROW_TILE), column(threadIdx.x % KDA_SLICE) {}
  __device__ int channels() const { return head * KDA_HEAD + 4 * lane; }
  __device__ int value() const { return head * KDA_HEAD + slice * KDA_SLICE + column; }
};

struct KdaLoaded {
  uint2 qk[KDA_ROUNDS][4], qk_before[3];  // raw rows -3 .. 0 of each round; those of the first that the history has
  uint2 decay[ROW_TILE / KDA_WARPS];
  bf16 v[4], v_before[3], gate, beta;
};

// Rows before the window, since the last commit: before the wait. Into registers of their own: a second load into one
// would have to await the first.
__device__ __forceinline__ void kda_load_history(KdaLoaded& to, const KdaSource& source, const KdaOwn& own) {
  const int inner = source.inner();
  const bf16 *qk = source.history + own.part * inner + own.channels(), *v = source.history + 2 * inner + own.value();
#pragma unroll
  for (int t = 0; t < 3; t++) {
    to.qk_before[t] = make_uint2(0, 0), to.v_before[t] = 0;
    if (own.place + t < 3) to.qk_before[t] = load_settled(reinterpret_cast<const uint2*>(qk + (own.place + t) * 3 * inner));
    if (own.row + t < 3) to.v_before[t] = load_settled(v + (own.row + t) * 3 * inner);
  }
}

// Where a thread's share of the window's rows begins: worked out before the wait. What is one load for every thread is
// asked for by all, of row 0 where a row is not live: a load that hangs on a condition is sent where its result is used.
struct KdaPlaces {
  const bf16 *qk, *decay, *value, *beta;  // rows place - 3, fade, row - 3, row

  __device__ __forceinline__ KdaPlaces(const KdaSource& source, const KdaOwn& own, int rows) {
    const int inner = source.inner(), width = source.width();
    qk = source.proj + (own.place - 3) * width + own.part * inner + own.channels();
    decay = source.proj + (own.fade < rows ? own.fade : 0) * width + 3 * inner + own.channels();
    value = source.proj + (own.row - 3) * width + 2 * inner + own.value();
    beta = source.proj + own.row * width + 5 * inner + own.head;
    settle_here(qk), settle_here(decay), settle_here(value), settle_here(beta);
  }
};

// Rounds of q and k after the first, and the decay's second, stand behind one branch each: one row passes them by.
template <bool EVEN>
__device__ __forceinline__ void kda_load_window(KdaLoaded& to, const KdaSource& source, const KdaOwn& own,
                                                const KdaPlaces& from, int rows) {
  const int inner = source.inner(), width = source.width();
  auto round = [&](int i) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
      if (i > 0) to.qk[i][t] = make_uint2(0, 0);
      const bool there = own.place + KDA_PLACES * i < rows && (i > 0 || own.place + t >= 3);
      if (there) to.qk[i][t] = kda_four<EVEN>(from.qk + (KDA_PLACES * i + t) * width);
    }
  };
  round(0);
  to.decay[0] = kda_four<EVEN>(from.decay);
  if (own.row < rows) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
      if (own.row + t >= 3) to.v[t] = load_activation(from.value + t * width);
    }
    to.gate = load_activation(from.value + (3 * width + 2 * inner));
    to.beta = load_activation(from.beta);
  }
  if (rows > KDA_PLACES) {
#pragma unroll
    for (int i = 1; i < KDA_ROUNDS; i++) round(i);
    if (own.fade + KDA_WARPS < rows) to.decay[1] = kda_four<EVEN>(from.decay + KDA_WARPS * width);
  }
  // not made into floats, which awaits them, where they are asked for
  settle_here(to.v[3]), settle_here(to.gate), settle_here(to.beta);
}

// The first round's rows, those before the window among them.
__device__ __forceinline__ void kda_join(KdaLoaded& to, const KdaOwn& own) {
#pragma unroll
  for (int t = 0; t < 3; t++) {
    if (own.place + t < 3) to.qk[0][t] = to.qk_before[t];
    if (own.row + t < 3) to.v[t] = to.v_before[t];
  }
}

// What commit needs, by the threads that do not walk; k, decay and beta of a row are written by one of the head's blocks.
template <bool EVEN>
__device__ __forceinline__ void kda_stage(const KdaVerify& job, const KdaOwn& own, const KdaVerifyShared& s) {
  constexpr int THREADS = KDA_THREADS - KDA_WALKERS, QUARTERS = KDA_SLICE / 4;
  const int heads = job.source.heads, inner = job.source.inner(), at = threadIdx.x - KDA_WALKERS;
  auto record = [&](int row) { return job.records + (i64(row) * heads + own.head) * KDA_RECORD; };
  auto copy = [](float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  };
  for (int row = own.slice; row < job.rows; row += KDA_SLICES) {
    if (at < WARP) copy(record(row) + KDA_K + 4 * at, &s.rows[row].k[4 * at]);
    if (at / WARP == 1) copy(record(row) + KDA_DECAY + 4 * (at - WARP), &s.rows[row].decay[4 * (at - WARP)]);
    if (at == 2 * WARP) record(row)[KDA_BETA] = s.rows[row].beta[0];
  }
  if (at < job.rows * QUARTERS) {
    const int row = at / QUARTERS, c = at % QUARTERS * 4;
    copy(record(row) + KDA_V + own.slice * KDA_SLICE + c, &s.rows[row].v[c]);
  }
  if (EVEN) return;  // the rows as they came are on their way (KdaPiece)
  for (int i = at; i < job.rows * 3 * KDA_SLICE; i += THREADS) {
    const int row = i / (3 * KDA_SLICE), part = i / KDA_SLICE % 3;
    const int channel = part * inner + own.head * KDA_HEAD + own.slice * KDA_SLICE + i % KDA_SLICE;
    job.raw[i64(row) * 3 * inner + channel] = load_activation(job.source.projected(row) + channel);
  }
}

// A thread's four channels of the window's rows as they came, which commit puts into the history: asked for with all else.
// The last threads have the first rows, whose q, k, decay and v are made by others.
struct KdaPiece {
  static constexpr int QUARTERS = KDA_SLICE / 4;
  static_assert(ROW_TILE * 3 * QUARTERS <= KDA_THREADS, "one for each thread at most");
  bool live;
  const bf16* from;
  bf16* to;
  uint2 x;

  __device__ __forceinline__ KdaPiece(const KdaSource& source, const KdaOwn& own, bf16* raw, int rows) {
    const int at = KDA_THREADS - 1 - int(threadIdx.x), row = at / (3 * QUARTERS), part = at / QUARTERS % 3;
    const int channel = part * source.inner() + own.head * KDA_HEAD + own.slice * KDA_SLICE + at % QUARTERS * 4;
    live = row < rows, from = source.projected(live ? row : 0) + channel, to = raw + row * 3 * source.inner() + channel;
    settle_here(from), settle_here(to);
  }
  __device__ __forceinline__ void load() { x = load_activations4(from); }
  __device__ __forceinline__ void store() const {
    if (live) *reinterpret_cast<uint2*>(to) = x;
  }
};

// Block (head, slice): raw projections to gated output that lacks its norm, which needs all eight slices of a head.
template <bool EVEN>
__device__ __forceinline__ void kda_verify(const KdaVerify& job, int head, int slice, KdaVerifyShared& s) {
  const KdaSource& source = job.source;
  const KdaOwn own(head, slice);
  const int inner = source.inner(), rows = job.rows;
  const bool walks = own.warp < KDA_WALKERS / WARP;
  float state[KDA_KEYS];
  if (walks) kda_load(state, job.state + kda_place(head, slice * KDA_SLICE));  // since the last commit
  KdaLoaded loaded;
  kda_load_history(loaded, source, own);
  // One warp looks whether the run goes on: all warps of all blocks would queue for that line at one place of L2. The
  // others ask for anything, their own: a load on a condition is awaited at once.
  const bool keeps = job.remaining != nullptr, asks = keeps && own.warp == KDA_WARPS - 1;
  const i64 remaining = load_settled(asks ? job.remaining : reinterpret_cast<const i64*>(job.conv) + threadIdx.x);
  const u8 done = load_settled(asks ? job.done : reinterpret_cast<const u8*>(job.conv) + threadIdx.x);
  const KdaTaps taps = kda_taps(job.conv, own.part * inner + own.channels());
  const uint2 v_taps = load_settled(reinterpret_cast<const uint2*>(job.conv) + 2 * inner + own.value());
  const float4 bias = load_settled(reinterpret_cast<const float4*>(job.dt_bias + own.channels()));
  const float a_log = load_constant(job.a_log + head);
  const bf16 norm = load_settled(job.o_norm + slice * KDA_SLICE + own.column);
  const KdaPlaces places(source, own, rows);
  bf16* to_out = job.out + own.row * inner + own.value();
  float* to_sums = job.sums + (own.row * source.heads + head) * KDA_SLICES + slice;
  settle_here(to_out), settle_here(to_sums);
  KdaPiece piece(source, own, job.raw, rows);
  let_next_start_early();  // out_proj reads weights alone before its own wait
  wait_for_producer();
  kda_load_window<EVEN>(loaded, source, own, places, rows);
  if (EVEN) piece.load();
  kda_join(loaded, own);

  auto mix = [&](int i) {
    const int row = own.place + KDA_PLACES * i;
    const uint2(&raw)[4] = loaded.qk[i];
    const float4 x = kda_mixed(raw[0], raw[1], raw[2], raw[3], taps);
    float* to = own.part == 0 ? s.rows[row].q : s.rows[row].k;
    *reinterpret_cast<float4*>(to + 4 * own.lane) = kda_unit(x, own.part == 0 ? KDA_Q_LENGTH : 1.0f);
  };
  const float rate = expf(a_log);
  auto fade = [&](int i) {
    const int row = own.fade + KDA_WARPS * i;
    if (row >= rows) return;
    *reinterpret_cast<float4*>(s.rows[row].decay + 4 * own.lane) = kda_decay(loaded.decay[i], bias, rate, source.lower_bound);
  };
  // rounds side by side, also where the later ones have rows past the last, which nobody reads
  if (rows <= KDA_PLACES) {
    if (own.place < rows) mix(0);
  } else {
    mix(0), mix(1), mix(2);
    if (rows > 3 * KDA_PLACES) mix(3);
  }
  fade(0), fade(1);
  const bool live = own.row < rows;
  float gate = 0.0f;
  if (live) {
    const bf16(&raw)[4] = loaded.v;
    s.rows[own.row].v[own.column] =
        kda_mixed(to_float(raw[0]), to_float(raw[1]), to_float(raw[2]), to_float(raw[3]), v_taps.x, v_taps.y);
    gate = kda_open(to_float(loaded.gate)) * to_float(norm);
    const float beta = kda_open(to_float(loaded.beta));
    if (own.column == 0) s.rows[own.row].beta[0] = beta;
  }
  if (EVEN) piece.store();
  if (asks) s.goes_on = done == 0 && remaining > 0;
  __syncthreads();
  if (walks) {
    kda_walk<true>(state, rows, s.rows, s.o[0] + kda_column(), KDA_SLICE);
    if (keeps && s.goes_on) kda_store(job.state + kda_place(head, slice * KDA_SLICE), state);
  } else {
    kda_stage<EVEN>(job, own, s);
  }
  __syncthreads();
  const float o = live ? s.o[own.row][own.column] : 0.0f;
  const float squares = kda_squares(o);
  if (!live) return;
  if (own.column == 0) *to_sums = squares;
  *to_out = to_bf16(o * gate);
}

// ---- commit -----------------------------------------------------------------------------------------------------

constexpr int KDA_COMMIT_COLUMNS = KDA_THREADS / KDA_LANES;  // 32: of one block
constexpr int KDA_COMMIT_PARTS = KDA_HEAD / KDA_COMMIT_COLUMNS;

struct KdaCommitShared {
  KdaRow<KDA_COMMIT_COLUMNS> rows[ROW_TILE + 1];
};

struct KdaCommit {
  const float* records;  // [layers, 16, H, KDA_RECORD]
  const bf16* raw;       // [layers, 16, 3P]
  bf16* history;         // [layers, 3, 3P]
  float* state;          // [layers, H, 128, 128]
  const i64* count;
  int heads, window;  // window: rows that were staged

  __device__ int inner() const { return heads * KDA_HEAD; }
  __device__ const float* record(int layer, int head, int row) const {
    return records + ((i64(layer) * ROW_TILE + row) * heads + head) * KDA_RECORD;
  }
  // Rows of the old history, then of the window.
  __device__ bf16* old(int layer, int row) const { return history + (i64(layer) * 3 + row) * 3 * inner(); }
  __device__ const bf16* followed(int layer, int row) const {
    return row < 3 ? old(layer, row) : raw + (i64(layer) * ROW_TILE + row - 3) * 3 * inner();
  }
};

// One head of one layer, asked for while the verdict is still being made. What is asked for may be read by nobody.
__device__ __forceinline__ void kda_ask(const KdaCommit& job, int layer, int head) {
  const int tid = threadIdx.x, inner = job.inner();
  constexpr u32 PIECE = KDA_HEAD * KDA_HEAD, PIECES = 4;  // bytes: a state has 64 KB
  if (tid < PIECES) {
    prefetch_l2(job.state + (i64(layer) * job.heads + head) * KDA_HEAD * KDA_HEAD + tid * PIECE / 4, PIECE);
  }
  const int row = tid - WARP;
  if (row >= 0 && row < job.window) {
    prefetch_l2(job.record(layer, head, row) + KDA_K, (KDA_RECORD - KDA_K) * sizeof(float));
  }
  for (int i = tid - 2 * WARP; i >= 0 && i < 3 * (3 + job.window); i += KDA_THREADS - 2 * WARP) {
    prefetch_l2(job.followed(layer, i / 3) + i % 3 * inner + head * KDA_HEAD, KDA_HEAD * sizeof(bf16));
  }
}

// New history: rows count .. count + 2 of the old one followed by the window. Four channels a thread.
__device__ __forceinline__ void kda_move_history(const KdaCommit& job, int layer, int first, int count) {
  const int part = threadIdx.x / (KDA_COMMIT_COLUMNS / 4);
  if (part >= 3) return;
  const int channel = part * job.inner() + first + threadIdx.x % (KDA_COMMIT_COLUMNS / 4) * 4;
  uint2 kept[3];
#pragma unroll
  for (int i = 0; i < 3; i++) kept[i] = load_activations4(job.followed(layer, count + i) + channel);
#pragma unroll
  for (int i = 0; i < 3; i++) *reinterpret_cast<uint2*>(job.old(layer, i) + channel) = kept[i];
}

// Block `block` of layers * H * 4: advance 32 columns of one head of one layer by the first *count staged rows. All that may
// be needed is asked for before the count is known.
__device__ __forceinline__ void kda_commit(const KdaCommit& job, int block, int layers, KdaCommitShared& s) {
  const int quarter = block % KDA_COMMIT_PARTS, unit = block / KDA_COMMIT_PARTS, layer = unit / job.heads;
  const int head = unit % job.heads, tid = threadIdx.x, first = quarter * KDA_COMMIT_COLUMNS;
  if (block < layers * job.heads) kda_ask(job, block / job.heads, block % job.heads);
  wait_for_producer();
  let_next_start();
  const i64 committed = load_activation(job.count);
  float* place = job.state + i64(layer) * job.inner() * KDA_HEAD + kda_place(head, first);
  float state[KDA_KEYS];
  kda_load(state, place);
  constexpr int CHUNKS = 2 * KDA_HEAD / 4, QUARTERS = KDA_COMMIT_COLUMNS / 4;
  for (int row = tid / CHUNKS; row < job.window; row += KDA_THREADS / CHUNKS) {
    copy16(s.rows[row].k + tid % CHUNKS * 4, job.record(layer, head, row) + KDA_K + tid % CHUNKS * 4);
  }
  if (tid < job.window * QUARTERS) {
    const int row = tid / QUARTERS, c = tid % QUARTERS * 4;
    copy16(s.rows[row].v + c, job.record(layer, head, row) + KDA_V + first + c);
  }
  if (tid < job.window) copy16(s.rows[tid].beta, job.record(layer, head, tid) + KDA_BETA);
  copies_commit();
  const int rows = int(committed);
  if (rows > 0) kda_move_history(job, layer, head * KDA_HEAD + first, rows);
  copies_wait<0>();
  __syncthreads();
  if (rows == 0) return;
  kda_walk<false>(state, rows, s.rows);
  kda_store(place, state);
}

// What is left of a commit where verify has advanced the state by its one row: the history moves by a row if *count says
// so. All of it is settled, and read before the wait. at: of layers * 3P / 4 threads.
__device__ __forceinline__ void kda_follow(const KdaCommit& job, int layers, int at) {
  const int quarters = 3 * job.inner() / 4, layer = at / quarters, channel = at % quarters * 4;
  const bool live = layer < layers;
  uint2 kept[3];
  bf16* to[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    to[i] = job.old(live ? layer : 0, i) + channel;
    kept[i] = load_settled(reinterpret_cast<const uint2*>(job.followed(live ? layer : 0, i + 1) + channel));
    settle_here(to[i]);
  }
  wait_for_producer();
  if (load_activation(job.count) == 0 || !live) return;
#pragma unroll
  for (int i = 0; i < 3; i++) *reinterpret_cast<uint2*>(to[i]) = kept[i];
}
