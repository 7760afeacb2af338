// The errors of a group.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ep {

enum class ErrorKind { other, peer_timeout, peer_lost, mismatch, capacity, invalid_routing, group_closed };

inline constexpr ErrorKind kErrorKinds[] = {ErrorKind::other,       ErrorKind::peer_timeout, ErrorKind::peer_lost,
                                            ErrorKind::mismatch,    ErrorKind::capacity,     ErrorKind::invalid_routing,
                                            ErrorKind::group_closed};

// The Python exception (jax_ep/errors.py).
inline const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::peer_timeout:
      return "PeerTimeoutError";
    case ErrorKind::peer_lost:
      return "PeerLostError";
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::capacity:
      return "CapacityError";
    case ErrorKind::invalid_routing:
      return "InvalidRoutingError";
    case ErrorKind::group_closed:
      return "GroupClosedError";
    case ErrorKind::other:
      break;
  }
  return "JaxEpError";
}

struct GroupError {
  ErrorKind kind;
  std::string message;
  bool fatal;
};

inline std::string text_of(const GroupError& error) { return name_of(error.kind) + (": " + error.message); }

class GroupException : public std::runtime_error {
 public:
  explicit GroupException(GroupError error) : std::runtime_error(text_of(error)), error(std::move(error)) {}

  const GroupError error;
};

}  // namespace jax_ep
