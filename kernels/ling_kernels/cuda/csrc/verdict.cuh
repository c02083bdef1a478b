// What becomes of a window once each row has its token.
#pragma once
#include "arch.cuh"

constexpr int RING_HEADER = 6, MAX_STOP_IDS = 16, STOPPED_EOS = 1, STOPPED_LENGTH = 2, ERROR_NON_FINITE = 1;

struct Words {  // of a verdict: what one thread of each row's warp reads. Settled: the step before wrote them
  i64 draft, stop, remaining, step;
  bool was_done;
};

struct VerdictJob {
  const i64* drafts;  // [rows - 1] or null
  const i64* remaining;
  const i64* stop_ids;  // [MAX_STOP_IDS]
  const u8* done;
  const i64* step;
  int rows;

  __device__ Words read() const {
    const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return {drafts != nullptr && row < rows - 1 ? load_settled(drafts + row) : -1,
            lane < MAX_STOP_IDS ? load_settled(stop_ids + lane) : -1, load_settled(remaining), load_settled(step),
            load_settled(done) != 0};
  }
};

struct VerdictShared {
  int tokens[ROW_TILE];
  u32 agrees[ROW_TILE], ends[ROW_TILE], bad[ROW_TILE];
};

struct VerdictOut {
  i64* tokens;  // [rows]
  i64* count;
  i64* anchor;
  u8* done;
  i64* entry;  // [RING_HEADER + ROW_TILE]
};

// ROW_TILE warps; row r's token and whether its logits are not finite, by warp r.
__device__ __forceinline__ void decide(const VerdictJob& job, const Words& words, int token, bool bad,
                                       const VerdictOut& out, VerdictShared& s) {
  const int row = threadIdx.x / WARP, lane = threadIdx.x % WARP, rows = job.rows;
  const u32 ends = __ballot_sync(ALL, lane < MAX_STOP_IDS && words.stop == token);
  if (lane == 0) {
    const bool live = row < rows;
    s.tokens[row] = live ? token : 0;
    s.agrees[row] = live && row < rows - 1 && words.draft == token;
    s.ends[row] = live && ends != 0;
    s.bad[row] = live && bad;
    if (live) out.tokens[row] = token;
  }
  __syncthreads();
  if (row > 0) return;
  const int at = lane % ROW_TILE;
  const u32 agree = __ballot_sync(ALL, lane < ROW_TILE && s.agrees[at] != 0);
  const u32 end = __ballot_sync(ALL, lane < ROW_TILE && s.ends[at] != 0);
  const u32 wrong_rows = __ballot_sync(ALL, lane < ROW_TILE && s.bad[at] != 0);
  const int first_end = end != 0 ? __ffs(end) - 1 : rows;
  i64 count = min(min(i64(__ffs(~agree)), i64(first_end) + 1), words.remaining);
  const bool wrong = count > 0 && (wrong_rows & ((1u << count) - 1)) != 0;
  if (words.was_done || wrong) count = 0;
  const bool eos = count > 0 && first_end + 1 == count;
  const bool length = count > 0 && !eos && count == words.remaining;
  if (lane < ROW_TILE) out.entry[RING_HEADER + lane] = s.tokens[lane];
  if (lane > 0) return;
  *out.count = count;
  *out.anchor = s.tokens[count > 0 ? count - 1 : 0];
  *out.done = words.was_done || wrong || eos || length;
  out.entry[0] = words.step;
  out.entry[1] = count;
  out.entry[2] = rows - 1;
  out.entry[3] = count > 0 ? count - 1 : 0;
  out.entry[4] = eos ? STOPPED_EOS : length ? STOPPED_LENGTH : 0;
  out.entry[5] = wrong && !words.was_done ? ERROR_NON_FINITE : 0;
}

// ---- past what was committed ------------------------------------------------------------------------------------

constexpr int ADVANCERS = 64;  // threads at least

struct Advance {  // ring [slots, width], positions [ROW_TILE]
  const i64 *count, *last;
  const u8* ended;
  const i64* entry;
  i64* ring;
  int slots, width;
  i64 *positions, *anchor, *remaining;
  u8* done;
  i64* step;
};
#define ADVANCE_ARGUMENTS                                                                                          \
  const i64 *count, const i64 *last, const u8 *ended, const i64 *entry, i64 *ring, int slots, int width,           \
      i64 *positions, i64 *anchor, i64 *remaining, u8 *done, i64 *step
#define ADVANCE_JOB \
  { count, last, ended, entry, ring, slots, width, positions, anchor, remaining, done, step }

// Moves a sequence's words, by one block. One trip to memory.
__device__ __forceinline__ void advance(const Advance& job) {
  const int tid = threadIdx.x;
  const i64 number = load_activation(job.step), kept = load_activation(job.count);
  const i64 word = load_activation(job.entry + min(tid, RING_HEADER + ROW_TILE - 1));
  const i64 position = load_activation(job.positions + min(tid, ROW_TILE - 1));
  const i64 last = load_activation(job.last), remaining = load_activation(job.remaining);
  const u8 ended = load_activation(job.ended);
  __syncthreads();  // all have read the step before it moves on
  i64* line = job.ring + u32(number) % u32(job.slots) * job.width;
  for (int i = tid; i < job.width; i += blockDim.x) line[i] = i < RING_HEADER + ROW_TILE ? word : 0;
  if (tid < ROW_TILE) job.positions[tid] = position + kept;
  if (tid > 0) return;
  *job.remaining = remaining - kept;
  if (kept > 0) *job.anchor = last;
  *job.done = ended;
  *job.step = number + 1;
}
