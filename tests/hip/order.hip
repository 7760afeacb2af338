// The two halves of a signal, alone, so that check_order.sh can read what they compile to.
#include "comm/platform.h"

extern "C" __global__ void publish(uint64_t* flag, uint64_t* data) {
  *data = 1;
  jax_ep::store_release(flag, uint64_t{1});
}

extern "C" __global__ void observe(uint64_t* flag, uint64_t* data) {
  const uint64_t seen = jax_ep::load_acquire(flag);
  *data += seen;
}
