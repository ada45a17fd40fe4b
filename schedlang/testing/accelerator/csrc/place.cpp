// Where a thread is: the line of Python, and inside of torch also the line that called it.
#include <Python.h>

#include "checker.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <unordered_map>

namespace simulated {
namespace {

// ours: of this package, or of a mode through which the call of another goes; never shown
struct Code { std::string file; bool torch, ours; };

std::mutex& guard() {
  static auto* one = new std::mutex();
  return *one;
}
std::vector<std::string>& texts() {
  static auto* all = new std::vector<std::string>{""};
  return *all;
}

Place numbered(const std::string& text) {
  static auto* known = new std::unordered_map<std::string, Place>();
  std::lock_guard<std::mutex> lock(guard());
  auto [found, added] = known->emplace(text, texts().size());
  if (added) texts().push_back(text);
  return found->second;
}

// The last parts of a path: enough to find the file again.
std::string shortened(const std::string& path, bool torch) {
  size_t start = torch ? path.rfind("/torch/") : path.rfind('/');
  return start == std::string::npos ? path : path.substr(start + 1);
}

const Code& known_code(PyCodeObject* code) {  // under the interpreter's lock
  static auto* all = new std::unordered_map<PyCodeObject*, Code>();
  auto found = all->find(code);
  if (found != all->end()) return found->second;
  Py_INCREF(code);  // the address stays its own
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  std::string path = file ? file : "?";
  const char* name = PyUnicode_AsUTF8(code->co_name);
  std::string called = name ? name : "";
  bool ours = path.find("/testing/accelerator/") != std::string::npos ||
      path.find("/contextlib.py") != std::string::npos ||
      called == "__torch_function__" || called == "__torch_dispatch__";
  bool torch = path.find("/torch/") != std::string::npos;
  return all->emplace(code, Code{shortened(path, torch), torch, ours}).first->second;
}

std::string line(PyFrameObject* frame, PyCodeObject* code) {
  return known_code(code).file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

struct Key {
  void *a, *b;
  int x, y;
  bool operator==(const Key& o) const { return a == o.a && b == o.b && x == o.x && y == o.y; }
};
struct Hash {
  size_t operator()(const Key& k) const {
    return std::hash<void*>()(k.a) * 31 + std::hash<void*>()(k.b) * 17 + k.x * 131 + k.y;
  }
};

// The innermost frame, and if that is torch's own the innermost that is not.
Place frames() {
  static auto* places = new std::unordered_map<Key, Place, Hash>();
  PyFrameObject* inner = PyEval_GetFrame();
  if (!inner) return 0;
  Py_INCREF(inner);
  PyFrameObject* outer = (PyFrameObject*)Py_NewRef((PyObject*)inner);
  for (int depth = 0; outer && depth < 60; depth++) {
    PyCodeObject* code = PyFrame_GetCode(outer);
    bool inside = known_code(code).torch || known_code(code).ours;
    Py_DECREF(code);
    if (!inside) break;
    PyFrameObject* next = PyFrame_GetBack(outer);
    Py_DECREF(outer);
    outer = next;
  }
  PyCodeObject* a = PyFrame_GetCode(inner);
  PyCodeObject* b = outer ? PyFrame_GetCode(outer) : nullptr;
  Key key{a, b, PyFrame_GetLasti(inner), outer ? PyFrame_GetLasti(outer) : -1};
  auto found = places->find(key);
  if (found == places->end()) {
    std::string text = line(inner, a);
    if (outer && known_code(a).ours) text = line(outer, b);
    else if (outer && outer != inner) text = line(outer, b) + " (in " + text + ")";
    found = places->emplace(key, numbered(text)).first;
  }
  Py_DECREF(a);
  Py_XDECREF(b);
  Py_DECREF(inner);
  Py_XDECREF(outer);
  return found->second;
}

}  // namespace

std::string told(Place place) {
  std::lock_guard<std::mutex> lock(guard());
  return texts().at(place);
}

Place here() {
  if (!checker().lines || !Py_IsInitialized()) return 0;
  Place place = 0;
  if (PyGILState_GetThisThreadState()) {  // a thread that has run Python before
    auto state = PyGILState_Ensure();
    place = frames();
    PyGILState_Release(state);
  }
  auto node = torch::autograd::get_current_node();
  if (!node) return place;
  return numbered((place ? told(place) + ", " : "") + node->name() + " of backward");
}

}  // namespace simulated
