// Included in front of every source by .ci/wheel: what the headers of this machine's C++ library would take from a
// younger C library than 2.28. It links with none of it then, and auditwheel looks at what is left.
#pragma once

#include <bits/c++config.h>
#include <unistd.h>

#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT    // 2.30
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK   // 2.30
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK  // 2.30

// 2.32: whether there is but one thread. "No" is always right.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;

// 2.36: what std::random_device reads.
__attribute__((weak, visibility("hidden"))) unsigned int arc4random() noexcept {
  unsigned int value = 0;
  while (getentropy(&value, sizeof value) != 0) {
  }
  return value;
}
}
