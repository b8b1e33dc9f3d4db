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
    dispatch(inputs, outputs, NOWHERE, NOWHERE, std::move(compute));
  }

  // As above; output `to` is written over input `from`, of its shape and type, where nobody else has that input.
  template <class F>
  void dispatch(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, size_t from, size_t to, F compute) {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<mx::array> given, made;
    bool empty = true;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& out = outputs[i];
      if (i == to && left_alone(inputs, outputs, from)) {
        out.copy_shared_buffer(inputs[from]);
      } else {
        out.set_data(mx::allocator::malloc(out.nbytes()));
      }
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

 private:
  static constexpr size_t NOWHERE = size_t(-1);

  // Whether input `from` lies together and belongs to this evaluation alone. Every output refers to the inputs; all are
  // made now, so that those of the others, which mlx forgets after the evaluation, can go before.
  static bool left_alone(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, size_t from) {
    for (auto& out : outputs) {
      if (&out.inputs() != &inputs) out.inputs().clear();
    }
    const mx::array& in = inputs[from];
    return in.is_donatable() && in.flags().row_contiguous && in.data_size() == in.size();
  }
};

}  // namespace spec
