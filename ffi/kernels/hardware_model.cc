#include "kernels/hardware_model.h"

#include <algorithm>

namespace jax_ep {
namespace {

constexpr int share_for_rows(int sms, const RowRates& rates = {}) {
  const int share = sms * rates.sm_percent / 100;
  return share > 1 ? share : 1;
}

// SMs, and the most shared memory of a CTA: the vendors' figures for the whole chip.
constexpr HardwareModel kModels[] = {
    {"sm_90", true, 132, share_for_rows(132), 232448, 32},
    {"sm_80", false, 108, share_for_rows(108), 166912, 32},
    {"gfx942", false, 304, share_for_rows(304), 65536, 64},
};
constexpr HardwareModel kUnknown{"unknown", false, 64, share_for_rows(64), 49152, 32};

}  // namespace

const HardwareModel& hardware_model(std::string_view architecture) {
  const auto* const end = std::end(kModels);
  const auto* const found =
      std::find_if(kModels, end, [&](const HardwareModel& each) { return each.architecture == architecture; });
  return found == end ? kUnknown : *found;
}

HardwareModel hardware_model(std::string_view architecture, int sms, int shared_bytes, int warp_lanes) {
  HardwareModel model = hardware_model(architecture);
  model.sms = sms;
  model.row_sms = share_for_rows(sms, model.rows);
  model.shared_bytes = shared_bytes;
  model.warp_lanes = warp_lanes;
  return model;
}

HardwareModel limit_sms(HardwareModel model, int most) {
  model.row_sms = model.sms = std::min(most, model.sms);
  return model;
}

HardwareModel leave_sms(HardwareModel model) {
  const auto part = [&](int percent) { return std::max(1, (model.sms * percent + 99) / 100); };
  model.row_sms = std::min(model.row_sms, part(model.rows.async_percent));
  model.sparse_sms = part(model.rows.async_sparse_percent);
  return model;
}

}  // namespace jax_ep
