// Writes one byte behind the end of XLA's result: overrun.py shows that AddressSanitizer catches it.
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

ffi::Error write_behind(ffi::Result<ffi::AnyBuffer> result) {
  static_cast<volatile char*>(result->untyped_data())[result->size_bytes()] = 1;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_write_behind, write_behind, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
