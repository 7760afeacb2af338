// The CPU: a coop is one thread. Every rank's part of an op runs on its own threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // which does not see such stores
#define JAX_EP_STREAMING_STORES 1
#else
#define JAX_EP_STREAMING_STORES 0
#endif

#define JAX_EP_FN inline
#define JAX_EP_COLD_FN inline
#define JAX_EP_CONSTANT_FN constexpr
#define JAX_EP_ROLLED

#include "comm/part.h"

namespace jax_ep {

constexpr int kLanePacks = 1, kRowPacks = 1;

template <class T>
JAX_EP_FN T load_relaxed(const T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
JAX_EP_FN void store_relaxed(T* p, T value) {
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
// Acquire and release at system scope: they order what this rank and its peers wrote before a flag.
template <class T>
JAX_EP_FN T load_acquire(const T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T>
JAX_EP_FN void store_release(T* p, T value) {
#if JAX_EP_STREAMING_STORES
  asm volatile("sfence" ::: "memory");  // after stream_out
#endif
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}
// Among the coops of one rank.
template <class T>
JAX_EP_FN void store_release_here(T* p, T value) {
  store_release(p, value);
}
template <class T>
JAX_EP_FN T fetch_add(T* p, T value) {
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}
template <class T>
JAX_EP_FN bool compare_exchange(T* p, T expected, T desired) {
  return __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// Copies past the caches, to memory that this rank will not read again. Ordinary stores would first load the cache
// lines.
template <class T, int kCount>
JAX_EP_FN void stream_out(T* to, const T (&from)[kCount]) {
#if JAX_EP_STREAMING_STORES
  if constexpr (kCount * sizeof(T) % 16 == 0) {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      using Word [[gnu::vector_size(16), gnu::may_alias]] = long long;
      for (size_t i = 0; i < kCount; i += 16 / sizeof(T)) {
        Word word;
        __builtin_memcpy(&word, from + i, 16);
        asm volatile("movntdq %1, %0" : "=m"(*reinterpret_cast<Word*>(to + i)) : "x"(word));
      }
      return;
    }
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}

// The next number, without memory order.
JAX_EP_FN uint64_t draw(uint64_t* numbers) { return __atomic_fetch_add(numbers, uint64_t{1}, __ATOMIC_RELAXED); }
// Relaxed atomics among the coops of one rank. Those with a result return the value before.
JAX_EP_FN int32_t atomic_add(int32_t* p, int32_t value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
JAX_EP_FN void atomic_add(uint64_t* p, uint64_t value) { __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
template <class T>
JAX_EP_FN T atomic_exchange(T* p, T value) {
  return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);
}
JAX_EP_FN void atomic_min(int32_t* p, int32_t value) {
  int32_t before = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (value < before && !__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
JAX_EP_FN void atomic_or(uint32_t* p, uint32_t bits) { __atomic_fetch_or(p, bits, __ATOMIC_RELAXED); }

JAX_EP_FN uint64_t clock_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// Ranks outnumber cores on the CPU, so a waiting rank soon yields its core.
JAX_EP_FN void pause(unsigned tries) {
  if (tries > 16) std::this_thread::yield();
}

// Counts without a call: the build does not assume the processor's instruction.
JAX_EP_FN int count_bits(uint64_t bits) {
  bits -= bits >> 1 & 0x5555555555555555;
  bits = (bits & 0x3333333333333333) + (bits >> 2 & 0x3333333333333333);
  bits = (bits + (bits >> 4)) & 0x0f0f0f0f0f0f0f0f;
  return static_cast<int>(bits * 0x0101010101010101 >> 56);
}
JAX_EP_FN int lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }

struct Coop {
  Coop(Part all, Part sender, Part receiver)
      : index(all.index), count(all.count), sender(sender), receiver(receiver), cta(all) {}
  explicit Coop(Part all = {0, 1}) : Coop(all, all, all) {}

  int index;  // among the coops of this rank
  int count;
  Part sender, receiver;
  Part cta;                               // a CTA of its own
  static constexpr Part in_cta = {0, 1};  // this coop in its CTA
  static constexpr char* shared = nullptr;
  static constexpr int shared_bytes = 0;
  static constexpr TrackRole track = TrackRole::sender;
  static constexpr int lane = 0;
  static constexpr int lanes = 1;

  void sync() const {}
  void cta_sync() const {}
  int broadcast(int value) const { return value; }
  uint64_t ballot(bool value) const { return value; }
  template <class V>
  V from_lane(V value, int) const {
    return value;
  }
  Match match(int) const { return {0, 1}; }
  int sum(int value) const { return value; }
  // The largest value among `width` adjacent lanes.
  uint32_t max(uint32_t value, int) const { return value; }
  // The sum over the lanes before this one. `total` is the sum over all lanes.
  int exclusive_scan(int value, int* total) const {
    *total = value;
    return 0;
  }
};

}  // namespace jax_ep
