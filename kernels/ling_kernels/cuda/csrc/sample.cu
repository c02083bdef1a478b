// Sampling launches. Scratch for each row: masses, counts [BINS] and listed, all zero between launches; list; cut.
#include "choose.cuh"
#include "verdict.cuh"

// grid: (SAMPLE_BLOCKS, rows). A first look at a row: best candidates of spans [rows, OWN_SPANS] and of blocks [rows,
// SAMPLE_BLOCKS], whether a part holds NaN or Inf, and on demand sums of exp(logit - the part's best).
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_first(const float* logits, int stride, int vocab, u64* spans, u64* best, u32* bad, float* sums) {
  __shared__ u64 warps[SAMPLE_WARPS];
  __shared__ float parts[SAMPLE_WARPS];
  wait_for_producer();
  let_next_start();
  const int block = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int size = own_size(vocab), span = block * SAMPLE_WARPS + warp;
  const int begin = min(span * size, vocab), end = min(begin + size, vocab);
  logits += i64(row) * stride;
  u64 top = 0;
  bool wrong = false;
  each_logit(logits, begin, end, lane, WARP, [&](float x, int id) {
    const u64 c = candidate(x, id);
    top = c > top ? c : top;
    wrong |= !is_finite(x);
  });
  top = warp_best(top);
  if (lane == 0 && spans != nullptr) spans[row * OWN_SPANS + span] = top;
  top = block_best(top, warps);
  const u64 any = block_best(wrong, warps);
  if (threadIdx.x == 0) {
    best[row * SAMPLE_BLOCKS + block] = top;
    bad[row * SAMPLE_BLOCKS + block] = u32(any);
  }
  if (sums == nullptr) return;
  const float max = candidate_value(top);
  float part = 0.0f;
  each_logit(logits, begin, end, lane, WARP, [&](float x, int) { part += expf(x - max); });
  part = warp_sum(part);
  if (lane == 0) parts[warp] = part;
  __syncthreads();
  if (threadIdx.x > 0) return;
  part = 0.0f;
  for (int w = 0; w < SAMPLE_WARPS; w++) part += parts[w];
  sums[row * SAMPLE_BLOCKS + block] = part;
}

// What a row's kernels share; size 0: the spans are sample_first's.
#define ROW_ARGUMENTS                                                                                               \
  const float *logits, int stride, int vocab, const float *values, const u64 *own, int size, const float *temperature, \
      const i64 *top_k, const float *top_p, int most
#define READ_ROW                                                     \
  const int row = blockIdx.y;                                        \
  const float heat = *temperature, share = *top_p;                   \
  const i64 wanted = *top_k;                                         \
  const Spans spans{values, own, size > 0 ? size : own_size(vocab)}; \
  logits += i64(row) * stride
#define READ_FILTER                                \
  const Filter filter(heat, wanted, share, most);  \
  const Way way = filter.way(vocab, spans.whole(vocab))

// grid: (blocks of at most MAX_A_BLOCK values, rows). Mass and number of the values in each bin.
constexpr int MAX_A_BLOCK = 4095;  // so many masses in two halves of 20 bits add up in 32
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_bins(ROW_ARGUMENTS, u64* masses, u32* counts) {
  __shared__ u32 number[BINS], low[BINS], high[BINS];
  __shared__ u64 warps[SAMPLE_WARPS];
  wait_for_producer();
  let_next_start();
  READ_ROW;
  READ_FILTER;
  if (way != BINNED) return;
  const bool by_count = filter.cuts_count(vocab);
  for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) number[i] = low[i] = high[i] = 0;
  const float max = filter.scaled(row_top(logits, spans, row, vocab, warps));
  const int part = (vocab + gridDim.x - 1) / gridDim.x, begin = min(int(blockIdx.x) * part, vocab);
  each_logit(logits, begin, min(begin + part, vocab), threadIdx.x, SAMPLE_THREADS, [&](float logit, int) {
    const float x = filter.scaled(logit);
    const int bin = bin_of(x, max);
    const u64 mass = mass_of(x, max);
    if (by_count) atomicAdd(&number[bin], 1u);
    if (mass == 0) return;
    atomicAdd(&low[bin], u32(mass) & 0xfffffu);
    atomicAdd(&high[bin], u32(mass >> 20));
  });
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) {
    const u64 mass = low[i] + (u64(high[i]) << 20);
    if (mass > 0) atomicAdd(masses + i64(row) * BINS + i, mass);
    if (number[i] > 0) atomicAdd(counts + i64(row) * BINS + i, number[i]);
  }
}

// grid: (SAMPLE_BLOCKS, rows). The best of what is certainly kept, with noise, and a list of what is unsure.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    sample_draw(ROW_ARGUMENTS, const u64* masses, const u32* counts, const i64* seed, const i64* positions, Cut* cuts,
                u64* list, u32* listed, int capacity, u64* drawn) {
  __shared__ CutShared s;
  __shared__ u64 warps[SAMPLE_WARPS];
  wait_for_producer();
  let_next_start();
  READ_ROW;
  READ_FILTER;
  if (way == FEW) return;
  const u64 noise = noise_row(*seed, positions[row]);
  const int part = (vocab + SAMPLE_BLOCKS - 1) / SAMPLE_BLOCKS, begin = min(int(blockIdx.x) * part, vocab);
  u64 chosen = 0;
  int low = 1, high = 0, kth = BINS;  // in EVERYTHING all have bin 0
  float max = 0.0f;
  if (way == BINNED) {
    max = filter.scaled(row_top(logits, spans, row, vocab, warps));
    find_cut(masses + i64(row) * BINS, counts + i64(row) * BINS, filter, vocab, s);
    low = s.cut.low, high = s.cut.high, kth = s.cut.kth;
    if (blockIdx.x == 0 && threadIdx.x == 0) cuts[row] = s.cut;
  }
  each_logit(logits, begin, min(begin + part, vocab), threadIdx.x, SAMPLE_THREADS, [&](float logit, int id) {
    const float x = filter.scaled(logit);
    const int bin = way == BINNED ? bin_of(x, max) : 0;
    if (bin < low) {
      const u64 c = candidate(x + gumbel(noise, id), id);
      chosen = c > chosen ? c : chosen;
    } else if (bin <= high || bin == kth) {
      const u32 place = atomicAdd(listed + row, 1u);
      if (place < u32(capacity)) list[i64(row) * MAX_LISTED + place] = candidate(x, id);
    }
  });
  chosen = block_best(chosen, warps);
  if (threadIdx.x == 0) drawn[row * SAMPLE_BLOCKS + blockIdx.x] = chosen;
}

// grid: (1, rows). Looks into what is unsure and draws: drawn becomes one candidate a row. bad, where given: whether
// the row holds NaN or Inf. Leaves the scratch zero.
extern "C" __global__ void __launch_bounds__(CHOOSERS)
    sample_choose(ROW_ARGUMENTS, u64* masses, u32* counts, const i64* seed, const i64* positions, const Cut* cuts,
                  const u64* list, u32* listed, int capacity, u64* drawn, u32* bad) {
  __shared__ ChooseShared s;
  wait_for_producer();
  let_next_start();
  READ_ROW;
  const i64 key = *seed, position = positions[row];
  if (threadIdx.x == 0) s.listed = s.num_wanted = 0;
  const float top = row_top(logits, spans, row, vocab, s.warps);  // asked for before any of the words is needed
  READ_FILTER;
  const u64 noise = noise_row(key, position);
  const float max = filter.scaled(top);
  if (bad != nullptr) {
    const int whole = spans.whole(vocab);
    bool wrong = false;
    for (int i = threadIdx.x; i < whole; i += 4 * CHOOSERS) {
      float x[4];
      spans.best(x, row, i, CHOOSERS, vocab);
#pragma unroll
      for (int j = 0; j < 4; j++) wrong |= !is_finite(x[j]);
    }
    for (int i = whole * spans.size + threadIdx.x; i < vocab; i += CHOOSERS) wrong |= !is_finite(logits[i]);
    const u32 any = __syncthreads_count(wrong) > 0;
    if (threadIdx.x < SAMPLE_BLOCKS) bad[row * SAMPLE_BLOCKS + threadIdx.x] = any;
  }
  Cut cut = {0, 0, 0, 0, 0, 0, 0};
  if (way == FEW) {
    list_few(logits, spans, row, vocab, filter, capacity, s);
  } else if (way == BINNED) {
    cut = cuts[row];
    if (threadIdx.x == 0) s.listed = listed[row];
    for (int i = threadIdx.x; i < capacity; i += CHOOSERS) s.list[i] = list[i64(row) * MAX_LISTED + i];
    for (int i = threadIdx.x; i < BINS; i += CHOOSERS) masses[i64(row) * BINS + i] = 0, counts[i64(row) * BINS + i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) listed[row] = 0;
  }
  const bool all = s.listed > u32(capacity) || s.num_wanted > MAX_WANTED;
  const int many = all ? 0 : int(s.listed);
  u64 chosen = way != FEW && !all && threadIdx.x < SAMPLE_BLOCKS ? drawn[row * SAMPLE_BLOCKS + threadIdx.x] : 0;
  auto draw = [&](float x, int id) {
    const u64 c = candidate(x + gumbel(noise, id), id);
    chosen = c > chosen ? c : chosen;
  };
  if (all) {
    const u32 lowest = lowest_kept_slowly(logits, vocab, filter, max, s.warps);
    each_logit(logits, 0, vocab, threadIdx.x, CHOOSERS, [&](float logit, int id) {
      const float x = filter.scaled(logit);
      if (key_of(x) >= lowest) draw(x, id);
    });
  } else if (many > 0) {
    sort_list(many, s);
    if (threadIdx.x < WARP) {
      const u32 lowest = lowest_kept(cut, way == FEW, many, filter, vocab, max, s.sorted);
      if (threadIdx.x == 0) s.lowest = lowest;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < many; i += CHOOSERS) {
      const u64 c = s.sorted[i];
      if (candidate_key(c) >= s.lowest) draw(candidate_value(c), candidate_id(c));
    }
  }
  chosen = block_best(chosen, s.warps);
  if (chosen == 0) chosen = candidate(0.0f, 0);  // a row of nothing but NaN
  if (threadIdx.x < SAMPLE_BLOCKS) drawn[row * SAMPLE_BLOCKS + threadIdx.x] = threadIdx.x == 0 ? chosen : 0;
}

#define VERDICT_ARGUMENTS                                                                                    \
  const i64 *drafts, const i64 *remaining, const i64 *stop_ids, const u8 *done, const i64 *step, i64 *tokens, \
      i64 *count, i64 *anchor, u8 *done_out, i64 *entry, int rows

// One block of ROW_TILE warps. drawn: each row's candidates.
extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP, 1)
    sample_verdict(const u64* drawn, const u32* bad, VERDICT_ARGUMENTS) {
  __shared__ VerdictShared s;
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const VerdictJob job{drafts, remaining, stop_ids, done, step, rows};
  const Words words = job.read();
  wait_for_producer();
  let_next_start();
  u64 best = 0;
  u32 any = 0;
  if (row < rows) {
    static_assert(SAMPLE_BLOCKS == 2 * WARP, "two a lane");
    const u32* parts = bad + row * SAMPLE_BLOCKS + lane;
    any = load_activation(parts) | load_activation(parts + WARP);
    best = best_of(drawn + row * SAMPLE_BLOCKS, SAMPLE_BLOCKS);
    any = warp_max(any);
  }
  decide(job, words, candidate_id(best), any != 0, {tokens, count, anchor, done_out, entry}, s);
}

// What a thread looks at: every `apart`-th of the `whole` spans of row `column`, from `first` on, and of the logits past
// them, a row's tail, as many apart, from `begin` on.
struct Look {
  const float *values, *tail;
  const int* ids;
  int column, first, begin, apart, whole, vocab;
};
struct Found {
  u64 span, tail;
  bool bad_span, bad_tail;
};

// SPANS of one and TAIL of the other are one trip to memory. Past the last comes the last once more.
template <int SPANS, int TAIL>
__device__ __forceinline__ Found look(Look at) {
  Found found = {0, 0, false, false};
  auto see = [](u64& best, bool& bad, float value, int id, bool there) {
    const u64 c = there ? candidate(value, id) : 0;
    best = c > best ? c : best, bad |= there && !is_finite(value);
  };
#pragma unroll 1
  do {
    float value[SPANS], rest[TAIL];
    int id[SPANS];
#pragma unroll
    for (int j = 0; j < SPANS; j++) {
      const int place = max(min(at.first + j * at.apart, at.whole - 1), 0) * ROW_TILE + at.column;
      value[j] = load_activation(at.values + place), id[j] = load_activation(at.ids + place);
    }
#pragma unroll
    for (int j = 0; j < TAIL; j++) rest[j] = load_activation(at.tail + min(at.begin + j * at.apart, at.vocab - 1));
#pragma unroll
    for (int j = 0; j < SPANS; j++) see(found.span, found.bad_span, value[j], min(id[j], at.vocab - 1), at.whole > 0);
#pragma unroll
    for (int j = 0; j < TAIL; j++) see(found.tail, found.bad_tail, rest[j], min(at.begin + j * at.apart, at.vocab - 1), true);
    at.first += SPANS * at.apart, at.begin += TAIL * at.apart;
  } while (at.first < at.whole || at.begin < at.vocab);
  return found;
}

// The same, greedy, from the best logits of the head's spans: values, ids [spans, ROW_TILE] of `size` rows each.
extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP, 1)
    sample_verdict_best(const float* logits, int stride, int vocab, const float* values, const int* ids, int size,
                        VERDICT_ARGUMENTS) {
  __shared__ VerdictShared s;
  __shared__ u64 parts[WARP][ROW_TILE + 1];
  __shared__ u32 wrong[WARP][ROW_TILE + 1];
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP, whole = vocab / size;
  const VerdictJob job{drafts, remaining, stop_ids, done, step, rows};
  const Words words = job.read();
  Look at{values, logits + i64(min(row, rows - 1)) * stride, ids, 0, 0, whole * size, WARP, whole, vocab};
  let_next_start_early();  // as short as a launch
  wait_for_producer();
  Found found;
  if (rows == 1) {  // all threads look at row 0
    at.first += threadIdx.x, at.begin += threadIdx.x, at.apart = ROW_TILE * WARP;
    found = look<1, 1>(at);
    found.span = warp_best(found.span > found.tail ? found.span : found.tail);
    found.bad_span = __any_sync(ALL, found.bad_span || found.bad_tail);
    if (lane == 0) parts[row][0] = found.span, wrong[row][0] = found.bad_span;
  } else {  // a thread at one row's spans, so that neighbours read neighbours; a warp at its row's tail
    at.column = threadIdx.x % ROW_TILE, at.first = threadIdx.x / ROW_TILE, at.begin += lane;
    found = look<12, 16>(at);
    parts[threadIdx.x / ROW_TILE][at.column] = found.span, wrong[threadIdx.x / ROW_TILE][at.column] = found.bad_span;
  }
  __syncthreads();
  const bool there = rows > 1 || lane < ROW_TILE;
  u64 best = there ? parts[lane][row] : 0;
  bool bad = there && wrong[lane][row] != 0;
  if (rows > 1) best = found.tail > best ? found.tail : best, bad |= found.bad_tail;
  best = warp_best(best), bad = __any_sync(ALL, bad);
  decide(job, words, candidate_id(best), bad, {tokens, count, anchor, done_out, entry}, s);
}

// One block. Moves a sequence's words where no commit was left to do it.
extern "C" __global__ void __launch_bounds__(ADVANCERS) sample_advance(ADVANCE_ARGUMENTS) {
  let_next_start_early();
  wait_for_producer();
  advance(ADVANCE_JOB);
}

// One warp. Drafts to where the next window has them, and their confidences in millionths into the last step's line.
extern "C" __global__ void __launch_bounds__(WARP)
    sample_expect(const i64* drafts, const float* confidence, int count, i64* next, i64* ring, int slots, int width,
                  const i64* step) {
  wait_for_producer();
  let_next_start();
  const int i = threadIdx.x;
  if (i >= count) return;
  next[i] = drafts[i];
  ring[(*step - 1 + slots) % slots * width + RING_HEADER + ROW_TILE + i] = i64(confidence[i] * 1e6f);
}

// grid: rows; one warp each. The token, and its probability in the softmax of the row. logits null: it is the best one.
extern "C" __global__ void __launch_bounds__(WARP)
    sample_picked(const float* logits, int stride, const u64* best, const u64* drawn, const float* sums, i64* tokens,
                  float* confidence) {
  wait_for_producer();
  let_next_start();
  const int row = blockIdx.x, lane = threadIdx.x;
  best += row * SAMPLE_BLOCKS;
  const u64 chosen = best_of(drawn + row * SAMPLE_BLOCKS, SAMPLE_BLOCKS);
  const int token = candidate_id(chosen);
  const float max = candidate_value(best_of(best, SAMPLE_BLOCKS));
  float total = 0.0f;
  for (int b = lane; b < SAMPLE_BLOCKS; b += WARP) {
    if (best[b] != 0) total += sums[row * SAMPLE_BLOCKS + b] * expf(candidate_value(best[b]) - max);
  }
  total = warp_sum(total);
  if (lane == 0) {
    tokens[row] = token;
    const float logit = logits == nullptr ? candidate_value(chosen) : logits[i64(row) * stride + token];
    confidence[row] = expf(logit - max) / total;
  }
}
