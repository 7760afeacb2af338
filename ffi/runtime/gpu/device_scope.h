// The current device, restored on leaving; and errors of the runtime as exceptions.
#pragma once

#include <stdexcept>
#include <string>

#include "platform/runtime.h"

namespace jax_ep::gpu {

// For errors that are expected, or that come too late to matter.
inline void ignore(Error) {}

inline void check(Error error, const char* doing) {
  if (error == kSuccess) return;
  ignore(take_last_error());
  throw std::runtime_error(std::string("jax_ep: ") + doing + " failed: " + describe(error));
}

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    ignore(get_device(&before_));
    check(set_device(device), "choosing a device");
  }
  ~DeviceScope() { ignore(set_device(before_)); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

}  // namespace jax_ep::gpu
