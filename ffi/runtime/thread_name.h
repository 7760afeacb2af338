// What debuggers, `top -H` and /proc call a thread of ours.
#pragma once

#include <pthread.h>

namespace jax_ep {

// Names the calling thread. `name` begins with "jax_ep" and has at most 15 characters: Linux takes no more.
inline void name_thread(const char* name) {
#ifdef __APPLE__
  pthread_setname_np(name);
#else
  pthread_setname_np(pthread_self(), name);
#endif
}

}  // namespace jax_ep
