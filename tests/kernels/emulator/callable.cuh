// What makes the kernels of a unit callable: EMULATED(kernel) after its source. The emulator itself is linked with it.
#pragma once
#include "arch.cuh"

#include <type_traits>
#include <utility>

namespace emulator {

template <class... A, size_t... I>
void apply(void (*kernel)(A...), void** from, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(from[I])...);
}
template <class... A>
void apply(void (*kernel)(A...), void** from) {
  apply(kernel, from, std::index_sequence_for<A...>{});
}

// One letter an argument: pointer, 32-bit integer, 64-bit integer, fp32.
template <class... A>
const char* kinds(void (*)(A...)) {
  static const char letters[] = {
      (std::is_pointer_v<A> ? 'p' : std::is_floating_point_v<A> ? 'f' : sizeof(A) == 8 ? 'l' : 'i')..., 0};
  return letters;
}

}  // namespace emulator

#define EMULATED(NAME)                                                     \
  extern "C" void run_##NAME(void** from) { emulator::apply(NAME, from); } \
  extern "C" const char* kinds_##NAME() { return emulator::kinds(NAME); }
