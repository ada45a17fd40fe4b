// The happens-before checker: clocks of streams and host, accesses to memory, what is not ordered.
//
// Every kernel runs at once, on the thread that launched it.  What could have run at another time on
// a real device is known from vector clocks: one entry a stream, raised by each launch, joined where
// a stream waits for an event or another stream, and by the host where it synchronises.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

// ---- clocks ---------------------------------------------------------------------------------

using Clock = std::vector<uint64_t>;  // by index of stream: the launches on it that are known

inline uint64_t known(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}
inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

using Place = uint32_t;  // a line of Python or a node of backward; 0: not asked for
Place here();            // where this thread is; takes the interpreter's lock, so never under ours
std::string told(Place place);

struct Stream {
  int device;
  int64_t id;      // as c10::Stream has it; 0 is the default stream of each device
  Place made;
  Clock clock;     // what is ordered before the next launch
  uint64_t launches = 0;
};

// ---- memory ---------------------------------------------------------------------------------

// Bytes of a strided tensor: runs of `chunk` bytes, repeated along `dims` (the longest stride first).
struct Footprint {
  struct Dim { int64_t count; size_t stride; };
  size_t low = 0, chunk = 0;
  c10::SmallVector<Dim, 3> dims;
  size_t high() const;  // one past the last byte
};
Footprint footprint(const at::Tensor& tensor, size_t offset);
bool overlap(const Footprint& a, const Footprint& b);
bool covers(const Footprint& outer, const Footprint& inner);

struct Access {
  Footprint where;
  int stream;
  uint64_t time;
  bool write;
  const std::string* op;  // interned
  Place place;
  std::string tensor;     // "float32[4, 16]"
};

struct Block {
  char* data;
  size_t bytes;
  int device;  // -1: pinned memory of the host
  int stream;  // on which it was allocated; -1 for the host
  Place made;
  std::vector<Access> accesses;
  std::vector<Access> before;  // of memory that was freed while other streams may still use it
  std::set<int> recorded;      // streams named by record_stream
};

// ---- what is told ---------------------------------------------------------------------------

struct Side { std::string op, stream, place, tensor; bool write; };
struct Report { std::string kind; Side first, second; std::string memory; int64_t count; };
struct Synchronisation { std::string what, place; };
struct Operation {
  const std::string* op; int stream; uint64_t time; Clock clock; Place place; std::string label;
};

enum class Check { off, collect, raise };

// ---- the state ------------------------------------------------------------------------------

// One process has one; each public function takes the lock by itself.
class Checker {
 public:
  std::recursive_mutex mutex;
  Check check = Check::collect;
  bool forbid = false;    // host synchronisations
  bool counting = true;
  bool timeline = false;  // keep every operation
  bool lines = true;      // look for lines of Python
  int devices = 0;        // as the program sees it; 0: nothing is simulated
  std::string label;
  std::vector<Report> reports;
  std::vector<Synchronisation> synchronisations;
  std::vector<Operation> operations;
  std::map<int, int64_t> bytes, peak;
  Clock host;

  int stream(int device, int64_t id, Place made = 0);
  int64_t new_stream(int device, Place made);
  const Stream& at(int index) const { return streams_[index]; }
  std::string name(int stream) const;

  // A launch: the time it got.  `touch` after it says what it reads and writes.
  uint64_t launch(int stream, const std::string& op, Place place);
  void touch(const at::Tensor& t, int stream, bool write, const std::string& op, Place place);

  void waits(int stream, const Clock& clock);
  Clock snapshot(int stream);
  Clock host_learns(const Clock& clock);
  bool host_knows(const Clock& clock);
  Clock everything(int device);  // all that was launched on a device

  void synchronised(const std::string& what, Place place);  // counts, or refuses

  void allocated(char* data, size_t bytes, int device, int stream, Place place);  // -1, -1: pinned
  void freed(void* data);
  void record(const void* data, int stream);
  Block* find(const void* data);  // under the lock
  void report(Report report);
  void reset();

 private:
  std::vector<Stream> streams_;
  std::map<std::pair<int, int64_t>, int> index_;
  std::map<char*, Block> blocks_;
  // freed while others may still use it: by stream of allocation, the last access of each other
  std::map<int, std::map<int, Access>> hazards_;
  std::set<std::string> told_;
  int64_t next_id_ = 1;

  void race(const char* kind, const Access& first, const Access& second, const Block& block);
  void prune(std::vector<Access>& accesses, const Clock& clock);
};

Checker& checker();
const std::string* interned(const std::string& text);
std::string shape(const at::Tensor& tensor);

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace simulated
