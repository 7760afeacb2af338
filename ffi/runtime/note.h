// Messages between two processes of a host, some with a file descriptor. Nothing here ever blocks.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/posix.h"

namespace jax_ep {

struct Note {
  enum class Kind : int32_t { share, mapped, refused, goodbye, heartbeat };

  Kind kind;
  int32_t slot;     // share: of which the region is the heap, or -1. heartbeat: whose epoch it tells, or -1
  uint64_t owner;   // share: a number of the process that has the region
  uint64_t region;  // its number there
  uint64_t bytes;
  uint64_t base;   // mapped: where the one who answers has mapped it
  uint64_t epoch;  // heartbeat: ops that the slot has finished
  char text[160];  // refused: why
};

enum class Sent { sent, later, gone };

// `later`: the socket is full. Send again when the other process has read.
Sent send_note(int socket, const Note& note, int descriptor = -1);

// What a socket had to say.
struct Received {
  enum class What { note, nothing, end, breach };

  What what;
  Note note{};
  Descriptor descriptor;  // what came along with the note
  std::string breach;     // which rule the message broke; what came along with it is closed
};

// Returns a note only if this build could have sent it: it is of a known kind, and has a descriptor if it must. The
// caller judges whether it makes sense now.
Received receive_note(int socket);

}  // namespace jax_ep
