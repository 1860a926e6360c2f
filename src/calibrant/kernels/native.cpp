// A loss on a GPU, the same one again: what `fused.py` does, from C++.
//
// Called from Python, a loss takes longer to be launched than to be computed. Here a call that is like the one
// before it (shapes, layouts, types, the loss's own tensors) goes straight to the driver, with the kernels that
// Triton has compiled. Whatever is different is left to Python: the call then gives None.

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors of a call, by number; between TARGET and FOUND stand those of the loss.
enum { LOGITS = 0, TARGET = 1, OWN = 2, FOUND = 9, VALUE = 10, GRADIENT = 11, UPSTREAM = 12, TENSORS = 13 };
using Pointers = std::array<const void*, TENSORS>;

// The functions of CUDA that are needed, as Python found them.
struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*stream_of)(int32_t, void**);
  int (*context)(void**);
  int (*retain_context)(void**, int);
  int (*set_context)(void*);
};

struct Parameter {
  long tensor;     // its number, or -1 for
  uint64_t value;  // a number, as its bits
};

struct Kernel {
  void* function = nullptr;
  unsigned programs = 0, threads = 0, shared = 0;
  std::vector<Parameter> parameters;
};

struct Shape {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  at::Device device;
  uintptr_t offset;  // from a multiple of 16 bytes

  explicit Shape(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()),
        device(tensor.device()),
        offset(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16) {}

  bool is_of(const Tensor& tensor) const {
    return tensor.scalar_type() == type && tensor.device() == device && tensor.sizes().equals(sizes) &&
        tensor.strides().equals(strides) && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == offset;
  }
};

struct Plan {
  Driver driver;
  Kernel compute, finish, scale;  // the latter two without a function where one program does it all
  Shape logits, target;
  int64_t found;  // how many numbers the programs leave

  void start(const Kernel& kernel, const Pointers& pointers) const {
    std::array<uint64_t, 64> values;
    std::array<void*, 64> places;
    size_t count = 0;
    for (const auto& parameter : kernel.parameters) {
      values[count] =
          parameter.tensor < 0 ? parameter.value : reinterpret_cast<uint64_t>(pointers[parameter.tensor]);
      places[count] = &values[count];
      ++count;
    }
    // Triton appends pointers to memory of its own, of which these kernels need none.
    for (int more = 0; more < 4; ++more, ++count) {
      values[count] = 0;
      places[count] = &values[count];
    }
    // A thread that has not used this GPU yet has no context, without which nothing can be launched.
    void *context = nullptr, *stream = nullptr;
    int error = driver.context(&context);
    if (error == 0 && context == nullptr) {
      error = driver.retain_context(&context, logits.device.index());
      error = error == 0 ? driver.set_context(context) : error;
    }
    TORCH_CHECK(error == 0, "no context of the GPU: CUDA error ", error);
    TORCH_CHECK(driver.stream_of(logits.device.index(), &stream) == 0, "no current stream");
    error = driver.launch(
        kernel.function, kernel.programs, 1, 1, kernel.threads, 1, 1, kernel.shared, stream, places.data(), nullptr);
    TORCH_CHECK(error == 0, "a kernel could not be launched: CUDA error ", error);
  }
};

struct Again {
  std::shared_ptr<const Plan> plan;
  PyObject* buffers;             // the loss's, a dict
  std::vector<PyObject*> names;  // of the buffers, and
  std::vector<PyObject*> held;   // what they were
  std::vector<Tensor> own;       // as the kernel wants them; undefined where it does not
  std::vector<Shape> shapes;     // of those that are defined
  PyObject* otherwise;           // does what is rare in a backward pass
};

// Whether the numbers are those in memory.
bool plain(const Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_nested() && !tensor.is_neg() && !tensor._is_zerotensor();
}

// What a backward pass needs.
struct Kept : torch::CustomClassHolder {
  std::shared_ptr<const Plan> plan;
  Tensor gradient, found;
  std::vector<int64_t> versions;
  PyObject* otherwise;

  explicit Kept(const Again& again) : plan(again.plan), otherwise(Py_NewRef(again.otherwise)) {}

  ~Kept() override {
    if (Py_IsInitialized()) {
      PyGILState_STATE state = PyGILState_Ensure();
      Py_DECREF(otherwise);
      PyGILState_Release(state);
    }
  }
};

Tensor in_python(const Kept& kept, const Tensor& logits, const Tensor& target, const Tensor& upstream) {
  pybind11::gil_scoped_acquire gil;
  auto wrapped = [](const Tensor& tensor) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor)); };
  pybind11::tuple versions(kept.versions.size());
  for (size_t number = 0; number < kept.versions.size(); ++number) {
    versions[number] = pybind11::int_(kept.versions[number]);
  }
  pybind11::object found = wrapped(kept.found);  // None if it is undefined
  pybind11::object x = wrapped(logits), y = wrapped(target), g = wrapped(upstream);
  PyObject* result = nullptr;
  if (x && y && g && found) {
    result = PyObject_CallFunctionObjArgs(kept.otherwise, x.ptr(), y.ptr(), g.ptr(), found.ptr(), versions.ptr(), nullptr);
  }
  if (result == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  return THPVariable_Unpack(pybind11::reinterpret_steal<pybind11::object>(result).ptr());
}

struct Loss : torch::autograd::Function<Loss> {
  static Tensor forward(
      AutogradContext* context,
      const Tensor& logits,
      const Tensor& target,
      const Again* again,
      c10::intrusive_ptr<Kept> kept) {
    const Plan& plan = *again->plan;
    auto numbers = logits.options().dtype(at::kFloat).requires_grad(false);
    Tensor value = at::empty({}, numbers);
    Tensor gradient = at::empty_like(logits);
    Pointers pointers;
    pointers.fill(logits.const_data_ptr());
    pointers[TARGET] = target.const_data_ptr();
    for (size_t number = 0; number < again->own.size(); ++number) {
      const Tensor& tensor = again->own[number];
      if (tensor.defined()) {
        pointers[OWN + number] = tensor.const_data_ptr();
        kept->versions.push_back(static_cast<int64_t>(tensor._version()));
      }
    }
    if (plan.found > 0) {
      kept->found = at::empty({plan.found}, numbers);
    }
    pointers[VALUE] = value.data_ptr();
    pointers[FOUND] = plan.found > 0 ? kept->found.data_ptr() : value.data_ptr();
    pointers[GRADIENT] = gradient.data_ptr();
    plan.start(plan.compute, pointers);
    if (plan.finish.function != nullptr) {
      plan.start(plan.finish, pointers);
    }
    kept->gradient = std::move(gradient);
    context->save_for_backward({logits, target});
    context->saved_data["kept"] = c10::IValue::make_capsule(std::move(kept));
    return value;
  }

  static variable_list backward(AutogradContext* context, variable_list upstreams) {
    auto capsule = context->saved_data["kept"].toCapsule();
    auto& kept = static_cast<Kept&>(*capsule);
    const Plan& plan = *kept.plan;
    const Tensor upstream = plain(upstreams[0]) ? upstreams[0] : upstreams[0].clone();
    Tensor gradient = std::move(kept.gradient);
    kept.gradient = Tensor();
    if (!gradient.defined() || at::GradMode::is_enabled()) {
      auto saved = context->get_saved_variables();
      gradient = in_python(kept, saved[0], saved[1], upstream);
    } else if (plan.scale.function != nullptr) {
      c10::DeviceGuard guard(gradient.device());
      Pointers pointers;
      pointers.fill(nullptr);
      pointers[GRADIENT] = gradient.data_ptr();
      pointers[UPSTREAM] = upstream.const_data_ptr();
      pointers[FOUND] = kept.found.const_data_ptr();
      plan.start(plan.scale, pointers);
    } else {
      gradient.mul_(upstream);
    }
    return {gradient, Tensor(), Tensor(), Tensor()};
  }
};

// ------------------------------------------------------------------------------------------- for Python to call

struct AgainObject {
  PyObject_HEAD Again* again;
};

// Whether anything looks on that would want to see operations; `torch.set_default_device` does not.
bool watched() {
  using at::impl::PythonTorchFunctionTLS;
  if (at::impl::torch_function_mode_enabled()) {
    for (int64_t number = 0; number < PythonTorchFunctionTLS::stack_len(); ++number) {
      PyObject* mode = PythonTorchFunctionTLS::get_stack_at(number)->ptr(getPyInterpreter());
      if (std::strcmp(Py_TYPE(mode)->tp_name, "DeviceContext") != 0) {
        return true;
      }
    }
  }
  using c10::DispatchKey;
  for (auto key : {DispatchKey::Python, DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::Tracer}) {
    if (c10::impl::tls_is_dispatch_key_included(key)) {
      return true;
    }
  }
  return false;
}

bool same(const Again& again, const Tensor& logits, const Tensor& target) {
  if (!at::GradMode::is_enabled() || !logits.requires_grad() || target.requires_grad() || watched() ||
      !plain(logits) || !plain(target) || logits._fw_grad(0).defined() ||
      !again.plan->logits.is_of(logits) || !again.plan->target.is_of(target)) {
    return false;
  }
  for (size_t number = 0; number < again.names.size(); ++number) {
    if (PyDict_GetItem(again.buffers, again.names[number]) != again.held[number]) {
      return false;
    }
  }
  auto shape = again.shapes.begin();
  for (const Tensor& tensor : again.own) {
    if (tensor.defined() && !(shape++)->is_of(tensor)) {  // by `buffer.data = …`
      return false;
    }
  }
  return true;
}

PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  HANDLE_TH_ERRORS
  PyObject *x = nullptr, *y = nullptr;
  if (!PyArg_UnpackTuple(arguments, "Again", 2, 2, &x, &y)) {
    return nullptr;
  }
  const Again* again = reinterpret_cast<AgainObject*>(self)->again;
  if (again == nullptr || !THPVariable_CheckExact(x) || !THPVariable_CheckExact(y)) {
    Py_RETURN_NONE;
  }
  const Tensor& logits = THPVariable_Unpack(x);
  const Tensor& target = THPVariable_Unpack(y);
  if (!same(*again, logits, target)) {
    Py_RETURN_NONE;
  }
  Tensor value;
  auto kept = c10::make_intrusive<Kept>(*again);
  {
    pybind11::gil_scoped_release others_may_go_on;
    c10::DeviceGuard guard(logits.device());
    value = Loss::apply(logits, target, again, std::move(kept));
  }
  return THPVariable_Wrap(value);
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  if (const Again* again = reinterpret_cast<AgainObject*>(self)->again) {
    Py_VISIT(again->buffers);
    Py_VISIT(again->otherwise);
    for (PyObject* each : again->held) {
      Py_VISIT(each);
    }
  }
  return 0;
}

int clear(PyObject* self) {
  auto* object = reinterpret_cast<AgainObject*>(self);
  Again* again = object->again;
  object->again = nullptr;
  if (again != nullptr) {
    Py_XDECREF(again->buffers);
    Py_XDECREF(again->otherwise);
    for (PyObject* each : again->names) {
      Py_XDECREF(each);
    }
    for (PyObject* each : again->held) {
      Py_XDECREF(each);
    }
    delete again;
  }
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject again_type = {PyVarObject_HEAD_INIT(nullptr, 0) "calibrant_native.Again"};

const char* const PLAN = "calibrant_native.Plan";

bool read_kernel(PyObject* given, Kernel& kernel) {
  if (given == Py_None) {
    return true;
  }
  unsigned long long function = 0;
  PyObject* parameters = nullptr;
  if (!PyArg_ParseTuple(
          given, "KIIIO!", &function, &kernel.programs, &kernel.threads, &kernel.shared, &PyList_Type, &parameters)) {
    return false;
  }
  kernel.function = reinterpret_cast<void*>(function);
  if (PyList_GET_SIZE(parameters) > 60) {
    PyErr_SetString(PyExc_ValueError, "a kernel may have 60 parameters at most");
    return false;
  }
  for (Py_ssize_t number = 0; number < PyList_GET_SIZE(parameters); ++number) {
    Parameter parameter;
    unsigned long long value = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(parameters, number), "lK", &parameter.tensor, &value)) {
      return false;
    }
    if (parameter.tensor < -1 || parameter.tensor >= TENSORS) {
      PyErr_SetString(PyExc_ValueError, "there is no tensor of that number");
      return false;
    }
    parameter.value = value;
    kernel.parameters.push_back(parameter);
  }
  return true;
}

// plan(driver, compute, finish, scale, logits, target, found)
PyObject* make_plan(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  std::array<unsigned long long, 5> driver{};
  PyObject *compute = nullptr, *finish = nullptr, *scale = nullptr, *x = nullptr, *y = nullptr;
  long long found = 0;
  if (!PyArg_ParseTuple(
          arguments,
          "(KKKKK)OOOOOL",
          &driver[0],
          &driver[1],
          &driver[2],
          &driver[3],
          &driver[4],
          &compute,
          &finish,
          &scale,
          &x,
          &y,
          &found)) {
    return nullptr;
  }
  if (!THPVariable_Check(x) || !THPVariable_Check(y)) {
    PyErr_SetString(PyExc_TypeError, "logits and target must be tensors");
    return nullptr;
  }
  auto plan = std::make_shared<Plan>(Plan{
      {reinterpret_cast<decltype(Driver::launch)>(driver[0]),
       reinterpret_cast<decltype(Driver::stream_of)>(driver[1]),
       reinterpret_cast<decltype(Driver::context)>(driver[2]),
       reinterpret_cast<decltype(Driver::retain_context)>(driver[3]),
       reinterpret_cast<decltype(Driver::set_context)>(driver[4])},
      {},
      {},
      {},
      Shape(THPVariable_Unpack(x)),
      Shape(THPVariable_Unpack(y)),
      found});
  if (!read_kernel(compute, plan->compute) || !read_kernel(finish, plan->finish) || !read_kernel(scale, plan->scale)) {
    return nullptr;
  }
  auto* holder = new std::shared_ptr<const Plan>(std::move(plan));
  return PyCapsule_New(holder, PLAN, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<const Plan>*>(PyCapsule_GetPointer(capsule, PLAN));
  });
  END_HANDLE_TH_ERRORS
}

// again(plan, buffers, own, otherwise)
PyObject* make_again(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *capsule = nullptr, *buffers = nullptr, *own = nullptr, *otherwise = nullptr;
  if (!PyArg_ParseTuple(
          arguments, "OO!O!O", &capsule, &PyDict_Type, &buffers, &PyTuple_Type, &own, &otherwise)) {
    return nullptr;
  }
  auto* plan = static_cast<std::shared_ptr<const Plan>*>(PyCapsule_GetPointer(capsule, PLAN));
  if (plan == nullptr) {
    return nullptr;
  }
  if (PyTuple_GET_SIZE(own) != FOUND - OWN) {
    PyErr_SetString(PyExc_ValueError, "a loss has seven tensors of its own, or None for them");
    return nullptr;
  }
  auto again = std::make_unique<Again>();
  again->plan = *plan;
  for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(own); ++number) {
    PyObject* each = PyTuple_GET_ITEM(own, number);
    if (each != Py_None && !THPVariable_Check(each)) {
      PyErr_SetString(PyExc_TypeError, "what a loss has of its own must be tensors");
      return nullptr;
    }
    again->own.push_back(each == Py_None ? Tensor() : THPVariable_Unpack(each));
    if (each != Py_None) {
      again->shapes.emplace_back(again->own.back());
    }
  }
  PyObject* object = again_type.tp_alloc(&again_type, 0);
  if (object == nullptr) {
    return nullptr;
  }
  again->buffers = Py_NewRef(buffers);
  again->otherwise = Py_NewRef(otherwise);
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(buffers, &position, &name, &value)) {
    again->names.push_back(Py_NewRef(name));
    again->held.push_back(Py_NewRef(value));
  }
  reinterpret_cast<AgainObject*>(object)->again = again.release();
  return object;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"plan", make_plan, METH_VARARGS, nullptr},
    {"again", make_again, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "calibrant_native", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_calibrant_native() {
  again_type.tp_basicsize = sizeof(AgainObject);
  again_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  again_type.tp_call = call;
  again_type.tp_traverse = traverse;
  again_type.tp_clear = clear;
  again_type.tp_dealloc = destroy;
  again_type.tp_free = PyObject_GC_Del;
  if (PyType_Ready(&again_type) < 0) {
    return nullptr;
  }
  return PyModule_Create(&module);
}
