// Mixture of experts for a window: gate_up and down over the distinct experts of all rows. Logits come from router.cu.
//
// An expert costs the same for one row as for sixteen, so gate_up computes all rows for every listed expert and keeps
// those that chose it, with the router's weight applied. Down is one long product over the listed experts, whose sum
// never leaves the tensor cores: a row takes part in the experts that it chose, and what it did not choose adds exact
// zeros, which change no bit.
//
// Weights go through a ring of copies in shared memory, a warp's own: each lane copies just the 16 bytes that it will
// multiply, so nothing but the lane's own wait stands between a copy and its use. Few registers and half of the shared
// memory leave room for down beside gate_up: its blocks choose experts by themselves, from logits that are settled by
// then, and fill their rings while gate_up is still at work.
#include "gemm.cuh"
#include "select.cuh"

constexpr int BATCH = 2;              // chunks of a warp between two waits
constexpr int PAIRS = 8;              // of gate and up rows in a tile
constexpr int CHUNK_BYTES = 16 * CHUNK * 2;
constexpr int MOE_THREADS = 256;      // at most

// A window's rows for gate_up, in shared memory where they fit, else in memory.
struct Window {
  const bf16* local;  // pitch values apart, or null
  const bf16* x;      // [*, width]
  int pitch, width, live;

  template <int NT>
  __device__ __forceinline__ void load(uint4 (&to)[NT], int k) const {
    const int group = threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + group < live ? n * 8 + group : 0, at = k < width ? k : 0;
      to[n] = local != nullptr ? *reinterpret_cast<const uint4*>(local + token * pitch + at)
                               : load_settled16(x + i64(token) * width + at);
      if (k >= width) to[n] = make_uint4(0, 0, 0, 0);
    }
  }
};

// Where a block is in its pairs of rows.
struct Pairs {
  int slot, first, left;

  __device__ __forceinline__ int count(int inner) const { return min(PAIRS, min(inner - first, left)); }
  __device__ __forceinline__ void next(int inner) {
    const int done = count(inner);
    left -= done, first += done;
    if (first == inner) first = 0, ++slot;
  }
};

// Tiles of up to 8 gate and 8 up rows, one after another without a gap in the stream of weights.
template <int NT>
struct PairStream {
  const bf16* weight;  // of expert 0 [2 inner, width]
  const u32* ids;      // by slot; null: there is one expert
  int inner, width;
  bool first_to_go;
  u8* ring;  // this lane's part of this warp's
  int depth;
  Pairs at, ahead;
  int ahead_batch;
  const bf16 *low, *high;  // this lane's rows of the tile ahead
  bool mine;               // it has such rows

  __device__ __forceinline__ int chunks() const { return (width + CHUNK - 1) / CHUNK; }
  __device__ __forceinline__ int batches() const {
    const int per = BATCH * (blockDim.x / WARP);
    return (chunks() + per - 1) / per;
  }
  __device__ __forceinline__ int chunk(int batch, int u) const {
    return (batch * BATCH + u) * (blockDim.x / WARP) + threadIdx.x / WARP;
  }

  __device__ __forceinline__ void aim() {
    const int group = threadIdx.x % WARP / 4;
    mine = group < ahead.count(inner);
    const int row = mine ? ahead.first + group : 0;
    const u32 id = ids != nullptr && ahead.left > 0 ? ids[ahead.slot] : 0;
    low = weight + (i64(id) * 2 * inner + row) * width + threadIdx.x % 4 * 8;
    high = low + i64(inner) * width;
  }

  __device__ __forceinline__ void send(int stage) {
    if (ahead.left > 0) {
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        const int c = chunk(ahead_batch, u);
        if (mine && c < chunks()) {
          u8* to = ring + (stage * BATCH + u) * CHUNK_BYTES;
          const int k = c * CHUNK + int(threadIdx.x) % 4 * 8 < width ? c * CHUNK : -(int(threadIdx.x) % 4 * 8);
          copy_weights(to, low + k, first_to_go);
          copy_weights(to + CHUNK_BYTES / 2, high + k, first_to_go);
        }
      }
      if (++ahead_batch == batches()) ahead_batch = 0, ahead.next(inner), aim();
    }
    copies_commit();
  }

  __device__ __forceinline__ void fill(const Pairs& from) {
    at = ahead = from;
    ahead_batch = 0;
    aim();
    for (int stage = 0; stage < depth; ++stage) send(stage);
  }

  // epilogue(tile, its sums) by all threads. sums: two sets, so that one barrier a tile is enough.
  template <class Epilogue>
  __device__ __forceinline__ void run(const Window& window, float* sums, Epilogue epilogue) {
    const int warp = threadIdx.x / WARP, column = threadIdx.x % 4 * 8;
    int stage = 0;
    for (int parity = 0; at.left > 0; parity ^= 1) {
      float part[BATCH][NT][4] = {};
      for (int batch = 0; batch < batches(); ++batch) {
        copies_wait_upto(depth - 1);
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
          const int c = chunk(batch, u);
          if (c < chunks()) {
            const uint4* from = reinterpret_cast<const uint4*>(ring + (stage * BATCH + u) * CHUNK_BYTES);
            const Chunk w = {from[0], from[CHUNK_BYTES / 2 / sizeof(uint4)]};
            uint4 in[NT];
            window.load<NT>(in, c * CHUNK + column);
            multiply(part[u], w, in);
          }
        }
        send(stage);
        stage = stage + 1 == depth ? 0 : stage + 1;
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][n][i] += part[1][n][i];
      }
      Sums<NT> all = {sums_of<NT>(sums, parity)};
      all.put(warp, part[0]);
      __syncthreads();
      epilogue(at, all);
      at.next(inner);
    }
  }
};

// A block's share of `total` things.
__device__ __forceinline__ Pairs share(int total, int inner, int slot) {
  const int per = (total + gridDim.x - 1) / gridDim.x, first = min(int(blockIdx.x) * per, total);
  return {slot + first / inner, first % inner, min(per, total - first)};
}

struct Experts {
  const bf16 *shared, *routed;
  int shared_inner, inner;
};

struct Limits {
  float routed, shared;
};

template <int NT>
__device__ __forceinline__ void gate_up(
    const bf16* x, const Experts& experts, const Router& router, bf16* out, int pitch, const Limits& limits, int width,
    int depth, int local, int first_to_go, const Ahead& asked) {
  DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  __shared__ bf16 kept[ROW_TILE * PAIRS];  // of the shared expert's tile; each entry always belongs to the same thread
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP, live = router.live;
  u8* ring = shared + warp * depth * BATCH * CHUNK_BYTES + lane * sizeof(uint4);
  float* sums = reinterpret_cast<float*>(shared + warps * depth * BATCH * CHUNK_BYTES);
  bf16* tokens = reinterpret_cast<bf16*>(sums_of<NT>(sums, 2));
  const Window window = {local ? tokens : nullptr, x, (width + 63) / 64 * 64 + 32, width, live};

  // Before the wait: the tokens, which the kernel before the producer wrote, and this block's tile of the shared expert.
  if (local) {
    for (int o = threadIdx.x; o < live * (width / 8); o += blockDim.x) {
      const int row = o / (width / 8), k = o % (width / 8) * 8;
      copy16(tokens + row * window.pitch + k, x + i64(row) * width + k);
    }
  }
  copies_commit();
  PairStream<NT> stream = {experts.shared, nullptr, experts.shared_inner, width, first_to_go != 0, ring, depth};
  stream.fill(share(experts.shared_inner, experts.shared_inner, 0));
  if (warp == warps - 1) ask_ahead(asked, blockIdx.x, gridDim.x);
  prepare_plan(router, plan);
  copies_wait_upto(depth);
  __syncthreads();
  const Pairs own = stream.at;
  stream.run(window, sums, [&](const Pairs& tile, const Sums<NT>& all) {
    for (int o = threadIdx.x; o < live * PAIRS; o += blockDim.x) {
      kept[o] = to_bf16(swiglu(all.at(o / PAIRS, o % PAIRS), all.at(o / PAIRS, o % PAIRS + PAIRS), limits.shared));
    }
  });

  wait_for_producer();
  make_plan(router, plan);
  stream.weight = experts.routed, stream.ids = plan.ids, stream.inner = experts.inner;
  stream.fill(share((plan.slots - 1) * experts.inner, experts.inner, 1));
  let_next_start();  // down: after this kernel's first loads, not among them
  for (int o = threadIdx.x; o < live * PAIRS; o += blockDim.x) {
    if (o % PAIRS < own.left) out[i64(o / PAIRS) * pitch + own.first + o % PAIRS] = kept[o];
  }
  stream.run(window, sums, [&](const Pairs& tile, const Sums<NT>& all) {
    const u32 rows = plan.rows[tile.slot], id = plan.ids[tile.slot];
    const int count = tile.count(experts.inner);
    for (int o = threadIdx.x; o < live * PAIRS; o += blockDim.x) {
      const int token = o / PAIRS, row = o % PAIRS;
      if (row >= count || !(rows >> token & 1)) continue;
      const float value = swiglu(all.at(token, row), all.at(token, row + PAIRS), limits.routed);
      out[i64(tile.slot * ROW_TILE + token) * pitch + tile.first + row] = to_bf16(plan.weight(token, id) * value);
    }
  });
}

// Where a warp is in the walk over the slots: how many chunks of its own it has behind it there.
struct Walk {
  int slot, step;
};

// out[token, this block's rows] = sum over slots of down[slot] · x[slot, token]. The warps share K, so each walks all
// experts in ascending order: which experts a warp has never depends on the other rows.
template <int NT>
struct Down {
  const bf16 *shared, *routed;  // this lane's first row at its column: of the shared expert, of expert 0
  int shared_inner, inner;
  i64 stride;  // from expert to expert
  const bf16* x;  // this lane's first token at its column, in slot 0
  int pitch;
  const Plan& plan;
  int live, rows;  // of the window; of this block
  u8* ring;        // this warp's: for each chunk, 64 bytes of each row, then of each token
  bool first_to_go;

  __device__ __forceinline__ int lane() const { return threadIdx.x % WARP; }
  __device__ __forceinline__ int group() const { return threadIdx.x % WARP / 4; }
  __device__ __forceinline__ int width(int slot) const { return slot == 0 ? shared_inner : inner; }
  __device__ __forceinline__ int chunks(int slot) const { return (width(slot) + CHUNK - 1) / CHUNK; }
  __device__ __forceinline__ int steps(int slot) const {
    return (chunks(slot) + blockDim.x / WARP - 1) / (blockDim.x / WARP);
  }
  __device__ __forceinline__ int chunk(const Walk& at) const {
    return at.step * (blockDim.x / WARP) + threadIdx.x / WARP;
  }
  __device__ __forceinline__ void advance(Walk& at) const {
    if (++at.step >= steps(at.slot)) at.step = 0, ++at.slot;
  }
  __device__ __forceinline__ bool inside(const Walk& at) const {
    return at.slot < plan.slots && chunk(at) < chunks(at.slot);
  }
  __device__ __forceinline__ u8* place(int stage) const { return ring + stage * (rows + live) * CHUNK * 2; }

  __device__ __forceinline__ void send_weights(int stage, const Walk& at) const {
    if (!inside(at)) return;
    const int column = lane() % 4 * 8, wide = width(at.slot);
    const int k = chunk(at) * CHUNK + column < wide ? chunk(at) * CHUNK : -column;  // past the end: the row's beginning
    const bf16* from = (at.slot == 0 ? shared : routed + plan.ids[at.slot] * stride) + k;
    u8* to = place(stage) + lane() * sizeof(uint4);
    if (group() < rows) copy_weights(to, from, first_to_go);
    if (group() + 8 < rows) copy_weights(to + 8 * CHUNK * 2, from + 8 * wide, first_to_go);
  }

  __device__ __forceinline__ void send_tokens(int stage, const Walk& at) const {
    if (!inside(at)) return;
    const u32 chose = plan.rows[at.slot];
    const bool within = chunk(at) * CHUNK + lane() % 4 * 8 < width(at.slot);
    const bf16* from = x + i64(at.slot) * ROW_TILE * pitch + (within ? chunk(at) * CHUNK : 0);
    u8* to = place(stage) + rows * CHUNK * 2 + lane() * sizeof(uint4);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 8 + group();
      if (token < live && (chose >> n * 8 & 0xff) != 0) {
        copy16_or_zeros(to + n * 8 * CHUNK * 2, from + n * 8 * pitch, within && (chose >> token & 1));
      }
    }
  }

  __device__ __forceinline__ void use(float (&sums)[NT][4], int stage, const Walk& at) const {
    if (!inside(at)) return;
    const u32 chose = plan.rows[at.slot];
    const u8* from = place(stage);
    // a lane without a row or token of its own takes another's: what becomes of it is not looked at
    const u32 column = lane() % 4 * sizeof(uint4), own = lane() * sizeof(uint4);
    const u8* tokens = from + rows * CHUNK * 2;
    const Chunk w = {
        *reinterpret_cast<const uint4*>(from + (group() < rows ? own : column)),
        *reinterpret_cast<const uint4*>(from + (group() + 8 < rows ? own + 8 * CHUNK * 2 : column))};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if ((chose >> n * 8 & 0xff) == 0) continue;
      const uint4 in[1] = {
          *reinterpret_cast<const uint4*>(tokens + n * 8 * CHUNK * 2 + (n * 8 + group() < live ? own : column))};
      float(&sum)[1][4] = reinterpret_cast<float(&)[1][4]>(sums[n]);
      multiply(sum, w, in);
    }
  }
};

template <int NT>
__device__ __forceinline__ void down(
    const Experts& experts, const Router& router, const bf16* x, bf16* out, int pitch, int width, int rows, int depth,
    int first_to_go, const Ahead& asked) {
  DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, group = threadIdx.x % WARP / 4;
  const int column = threadIdx.x % 4 * 8, live = router.live, first = blockIdx.x * rows, here = min(rows, width - first);
  // The logits are settled: all blocks of gate_up are past their wait when this kernel starts, so the router's have
  // finished. So are the lists.
  prepare_plan(router, plan);
  __syncthreads();
  make_plan(router, plan);

  const int row = first + (group < here ? group : 0), token = group < live ? group : 0;
  const int ring_bytes = depth * BATCH * (here + live) * CHUNK * 2;
  const Down<NT> walk = {
      experts.shared + i64(row) * experts.shared_inner + column,
      experts.routed + i64(row) * experts.inner + column,
      experts.shared_inner,
      experts.inner,
      i64(width) * experts.inner,
      x + token * pitch + column,
      pitch,
      plan,
      live,
      here,
      shared + warp * ring_bytes,
      first_to_go != 0};
  Walk ahead = {0, 0};
  for (int batch = 0; batch < depth; ++batch) {
#pragma unroll
    for (int u = 0; u < BATCH; ++u) walk.send_weights(batch * BATCH + u, ahead), walk.advance(ahead);
    copies_commit();
  }
  wait_for_producer();
  let_next_start();
  ahead = {0, 0};
  for (int batch = 0; batch < depth; ++batch) {
#pragma unroll
    for (int u = 0; u < BATCH; ++u) walk.send_tokens(batch * BATCH + u, ahead), walk.advance(ahead);
    copies_commit();
  }
  float sums[BATCH][NT][4] = {};
  bool silent = warp == 0;
  int batch = 0;
  for (Walk at = {0, 0}; at.slot < plan.slots;) {
    if (silent && ahead.slot >= plan.slots) silent = false, ask_ahead(asked, blockIdx.x, gridDim.x);
    copies_wait_upto(depth - 1);
#pragma unroll
    for (int u = 0; u < BATCH; ++u) walk.use(sums[u], batch * BATCH + u, at), walk.advance(at);
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      walk.send_weights(batch * BATCH + u, ahead);
      walk.send_tokens(batch * BATCH + u, ahead);
      walk.advance(ahead);
    }
    copies_commit();
    batch = batch + 1 == depth ? 0 : batch + 1;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][n][i] += sums[1][n][i];
  }
  Sums<NT> all = {reinterpret_cast<float*>(shared + warps * depth * BATCH * (rows + live) * CHUNK * 2)};
  all.put(warp, sums[0]);
  __syncthreads();
  for (int o = threadIdx.x; o < live * here; o += blockDim.x) {
    out[i64(o / here) * width + first + o % here] = to_bf16(all.at(o / here, o % here));
  }
}

#define ROUTING                                                                                                   \
  const float *logits, const float *bias, const u32 *lists, int count, int groups, int allowed_groups, int chosen, \
      float scale, int live
#define ROUTER Router{logits, bias, lists, count, groups, allowed_groups, chosen, scale, live}

// x [*, width], shared [2 shared_inner, width], routed [E, 2 inner, width] -> out [slots, ROW_TILE, pitch], where a row
// that did not choose a slot's expert is not written. x is read before the wait. Grid: at least shared_inner / 8. Shared:
// warps · depth · 2 KB, 2 · warps · 8 NT · PITCH floats, and with `local` the tokens.
#define EXPERTS_GATE_UP(NAME, NT)                                                                                 \
  extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) NAME(                                              \
      const bf16* x, const bf16* shared, const bf16* routed, ROUTING, bf16* out, int shared_inner, int inner,     \
      int pitch, float limit, float shared_limit, int width, int depth, int local, int first_to_go, Ahead asked) {\
    gate_up<NT>(x, Experts{shared, routed, shared_inner, inner}, ROUTER, out, pitch, Limits{limit, shared_limit}, \
                width, depth, local, first_to_go, asked);                                                         \
  }
EXPERTS_GATE_UP(experts_gate_up_8, 1)
EXPERTS_GATE_UP(experts_gate_up_16, 2)

// x as gate_up left it, shared [width, shared_inner], routed [E, width, inner] -> out [*, width]. Logits and lists are
// read before the wait. Grid: ceil(width / rows), rows at most 16. Shared: warps · depth · 2 · (rows + live) · 64 bytes
// and warps · 8 NT · PITCH floats.
#define EXPERTS_DOWN(NAME, NT)                                                                                    \
  extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) NAME(                                              \
      const bf16* x, const bf16* shared, const bf16* routed, ROUTING, bf16* out, int shared_inner, int inner,     \
      int pitch, int width, int rows, int depth, int first_to_go, Ahead asked) {                                  \
    down<NT>(Experts{shared, routed, shared_inner, inner}, ROUTER, x, out, pitch, width, rows, depth, first_to_go,\
             asked);                                                                                              \
  }
EXPERTS_DOWN(experts_down_8, 1)
EXPERTS_DOWN(experts_down_16, 2)
