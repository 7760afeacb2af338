// The Python module of one platform's library: groups, handlers, and the sizes that Python must know.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "binding/decode.h"
#include "binding/extra.h"
#include "binding/handlers.h"

namespace py = pybind11;

namespace jax_ep {
namespace {

template <class Function>
py::capsule capsule(Function* handler) {
  return py::capsule(reinterpret_cast<void*>(handler));
}

// The handlers by op; the platform adds the stages it needs besides "execute".
py::dict handlers() {
  py::dict all;
  for (const auto& [name, handler] : {std::pair{"dispatch", dispatch_handler},
                                      {"scatter", scatter_handler},
                                      {"combine", combine_handler},
                                      {"ragged_all_to_all", ragged_all_to_all_handler}}) {
    py::dict stages;
    stages["execute"] = capsule(handler);
    if (instantiate_handler()) stages["instantiate"] = capsule(instantiate_handler());
    all[name] = stages;
  }
  for (const auto& [name, handler] : extra_handlers()) {
    py::dict stages;
    stages["execute"] = capsule(handler);
    if (instantiate_handler()) stages["instantiate"] = capsule(instantiate_handler());
    all[name] = stages;
  }
  return all;
}

py::dict types() {
  py::dict all;
  if (XLA_FFI_TypeId* id = call_site_type()) {
    static constexpr XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
    py::dict type;
    type["type_id"] = py::capsule(static_cast<void*>(id));
    type["type_info"] = py::capsule(static_cast<const void*>(&info));
    all["jax_ep_call_site"] = type;
  }
  return all;
}

// A group as Python holds it: registered while open.
class Handle {
 public:
  Handle(std::vector<std::vector<int>> lines, double timeout, bool poison)
      : group_(std::make_shared<PlatformGroup>(std::move(lines), timeout, poison)), id_(register_group(group_)) {}

  int64_t id() const { return id_; }
  void close() {
    group_->close();
    forget_group(id_);
  }
  std::optional<std::pair<std::string, std::string>> take_error() {
    const std::optional<GroupError> error = group_->take_error();
    if (!error) return std::nullopt;
    return std::pair{error->kind, error->message};
  }
  void stall(int rank, const std::string& where) { group_->stall(rank, where); }

 private:
  std::shared_ptr<PlatformGroup> group_;
  int64_t id_;
};

}  // namespace

PYBIND11_MODULE(JAX_EP_MODULE, module) {
  module.attr("version") = JAX_EP_VERSION;
  module.attr("max_experts") = kMaxExperts;
  module.attr("max_ranks") = kMaxRanks;
  module.def("handlers", &handlers);
  module.def("types", &types);
  module.def("route_scratch", &route_scratch);
  module.def("wire_row_bytes", &wire_row_bytes);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Handle>(module, "Group")
      .def(py::init<std::vector<std::vector<int>>, double, bool>(), unlocked)
      .def_property_readonly("id", &Handle::id)
      .def("close", &Handle::close, unlocked)
      .def("take_error", &Handle::take_error)
      .def("stall", &Handle::stall);
}

}  // namespace jax_ep
