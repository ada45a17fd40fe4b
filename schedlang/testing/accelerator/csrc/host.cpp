// What the host does with pinned memory before the copy into it is known to be done.
//
// Operators of the CPU are looked at while such a copy is on its way, and only then.  What reads by
// an address (`numpy`, `tolist`) is not seen: it finds NaN.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <unordered_map>

namespace simulated {
namespace {

// The arguments of an operator whose bytes it uses; of views, and of what only asks for shapes, none.
std::vector<bool> uses(const c10::OperatorName& name) {
  static const std::set<std::string> shapes = {"aten::set_", "aten::resize_"};
  auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || !op->hasSchema() || shapes.count(name.name)) return {};
  bool copies = name.name == "aten::copy_";  // it serves all devices alike
  if (!copies && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return {};
  std::vector<bool> found;
  for (auto& argument : op->schema().arguments()) {
    auto* alias = argument.alias_info();
    found.push_back(!alias || alias->isWrite());
  }
  return found;
}

const std::vector<bool>& known_uses(const c10::OperatorName& name) {
  thread_local std::unordered_map<c10::OperatorName, std::vector<bool>> all;
  auto found = all.find(name);
  return (found == all.end() ? all.emplace(name, uses(name)).first : found)->second;
}

template <class F>
void each_tensor(const c10::IValue& value, F use) {
  if (value.isTensor()) use(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& one : value.toTensorVector()) use(one);
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  auto name = call.operator_name();
  if (!name) return nullptr;
  auto& used = known_uses(*name);
  auto inputs = call.inputs();
  bool device = false;  // what the device does is followed on its streams
  std::optional<Side> copy;
  at::Tensor tensor;
  for (size_t i = 0; i < inputs.size() && i < used.size(); i++)
    each_tensor(inputs[i], [&](const at::Tensor& one) {
      device |= one.defined() && one.device().type() == TYPE;
      if (copy || !used[i]) return;
      copy = arriving(one);
      if (copy) tensor = one;
    });
  if (!copy || device) return nullptr;
  Side use{name->name, "the host", told(here()), shape(tensor), false};
  auto bytes = std::to_string(tensor.nbytes()) + " bytes of pinned host memory";
  checker().report({"early use", *copy, use, bytes, 1});
  return nullptr;
}

}  // namespace

void watch_the_host(bool watched) {
  static bool now = true;
  static auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  if (now == watched) return;
  watched ? at::reenableCallback(handle) : at::disableCallback(handle);
  now = watched;
}

}  // namespace simulated
