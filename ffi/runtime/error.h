// What goes wrong with a group, under the names of the Python exceptions.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ep {

struct GroupError {
  std::string kind;  // the name of the Python exception
  std::string message;
  bool fatal;
};

class GroupException : public std::runtime_error {
 public:
  explicit GroupException(GroupError error)
      : std::runtime_error(error.kind + ": " + error.message), error(std::move(error)) {}

  const GroupError error;
};

}  // namespace jax_ep
