// Primitives of comm/platform/hip.h, each alone, so that check_code.sh can read what it compiles to.
#include "comm/platform.h"

extern "C" __global__ void put(uint64_t* word) { jax_ep::store_relaxed(word, uint64_t{1}); }

extern "C" __global__ void look(uint64_t* word, uint64_t* data) { *data = jax_ep::load_relaxed(word); }

extern "C" __global__ void publish(uint64_t* flag, uint64_t* data) {
  *data = 1;
  jax_ep::store_release(flag, uint64_t{1});
}

extern "C" __global__ void observe(uint64_t* flag, uint64_t* data) {
  const uint64_t seen = jax_ep::load_acquire(flag);
  *data += seen;
}

extern "C" __global__ void claim(uint64_t* flag, uint64_t* data) {
  *data = 1;
  if (jax_ep::compare_exchange(flag, 0, 1)) *data += 1;
}

extern "C" __global__ void publish_here(uint64_t* flag, uint64_t* data) {
  *data = 1;
  jax_ep::store_release_here(flag, uint64_t{1});
}

extern "C" __global__ void count_here(uint64_t* flag, uint64_t* data) {
  *data = 1;
  *data += jax_ep::fetch_add(flag, 1);
}
