// What every primitive of this library has in common.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace spec {

namespace mx = mlx::core;

// An operation that exists for the CPU alone.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlx-spec-cpu kernels: found a GPU stream, expected a CPU stream.");
  }

 protected:
  // Gives the outputs memory and has compute(inputs, outputs) called once the inputs are there, in the stream's
  // thread. It is not called when there is nothing to write.
  template <class F>
  void dispatch(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, F compute) {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<mx::array> given, made;
    bool empty = true;
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      empty = empty && out.size() == 0;
      encoder.set_output_array(out);
      made.push_back(mx::array::unsafe_weak_copy(out));
    }
    if (empty) return;
    for (auto& input : inputs) {
      encoder.set_input_array(input);
      given.push_back(mx::array::unsafe_weak_copy(input));
    }
    encoder.dispatch([given = std::move(given), made = std::move(made), compute = std::move(compute)]() mutable {
      compute(given, made);
    });
  }
};

}  // namespace spec
