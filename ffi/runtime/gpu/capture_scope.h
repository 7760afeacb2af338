// Keeps runtime calls of this thread from invalidating a stream capture.
#pragma once

#include "platform/vmm.h"
#include "runtime/gpu/device_scope.h"

namespace jax_ep::gpu {

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
