// The device itself: memory, streams and events, generators, and what torch asks of a backend.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

namespace simulated {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;

namespace {

thread_local int device_now = 0;
thread_local int64_t stream_now[MOST] = {};

int index_of(Device device) { return device.index() < 0 ? device_now : device.index(); }
int index_of(const c10::Stream& s) { return checker().stream(index_of(s.device()), s.id()); }

// ---- memory ---------------------------------------------------------------------------------

// Filled with 0xFF when it is taken and when it is given back: NaN, and no valid index.
DataPtr taken(size_t bytes, int device) {
  bool pinned = device < 0;
  int most = checker().devices ? checker().devices : MOST;
  TORCH_CHECK(pinned || device < most, "there is no device sim:", device);
  size_t size = std::max<size_t>(bytes, 1);
  char* data = (char*)c10::alloc_cpu(size);
  memset(data, 0xFF, size);
  checker().allocated(data, bytes, device, pinned ? -1 : stream_here(device), here());
  struct Owned { char* data; size_t size; };
  auto free = [](void* context) {
    auto* owned = (Owned*)context;
    checker().freed(owned->data);
    memset(owned->data, 0xFF, owned->size);
    c10::free_cpu(owned->data);
    delete owned;
  };
  return DataPtr(data, new Owned{data, size}, free, pinned ? Device(c10::kCPU) : Device(TYPE, device));
}

struct OnDevice final : c10::Allocator {
  DataPtr allocate(size_t bytes) override { return taken(bytes, device_now); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
struct Pinned final : c10::Allocator {
  DataPtr allocate(size_t bytes) override { return taken(bytes, -1); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
OnDevice on_device;
Pinned pinned;
REGISTER_ALLOCATOR(TYPE, &on_device);

// ---- streams and events ---------------------------------------------------------------------

struct Event {
  Clock clock;
  bool asked = false;  // a first query finds it unfinished, the next one does not
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device device) const override {
    auto before = device_now;
    if (device.index() >= 0) device_now = device.index();
    return Device(TYPE, before);
  }
  Device getDevice() const override { return Device(TYPE, device_now); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return MOST; }  // autograd asks once

  static c10::Stream made(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, device), id);
  }
  c10::Stream getStream(Device d) const override {
    return made(index_of(d), stream_now[index_of(d)]);
  }
  c10::Stream getDefaultStream(Device d) const override { return made(index_of(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    return made(index_of(d), checker().new_stream(index_of(d), here()));
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    stream_now[index_of(s.device())] = s.id();
    return before;
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *(Event*)*event = Event{checker().snapshot(index_of(s)), false};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) stream_waits(index_of(s), ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = (Event*)event;
    if (!e || checker().host_knows(e->clock)) return true;
    bool asked = std::exchange(e->asked, true);
    if (asked) host_learns(e->clock);
    return asked;
  }
  void synchronizeEvent(void* event) const override {
    checker().synchronised("event.synchronize", here());
    if (event) host_learns(((Event*)event)->clock);
  }
  bool queryStream(const c10::Stream& s) const override {
    thread_local Clock asked;
    auto clock = checker().snapshot(index_of(s));
    if (checker().host_knows(clock)) return true;
    bool again = asked == clock;
    asked = clock;
    if (again) host_learns(clock);
    return again;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    synchronise("stream.synchronize", index_of(s));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    checker().synchronised("synchronize", here());
    host_learns(checker().everything(device < 0 ? device_now : device));
  }
  void recordDataPtrOnStream(const DataPtr& data, const c10::Stream& s) const override {
    checker().record(data.get(), index_of(s));
  }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers -------------------------------------------------------------------------

// 16 bytes of state, seed and offset, as CUDA has: DTensor's tracker moves the offset.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_, offset_ = 0;
  Generator(DeviceIndex index, uint64_t seed)
      : GeneratorImpl(Device(TYPE, index), c10::DispatchKeySet(KEY)), seed_(seed) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                    state.device().is_cpu(), "the state of a generator is 16 bytes on the host");
    auto* words = (const uint64_t*)state.data();
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::kByte);
    auto* words = (uint64_t*)state.mutable_data_ptr();
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* twin = new Generator(device().index(), seed_);
    twin->offset_ = offset_;
    return twin;
  }
  static c10::DeviceType device_type() { return TYPE; }
};

// ---- what torch asks ------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return checker().devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return checker().devices > 0; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return checker().devices; }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(device_now, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    return default_generator(d);
  }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(checker().mutex);
    auto* block = checker().find(data);
    return block && block->device < 0;
  }
  Device getDeviceFromPtr(void* data) const override {
    Lock lock(checker().mutex);
    auto* block = checker().find(data);
    return Device(TYPE, block ? block->device : 0);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* s = storage.unsafeGetStorageImpl();
    int device = s->device().index();
    auto data = bytes ? taken(bytes, device) : DataPtr(nullptr, Device(TYPE, device));
    if (bytes && s->nbytes()) memcpy(data.get(), s->data(), std::min(bytes, s->nbytes()));
    s->set_data_ptr_noswap(std::move(data));
    s->set_nbytes(bytes);
  }
};

}  // namespace

// ---- shared with the other files --------------------------------------------------------------

int current_device() { return device_now; }
void set_current_device(int device) {
  TORCH_CHECK(device < checker().devices || !checker().devices, "there is no device sim:", device,
              ": ", checker().devices, " are simulated");
  if (device >= 0) device_now = device;
}
int64_t current_stream(int device) { return stream_now[device]; }
void set_current_stream(int device, int64_t id) { stream_now[device] = id; }
int stream_here(int device) { return checker().stream(device, stream_now[device]); }

void stream_waits(int stream, const Clock& clock) {
  checker().waits(stream, clock);
  publish(clock);
}
void host_learns(const Clock& clock) {
  publish(clock);
  finish_copies(checker().host_learns(clock));
}
void synchronise(const std::string& what, int stream) {
  checker().synchronised(what, here());
  host_learns(checker().snapshot(stream));
}

at::Allocator* device_allocator() { return &on_device; }

DataPtr adopted(const c10::Storage& storage, int device) {
  char* data = (char*)storage.mutable_data();
  if (!data) return DataPtr(nullptr, Device(TYPE, device));
  checker().allocated(data, storage.nbytes(), device, stream_here(device), here());
  auto free = [](void* context) {
    auto* held = (c10::Storage*)context;
    checker().freed(held->mutable_data());
    if (held->use_count() == 1) memset(held->mutable_data(), 0xFF, held->nbytes());
    delete held;
  };
  return DataPtr(data, new c10::Storage(storage), free, Device(TYPE, device));
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? device_now : device, c10::default_rng_seed_val);
}
at::Generator& default_generator(int device) {
  static auto* all = new std::map<int, at::Generator>();
  Lock lock(checker().mutex);
  if (device < 0) device = device_now;
  auto found = all->find(device);
  if (found == all->end()) found = all->emplace(device, new_generator(device)).first;
  return found->second;
}
at::Generator drawn(const at::Generator& generator, int64_t numbers) {
  auto* g = (Generator*)generator.unsafeGetGeneratorImpl();
  auto seed = g->seed_ * 0x9E3779B97F4A7C15ull + g->offset_ * 0xBF58476D1CE4E5B9ull + 1;
  g->offset_ += (std::max<int64_t>(numbers, 1) + 3) / 4 * 4;
  return at::detail::createCPUGenerator(seed);
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simulated
