// The Python module of one platform's library: groups, handlers, and the sizes that Python must know.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/bound_op.h"
#include "comm/float8.h"
#include "gemm/grouped_matmul.h"
#include "gemm/plan.h"
#include "platform/launch.h"
#include "runtime/memory.h"
#include "runtime/profiler.h"

namespace py = pybind11;

namespace jax_ep {
namespace {

template <class Function>
py::capsule capsule(Function* handler) {
  return py::capsule(reinterpret_cast<void*>(handler));
}

// Every op of this library, by its FFI target.
const std::map<std::string, BoundOp>& bound_ops() {
  static const auto* const ops = [] {
    auto* const all = new std::map<std::string, BoundOp>;
    for (const auto& some : {bind_row_ops(), bind_matmuls()})
      for (const BoundOp& op : some) all->emplace(op.ffi_target, op);
    return all;
  }();
  return *ops;
}

py::dict stages(XLA_FFI_Handler* handler) {
  py::dict stages;
  stages["instantiate"] = capsule(call_state_handler);
  stages["initialize"] = capsule(group_check_handler);
  stages["execute"] = capsule(handler);
  return stages;
}

// Whether a product with grouped rows is planned as two halves of its contraction, on a Hopper with `sms` SMs.
bool splits_contraction(int m, int n, int k, int groups, int sms) {
  return gemm::plan_tiles({gemm::Grouping::m_grouped, m, n, k, groups}, sms).split_k;
}

py::dict handlers() {
  py::dict all;
  for (const auto& [ffi_target, op] : bound_ops()) all[py::str(ffi_target)] = stages(op.handler);
  all["mark"] = stages(mark_handler);
  return all;
}

// The keyword arguments of a call from Python, as settings.
class Keywords final : public Settings {
 public:
  explicit Keywords(const py::kwargs& all) : all_(all) {}
  std::optional<int64_t> integer(const char* name) const override { return get<int64_t, py::int_>(name); }
  std::optional<bool> option(const char* name) const override { return get<bool, py::bool_>(name); }
  std::optional<float> real(const char* name) const override { return get<float, py::float_>(name); }
  std::optional<std::string> text(const char* name) const override { return get<std::string, py::str>(name); }

 private:
  template <class T, class Python>
  std::optional<T> get(const char* name) const {
    const py::object value = all_.contains(name) ? py::object(all_[name]) : py::none();
    return py::isinstance<Python>(value) ? std::optional<T>(value.cast<T>()) : std::nullopt;
  }
  const py::kwargs& all_;
};

CallTypes call_types(const std::string& ffi_target, int ranks, const py::kwargs& settings) {
  return bound_ops().at(ffi_target).call_types(Keywords(settings), ranks);
}

// By FFI target.
std::map<std::string, OpNames> names() {
  std::map<std::string, OpNames> all;
  for (const auto& [ffi_target, op] : bound_ops()) all.emplace(ffi_target, op.names);
  return all;
}

py::dict types() {
  static constexpr XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallState>();
  py::dict type, all;
  type["type_id"] = py::capsule(static_cast<void*>(&CallState::id));
  type["type_info"] = py::capsule(static_cast<const void*>(&info));
  all["jax_ep_call_state"] = type;
  return all;
}

// (CTA, role, epoch, op, phase, begin_ns, end_ns). Of a product the op is empty.
using PySpan = std::tuple<int, int, uint64_t, const char*, const char*, int64_t, int64_t>;
// (line, rank, lost, unfinished, spans)
using PyRankProfile = std::tuple<int, int, uint64_t, uint64_t, std::vector<PySpan>>;

PyRankProfile to_python(const RankProfile& profile) {
  std::vector<PySpan> spans;
  for (const Span& s : profile.spans)
    spans.emplace_back(s.cta, s.role, s.epoch, s.role == kProductRole ? "" : name_of(s.op), name_of(s.phase),
                       s.begin_ns, s.end_ns);
  return {profile.rank_id.line, profile.rank_id.rank, profile.lost, profile.unfinished, std::move(spans)};
}

// (epoch, op, call, outcome, begin_ns, end_ns)
using PyRecord = std::tuple<uint64_t, const char*, std::string, const char*, uint64_t, uint64_t>;
// (line, rank, finished, process, waited_ns, received_bytes, records)
using PyHistory =
    std::tuple<int, int, uint64_t, std::string, std::vector<uint64_t>, std::vector<uint64_t>, std::vector<PyRecord>>;

PyHistory to_python(const RankHistory& history) {
  static constexpr const char* kOutcomes[] = {"running", "delivered", "failed"};
  std::vector<PyRecord> records;
  for (const OpRecord& op : history.ops)
    records.emplace_back(op.epoch, name_of(op.signature.op), describe_call(op.signature, static_cast<int32_t>(op.site)),
                         kOutcomes[std::min<uint64_t>(op.outcome, 2)], op.begin_ns, op.end_ns);
  return {history.rank_id.line, history.rank_id.rank,   history.finished,  history.process,
          history.waited_ns,    history.received_bytes, std::move(records)};
}

using PyError = std::optional<std::pair<ErrorKind, std::string>>;

PyError to_python(const std::optional<GroupError>& error) {
  if (!error) return std::nullopt;
  return std::pair{error->kind, error->message};
}

// A group as Python holds it; it is registered while open. A forked child has none of the group's threads, so there
// everything is left as it is. A closed or released group has nothing more to tell.
class Handle {
 public:
  Handle(std::vector<std::vector<int>> lines, double timeout, bool poison, std::vector<std::vector<int>> processes,
         std::vector<int> sockets, double open_timeout, int64_t content, int number, std::optional<int> max_sms)
      : registration_(register_group(content, number)), id_(registration_->id) {
    const auto group = std::make_shared<PlatformGroup>(
        std::move(lines), timeout, poison, Neighbours{std::move(processes), std::move(sockets), open_timeout}, id_);
    if (max_sms) group->limit_sms(*max_sms);
    registration_->open(group);  // from here on programs may call it
  }
  ~Handle() {
    if (is_forked()) (void)profiler_.release();  // it may hold the group alone
  }

  int64_t id() const { return id_; }
  void close() {
    if (is_forked()) return;
    const std::shared_ptr<PlatformGroup> group = open_group();
    if (!group) return;
    group->close();
    {
      const std::lock_guard lock(profiler_mutex_);
      profiler_ = nullptr;
    }
    std::atomic_load(&registration_)->end();
  }
  // Called when nobody in Python holds the group any more. It is closed with the last program that was compiled for it,
  // and not before the profile under way ends.
  void release() {
    if (is_forked()) return;
    const std::lock_guard lock(profiler_mutex_);
    std::atomic_store(&registration_, {});
    if (!profiles_) profiler_ = nullptr;
  }
  // Waits in short steps. Between them the caller, the watchdog, does not keep a released group alive.
  PyError await_failure(double seconds) {
    constexpr double kPeriod = 0.05;
    for (; seconds > 0; seconds -= kPeriod) {
      const std::shared_ptr<PlatformGroup> group = open_group();
      if (!group) return std::pair{ErrorKind::group_closed, "the group was closed"};
      if (const auto error = group->await_failure(kPeriod)) return to_python(error);
    }
    return std::nullopt;
  }
  std::vector<PyHistory> history() const {
    std::vector<PyHistory> all;
    if (const std::shared_ptr<PlatformGroup> group = open_group())
      for (const RankHistory& each : group->history()) all.push_back(to_python(each));
    return all;
  }
  // (begun, ended, the call begun last) of the ranks of this process; see comm/marks.h
  std::vector<std::tuple<uint64_t, uint64_t, std::string>> marks() const {
    std::vector<std::tuple<uint64_t, uint64_t, std::string>> all;
    if (const std::shared_ptr<PlatformGroup> group = open_group())
      for (const Marks& m : group->marks()) all.emplace_back(m.begun, m.ended, text_of_site(m.call));
    return all;
  }
  PyError take_error() {
    const std::shared_ptr<PlatformGroup> group = open_group();
    return group ? to_python(group->take_error()) : std::nullopt;
  }
  void start_profile() {
    const std::lock_guard lock(profiler_mutex_);
    const std::shared_ptr<PlatformGroup> group = open_group();
    if (!group) return;
    if (!profiler_) profiler_ = std::make_unique<Profiler>(group, group->max_ctas(), group->products());
    profiler_->start();
    profiles_ = true;
  }
  std::vector<PyRankProfile> stop_profile() {
    const std::lock_guard lock(profiler_mutex_);
    std::vector<PyRankProfile> all;
    if (!profiler_) return all;
    profiles_ = false;
    for (const RankProfile& profile : profiler_->stop()) all.push_back(to_python(profile));
    if (!std::atomic_load(&registration_)) profiler_ = nullptr;
    return all;
  }

 private:
  friend class TestHooks;
  std::shared_ptr<PlatformGroup> open_group() const {
    const std::shared_ptr<Registration> registration = std::atomic_load(&registration_);
    return registration ? std::static_pointer_cast<PlatformGroup>(registration->group()) : nullptr;
  }

  std::shared_ptr<Registration> registration_;
  const int64_t id_;
  mutable std::mutex profiler_mutex_;  // the garbage collector may release the group while a thread profiles it
  std::unique_ptr<Profiler> profiler_;
  bool profiles_ = false;
};

// What tests alone ask of a group.
class TestHooks {
 public:
  explicit TestHooks(const Handle& handle) : handle_(handle) {}
  void stall(int rank, const std::string& where) const {
    if (const std::shared_ptr<PlatformGroup> group = handle_.open_group()) group->stall(rank, where);
  }
  void stage_all() const {
    if (const std::shared_ptr<PlatformGroup> group = handle_.open_group()) group->stage_all();
  }
  // The op and the phase that a rank has entered last, during a profile.
  std::optional<std::pair<std::string, std::string>> last_phase(int line, int rank) const {
    const std::lock_guard lock(handle_.profiler_mutex_);
    const auto last = handle_.profiler_ ? handle_.profiler_->last_of({line, rank}) : std::nullopt;
    if (!last) return std::nullopt;
    return std::pair{name_of(last->op), name_of(last->phase)};
  }

 private:
  const Handle& handle_;
};

}  // namespace

// The kinds, by the names of their exceptions, and `GroupException(kind, message)`, which opening a group may raise.
void bind_errors(py::module_& module) {
  py::enum_<ErrorKind> kinds(module, "ErrorKind", py::module_local());
  for (std::size_t i = 0; i < std::size(kErrorNames); ++i) kinds.value(kErrorNames[i], static_cast<ErrorKind>(i));
  static PyObject* exception = nullptr;  // a translator holds no state
  const std::string name = module.attr("__name__").cast<std::string>() + ".GroupException";
  exception = PyErr_NewException(name.c_str(), PyExc_RuntimeError, nullptr);
  module.attr("GroupException") = py::handle(exception);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const GroupException& caught) {
      PyErr_SetObject(exception, py::make_tuple(caught.error.kind, caught.error.message).ptr());
    }
  });
}

PYBIND11_MODULE(JAX_EP_MODULE, module) {
  bind_errors(module);
  module.attr("version") = JAX_EP_VERSION;
  module.attr("architectures") = JAX_EP_ARCHITECTURES;
  module.attr("mail_numbers") = kMailNumbers;
  module.attr("max_ranks") = kMaxRanks;
  module.attr("float8_block") = kScaleBlock;
  module.attr("tma_multiple") = gemm::kTmaMultiple;
  module.def("handlers", &handlers);
  module.def("await_devices", &await_devices, py::call_guard<py::gil_scoped_release>());
  module.def("close_all", &close_all, py::call_guard<py::gil_scoped_release>());
  module.def("names", &names);
  module.def("types", &types);
  module.def("call_types", &call_types);
  module.def("splits_contraction", &splits_contraction);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Handle>(module, "Group")
      .def(py::init<std::vector<std::vector<int>>, double, bool, std::vector<std::vector<int>>, std::vector<int>,
                    double, int64_t, int, std::optional<int>>(),
           unlocked)
      .def_property_readonly("id", &Handle::id)
      .def("close", &Handle::close, unlocked)
      .def("release", &Handle::release, unlocked)
      .def("take_error", &Handle::take_error, unlocked)
      .def("await_failure", &Handle::await_failure, unlocked)
      .def("history", &Handle::history, unlocked)
      .def("marks", &Handle::marks, unlocked)
      .def("start_profile", &Handle::start_profile, unlocked)
      .def("stop_profile", &Handle::stop_profile, unlocked)
      .def_property_readonly("test_hooks", py::cpp_function([](const Handle& handle) { return TestHooks(handle); },
                                                            py::keep_alive<0, 1>()));
  py::class_<TestHooks>(module, "TestHooks", py::module_local())
      .def("last_phase", &TestHooks::last_phase, unlocked)
      .def("stall", &TestHooks::stall)
      .def("stage_all", &TestHooks::stage_all);
}

}  // namespace jax_ep
