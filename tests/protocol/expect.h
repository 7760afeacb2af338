// How a check fails. On the thread of a test case it ends the case, and the next one follows; on another thread, which
// peers may wait for, the case goes on and fails at its end.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>

namespace jax_ep {

inline const std::thread::id test_thread = std::this_thread::get_id();
inline std::atomic<int> failed_checks = 0;

inline void expect(bool condition, const char* what) {
  if (condition) return;
  ++failed_checks;
  if (std::this_thread::get_id() == test_thread) FAIL(std::string(what));
  FAIL_CHECK(std::string(what));
}

}  // namespace jax_ep
