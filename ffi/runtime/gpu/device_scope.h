// The current device and the capture mode of this thread, restored on leaving; and errors of the runtime as texts and
// exceptions.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "comm/text.h"
#include "platform/vmm.h"

namespace jax_ep::gpu {

// For errors that are expected, or that come too late to matter.
inline void ignore(Error) {}

// The text of an error, which XLA's next call does not see any more. Nothing if there is none.
inline std::optional<std::string> explain(Error error) {
  if (error == kSuccess) return std::nullopt;
  ignore(take_last_error());
  return describe(error);
}
// The text of an error of a launch.
template <class Config>
std::optional<std::string> explain(Error error, const Config& config) {
  const std::optional<std::string> why = explain(error);
  return why ? std::optional(concat(config.describe(), ": ", *why)) : std::nullopt;
}

inline void check(Error error, const char* doing) {
  if (const auto why = explain(error)) throw std::runtime_error(concat("jax_ep: ", doing, " failed: ", *why));
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

// Keeps runtime calls of this thread from invalidating a stream capture.
class CaptureAllowsAll {
 public:
  CaptureAllowsAll() { ignore(exchange_capture_mode(&mode_)); }
  ~CaptureAllowsAll() { ignore(exchange_capture_mode(&mode_)); }
  CaptureAllowsAll(const CaptureAllowsAll&) = delete;
  CaptureAllowsAll& operator=(const CaptureAllowsAll&) = delete;

 private:
  CaptureMode mode_ = kCaptureRelaxed;
};

}  // namespace jax_ep::gpu
