// Kernels: every operation is that of the CPU, on an alias of the device's memory.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

namespace {

Storage on_cpu(const Storage& storage) {
  auto keep = [](void* context) { delete (Storage*)context; };
  c10::DataPtr data(storage.mutable_data(), new Storage(storage), keep, Device(c10::kCPU));
  return Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
}
Tensor seen_as(const Tensor& t, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key),
                                                       t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}
bool ours(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// ---- one call -------------------------------------------------------------------------------

struct Call {
  const c10::FunctionSchema& schema;
  const std::string& op;
  std::map<c10::StorageImpl*, Storage> to_cpu, to_device;
  std::vector<std::pair<Tensor, bool>> touched;     // and whether it is written
  std::vector<std::pair<Tensor, Tensor>> written;   // ours, the alias
  int device = -1;
  bool strangers = false, cpu_index = false, masked = false, generated = false, factory = false;

  explicit Call(const c10::OperatorHandle& handle)
      : schema(handle.schema()), op(handle.schema().name()) {}

  bool indexes() const {
    return op == "aten::index" || op == "aten::index_put" || op == "aten::index_put_" ||
           op == "aten::_index_put_impl_";
  }
  bool is_view() const {
    for (auto& r : schema.returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) return true;
    return false;
  }
  int64_t numel() const { return touched.empty() ? 4 : touched[0].first.numel(); }

  Tensor in(const Tensor& t, bool write, bool index) {
    if (!t.defined()) return t;
    if (!ours(t)) {
      bool number = t.dim() == 0 && !write;  // goes along with the launch
      if (t.device().is_cpu() && index && t.numel()) cpu_index = true;
      if (t.device().is_cpu() && !number && !index) strangers = true;
      return t;
    }
    int index_ = t.device().index();
    TORCH_CHECK(device < 0 || device == index_, op, ": Expected all tensors to be on the same "
                "device, but found at least two devices, sim:", device, " and sim:", index_, "!");
    device = index_;
    touched.emplace_back(t, write);
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = to_cpu.find(key);
    if (found == to_cpu.end()) {
      found = to_cpu.emplace(key, on_cpu(t.storage())).first;
      to_device[found->second.unsafeGetStorageImpl()] = t.storage();
    }
    auto alias = seen_as(t, found->second, DispatchKey::CPU);
    if (write) written.emplace_back(t, alias);
    return alias;
  }

  Tensor out(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [own, alias] : written)
      if (alias.is_same(t)) return own;
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = to_device.find(key);
    if (found == to_device.end()) {
      auto made = Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), adopted(t.storage(), device),
          device_allocator(), true));
      found = to_device.emplace(key, made).first;
    }
    return seen_as(t, found->second, KEY);
  }

  void take(torch::jit::Stack* stack, size_t base) {
    auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      IValue& v = (*stack)[base + i];
      bool write = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (v.isTensor()) {
        v = in(v.toTensor(), write, indexes() && i > 0);
      } else if (v.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(in(t, write, false));
        v = list;
      } else if (v.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) {
          auto type = t && t->defined() ? t->scalar_type() : c10::kLong;
          masked |= type == c10::kBool || type == c10::kByte;
          list.push_back(t ? std::optional<Tensor>(in(*t, write, true)) : t);
        }
        v = list;
      } else if (v.isDevice() && v.toDevice().type() == TYPE) {
        factory = true;
        int index = v.toDevice().index();
        if (device < 0) device = index < 0 ? current_device() : index;
        v = Device(c10::kCPU);
      } else if (v.isGenerator()) {
        generated = true;
        auto g = v.toGenerator();
        TORCH_CHECK(g.device().type() == TYPE, op, ": Expected a 'sim' device type for generator "
                    "but found '", g.device(), "'");
        v = IValue(drawn(g, numel()));
      }
    }
    if (device < 0) device = current_device();
    TORCH_CHECK(!strangers, op, ": Expected all tensors to be on the same device, but found at "
                "least two devices, sim:", device, " and cpu!");
  }

  // A generator that was not given is the device's, wherever the schema has a place for one.
  void draw(torch::jit::Stack* stack, size_t base) {
    auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto* optional = arguments[i].type()->castRaw<c10::OptionalType>();
      if (!optional || optional->getElementType()->kind() != c10::TypeKind::GeneratorType) continue;
      if ((*stack)[base + i].isNone())
        (*stack)[base + i] = IValue(drawn(default_generator(device), numel()));
      generated = true;
    }
  }

  // Outputs that a kernel resized: their memory and sizes become ours.
  void resized() {
    for (auto& [own, alias] : written) {
      bool moved = own.storage().data() != alias.storage().data();
      if (moved) {
        auto* s = own.storage().unsafeGetStorageImpl();
        s->set_data_ptr_noswap(adopted(alias.storage(), device));
        s->set_nbytes(alias.storage().nbytes());
      }
      if (moved || own.sizes() != alias.sizes() || own.strides() != alias.strides() ||
          own.storage_offset() != alias.storage_offset())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                         alias.storage_offset());
    }
  }

  // Does the host need a value of the device before it can go on?
  bool needs_host(const c10::OperatorHandle& handle, bool scalar, bool sized) const {
    if (op == "aten::index") return cpu_index;  // a mask asks `nonzero` by itself
    if (indexes()) return masked || cpu_index;
    if (op == "aten::repeat_interleave" && sized) return false;
    if (handle.hasTag(at::Tag::data_dependent_output)) return true;
    if (handle.hasTag(at::Tag::dynamic_output_shape)) return true;
    return scalar && op != "aten::_fused_sdp_choice";
  }
};

void run(const c10::OperatorHandle& handle, Call& call, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  bool hidden = handle.hasTag(at::Tag::nondeterministic_seeded) && !call.generated;
  auto cpu = at::detail::getDefaultCPUGenerator();
  Tensor kept;
  if (hidden) {  // it draws from the CPU's own generator, which must not notice
    kept = Tensor(cpu.unsafeGetGeneratorImpl()->get_state());
    auto drawn_ = drawn(default_generator(call.device), call.numel());
    cpu.set_state(Tensor(drawn_.unsafeGetGeneratorImpl()->get_state()));
  }
  handle.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (hidden) cpu.set_state(kept);
}

void fallback(const c10::OperatorHandle& handle, DispatchKeySet, torch::jit::Stack* stack) {
  Call call(handle);
  size_t base = stack->size() - call.schema.arguments().size();
  bool sized = call.schema.arguments().size() && stack->back().isInt();
  call.take(stack, base);
  if (handle.hasTag(at::Tag::nondeterministic_seeded)) call.draw(stack, base);
  bool view = call.is_view();
  Place place = view ? 0 : here();
  int stream = stream_here(call.device);
  if (!view) {
    checker().launch(stream, call.op, place);
    for (auto& [t, write] : call.touched) checker().touch(t, stream, write, call.op, place);
  }
  run(handle, call, stack);
  call.resized();
  bool scalar = false;
  size_t results = call.schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    IValue& v = (*stack)[first + i];
    if (v.isTensor()) {
      v = call.out(v.toTensor());
      if (!view && ours(v.toTensor())) checker().touch(v.toTensor(), stream, true, call.op, place);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) {
        list.push_back(call.out(t));
        Tensor last = list.get(list.size() - 1);
        if (!view && ours(last)) checker().touch(last, stream, true, call.op, place);
      }
      v = list;
    } else {
      scalar |= (v.isBool() || v.isScalar()) && !call.touched.empty() && !call.factory;
    }
  }
  if (call.needs_host(handle, scalar, sized)) synchronise(call.op, stream);
}

// ---- copies ---------------------------------------------------------------------------------

thread_local int copying = 0;  // what this file itself does with memory of the host
struct Copying {
  Copying() { copying++; }
  ~Copying() { copying--; }
};

struct Late {
  bool to_host;
  Tensor host, kept;
  int stream;
  uint64_t time;
  Place place;
};
std::vector<Late>& late() {
  static auto* all = new std::vector<Late>();
  return *all;
}

void finish(Late& copy) {
  Copying inside;
  if (copy.to_host) {
    copy.host.copy_(copy.kept);
    return;
  }
  if (!memcmp(copy.host.data_ptr(), copy.kept.data_ptr(), copy.host.nbytes())) return;
  Side by{"copy to the device", checker().name(copy.stream), told(copy.place), shape(copy.host),
          false};
  Side host{"the program", "the host", "", shape(copy.host), true};
  auto bytes = std::to_string(copy.host.nbytes()) + " bytes of pinned host memory";
  checker().report({"changed source", by, host, bytes, 1});
}

void finish_some(const std::function<bool(const Late&)>& done) {
  std::vector<Late> now, later;
  {
    Lock lock(checker().mutex);
    for (auto& one : late()) (done(one) ? now : later).push_back(one);
    late().swap(later);
    bool arriving = std::any_of(late().begin(), late().end(), [](auto& one) { return one.to_host; });
    watch_the_host(arriving);
  }
  for (auto& one : now) finish(one);
}

bool is_pinned(const Tensor& t) {
  Lock lock(checker().mutex);
  auto* block = checker().find(t.storage().data());
  return block && block->device < 0;
}

Tensor between_devices(const Tensor& source, const Tensor& target, Place place) {
  int from = source.device().index(), to = target.device().index();
  int s = stream_here(from), other = stream_here(to);
  if (from != to) stream_waits(s, checker().snapshot(other));
  checker().launch(s, "copy", place);
  checker().touch(source, s, false, "copy", place);
  checker().touch(target, s, true, "copy", place);
  host_alias(target).copy_(host_alias(source));
  if (from != to) stream_waits(other, checker().snapshot(s));
  return target;
}

Tensor to_host(const Tensor& source, const Tensor& target, bool non_blocking, Place place) {
  static const std::string name = "copy to the host";
  int s = stream_here(source.device().index());
  bool pinned = is_pinned(target);
  uint64_t time = checker().launch(s, name, place);
  checker().touch(source, s, false, name, place);
  if (pinned) checker().touch(target, s, true, name, place);
  auto alias = host_alias(source);
  if (!non_blocking || !pinned || !target.is_contiguous()) {
    target.copy_(alias);
    synchronise(pinned || !non_blocking ? name : name + " (pageable memory)", s);
    return target;
  }
  auto kept = alias.to(target.scalar_type()).expand(target.sizes());
  kept = kept.clone(at::MemoryFormat::Contiguous);
  memset(target.data_ptr(), 0xFF, target.nbytes());
  Lock lock(checker().mutex);
  late().push_back({true, target, kept, s, time, place});
  watch_the_host(true);
  return target;
}

Tensor to_device(const Tensor& source, const Tensor& target, bool non_blocking, Place place) {
  static const std::string name = "copy to the device";
  int s = stream_here(target.device().index());
  bool pinned = is_pinned(source);
  uint64_t time = checker().launch(s, name, place);
  checker().touch(target, s, true, name, place);
  if (pinned) {
    checker().touch(source, s, false, name, place);
    auto clock = checker().snapshot(s);  // what came into the source before, in order, is there
    finish_some([&](const Late& one) {
      return one.to_host && known(clock, one.stream) >= one.time &&
             one.host.storage().data() == source.storage().data();
    });
  }
  host_alias(target).copy_(source);
  if (!non_blocking) {
    synchronise(name, s);
  } else if (pinned && source.is_contiguous()) {
    auto kept = source.clone();
    Lock lock(checker().mutex);
    late().push_back({false, source, kept, s, time, place});
  }
  return target;
}

}  // namespace

Tensor host_alias(const Tensor& tensor) {
  return seen_as(tensor, on_cpu(tensor.storage()), DispatchKey::CPU);
}

std::optional<Side> arriving(const Tensor& t) {
  if (copying || !t.defined() || !t.device().is_cpu() || !t.has_storage() || !t.numel()) return {};
  Lock lock(checker().mutex);
  auto where = [](const Tensor& one) { return footprint(one, (size_t)one.storage().data()); };
  for (auto& one : late())
    if (one.to_host && overlap(where(one.host), where(t)))
      return Side{"copy to the host", checker().name(one.stream), told(one.place), shape(one.host),
                  true};
  return {};
}

void finish_copies(const Clock& clock) {
  finish_some([&](const Late& one) { return known(clock, one.stream) >= one.time; });
}

Tensor copied(const Tensor& source, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Place place = here();
  Copying inside;
  if (ours(source) && ours(target)) return between_devices(source, target, place);
  if (ours(source)) return to_host(source, target, non_blocking, place);
  return to_device(source, target, non_blocking, place);
}

namespace {

Tensor copy_resized(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copied(source, target, false);
}

// ---- what has no kernel of the CPU ------------------------------------------------------------

using Dtype = std::optional<at::ScalarType>;

Tensor empty(at::IntArrayRef size, Dtype dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(KEY),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype,
                     std::optional<at::Layout>, std::optional<Device> device,
                     std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DispatchKeySet(KEY),
                                           c10::dtype_or_default(dtype));
}
Tensor& set_to(Tensor& t, Storage source, int64_t offset, at::IntArrayRef size,
               at::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == TYPE, "set_: the storage is on ", source.device());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return t;
}
Tensor& set_whole(Tensor& t, Storage source) {
  int64_t items = source.nbytes() / t.element_size();
  return set_to(t, source, 0, {items}, {1});
}
void record_stream(Tensor& t, c10::Stream s) {
  checker().record(t.storage().data(), checker().stream(s.device_index(), s.id()));
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more,
                   c10::SymInt groups) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  torch::jit::Stack stack{x, w, b ? IValue(*b) : IValue(), IValue(stride.vec()),
                          IValue(padding.vec()), IValue(dilation.vec()), transposed,
                          IValue(more.vec()), IValue(groups)};
  fallback(op, {}, &stack);
  return stack[0].toTensor();
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& w, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef more, c10::SymInt groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  c10::List<bool> wanted;
  for (bool one : mask) wanted.push_back(one);
  int64_t bias = transposed ? (groups * w.sym_size(1)).expect_int() : w.size(0);
  torch::jit::Stack stack{grad, x, w, IValue(std::vector<int64_t>{bias}), IValue(stride.vec()),
                          IValue(padding.vec()), IValue(dilation.vec()), transposed,
                          IValue(more.vec()), IValue(groups), IValue(wanted)};
  fallback(op, {}, &stack);
  auto tensor = [&](int i) { return stack[i].isTensor() ? stack[i].toTensor() : Tensor(); };
  return {tensor(0), tensor(1), tensor(2)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Storage", set_whole);
  m.impl("_copy_from", copied);
  m.impl("_copy_from_and_resize", copy_resized);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// ---- autocast, by the lists that CUDA has -----------------------------------------------------

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;  // the lists name its types, before 2.13 also those of named dims
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace
}  // namespace simulated
