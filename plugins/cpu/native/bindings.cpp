#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "delta.h"
#include "embedding.h"
#include "greedy.h"
#include "linear.h"
#include "mlx/version.h"
#include "pool.h"
#include "program.h"
#include "rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Kept alive by Python while it is built and called, by mlx's graph until it has run.
struct Program {
  std::shared_ptr<spec::Program> held;
};

// Seconds of one run of `task` on every thread, the best of several.
template <class F>
double best_seconds(F&& task) {
  double best = 1e9;
  for (int i = 0; i < 7; i++) {
    auto start = std::chrono::steady_clock::now();
    spec::parallel_for(spec::threads() * 8, task);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Whether dictionaries hold the very objects of `values`, one after the other, and no others.
bool hold(const nb::list& dictionaries, const nb::list& values) {
  const Py_ssize_t size = PyList_Size(values.ptr());
  Py_ssize_t n = 0;
  for (nb::handle one : dictionaries) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(one.ptr(), &place, &key, &value); n++) {
      if (n == size || PyList_GetItem(values.ptr(), n) != value) return false;
    }
  }
  return n == size;
}

// Bytes a second read from memory by all threads, over `mib` mebibytes.
double read_rate(int mib) {
  std::vector<float> data(size_t(mib) << 18, 1.0f);
  const int64_t pieces = spec::threads() * 8, step = int64_t(data.size()) / pieces;
  std::vector<float> sums(static_cast<size_t>(pieces));
  const double seconds = best_seconds([&](int64_t i) { sums[size_t(i)] = spec::kernels().read(&data[size_t(i * step)], step); });
  return double(step * pieces * 4) / seconds;
}

// Multiply-adds a second by all threads.
double multiply_add_rate() {
  const int64_t rounds = 400'000, pieces = spec::threads() * 8;
  std::vector<float> sums(static_cast<size_t>(pieces));
  const double seconds = best_seconds([&](int64_t i) { sums[size_t(i)] = spec::kernels().multiply_add(rounds); });
  return double(rounds * pieces) * spec::kernels().multiply_adds_a_round / seconds;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::module_::import_("mlx.core");  // registers the array type
  m.attr("interface") = 14;  // INTERFACE of native.py: raised with every change of names or arguments below
  m.attr("built_for") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                        std::to_string(MLX_VERSION_PATCH);
  m.def(
      "linear",
      [](const mlx::core::array& x, const mlx::core::array& w, const std::optional<mlx::core::array>& scales,
         const std::optional<mlx::core::array>& biases, const std::optional<mlx::core::array>& bias,
         const std::string& mode, int group, int bits) {
        return spec::linear(x, w, scales, biases, bias, {mode, group, bits}, {});
      },
      "x"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "bias"_a = nb::none(), "mode"_a = "dense",
      "group_size"_a = 0, "bits"_a = 0);
  m.def(
      "gathered",
      [](const mlx::core::array& x, const mlx::core::array& w, const mlx::core::array& indices,
         const std::optional<mlx::core::array>& scales, const std::optional<mlx::core::array>& biases,
         const std::string& mode, int group, int bits) {
        return spec::gathered(x, w, scales, biases, indices, {mode, group, bits}, {});
      },
      "x"_a, "weight"_a, "indices"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "mode"_a = "dense",
      "group_size"_a = 0, "bits"_a = 0);
  m.def(
      "rms_norm",
      [](const mlx::core::array& x, const std::optional<mlx::core::array>& weight, float eps) {
        return spec::rms_norm(x, weight, eps, {});
      },
      "x"_a, "weight"_a.none(), "eps"_a);
  m.def(
      "attention",
      [](const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v, float scale,
         const std::optional<mlx::core::array>& mask, bool causal) {
        return spec::attention(q, {k, {}, {}}, {v, {}, {}}, {}, scale, mask, causal, {});
      },
      "queries"_a, "keys"_a, "values"_a, "scale"_a, "mask"_a = nb::none(), "causal"_a = false);
  using Packed = std::tuple<mlx::core::array, mlx::core::array, mlx::core::array>;  // words, scales, biases
  m.def(
      "packed_attention",
      [](const mlx::core::array& q, const Packed& k, const Packed& v, float scale, int group, int bits,
         const std::optional<mlx::core::array>& mask, bool causal) {
        auto entries = [](const Packed& p) { return spec::Entries{std::get<0>(p), std::get<1>(p), std::get<2>(p)}; };
        return spec::attention(q, entries(k), entries(v), {bits, group}, scale, mask, causal, {});
      },
      "queries"_a, "keys"_a, "values"_a, "scale"_a, "group_size"_a, "bits"_a, "mask"_a = nb::none(), "causal"_a = false);
  m.def(
      "rope",
      [](const mlx::core::array& x, int dims, bool neighbours, float scale, const mlx::core::array& inverse,
         const std::variant<int, mlx::core::array>& offset) {
        return spec::rope(x, dims, neighbours, scale, inverse, offset, {});
      },
      "x"_a, "dims"_a, "neighbours"_a, "scale"_a, "inverse"_a, "offset"_a = 0);
  m.def(
      "rows",
      [](const mlx::core::array& indices, const mlx::core::array& w, const std::optional<mlx::core::array>& scales,
         const std::optional<mlx::core::array>& biases, const std::string& mode, int group, int bits) {
        return spec::rows(indices, w, scales, biases, {mode, group, bits}, {});
      },
      "indices"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "mode"_a = "dense", "group_size"_a = 0,
      "bits"_a = 0);
  m.def(
      "greedy",
      [](const mlx::core::array& logits, int limit) {
        auto made = spec::greedy(logits, limit, {});
        return std::make_tuple(made[0], made[1]);
      },
      "logits"_a, "limit"_a);
  m.def(
      "gated_delta",
      [](const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v, const mlx::core::array& decay,
         const mlx::core::array& rate, const mlx::core::array& state) {
        auto made = spec::gated_delta(q, k, v, decay, rate, state, {});
        return std::make_tuple(made[0], made[1], made[2]);
      },
      "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a);
  m.def(
      "replay_delta",
      [](const mlx::core::array& state, const mlx::core::array& k, const mlx::core::array& decay,
         const mlx::core::array& delta, const mlx::core::array& keep) {
        return spec::replay_delta(state, k, decay, delta, keep, {});
      },
      "state"_a, "k"_a, "g"_a, "delta"_a, "keep"_a);
  m.def(
      "resume_delta",
      [](const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v, const mlx::core::array& decay,
         const mlx::core::array& rate, const mlx::core::array& state, const mlx::core::array& owed_k,
         const mlx::core::array& owed_decay, const mlx::core::array& owed_delta, const mlx::core::array& keep) {
        auto made = spec::resume_delta(q, k, v, decay, rate, state, owed_k, owed_decay, owed_delta, keep, {});
        return std::make_tuple(made[0], made[1], made[2]);
      },
      "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a, "owed_k"_a, "owed_g"_a, "owed_delta"_a, "keep"_a);
  nb::class_<Program>(m, "Program")
      .def("__init__", [](Program* self, const mlx::core::array& like) { new (self) Program{std::make_shared<spec::Program>(like.dtype())}; }, "like"_a)
      .def("input", [](Program& self, int64_t width, int heads) { return self.held->input(width, heads); }, "width"_a, "heads"_a = 0)
      .def("ids", [](Program& self) { return self.held->ids(); })
      .def(
          "embed",
          [](Program& self, int ids, const mlx::core::array& w, const std::optional<mlx::core::array>& scales,
             const std::optional<mlx::core::array>& biases, const std::string& mode, int group, int bits) {
            return self.held->embed(ids, w, scales, biases, {mode, group, bits});
          },
          "of"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "mode"_a = "dense", "group_size"_a = 0,
          "bits"_a = 0)
      .def("join", [](Program& self, int a, int b) { return self.held->join(a, b); }, "first"_a, "second"_a)
      .def("choose", [](Program& self, int of) { return self.held->choose(of); }, "of"_a)
      .def("feed", [](Program& self, int of, int into) { self.held->feed(of, into); }, "of"_a, "into"_a)
      .def(
          "norm",
          [](Program& self, int of, const std::optional<mlx::core::array>& weight, float eps, int64_t size) {
            return self.held->norm(of, weight, eps, size);
          },
          "of"_a, "weight"_a.none(), "eps"_a, "size"_a)
      .def(
          "linear",
          [](Program& self, int of, const mlx::core::array& w, const std::optional<mlx::core::array>& scales,
             const std::optional<mlx::core::array>& biases, const std::optional<mlx::core::array>& bias,
             const std::string& mode, int group, int bits) {
            return self.held->linear(of, w, scales, biases, bias, {mode, group, bits});
          },
          "of"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "bias"_a = nb::none(), "mode"_a = "dense",
          "group_size"_a = 0, "bits"_a = 0)
      .def("combine", [](Program& self, const std::string& name, int a, int b) { return self.held->combine(name, a, b); }, "name"_a, "first"_a, "second"_a)
      .def(
          "rotate",
          [](Program& self, int of, int heads, int dims, bool neighbours, float scale, const mlx::core::array& inverse) {
            return self.held->rotate(of, heads, dims, neighbours, scale, inverse);
          },
          "of"_a, "heads"_a, "dims"_a, "neighbours"_a, "scale"_a, "inverse"_a)
      .def(
          "attend",
          [](Program& self, int queries, int keys, int values, int heads, int key_heads, float scale, int window) {
            return self.held->attend(queries, keys, values, heads, key_heads, scale, window);
          },
          "queries"_a, "keys"_a, "values"_a, "heads"_a, "key_heads"_a, "scale"_a, "window"_a = 0)
      .def(
          "look",
          [](Program& self, int place, int queries, int heads, int key_heads, float scale, int window) {
            return self.held->look(place, queries, heads, key_heads, scale, window);
          },
          "place"_a, "queries"_a, "heads"_a, "key_heads"_a, "scale"_a, "window"_a = 0)
      .def("scale", [](Program& self, int of, const mlx::core::array& weight) { return self.held->scale(of, weight); }, "of"_a, "weight"_a)
      .def("output", [](Program& self, int of, int heads) { self.held->output(of, heads); }, "of"_a, "heads"_a = 0)
      .def(
          "__call__",
          [](const Program& self, nb::args given, const std::variant<int, mlx::core::array>& offset,
             const std::optional<mlx::core::array>& keys, const std::optional<mlx::core::array>& values, int low, int start,
             const std::vector<std::tuple<mlx::core::array, mlx::core::array, int, int>>& lent, int repeat, int limit) {
            std::vector<mlx::core::array> inputs;
            inputs.reserve(given.size() + 1);
            for (auto x : given) inputs.push_back(nb::cast<mlx::core::array>(x));
            std::optional<spec::Program::Storage> storage;
            if (keys && values) storage = spec::Program::Storage{*keys, *values, low, start};
            std::vector<spec::Program::Lent> read;
            for (auto& [k, v, first, end] : lent) read.push_back({k, v, first, end});
            return spec::Program::call(self.held, std::move(inputs), offset, storage, read, repeat, limit, {});
          },
          "inputs"_a, "offset"_a = 0, "keys"_a = nb::none(), "values"_a = nb::none(), "low"_a = 0, "start"_a = 0,
          "lent"_a = nb::list(), "repeat"_a = 1, "limit"_a = 0);
  m.def(
      "activation",
      [](const mlx::core::array& gate, const std::optional<mlx::core::array>& x, const std::string& act) {
        return spec::activation(gate, x, act, std::nullopt, {});
      },
      "gate"_a, "x"_a = nb::none(), "act"_a = "silu");
  m.def(
      "precise_activation",  // rounded once, to the dtype of `like`
      [](const mlx::core::array& gate, const std::optional<mlx::core::array>& x, const std::string& act,
         const mlx::core::array& like) { return spec::activation(gate, x, act, like.dtype(), {}); },
      "gate"_a, "x"_a.none(), "act"_a, "like"_a);
  m.def("soft_cap", [](const mlx::core::array& x, float cap) { return spec::soft_cap(x, cap, {}); }, "x"_a, "cap"_a);
  m.def(
      "short_convolution",
      [](const mlx::core::array& x, const mlx::core::array& w, const std::optional<mlx::core::array>& bias) {
        return spec::short_convolution(x, w, bias, {});
      },
      "x"_a, "weight"_a, "bias"_a = nb::none());
  m.def("hold", &hold, "dictionaries"_a, "values"_a);
  m.def("read_rate", &read_rate, "mib"_a = 256, nb::call_guard<nb::gil_scoped_release>());
  m.def("multiply_add_rate", &multiply_add_rate, nb::call_guard<nb::gil_scoped_release>());
  m.def("threads", &spec::threads);
  m.def("set_threads", &spec::set_threads, "count"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("usable_cores", &spec::usable_cores);
  m.def("kernels", [] { return std::string(spec::kernels().name); });
  m.def("kernel_names", &spec::kernel_names);
  m.def("use_kernels", &spec::use_kernels, "name"_a);
  m.def(
      "count_in_parallel",
      [](int64_t count) {  // how many of `count` tasks ran: the pool's own check, also in a child of fork
        std::atomic<int64_t> ran{0};
        spec::parallel_for(count, [&](int64_t) { ran++; });
        return ran.load();
      },
      "count"_a, nb::call_guard<nb::gil_scoped_release>());
}
