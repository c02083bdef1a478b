// Sampling launches. Scratch for each row: best, drawn [SAMPLE_BLOCKS] candidates; bad, sums [SAMPLE_BLOCKS];
// bins [2 phases][3 digits][BINS]; found [2 * 3 + 1].
#include "sample.cuh"

// grid: (SAMPLE_BLOCKS, rows). sums may be null. bins, where given, are cleared for the passes that follow.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_first(const float* logits, int stride, int vocab, u64* best, u32* bad, float* sums, u64* bins,
                 Found* found, const i64* top_k) {
  __shared__ u64 warps[SAMPLE_WARPS];
  wait_for_producer();
  let_next_start();
  const int block = blockIdx.x, row = blockIdx.y, place = row * SAMPLE_BLOCKS + block;
  if (bins != nullptr) {
    u64* own = bins + i64(row) * 2 * DIGITS * BINS;
    for (int i = block * SAMPLE_THREADS + threadIdx.x; i < 2 * DIGITS * BINS; i += SAMPLE_BLOCKS * SAMPLE_THREADS) {
      own[i] = 0;
    }
    if (block == 0 && threadIdx.x == 0) {
      found[row * (2 * DIGITS + 1)] = Found{u64(*top_k > 0 ? *top_k : 0), 0, 0, 0, 0};
    }
  }
  sample_scan(logits + i64(row) * stride, span_of(block, vocab), best + place, bad + place,
              sums == nullptr ? nullptr : sums + place, warps);
}

// What is known at pass `number` (0..2: phase 0, 3..5: phase 1, 6: the end) from the pass before it.
__device__ __forceinline__ Found sample_found(int number, const Found* found, const u64* bins, const Filter& filter,
                                              int vocab, float max, SelectShared& s) {
  if (number == 0) return found[0];
  const int before = number - 1, phase = before / DIGITS, level = before % DIGITS;
  Found now = found[before];
  if (phase == 0 ? filter.cuts_count(vocab) : filter.cuts_mass()) {
    now = after_pass(now, phase, level, bins + before * BINS, filter, max, s);
  }
  if (number == DIGITS) {  // phase 0 is over: its threshold bounds phase 1
    const bool cut = filter.cuts_count(vocab);
    now = Found{0, 0, cut ? now.prefix : 0, cut ? now.target : 0, !filter.cuts_mass()};
  }
  return now;
}

__device__ __forceinline__ u32 threshold_of(const Found& found) { return found.final ? found.last : found.prefix; }

// grid: (SAMPLE_BLOCKS, rows). One digit of one phase: number = 3 * phase + digit.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_pass(const float* logits, int stride, int vocab, const u64* best, u64* bins, Found* found,
                const float* temperature, const i64* top_k, const float* top_p, int number) {
  __shared__ SelectShared s;
  wait_for_producer();
  let_next_start();
  const int block = blockIdx.x, row = blockIdx.y, phase = number / DIGITS, level = number % DIGITS;
  const Filter filter{temperature, top_k, top_p};
  bins += i64(row) * 2 * DIGITS * BINS;
  found += row * (2 * DIGITS + 1);
  const u64 top = block_best(best_of(best + row * SAMPLE_BLOCKS, SAMPLE_BLOCKS), s.warps);
  const float max = filter.scaled(candidate_value(top));
  const Found now = sample_found(number, found, bins, filter, vocab, max, s);
  if (block == 0 && threadIdx.x == 0) found[number] = now;
  if (!(phase == 0 ? filter.cuts_count(vocab) : filter.cuts_mass()) || now.final) return;
  for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) s.bins[i] = 0;
  __syncthreads();
  const Span span = span_of(block, vocab);
  const u32 mask = level == 0 ? 0 : ~0u << digit_shift(level - 1);  // digits found so far
  for (int i = span.begin + threadIdx.x; i < span.end; i += SAMPLE_THREADS) {
    const float x = filter.scaled(logits[i64(row) * stride + i]);
    const u32 key = ordered(x);
    if ((key & mask) != now.prefix || (phase == 1 && key <= now.last)) continue;
    const u64 amount = phase == 0 ? 1 : u64(expf(x - max) * MASS_UNIT);
    if (amount > 0) atomicAdd(&s.bins[digit_of(key, level)], amount);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) {
    if (s.bins[i] > 0) atomicAdd(bins + number * BINS + i, s.bins[i]);
  }
}

// grid: (SAMPLE_BLOCKS, rows). The draw: best of what is kept, with noise.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_draw(const float* logits, int stride, int vocab, const u64* best, const u64* bins, const Found* found,
                const float* temperature, const i64* top_k, const float* top_p, const i64* seed, const i64* positions,
                u64* drawn) {
  __shared__ SelectShared s;
  wait_for_producer();
  let_next_start();
  const int block = blockIdx.x, row = blockIdx.y;
  const Filter filter{temperature, top_k, top_p};
  const u64 top = block_best(best_of(best + row * SAMPLE_BLOCKS, SAMPLE_BLOCKS), s.warps);
  const float max = filter.scaled(candidate_value(top));
  const Found last = sample_found(2 * DIGITS, found + row * (2 * DIGITS + 1), bins + i64(row) * 2 * DIGITS * BINS,
                                  filter, vocab, max, s);
  const u32 lowest = threshold_of(last);
  const u64 noise = noise_row(*seed, positions[row]);
  const Span span = span_of(block, vocab);
  u64 chosen = 0;
  for (int i = span.begin + threadIdx.x; i < span.end; i += SAMPLE_THREADS) {
    const float x = filter.scaled(logits[i64(row) * stride + i]);
    const float score = ordered(x) >= lowest ? x + gumbel(noise, i) : -infinity();
    const u64 c = candidate(score, i);
    chosen = c > chosen ? c : chosen;
  }
  chosen = block_best(chosen, s.warps);
  if (threadIdx.x == 0) drawn[row * SAMPLE_BLOCKS + block] = chosen;
}

// One block of ROW_TILE warps. drawn: each row's candidates.
extern "C" __global__ void __launch_bounds__(ROW_TILE* WARP)
    sample_verdict(const u64* drawn, const u32* bad, const i64* drafts, const i64* remaining, const i64* stop_ids,
                   const u8* done, const i64* step, i64* tokens, i64* count, i64* anchor, u8* done_out, i64* entry,
                   int rows) {
  __shared__ int chosen[ROW_TILE];
  __shared__ u32 wrong[ROW_TILE];
  wait_for_producer();
  let_next_start();
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (row < rows) {
    const u64 best = best_of(drawn + row * SAMPLE_BLOCKS, SAMPLE_BLOCKS);
    u32 any = 0;
    for (int b = lane; b < SAMPLE_BLOCKS; b += WARP) any |= bad[row * SAMPLE_BLOCKS + b];
    any = warp_max(any);
    if (lane == 0) {
      chosen[row] = candidate_id(best);
      wrong[row] = any;
      tokens[row] = candidate_id(best);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    decide({drafts, remaining, stop_ids, done, step, rows}, chosen, wrong, count, anchor, done_out, entry);
  }
}

// One block. Moves a sequence's words past what was committed; ring [slots, width].
extern "C" __global__ void __launch_bounds__(64)
    sample_advance(const i64* count, const i64* last, const u8* ended, const i64* entry, i64* ring, int slots,
                   int width, i64* length, i64* anchor, i64* remaining, u8* done, i64* step) {
  wait_for_producer();
  let_next_start();
  const i64 number = *step;
  __syncthreads();  // all have read the step before it moves on
  i64* line = ring + number % slots * width;
  for (int i = threadIdx.x; i < width; i += 64) line[i] = i < RING_HEADER + ROW_TILE ? entry[i] : 0;
  if (threadIdx.x > 0) return;
  *length += *count;
  *remaining -= *count;
  if (*count > 0) *anchor = *last;
  *done = *ended;
  *step = number + 1;
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
