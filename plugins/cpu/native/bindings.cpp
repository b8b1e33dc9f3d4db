#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <atomic>

#include "linear.h"
#include "mlx/version.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, m) {
  nb::module_::import_("mlx.core");  // registers the array type
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
