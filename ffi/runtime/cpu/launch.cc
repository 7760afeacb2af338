#include "runtime/cpu/launch.h"

namespace jax_ep {

// Peers' memory is as near as one's own: no part is sent ahead.
int sparse_landing_room(int, int, bool) { return 0; }

}  // namespace jax_ep
