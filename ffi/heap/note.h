// Notes between two processes of a host, each with a file descriptor where there is one.
#pragma once

#include <cstdint>

namespace jax_ep {

struct Note {
  enum class Kind : int32_t { share, mapped, refused, goodbye };

  Kind kind;
  int32_t seat;     // of which the region is the heap, or -1
  uint64_t owner;   // a number of the process that has the region
  uint64_t region;  // its number there
  uint64_t bytes;
  uint64_t base;   // where the one who answers has mapped it
  char text[160];  // why it refuses
};

// False if the other process is gone.
bool send_note(int socket, const Note& note, int descriptor = -1);

// Sets `descriptor` to what came along, or -1. False if the other process is gone.
bool receive_note(int socket, Note* note, int* descriptor);

}  // namespace jax_ep
