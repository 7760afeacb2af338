// The errors of a group.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "comm/text.h"

namespace jax_ep {

enum class ErrorKind { other, peer_timeout, peer_lost, mismatch, capacity, invalid_routing, group_closed };

// By kind: the Python exception (jax_ep/errors.py).
inline constexpr const char* kErrorNames[] = {"JaxEpError",      "PeerTimeoutError", "PeerLostError",
                                              "MismatchError",   "CapacityError",    "InvalidRoutingError",
                                              "GroupClosedError"};
static_assert(std::size(kErrorNames) == static_cast<int>(ErrorKind::group_closed) + 1);
inline const char* name_of(ErrorKind kind) { return kErrorNames[static_cast<int>(kind)]; }

// Whether the error fails the group.
constexpr bool is_fatal(ErrorKind kind) { return kind != ErrorKind::capacity && kind != ErrorKind::invalid_routing; }

struct GroupError {
  ErrorKind kind;
  std::string message;
};

// The error of a group that has failed for good.
template <class... Parts>
GroupError fatal_error(ErrorKind kind, const Parts&... what) {
  return {kind, concat(what..., "; the group has failed")};
}
inline GroupError closed_too_early() {
  return {ErrorKind::group_closed,
          "the group was closed before the op ran: first await its results, as by jax.block_until_ready"};
}
// The error of a program whose group is not open.
inline GroupError group_not_open() {
  return {ErrorKind::group_closed,
          "the group of this program is closed, or was never opened here: await results before closing, or open a "
          "jax_ep.Group over the mesh and axis that the program was compiled for"};
}

inline std::string text_of(const GroupError& error) { return concat(name_of(error.kind), ": ", error.message); }

class GroupException : public std::runtime_error {
 public:
  explicit GroupException(GroupError error) : std::runtime_error(text_of(error)), error(std::move(error)) {}

  const GroupError error;
};

}  // namespace jax_ep
