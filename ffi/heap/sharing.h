// What the processes of a group show each other: each maps the others' regions and tells them where. A thread answers,
// so that nobody waits for what a peer's Python is doing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "heap/error.h"
#include "heap/note.h"
#include "heap/region.h"

namespace jax_ep {

class Sharing {
 public:
  static constexpr int kNoSeat = -1;

  // `sockets`: connected, one per process in message mode, -1 for this one; taken over. `devices`: of this process,
  // which are to write into what is mapped. `lost` is called on the thread when a process ends without goodbye.
  Sharing(std::vector<int> sockets, std::vector<int> devices, double timeout_seconds, std::function<void(int)> lost);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;

  // Says goodbye and stops answering. May be called twice.
  void close();

  // Where every process sees the region; the first call asks them to map it. Throws GroupException. `seat`: the one
  // of which the region is the heap.
  std::vector<char*> share(const Region& region, int seat = kNoSeat);

  // Where this process sees the heap of a seat of `process`, once that has shared it. Throws GroupException.
  char* await_heap(int process, int seat);

 private:
  struct Shared {
    std::vector<char*> bases;  // by process, null while unknown
    std::string refusal;
  };

  void answer();
  void handle(int process, const Note& note, int descriptor);
  Note map(const Note& request, int descriptor);
  void end_of(int process);
  void await(std::unique_lock<std::mutex>& lock, int process, const std::function<bool()>& ready);

  const std::vector<int> sockets_, devices_;
  const std::chrono::duration<double> timeout_;
  const std::function<void(int)> lost_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Shared> shared_;  // by region
  std::map<int, char*> heaps_;         // of other processes, by seat
  std::vector<bool> left_;             // by process
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
