// Mixture of experts for a window: gate_up and down over the distinct experts of all rows. Logits come from router.cu.
//
// An expert costs the same for one row as for sixteen, so gate_up computes all rows for every listed expert and keeps
// those that chose it, with the router's weight applied; down adds them up.
//
// Few registers and half of the shared memory leave room for down beside gate_up on a multiprocessor: its blocks choose
// experts by themselves, from logits that are settled by then, and fill their rings while gate_up is still at work.
#include "down.cuh"
#include "gate_up.cuh"

#define ROUTING                                                                                                       \
  const float *logits, const float *bias, const u32 *lists, int count, int groups, int allowed_groups, int chosen,    \
      float scale, int live
#define ROUTER Router{logits, bias, lists, count, groups, allowed_groups, chosen, scale, live}

// x [*, width], shared [2 shared_inner, width], routed [E, 2 inner, width] -> out [slots, ROW_TILE, pitch], where a row
// that did not choose a slot's expert is not written. x is read before the wait. Grid: at least shared_inner / PAIRS.
// Shared: a ring of 2 PAIRS rows, tile_sums(live) floats, and with `local` the tokens, Kept::pitch_of(width) each.
#define EXPERTS_GATE_UP(NAME, NT)                                                                                     \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                      \
      const bf16* x, const bf16* shared, const bf16* routed, ROUTING, bf16* out, int shared_inner, int inner,         \
      int pitch, float limit, float shared_limit, int width, int depth, int local) {                                  \
    gate_up<NT>(x, shared, routed, ROUTER, out, shared_inner, inner, pitch, Limits{limit, shared_limit}, width,       \
                depth, local);                                                                                        \
  }
EXPERTS_GATE_UP(experts_gate_up_8, 1)
EXPERTS_GATE_UP(experts_gate_up_16, 2)

// x as gate_up left it, shared [width, shared_inner], routed [E, width, inner] -> out [*, width]. Logits and lists are
// read before the wait. Grid: ceil(width / rows), rows at most 16 TALL. room: all pairs of a slot and a row that chose it,
// or fewer, a multiple of GROUP and at least 3 GROUP.
// Shared: a ring of `rows` rows, row_bytes(the larger inner) each, TALL · CONSUMERS · live · SUM_PITCH floats, and for
// each pair of `room` the larger inner rounded up to CONSUMERS · CHUNK.
#define EXPERTS_DOWN(NAME, NT, TALL)                                                                                  \
  extern "C" __global__ void STREAM_BOUNDS NAME(                                                                      \
      const bf16* x, const bf16* shared, const bf16* routed, ROUTING, bf16* out, int shared_inner, int inner,         \
      int pitch, int width, int rows, int depth, int room, Ahead asked) {                                             \
    down<NT, TALL>(x, shared, routed, ROUTER, out, shared_inner, inner, DownSizes{pitch, width, rows, depth, room},   \
                   asked);                                                                                            \
  }
EXPERTS_DOWN(experts_down_8, 1, 1)
EXPERTS_DOWN(experts_down_16, 2, 1)
EXPERTS_DOWN(experts_down_tall_8, 1, 2)
EXPERTS_DOWN(experts_down_tall_16, 2, 2)
