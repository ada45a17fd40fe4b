// What the parts of the device share: its key, the streams of this thread, and orders that publish.
#pragma once

#include "checker.h"

#include <ATen/Generator.h>

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr int MOST = 16;  // devices of a process

int current_device();
void set_current_device(int device);
int64_t current_stream(int device);  // of this thread, as c10::Stream has it
void set_current_stream(int device, int64_t id);
int stream_here(int device);         // the same as index of the checker

// Orders by which results of the collective library become visible (see works.cpp).
void stream_waits(int stream, const Clock& clock);
void host_learns(const Clock& clock);
void synchronise(const std::string& what, int stream);
void publish(const Clock& clock);

at::Tensor host_alias(const at::Tensor& tensor);  // the same memory, as a tensor of the CPU
at::Generator& default_generator(int device);
at::Generator new_generator(int device);
at::Generator drawn(const at::Generator& generator, int64_t numbers);  // of the CPU, for one kernel
at::Allocator* device_allocator();
c10::DataPtr adopted(const c10::Storage& storage, int device);  // memory that a CPU kernel took

// Copies to and from pinned memory that end when the host learns of it.
void finish_copies(const Clock& known_to_host);
std::optional<Side> arriving(const at::Tensor& host);  // the copy that it waits for, if there is one
void watch_the_host(bool watched);                     // while there is such a copy (see host.cpp)
at::Tensor copied(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

}  // namespace simulated
