// File descriptors that close themselves, and names of threads.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <utility>

namespace jax_ep {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// Names the calling thread, for debuggers, `top -H` and /proc. `name` begins with "jax_ep" and has at most 15
// characters: Linux takes no more.
inline void name_thread(const char* name) {
#ifdef __APPLE__
  pthread_setname_np(name);
#else
  pthread_setname_np(pthread_self(), name);
#endif
}

}  // namespace jax_ep
