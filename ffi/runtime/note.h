// Messages between two processes of a host, some with a file descriptor. Nothing here ever blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "comm/text.h"
#include "runtime/posix.h"

namespace jax_ep {

struct Note {
  enum class Kind : int32_t { share, mapped, refused, goodbye };

  Kind kind;
  int32_t rank_index = -1;  // share: whose signal pad the region is, or -1
  uint64_t owner = 0;       // share: a number of the process that has the region
  uint64_t region = 0;      // its number there
  uint64_t bytes = 0;
  uint64_t base = 0;    // mapped: the address in the answering process
  char text[160] = {};  // refused: why
};

enum class Sent { sent, later, gone };

// `later`: the socket is full. Send again when the other process has read.
Sent send_note(int socket, const Note& note, int descriptor = -1);

// The next message of a socket.
struct Received {
  enum class What { note, nothing, end, breach };

  What what;
  Note note{};
  Descriptor descriptor;  // of the note
  std::string breach;     // the rule that the message broke; then its descriptors are closed
};

// Returns a note only if its kind is known, and it has a descriptor if the kind needs one. The caller checks whether
// the note is due.
Received receive_note(int socket);

// Notes to another process, in order. The sender never waits for the reader.
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
