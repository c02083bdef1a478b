// The next layer's first projection, a part of which is asked for, into L2, while the memory has nothing else to do: by KDA once
// its own window is there, and by gate_up's blocks, which stand ready before there is a choice. No bit depends on it.
#pragma once
#include "arch.cuh"

// Of each of `rows` rows, `pitch` bytes long, a piece of `piece` bytes: not the first, which the projection's own blocks load
// before they wait, but one of the `pieces` after it, tile by tile another, so that at any time some of its warps find theirs
// in L2 while the memory sends what the others want. at: null where nothing is to be asked for.
struct Ahead {
  const u8* at;
  int rows, pitch, piece, pieces, turn;

  // By all threads of all blocks.
  __device__ __forceinline__ void ask() const {
    if (at == nullptr) return;
    for (int row = threadIdx.x * gridDim.x + blockIdx.x; row < rows; row += blockDim.x * gridDim.x) {
      const int which = 1 + (row / 16 + turn) % pieces;
      prefetch_l2(at + i64(row) * pitch + which * piece, u32(min(piece, pitch - which * piece)));
    }
  }
};

#define AHEAD_ARGUMENTS const u8 *ahead, int ahead_rows, int ahead_pitch, int ahead_piece, int ahead_pieces, int ahead_turn
#define AHEAD_OF {ahead, ahead_rows, ahead_pitch, ahead_piece, ahead_pieces, ahead_turn}
