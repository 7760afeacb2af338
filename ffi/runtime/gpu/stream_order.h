// Keeps the ops of a rank in the order in which XLA enqueues them, on any streams. Two ops of a rank must not overlap,
// as they share its flags. The order is the same on all ranks. XLA takes one stream for all ops, but for those that a
// program puts on others (`jax.experimental.compute_on`).
#pragma once

#include <mutex>

#include "runtime/gpu/device_scope.h"

namespace jax_ep::gpu {

class StreamOrder {
 public:
  ~StreamOrder() {
    if (event_) ignore(destroy_event(event_));
  }

  // Around the launch of an op, on the device of the stream. Throws std::runtime_error.
  class Turn {
   public:
    Turn(StreamOrder& order, Stream stream) : order_(order), stream_(stream), lock_(order.mutex_) {
      captured_ = is_capturing(stream);
      if (!captured_) order.await_last(stream);
    }
    ~Turn() {
      if (!captured_) order_.note_last(stream_);
    }

   private:
    StreamOrder& order_;
    const Stream stream_;
    const std::lock_guard<std::mutex> lock_;
    bool captured_;  // the graph keeps its own order, and runs on one stream
  };

 private:
  // Events cost time, so none are used while all ops come on one stream.
  void await_last(Stream stream) {
    if (!used_ || stream == last_) return;
    if (!event_) {
      check(create_event(&event_), "creating an event");
      check(record_event(event_, last_), "recording an event");
    }
    check(wait_event(stream, event_), "waiting for an event");
  }
  void note_last(Stream stream) {
    last_ = stream;
    used_ = true;
    if (event_) ignore(record_event(event_, stream));
  }

  std::mutex mutex_;
  bool used_ = false;
  Stream last_{};
  Event event_{};  // after the last op
};

}  // namespace jax_ep::gpu
