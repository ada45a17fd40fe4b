// What two streams do to the same bytes without an order between them is found here.
#include "checker.h"

#include <sstream>
#include <unordered_set>

namespace simulated {

Checker& checker() {
  static Checker* one = new Checker();  // never destroyed: tensors outlive everything
  return *one;
}

const std::string* interned(const std::string& text) {
  static auto* all = new std::unordered_set<std::string>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  return &*all->insert(text).first;
}

std::string shape(const at::Tensor& tensor) {
  std::ostringstream out;
  std::string dtype = at::toString(tensor.scalar_type());
  static const std::map<std::string, std::string> names = {
      {"Float", "float32"}, {"Double", "float64"}, {"Half", "float16"}, {"BFloat16", "bfloat16"},
      {"Long", "int64"},    {"Int", "int32"},      {"Bool", "bool"},    {"Byte", "uint8"}};
  auto found = names.find(dtype);
  out << (found == names.end() ? dtype : found->second) << "[";
  for (int64_t d = 0; d < tensor.dim(); d++) out << (d ? ", " : "") << tensor.size(d);
  out << "]";
  return out.str();
}

// ---- footprints -----------------------------------------------------------------------------

size_t Footprint::high() const {
  size_t last = low;
  for (auto& dim : dims) last += (dim.count - 1) * dim.stride;
  return last + chunk;
}

Footprint footprint(const at::Tensor& tensor, size_t offset) {
  Footprint f;
  size_t item = tensor.element_size();
  f.low = offset + tensor.storage_offset() * item;
  f.chunk = tensor.numel() ? item : 0;
  if (!tensor.numel()) return f;
  for (int64_t d = 0; d < tensor.dim(); d++)
    if (tensor.size(d) > 1 && tensor.stride(d) > 0)
      f.dims.push_back({tensor.size(d), tensor.stride(d) * item});
  std::sort(f.dims.begin(), f.dims.end(), [](auto& a, auto& b) { return a.stride > b.stride; });
  while (!f.dims.empty() && f.dims.back().stride <= f.chunk) {  // the runs touch: one longer run
    auto dim = f.dims.back();
    f.dims.pop_back();
    f.chunk += (dim.count - 1) * dim.stride;
  }
  return f;
}

namespace {

Footprint part(const Footprint& whole, int64_t index) {
  Footprint f;
  f.low = whole.low + index * whole.dims[0].stride;
  f.chunk = whole.chunk;
  f.dims.append(whole.dims.begin() + 1, whole.dims.end());
  return f;
}

// Exact, until the budget is spent: then "yes", which may be a false report and never a missed one.
bool meets(const Footprint& a, const Footprint& b, int& budget) {
  if (!a.chunk || !b.chunk || a.high() <= b.low || b.high() <= a.low) return false;
  if (a.dims.empty() && b.dims.empty()) return true;
  if (--budget < 0) return true;
  bool first = !a.dims.empty() && (b.dims.empty() || a.high() - a.low >= b.high() - b.low);
  const auto& split = first ? a : b;
  const auto& other = first ? b : a;
  size_t stride = split.dims[0].stride, length = part(split, 0).high() - split.low;
  int64_t from = other.low >= split.low + length ? (other.low - split.low - length) / stride : 0;
  int64_t to = other.high() > split.low ? (other.high() - split.low - 1) / stride : 0;
  for (int64_t i = from; i <= std::min(to, split.dims[0].count - 1); i++)
    if (meets(part(split, i), other, budget)) return true;
  return false;
}

}  // namespace

bool overlap(const Footprint& a, const Footprint& b) {
  int budget = 20000;
  return meets(a, b, budget);
}

bool covers(const Footprint& outer, const Footprint& inner) {
  if (outer.dims.empty()) return outer.low <= inner.low && inner.high() <= outer.high();
  if (outer.low != inner.low || outer.chunk != inner.chunk) return false;
  if (outer.dims.size() != inner.dims.size()) return false;
  for (size_t i = 0; i < outer.dims.size(); i++)
    if (outer.dims[i].count != inner.dims[i].count || outer.dims[i].stride != inner.dims[i].stride)
      return false;
  return true;
}

// ---- streams --------------------------------------------------------------------------------

int Checker::stream(int device, int64_t id, Place made) {
  Lock lock(mutex);
  auto key = std::make_pair(device, id);
  auto found = index_.find(key);
  if (found != index_.end()) return found->second;
  int index = streams_.size();
  streams_.push_back({device, id, made, {}, 0});
  index_[key] = index;
  return index;
}

int64_t Checker::new_stream(int device, Place made) {
  Lock lock(mutex);
  int64_t id = next_id_++;
  stream(device, id, made);
  return id;
}

std::string Checker::name(int stream) const {
  if (stream < 0) return "the host";
  auto& s = streams_[stream];
  std::string text = "sim:" + std::to_string(s.device);
  if (s.id == 0) return "the default stream of " + text;
  text = "stream " + std::to_string(s.id) + " of " + text;
  return s.made ? text + " (made at " + told(s.made) + ")" : text;
}

uint64_t Checker::launch(int stream, const std::string& op, Place place) {
  Lock lock(mutex);
  auto& s = streams_[stream];
  join(s.clock, host);
  if (static_cast<int>(s.clock.size()) <= stream) s.clock.resize(stream + 1, 0);
  s.clock[stream] = ++s.launches;
  if (timeline) operations.push_back({interned(op), stream, s.launches, s.clock, place, label});
  return s.launches;
}

void Checker::waits(int stream, const Clock& clock) {
  Lock lock(mutex);
  join(streams_[stream].clock, clock);
}

Clock Checker::snapshot(int stream) {
  Lock lock(mutex);
  join(streams_[stream].clock, host);
  return streams_[stream].clock;
}

Clock Checker::host_learns(const Clock& clock) {
  Lock lock(mutex);
  join(host, clock);
  return host;
}

bool Checker::host_knows(const Clock& clock) {
  Lock lock(mutex);
  for (size_t i = 0; i < clock.size(); i++)
    if (known(host, i) < clock[i]) return false;
  return true;
}

Clock Checker::everything(int device) {
  Lock lock(mutex);
  Clock all;
  for (auto& s : streams_)
    if (s.device == device) join(all, s.clock);
  return all;
}

void Checker::synchronised(const std::string& what, Place place) {
  Lock lock(mutex);
  if (!devices || !counting) return;
  TORCH_CHECK(!forbid, "a synchronisation of host and device, which is forbidden here: ", what);
  synchronisations.push_back({what, told(place)});
}

// ---- memory ---------------------------------------------------------------------------------

Block* Checker::find(const void* data) {
  auto next = blocks_.upper_bound((char*)data);
  if (next == blocks_.begin()) return nullptr;
  auto& block = (--next)->second;
  bool inside = (char*)data < block.data + std::max<size_t>(block.bytes, 1);
  return inside ? &block : nullptr;
}

void Checker::allocated(char* data, size_t size, int device, int stream, Place place) {
  Lock lock(mutex);
  Block block{data, size, device, stream, place, {}, {}, {}};
  if (device >= 0) {
    bytes[device] += size;
    peak[device] = std::max(peak[device], bytes[device]);
    auto& s = streams_[stream];
    auto& left = hazards_[stream];
    join(s.clock, host);
    for (auto next = left.begin(); next != left.end();) {
      if (known(s.clock, next->first) >= next->second.time) {
        next = left.erase(next);
      } else {
        block.before.push_back(next->second);
        ++next;
      }
    }
  }
  blocks_[data] = std::move(block);
}

void Checker::freed(void* data) {
  Lock lock(mutex);
  auto found = blocks_.find((char*)data);
  if (found == blocks_.end()) return;
  auto& block = found->second;
  if (block.device >= 0) bytes[block.device] -= block.bytes;
  if (block.stream >= 0 && check != Check::off) {
    auto& left = hazards_[block.stream];
    for (auto* some : {&block.accesses, &block.before})
      for (auto& access : *some)
        if (access.stream != block.stream && !block.recorded.count(access.stream))
          if (left[access.stream].time <= access.time) left[access.stream] = access;
  }
  blocks_.erase(found);
}

void Checker::record(const void* data, int stream) {
  Lock lock(mutex);
  if (auto* block = find(data)) block->recorded.insert(stream);
}

// What everybody knows cannot race any more.
void Checker::prune(std::vector<Access>& accesses, const Clock& clock) {
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                     [&](auto& a) { return known(clock, a.stream) >= a.time; }), accesses.end());
}

void Checker::touch(const at::Tensor& t, int s, bool write, const std::string& op, Place place) {
  if (!t.defined() || !t.has_storage() || !t.storage().data() || !t.numel()) return;
  Lock lock(mutex);
  if (check == Check::off) return;
  auto* block = find(t.storage().data());
  if (!block) return;
  size_t offset = (char*)t.storage().data() - block->data;
  auto& clock = streams_[s].clock;
  Access now{footprint(t, offset), s, streams_[s].launches, write, interned(op), place, shape(t)};
  for (auto& then : block->before)
    if (known(clock, then.stream) < then.time) race("reuse", then, now, *block);
  prune(block->before, clock);
  for (auto& then : block->accesses)
    if ((then.write || write) && then.stream != s && known(clock, then.stream) < then.time &&
        overlap(then.where, now.where))
      race("race", then, now, *block);
  auto& all = block->accesses;
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& then) {
              return covers(now.where, then.where) && (write || (!then.write && then.stream == s));
            }), all.end());
  all.push_back(std::move(now));
  if (all.size() > 256) prune(all, host);
}

// ---- reports --------------------------------------------------------------------------------

void Checker::race(const char* kind, const Access& first, const Access& second, const Block& b) {
  auto side = [&](const Access& a) {
    return Side{*a.op, name(a.stream), told(a.place), a.tensor, a.write};
  };
  std::ostringstream memory;
  memory << b.bytes << " bytes of " << (b.device < 0 ? "pinned host memory" : "device memory");
  if (b.made) memory << ", allocated at " << told(b.made);
  report({kind, side(first), side(second), memory.str(), 1});
}

void Checker::report(Report r) {
  Lock lock(mutex);
  if (check == Check::off) return;
  for (auto& old : reports)
    if (old.kind == r.kind && old.first.op == r.first.op && old.first.place == r.first.place &&
        old.first.stream == r.first.stream && old.second.op == r.second.op &&
        old.second.place == r.second.place && old.second.stream == r.second.stream) {
      old.count++;
      return;
    }
  reports.push_back(r);
  if (check == Check::raise && r.kind != "early use")  // nobody would hear it: simulation.py raises
    TORCH_CHECK(false, "sim ", r.kind, ": ", r.second.op, " at ", r.second.place, " on ",
                r.second.stream, r.second.write ? " writes " : " reads ", r.second.tensor,
                " without being ordered after ", r.first.op, " at ", r.first.place, " on ",
                r.first.stream, ", which ", r.first.write ? "writes " : "reads ", r.first.tensor);
}

void Checker::reset() {
  Lock lock(mutex);
  reports.clear();
  synchronisations.clear();
  operations.clear();
  hazards_.clear();
  label.clear();
  for (auto& s : streams_) join(host, s.clock);
  for (auto& [data, block] : blocks_) block.accesses.clear(), block.before.clear();
  for (auto& [device, now] : bytes) peak[device] = now;
}

}  // namespace simulated
