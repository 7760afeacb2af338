#include "kernels/hardware_model.h"

#include <algorithm>

namespace jax_ep {

HardwareModel hardware_model(int sms, int shared_bytes, int warp_lanes) {
  HardwareModel model{sms, 0, shared_bytes, warp_lanes};
  model.row_sms = std::max(sms * model.rates.rows.sm_percent / 100, 1);
  return model;
}

HardwareModel limit_sms(HardwareModel model, int most) {
  model.row_sms = model.sms = std::min(most, model.sms);
  return model;
}

}  // namespace jax_ep
