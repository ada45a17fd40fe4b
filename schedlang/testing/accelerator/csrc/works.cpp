// The collective library as c10d sees it, and what Python sees of all of this.
//
// A collective is one method of a Python object (collectives.py), which moves the data.  Its result
// is published when a stream, or the host, is ordered after it, whoever asked for that order.
#include "device.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace simulated {

void register_hooks();

namespace {

// ---- results that are not there yet -----------------------------------------------------------

struct Open { uint64_t ticket; int stream; uint64_t time; };
std::vector<Open>& open_works() {
  static auto* all = new std::vector<Open>();
  return *all;
}
py::object* publisher = nullptr;

void close(uint64_t ticket) {
  Lock lock(checker().mutex);
  auto& all = open_works();
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& o) { return o.ticket == ticket; }),
            all.end());
}

}  // namespace

void publish(const Clock& clock) {
  std::vector<uint64_t> due;
  {
    Lock lock(checker().mutex);
    for (auto& one : open_works())
      if (known(clock, one.stream) >= one.time) due.push_back(one.ticket);
  }
  if (due.empty() || !publisher) return;
  py::gil_scoped_acquire gil;
  for (auto ticket : due) (*publisher)(ticket);
}

// ---- c10d ---------------------------------------------------------------------------------------

template <class T>
using ptr = c10::intrusive_ptr<T>;
using Tensors = std::vector<at::Tensor>;

namespace {

struct SimWork : c10d::Work {
  py::object object;
  ptr<c10::ivalue::Future> future;

  explicit SimWork(py::object o) : object(std::move(o)) {}
  ~SimWork() override {
    py::gil_scoped_acquire gil;
    object = py::object();
  }
  bool wait(std::chrono::milliseconds) override {
    py::gil_scoped_acquire gil;
    object.attr("wait")();
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  void blockCurrentStream() override { wait(std::chrono::milliseconds(0)); }
  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return object.attr("is_completed")().cast<bool>();
  }
  bool isSuccess() const override { return true; }
  Tensors result() override {
    py::gil_scoped_acquire gil;
    return object.attr("result")().cast<Tensors>();
  }
  // Complete at once, as NCCL's: waiting for it orders the stream, and that publishes.
  ptr<c10::ivalue::Future> getFuture() override {
    if (future) return future;
    Tensors results;
    int device;
    int64_t stream;
    {
      py::gil_scoped_acquire gil;
      results = object.attr("result")().cast<Tensors>();
      device = object.attr("device").cast<int>();
      stream = object.attr("stream").cast<int64_t>();
    }
    c10::Device where(TYPE, device);
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{where});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, where, stream));
    future->markCompleted(c10::IValue(results));
    return future;
  }
};

struct SimOptions : c10d::Backend::Options {
  SimOptions() : Options("simccl") {}
};

struct SimBackend : c10d::Backend {
  py::object object;
  SimBackend(int rank, int size, py::object o) : Backend(rank, size), object(std::move(o)) {}
  ~SimBackend() override {
    py::gil_scoped_acquire gil;
    object = py::object();
  }
  const std::string getBackendName() const override { return "simccl"; }
  ptr<Options> getBackendOptions() override { return c10::make_intrusive<SimOptions>(); }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}

  template <class... A>
  ptr<c10d::Work> call(const char* name, A&&... arguments) {
    py::gil_scoped_acquire gil;
    py::object made = object.attr(name)(std::forward<A>(arguments)...);
    return c10::make_intrusive<SimWork>(made);
  }
  void tell(const char* name) {
    py::gil_scoped_acquire gil;
    object.attr(name)();
  }
  void abort() override { tell("shutdown"); }
  void shutdown() override { tell("shutdown"); }
  void eagerConnectSingleDevice(at::Device device) override {
    py::gil_scoped_acquire gil;
    object.attr("connect")(static_cast<int>(device.index()));
  }
  ptr<Backend> split(const ptr<c10d::Store>& store, const std::vector<int>& ranks,
                     const ptr<Options>& options) override {
    py::gil_scoped_acquire gil;
    auto timeout = options ? options->timeout : kBackendDefaultTimeout;
    py::object made = object.attr("split")(store->clone(), ranks, static_cast<int64_t>(timeout.count()));
    if (made.is_none()) return nullptr;
    int rank = made.attr("rank").cast<int>();
    return c10::make_intrusive<SimBackend>(rank, static_cast<int>(ranks.size()), made);
  }

  void startCoalescing() override { tell("start_coalescing"); }
  ptr<c10d::Work> endCoalescing() override { return call("end_coalescing"); }
  ptr<c10d::Work> broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return call("broadcast", t, o.rootRank, o.asyncOp);
  }
  ptr<c10d::Work> allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return call("all_reduce", t, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> allreduce_coalesced(Tensors& t,
                                      const c10d::AllreduceCoalescedOptions& o) override {
    return call("all_reduce", t, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return call("reduce", t, o.rootRank, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> allgather(std::vector<Tensors>& out, Tensors& in,
                            const c10d::AllgatherOptions& o) override {
    return call("all_gather", out, in, o.asyncOp);
  }
  ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                  const c10d::AllgatherOptions& o) override {
    return call("all_gather_into_tensor", Tensors{out}, Tensors{in}, o.asyncOp);
  }
  ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                  const c10d::AllgatherOptions& o) override {
    return call("all_gather_into_tensor", out, in, o.asyncOp);
  }
  ptr<c10d::Work> reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                 const c10d::ReduceScatterOptions& o) override {
    return call("reduce_scatter", out, in, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                       const c10d::ReduceScatterOptions& o) override {
    return call("reduce_scatter_tensor", Tensors{out}, Tensors{in}, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return call("reduce_scatter_tensor", out, in, o.reduceOp, o.asyncOp);
  }
  ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs,
                                std::vector<int64_t>& ins,
                                const c10d::AllToAllOptions& o) override {
    return call("all_to_all_single", out, in, outs, ins, o.asyncOp);
  }
  ptr<c10d::Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return call("all_to_all", out, in, o.asyncOp);
  }
  ptr<c10d::Work> gather(std::vector<Tensors>& out, Tensors& in,
                         const c10d::GatherOptions& o) override {
    return call("gather", out, in, o.rootRank, o.asyncOp);
  }
  ptr<c10d::Work> scatter(Tensors& out, std::vector<Tensors>& in,
                          const c10d::ScatterOptions& o) override {
    return call("scatter", out, in, o.rootRank, o.asyncOp);
  }
  ptr<c10d::Work> send(Tensors& t, int peer, int tag) override {
    return call("send", t, peer, tag);
  }
  ptr<c10d::Work> recv(Tensors& t, int peer, int tag) override {
    return call("recv", t, peer, tag);
  }
  ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    int device = o.device ? o.device->index() : o.device_ids.empty() ? -1 : o.device_ids[0];
    return call("barrier", device, o.asyncOp);
  }
};

// ---- what Python sees ---------------------------------------------------------------------------

py::dict as_dict(const Side& side) {
  py::dict d;
  d["op"] = side.op, d["stream"] = side.stream, d["place"] = side.place;
  d["tensor"] = side.tensor, d["write"] = side.write;
  return d;
}

void bind_checker(py::module& m) {
  m.def("reports", [] {
    Lock lock(checker().mutex);
    py::list all;
    for (auto& r : checker().reports)
      all.append(py::make_tuple(r.kind, as_dict(r.first), as_dict(r.second), r.memory, r.count));
    return all;
  });
  m.def("synchronisations", [] {
    Lock lock(checker().mutex);
    py::list all;
    for (auto& s : checker().synchronisations) all.append(py::make_tuple(s.what, s.place));
    return all;
  });
  m.def("operations", [] {
    Lock lock(checker().mutex);
    py::list all;
    for (auto& o : checker().operations)
      all.append(py::make_tuple(*o.op, o.stream, checker().name(o.stream), o.time, o.clock,
                                told(o.place), o.label));
    return all;
  });
  m.def("reset", [] { checker().reset(); });
  m.def("set_check", [](int mode) {
    return static_cast<int>(std::exchange(checker().check, static_cast<Check>(mode)));
  });
  m.def("set_forbid", [](bool on) { return std::exchange(checker().forbid, on); });
  m.def("set_counting", [](bool on) { return std::exchange(checker().counting, on); });
  m.def("set_timeline", [](bool on) { return std::exchange(checker().timeline, on); });
  m.def("set_lines", [](bool on) { return std::exchange(checker().lines, on); });
  m.def("set_devices", [](int n) {
    TORCH_CHECK(n >= 0 && n <= MOST, "0 to ", MOST, " devices can be simulated, not ", n);
    return std::exchange(checker().devices, n);
  });
  m.def("set_label", [](std::string label) {
    Lock lock(checker().mutex);
    return std::exchange(checker().label, std::move(label));
  });
  m.def("device_count", [] { return checker().devices; });
  m.def("memory", [](int device) {
    Lock lock(checker().mutex);
    return py::make_tuple(checker().bytes[device], checker().peak[device]);
  });
  m.def("reset_peak", [](int device) {
    Lock lock(checker().mutex);
    checker().peak[device] = checker().bytes[device];
  });
}

void bind_device(py::module& m) {
  m.def("register", [] { register_hooks(); });
  m.def("get_device", [] { return current_device(); });
  m.def("set_device", [](int device) { set_current_device(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("alias", [](const at::Tensor& t) { return host_alias(t); });
  m.def("shallow_set", [](at::Tensor to, const at::Tensor& from) {  // what `.data =` does elsewhere
    auto* meta = torch::autograd::impl::get_autograd_meta(to);
    if (meta && to.device() != from.device()) {
      std::lock_guard<std::mutex> lock(meta->mutex_);
      meta->grad_accumulator_.reset();
    }
    to.unsafeGetTensorImpl()->shallow_copy_from(from.getIntrusivePtr());
  });
}

void bind_works(py::module& m) {
  py::module::import("torch._C._distributed_c10d");
  py::class_<SimOptions, ptr<SimOptions>, c10d::Backend::Options>(m, "SimOptions")
      .def(py::init([] { return c10::make_intrusive<SimOptions>(); }))
      .def("__deepcopy__", [](const SimOptions& self, py::dict) {
        return c10::make_intrusive<SimOptions>(self);
      });
  py::class_<SimBackend, ptr<SimBackend>, c10d::Backend>(m, "SimBackend")
      .def(py::init([](int rank, int size, py::object o) {
        return c10::make_intrusive<SimBackend>(rank, size, o);
      }))
      .def_property_readonly("options", [](SimBackend&) { return c10::make_intrusive<SimOptions>(); })
      .def_property_readonly("communicator", [](SimBackend& self) { return self.object; });
  m.def("set_publisher", [](py::object o) { publisher = new py::object(std::move(o)); });
  m.def("new_stream", [](int device) { return checker().new_stream(device, here()); });
  m.def("current_stream", [](int device) { return current_stream(device); });
  m.def("stream_name", [](int device, int64_t id) {
    Lock lock(checker().mutex);
    return checker().name(checker().stream(device, id));
  });
  m.def("launch", [](int device, int64_t id, const std::string& op, Tensors reads, Tensors writes) {
    Place place = here();
    int s = checker().stream(device, id);
    auto time = checker().launch(s, op, place);
    for (auto& t : reads) checker().touch(t, s, false, op, place);
    for (auto& t : writes) checker().touch(t, s, true, op, place);
    return py::make_tuple(s, time);
  });
  m.def("snapshot", [](int device, int64_t id) {
    return checker().snapshot(checker().stream(device, id));
  });
  m.def("opened", [](uint64_t ticket, int stream, uint64_t time) {
    Lock lock(checker().mutex);
    open_works().push_back({ticket, stream, time});
  });
  m.def("closed", [](uint64_t ticket) { close(ticket); });
  m.def("stream_waits", [](int device, int64_t id, const Clock& clock) {
    stream_waits(checker().stream(device, id), clock);
  }, py::call_guard<py::gil_scoped_release>());
  m.def("synchronise", [](const std::string& what, int device, int64_t id) {
    synchronise(what, checker().stream(device, id));
  }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  simulated::bind_checker(m);
  simulated::bind_device(m);
  simulated::bind_works(m);
}
