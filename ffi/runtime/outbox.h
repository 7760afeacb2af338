// Notes to another process, in order. The sender never waits for the reader.
#pragma once

#include <deque>

#include "runtime/note.h"
#include "runtime/posix.h"

namespace jax_ep {

class Outbox {
 public:
  explicit Outbox(Descriptor socket) : socket_(std::move(socket)) {}

  int socket() const { return socket_.get(); }
  std::size_t waiting() const { return notes_.size(); }

  // The descriptor must stay open until the note is sent.
  void push(const Note& note, int descriptor) {
    notes_.push_back({note, descriptor});
    flush();
  }

  // Sends what the socket has room for.
  void flush() {
    while (!notes_.empty()) {
      const Sent sent = send_note(socket(), notes_.front().note, notes_.front().descriptor);
      if (sent == Sent::later) return;
      if (sent == Sent::gone) return notes_.clear();  // the last notes of the other process can still be read
      notes_.pop_front();
    }
  }

  void clear() { notes_.clear(); }
  void close() {
    clear();
    socket_ = Descriptor();
  }

 private:
  struct Outgoing {
    Note note;
    int descriptor;
  };
  Descriptor socket_;
  std::deque<Outgoing> notes_;
};

}  // namespace jax_ep
