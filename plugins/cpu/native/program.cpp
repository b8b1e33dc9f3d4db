#include "program.h"

#include <algorithm>

#include "arrays.h"
#include "attending.h"
#include "greedy.h"
#include "mlx/ops.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

constexpr int64_t SCRATCH = 4 << 20;      // bytes of registers at a time, which the caches should hold
constexpr int64_t FEWEST = 64;            // rows at a time all the same: every block decodes the weights anew
constexpr int64_t SERIAL = 4'000;         // additions below which sharing rows among threads costs more than it saves
constexpr int64_t SMALL = 8'192;          // weights of a layer that every row is multiplied with on its own
constexpr int64_t ROWS = 8;               // at a time, of operations in a row
constexpr int64_t SOON = 128 << 10;       // bytes of keys and values per thread that are fetched before they are read

thread_local Buffer registers_buffer;

// Cosines and sines of rows: layers of a model mostly turn the same rows by the same few angles.
struct Waves {
  const Kernels* kernels = nullptr;
  Type type{};
  float scale = 0;
  int64_t first = 0, rows = 0, L = 0;
  std::vector<int> offsets;
  std::vector<float> wavelengths;  // inverse ones
  Buffer values;
  const float* cosines = nullptr;  // (2, rows, pitch), sines behind them
  uint64_t used = 0;
};
constexpr size_t WAVES = 4;  // kept, but for those of one run of operations
thread_local std::vector<std::unique_ptr<Waves>> waves_kept;
thread_local uint64_t waves_asked = 0;

mx::array held(const mx::array& a) {
  mx::array whole = mx::contiguous(a);
  whole.eval();
  return whole;
}

std::optional<mx::array> held(const std::optional<mx::array>& a) {
  return a ? std::optional<mx::array>(held(*a)) : std::nullopt;
}

// Rows of width values, heads apart in `ported`, together in `rows`; copied either way, `first` counts rows.
void copy_heads(char* rows, char* ported, bool in, int64_t first, int64_t count, const mx::Shape& shape, const mx::Strides& strides, int64_t item) {
  const int64_t H = shape[1], L = shape[2], D = shape[3];
  for (int64_t r = 0; r < count; r++) {
    const int64_t b = (first + r) / L, l = (first + r) % L;
    for (int64_t h = 0; h < H; h++) {
      char* one = rows + (r * H + h) * D * item;
      char* other = ported + (b * strides[0] + h * strides[1] + l * strides[2]) * item;
      if (!in) {
        memcpy(other, one, size_t(D * item));
      } else if (strides[3] == 1) {
        memcpy(one, other, size_t(D * item));
      } else {
        for (int64_t d = 0; d < D; d++) memcpy(one + d * item, other + d * strides[3] * item, size_t(item));
      }
    }
  }
}

// The heads of an array lie where rows would have them.
bool as_rows(const mx::array& a, int heads) {
  return a.flags().row_contiguous && (heads == 0 || a.shape(2) == 1 || a.shape(1) == 1);
}

class RowProgram : public CpuPrimitive {
 public:
  // Inputs are those of the program, positions per batch if any, what is lent, and the storage if it attends.
  RowProgram(mx::Stream stream, std::shared_ptr<const Program> program, size_t first_lent, bool offsets, Program::Call call)
      : CpuPrimitive(stream), program_(std::move(program)), first_lent_(first_lent), has_offsets_(offsets), call_(std::move(call)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    if (!program_->attends()) {
      dispatch(inputs, outputs, [program = program_, first = first_lent_, has_offsets = has_offsets_, call = call_](
                                    const std::vector<mx::array>& given, std::vector<mx::array>& made) mutable {
        if (has_offsets) call.offsets = &given[first - 1];
        for (size_t i = 0; i < call.lent.size(); i++) call.lent[i].lies_in(given[first + 2 * i], given[first + 2 * i + 1]);
        program->run(given, call, made);
      });
      return;
    }
    // the storage is the last two of both; filled in place unless somebody else holds it
    // Every output holds the inputs; without that of the others, what nobody else holds counts as such.
    for (auto& out : outputs) {
      if (!out.is_tracer() && &out.inputs() != &inputs) out.inputs().clear();
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<mx::array> given, made;
    std::vector<std::pair<mx::array, mx::array>> copies;
    for (size_t i = 0; i < outputs.size(); i++) {
      mx::array& out = outputs[i];
      const mx::array* kept = i + 2 < outputs.size() ? nullptr : &inputs[inputs.size() + i - outputs.size()];
      if (kept && kept->is_donatable() && kept->flags().row_contiguous) {
        out.copy_shared_buffer(*kept);
      } else {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        if (kept) copies.emplace_back(mx::array::unsafe_weak_copy(*kept), mx::array::unsafe_weak_copy(out));
      }
      encoder.set_output_array(out);
      made.push_back(mx::array::unsafe_weak_copy(out));
    }
    for (auto& input : inputs) {
      encoder.set_input_array(input);
      given.push_back(mx::array::unsafe_weak_copy(input));
    }
    encoder.dispatch([program = program_, first = first_lent_, given = std::move(given), made = std::move(made), copies = std::move(copies), call = call_]() mutable {
      for (auto& [from, to] : copies) {
        const Contiguous whole(from);
        memcpy(to.data<char>(), whole.get(), to.nbytes());
      }
      call.own.lies_in(made[made.size() - 2], made.back());
      for (size_t i = 0; i < call.lent.size(); i++) call.lent[i].lies_in(given[first + 2 * i], given[first + 2 * i + 1]);
      program->run(given, call, made);
    });
  }

  const char* name() const override { return "SpecProgram"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const RowProgram&>(other);
    auto alike = [](const Program::Store& a, const Program::Store& b) { return a.low == b.low && a.start == b.start; };
    const Program::Call &a = call_, &b = o.call_;
    return program_ == o.program_ && has_offsets_ == o.has_offsets_ && a.offset == b.offset && a.repeat == b.repeat &&
           a.limit == b.limit && alike(a.own, b.own) &&
           std::equal(a.lent.begin(), a.lent.end(), b.lent.begin(), b.lent.end(), alike);
  }

 private:
  std::shared_ptr<const Program> program_;
  size_t first_lent_;
  bool has_offsets_;
  Program::Call call_;
};

}  // namespace

Program::Program(mx::Dtype dtype) : dtype_(dtype) {
  if (!stored_type(dtype)) refuse("activations", text(dtype), "float32, float16 or bfloat16");
}

int Program::add(int64_t width, mx::Dtype dtype) {
  if (width < 1) refuse("width", text(width), "a positive number");
  registers_.push_back({width, dtype, stored_type(dtype).value_or(Type::f32)});
  return int(registers_.size()) - 1;
}

const Program::Register& Program::any(int place) const {
  if (place < 0 || place >= int(registers_.size())) refuse("register", text(place), "one of " + text(registers_.size()));
  return registers_[size_t(place)];
}

const Program::Register& Program::at(int place) const {
  const Register& found = any(place);
  if (found.dtype == mx::int32) refuse("register " + text(place), "ids", "activations");
  return found;
}

const Program::Register& Program::ids_at(int place) const {
  const Register& found = any(place);
  if (found.dtype != mx::int32) refuse("register " + text(place), "activations", "ids");
  return found;
}

Program::Stage& Program::stage(Kind kind, int a, int b, int to) {
  stages_.push_back({});
  Stage& s = stages_.back();
  s.kind = kind, s.a = a, s.b = b, s.to = to;
  return s;
}

int Program::input(int64_t width, int heads) {
  if (heads < 0 || (heads > 0 && width % heads)) refuse("heads", text(heads), "a divisor of " + text(width));
  inputs_.push_back({add(width, dtype_), heads});
  return inputs_.back().place;
}

int Program::ids() {
  inputs_.push_back({add(1, mx::int32), 0});
  return inputs_.back().place;
}

int Program::embed(int ids, const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, const Layout& layout) {
  ids_at(ids);
  auto table = std::make_unique<Table>(table_of(held(w), held(scales), held(biases), layout));
  const int to = add(table->width, table->result);
  stage(Kind::embed, ids, ids, to).table = std::move(table);
  return to;
}

int Program::join(int a, int b) {
  const Register first = at(a), second = at(b);
  if (first.dtype != second.dtype) refuse("registers to join", text(first.dtype) + " and " + text(second.dtype), "one dtype");
  const int to = add(first.width + second.width, first.dtype);
  stage(Kind::join, a, b, to);
  return to;
}

int Program::choose(int logits) {
  at(logits);
  const int to = add(1, mx::int32);
  stage(Kind::choose, logits, logits, to);
  return to;
}

int Program::norm(int from, const std::optional<mx::array>& weight, float eps, int64_t size) {
  const Register source = at(from);
  if (size < 1 || source.width % size) refuse("norm size", text(size), "a divisor of " + text(source.width));
  if (weight && (weight->shape() != mx::Shape{mx::ShapeElem(size)} || !stored_type(weight->dtype()))) {
    refuse("norm weight", text(weight->dtype()) + " of shape " + text(weight->shape()), "floats of shape (" + text(size) + ",)");
  }
  const int to = add(source.width, weight ? mx::promote_types(source.dtype, weight->dtype()) : source.dtype);
  Stage& s = stage(Kind::norm, from, from, to);
  s.weight = held(weight), s.weight_type = weight ? *stored_type(weight->dtype()) : Type::f32, s.number = eps, s.size = size;
  return to;
}

int Program::linear(int from, const mx::array& w, const std::optional<mx::array>& scales,
                    const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout) {
  const Register source = at(from);
  auto factor = std::make_unique<Factor>(factor_of(source.width, source.dtype, held(w), held(scales), held(biases), held(bias), layout));
  const int to = add(w.shape(0), factor->result);
  stage(Kind::linear, from, from, to).factor = std::move(factor);
  return to;
}

int Program::combine(const std::string& name, int a, int b) {
  const Register first = at(a), second = at(b);
  if (first.width != second.width || first.dtype != second.dtype) {
    refuse("registers to combine", text(first.dtype) + " of " + text(first.width) + " and " + text(second.dtype) + " of " + text(second.width), "two alike");
  }
  Rowwise op;
  if (name == "add") op = Rowwise::add;
  else if (name == "multiply") op = Rowwise::multiply;
  else if (name == "silu") op = Rowwise::silu;
  else if (name == "gelu") op = Rowwise::gelu;
  else refuse("operation", name, "add, multiply, silu or gelu");
  const int to = add(first.width, first.dtype);
  stage(Kind::combine, a, b, to).op = op;
  return to;
}

int Program::rotate(int from, int heads, int dims, bool neighbours, float scale, const mx::array& inverse) {
  const Register source = at(from);
  if (heads < 1 || source.width % heads) refuse("heads", text(heads), "a divisor of " + text(source.width));
  const int64_t D = source.width / heads;
  if (dims < 0 || dims % 2 || dims > D) refuse("dims", text(dims), "an even number up to " + text(D));
  if (inverse.dtype() != mx::float32 || inverse.shape() != mx::Shape{dims / 2}) {
    refuse("inverse wavelengths", text(inverse.dtype()) + " of shape " + text(inverse.shape()), "float32 of shape (" + text(dims / 2) + ",)");
  }
  const int to = add(source.width, source.dtype);
  Stage& s = stage(Kind::rotate, from, from, to);
  s.size = D, s.dims = dims, s.neighbours = neighbours, s.number = scale, s.weight = held(inverse);
  return to;
}

int Program::scale(int from, const mx::array& weight) {
  const Register source = at(from);
  if (weight.dtype() != source.dtype || weight.ndim() != 1 || (weight.shape(0) != 1 && weight.shape(0) != source.width)) {
    refuse("scale", text(weight.dtype()) + " of shape " + text(weight.shape()), text(source.dtype) + " of shape (1,) or (" + text(source.width) + ",)");
  }
  const int to = add(source.width, source.dtype);
  Stage& s = stage(Kind::scale, from, from, to);
  s.weight = held(mx::broadcast_to(weight, {mx::ShapeElem(source.width)}));
  return to;
}

int Program::attend(int queries, int keys, int values, int heads, int key_heads, float scale, int window) {
  const Register q = at(queries), k = at(keys), v = at(values);
  if (attends_) refuse("attentions", "a second one", "one per program");
  if (heads < 1 || key_heads < 1 || heads % key_heads) refuse("heads", text(heads) + " over " + text(key_heads), "whole groups");
  if (q.width % heads || k.width % key_heads || v.width % key_heads || q.width / heads != k.width / key_heads || k.dtype != v.dtype) {
    refuse("queries, keys and values", text(q.width) + ", " + text(k.width) + " and " + text(v.width) + " values", "heads of one width");
  }
  if (window < 0) refuse("window", text(window), "a number of keys, or 0");
  attends_ = true;
  const int to = add(v.width / key_heads * heads, q.dtype);
  Stage& s = stage(Kind::attend, queries, keys, to);
  s.c = values, s.heads = heads, s.key_heads = key_heads, s.number = scale, s.window = window;
  return to;
}

int Program::look(int place, int queries, int heads, int key_heads, float scale, int window) {
  const Register q = at(queries);
  if (heads < 1 || key_heads < 1 || heads % key_heads || q.width % heads) refuse("heads", text(heads) + " over " + text(key_heads), "whole groups");
  if (window < 0 || place < 0 || place > lent_) refuse("window and place", text(window) + " and " + text(place), "a number of keys, or 0, and the next place");
  lent_ = std::max(lent_, place + 1);
  const int to = add(q.width, q.dtype);
  Stage& s = stage(Kind::look, queries, queries, to);
  s.place = place, s.heads = heads, s.key_heads = key_heads, s.number = scale, s.window = window;
  return to;
}

void Program::feed(int result, int input) {
  const Register source = any(result), into = any(input);
  auto given = [&](int place) {
    return std::any_of(inputs_.begin(), inputs_.end(), [&](const Port& port) { return port.place == place && port.heads == 0; });
  };
  const bool fed = std::any_of(feeds_.begin(), feeds_.end(), [&](const Feed& feed) { return feed.to == input; });
  if (given(result) || !given(input) || fed || source.width != into.width || source.dtype != into.dtype) {
    refuse("feed", text(source.dtype) + " of " + text(source.width) + " into " + text(into.dtype) + " of " + text(into.width),
           "a result, and an input without heads that is like it and fed once");
  }
  feeds_.push_back({result, input});
}

void Program::output(int from, int heads) {
  const int64_t width = any(from).width;
  if (heads < 0 || (heads > 0 && width % heads)) refuse("heads", text(heads), "a divisor of " + text(width));
  outputs_.push_back({from, heads});
}

std::vector<mx::array> Program::call(const std::shared_ptr<const Program>& program, std::vector<mx::array> inputs,
                                     const std::variant<int, mx::array>& offset, const std::optional<Storage>& storage,
                                     const std::vector<Lent>& lent, int repeat, int limit, mx::StreamOrDevice stream) {
  const auto& ports = program->inputs_;
  if (inputs.size() != ports.size() || inputs.empty() || program->outputs_.empty()) {
    refuse("inputs", text(inputs.size()), text(ports.size()) + ", and some output");
  }
  mx::ShapeElem B = 0, L = 0;
  auto shape = [&](const Port& port) {
    const Register& r = program->registers_[size_t(port.place)];
    const auto width = mx::ShapeElem(r.width);
    if (r.dtype == mx::int32) return mx::Shape{B, L};
    return port.heads ? mx::Shape{B, port.heads, L, width / port.heads} : mx::Shape{B, L, width};
  };
  for (size_t i = 0; i < inputs.size(); i++) {
    const mx::array& x = inputs[i];
    const mx::Dtype wanted = program->registers_[size_t(ports[i].place)].dtype;
    if (i == 0 && x.ndim() > 1) B = x.shape(0), L = x.shape(ports[0].heads && x.ndim() > 2 ? 2 : 1);
    if (x.dtype() != wanted || x.shape() != shape(ports[i])) {
      refuse("input " + text(i), text(x.dtype()) + " of shape " + text(x.shape()), text(wanted) + " of shape " + text(shape(ports[i])));
    }
  }
  if (repeat < 1 || (repeat > 1 && (B != 1 || L != 1 || program->attends_))) {
    refuse("repeat", text(repeat) + " of " + text(B) + " times " + text(L) + " rows", "1, or more for one row of a program that does not attend");
  }
  for (const Stage& s : program->stages_) {
    const int64_t width = program->registers_[size_t(s.a)].width;
    if (s.kind == Kind::choose && (limit < 0 || limit > width)) refuse("limit", text(limit), "0 to " + text(width));
  }
  if (repeat > 1) L = repeat;  // of the outputs
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const Port& port : program->outputs_) {
    shapes.push_back(shape(port));
    dtypes.push_back(program->registers_[size_t(port.place)].dtype);
  }
  if (repeat > 1) L = 1;
  auto* each = std::get_if<mx::array>(&offset);
  if (each) {
    const bool fits = each->size() == 1 || each->shape() == mx::Shape{B};
    if (!fits || each->dtype() != mx::int32) refuse("offset", text(each->dtype()) + " of shape " + text(each->shape()), "int32, one for all or shape (" + text(B) + ",)");
    inputs.push_back(each->ndim() == 1 ? *each : mx::reshape(*each, {1}, stream));
  }
  if (int(lent.size()) != program->lent_) refuse("lent storages", text(lent.size()), text(program->lent_));
  const size_t first_lent = inputs.size();
  Call call{};
  call.offset = each ? 0 : std::get<int>(offset), call.repeat = repeat, call.limit = limit;
  for (const Stage& s : program->stages_) {
    if (s.kind != Kind::look) continue;
    const Lent& one = lent[size_t(s.place)];
    const Register& q = program->registers_[size_t(s.a)];
    auto fits = [&](const mx::array& a) {
      return a.ndim() == 4 && a.dtype() == q.dtype && a.shape(0) == 1 && a.shape(1) == s.key_heads && a.shape(3) == q.width / s.heads && a.shape(2) >= one.end;
    };
    if (B != 1 || !fits(one.keys) || !fits(one.values) || one.low < 0 || one.low > one.end - L) {
      refuse("lent storage " + text(s.place), text(one.keys.shape()) + " and " + text(one.values.shape()) + " read from " + text(one.low) + " to " + text(one.end),
             "keys and values of " + text(s.key_heads) + " heads, with a key for each row of one batch");
    }
  }
  for (const Lent& one : lent) {
    call.lent.push_back({}), call.lent.back().low = one.low, call.lent.back().start = one.end - L;
    inputs.push_back(one.keys), inputs.push_back(one.values);
  }
  if (program->attends_ != storage.has_value()) refuse("storage", storage ? "some" : "none", storage ? "none" : "some");
  if (storage) {
    const auto& stages = program->stages_;
    const Stage& s = *std::find_if(stages.begin(), stages.end(), [](const Stage& one) { return one.kind == Kind::attend; });
    const Register &k = program->registers_[size_t(s.b)], &v = program->registers_[size_t(s.c)];
    if (each || B != 1) refuse("positions of an attention", each ? "an array" : text(B) + " batches", "one batch");
    auto fits = [&](const mx::array& a, const Register& r) {
      return a.ndim() == 4 && a.dtype() == r.dtype && a.shape(0) == 1 && a.shape(1) == s.key_heads && a.shape(3) == r.width / s.key_heads &&
             a.shape(2) >= storage->start + L && a.size() > 0;
    };
    if (!fits(storage->keys, k) || !fits(storage->values, v) || storage->low < 0 || storage->low > storage->start) {
      refuse("storage", text(storage->keys.shape()) + " and " + text(storage->values.shape()) + " read from " + text(storage->low),
             "keys and values of " + text(s.key_heads) + " heads with room for rows " + text(storage->start) + " to " + text(storage->start + L));
    }
    inputs.push_back(storage->keys), inputs.push_back(storage->values);
    for (auto* kept : {&storage->keys, &storage->values}) shapes.push_back(kept->shape()), dtypes.push_back(kept->dtype());
  }
  if (storage) call.own.low = storage->low, call.own.start = storage->start;
  auto primitive = std::make_shared<RowProgram>(mx::to_stream(stream), program, first_lent, each != nullptr, std::move(call));
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, std::move(inputs));
}

void Program::run(const std::vector<mx::array>& inputs, const Call& call, std::vector<mx::array>& outputs) const {
  const mx::array& first = inputs[0];
  const int64_t total = int64_t(first.size()) / registers_[size_t(inputs_[0].place)].width;
  std::vector<char*> direct(registers_.size(), nullptr);  // registers that are arrays themselves
  std::vector<std::optional<Contiguous>> copies;
  const size_t count = inputs_.size();
  std::vector<bool> gathered(count, false);  // inputs whose heads have to be put side by side
  std::vector<bool> fed(registers_.size(), false);  // inputs that later runs find something else in
  for (const Feed& feed : feeds_) fed[size_t(feed.to)] = call.repeat > 1;
  copies.reserve(count);
  for (size_t i = 0; i < count; i++) {
    const mx::array& x = inputs[i];
    if (inputs_[i].heads == 0) {
      copies.emplace_back(x);
      if (!fed[size_t(inputs_[i].place)]) direct[size_t(inputs_[i].place)] = const_cast<char*>(static_cast<const char*>(copies.back()->get()));
    } else if (as_rows(x, inputs_[i].heads)) {
      direct[size_t(inputs_[i].place)] = const_cast<char*>(x.data<char>());
    } else {
      gathered[i] = true;
    }
  }
  for (size_t i = 0; i < outputs_.size(); i++) {
    auto& place = direct[size_t(outputs_[i].place)];
    if (!place && as_rows(outputs[i], outputs_[i].heads)) place = outputs[i].data<char>();
  }

  std::vector<int64_t> starts(registers_.size());
  int64_t row_bytes = 0;
  for (size_t r = 0; r < registers_.size(); r++) {
    starts[r] = row_bytes;
    if (!direct[r]) row_bytes += (registers_[r].width * int64_t(mx::size_of(registers_[r].dtype)) + 63) / 64 * 64;
  }
  const int64_t at_once = std::min(total, std::max(FEWEST, SCRATCH / std::max<int64_t>(row_bytes, 1)));
  const bool again = call.repeat > 1;  // then an input is one row, and an output has one per run
  char* scratch = reinterpret_cast<char*>(registers_buffer.floats(size_t(row_bytes * at_once / 4 + 16)));

  std::vector<char*> data(registers_.size());
  std::vector<bool> given(registers_.size(), false);
  for (const Port& port : inputs_) given[size_t(port.place)] = true;
  auto bytes_of = [&](size_t r) { return registers_[r].width * int64_t(mx::size_of(registers_[r].dtype)); };
  for (int64_t m = 0; m < total * call.repeat; m += at_once) {
    const int64_t rows = again ? 1 : std::min(at_once, total - m);
    for (size_t r = 0; r < registers_.size(); r++) {
      data[r] = direct[r] ? direct[r] + (again && given[r] ? 0 : m) * bytes_of(r) : scratch + starts[r] * at_once;
    }
    for (size_t i = 0; i < count; i++) {
      const size_t r = size_t(inputs_[i].place);
      if (fed[r] && m == 0) memcpy(data[r], copies[i]->get(), size_t(bytes_of(r)));
      if (gathered[i]) copy_heads(data[r], const_cast<char*>(inputs[i].data<char>()), true, m, rows, inputs[i].shape(), inputs[i].strides(), int64_t(inputs[i].itemsize()));
    }
    block({data.data(), again ? 0 : m, rows, first.shape(inputs_[0].heads ? 2 : 1)}, call);
    for (size_t i = 0; i < outputs_.size(); i++) {
      const size_t r = size_t(outputs_[i].place);
      mx::array& out = outputs[i];
      if (direct[r] == out.data<char>()) continue;
      if (outputs_[i].heads) {
        copy_heads(data[r], out.data<char>(), false, m, rows, out.shape(), out.strides(), int64_t(out.itemsize()));
      } else {
        memcpy(out.data<char>() + m * bytes_of(r), data[r], size_t(rows * bytes_of(r)));
      }
    }
    if (again) {
      for (const Feed& feed : feeds_) memcpy(data[size_t(feed.to)], data[size_t(feed.from)], size_t(bytes_of(size_t(feed.to))));
    }
  }
}

// The layers that read what stage i reads, up to the first that is not one of them.
size_t Program::layers_from(size_t i) const {
  size_t end = i;
  while (end < stages_.size() && stages_[end].kind == Kind::linear && stages_[end].a == stages_[i].a) end++;
  return end;
}

// Where the operations end that do with every row something of its own, from stage i on.
size_t Program::rows_end(size_t i) const {
  while (i < stages_.size()) {
    const Kind kind = stages_[i].kind;
    if (kind == Kind::attend || kind == Kind::look || kind == Kind::choose) return i;
    if (kind != Kind::linear) {
      i++;
      continue;
    }
    const size_t end = layers_from(i);
    int64_t weights = 0;
    for (size_t l = i; l < end; l++) weights += stages_[l].factor->product.N * stages_[l].factor->product.K;
    if (weights > SMALL) return i;
    i = end;
  }
  return i;
}

// The stored keys and values that an attention reads before any further layer does, from stage i on, as far as caches should
// hold them; keys are read first.
void Program::read_soon(size_t i, const Block& b, const Call& call, std::vector<Soon>& soon) const {
  const size_t end = rows_end(i);
  if (end == stages_.size() || (stages_[end].kind != Kind::attend && stages_[end].kind != Kind::look)) return;
  const Stage& s = stages_[end];
  const Store& over = s.kind == Kind::attend ? call.own : call.lent[size_t(s.place)];
  const Register& key = registers_[size_t(s.kind == Kind::attend ? s.b : s.a)];
  const int64_t item = int64_t(mx::size_of(key.dtype)), start = over.start + b.first, upto = s.kind == Kind::attend ? over.start : start + b.rows;
  const int64_t low = s.window ? std::max<int64_t>(over.low, start + 1 - s.window) : over.low;
  int64_t room = SOON * threads();
  for (bool values : {false, true}) {
    const char* data = values ? over.values : over.keys;
    const int64_t* strides = values ? over.value_strides : over.key_strides;
    const int64_t bytes = (upto - low) * strides[1] * item;
    room -= bytes * s.key_heads;
    if (bytes <= 0 || room < 0) return;
    soon.push_back({data + low * strides[1] * item, bytes, strides[0] * item, s.key_heads});
  }
}

// Runs the stages over rows that lie together in every register.
void Program::block(const Block& b, const Call& call) const {
  for (size_t i = 0; i < stages_.size();) {
    const size_t end = rows_end(i);
    const bool stores = end < stages_.size() && stages_[end].kind == Kind::attend;
    if (end > i || stores) by_rows(i, end + stores, b, call);
    if (end == stages_.size()) return;
    const Stage& s = stages_[end];
    const Register& from = registers_[size_t(s.a)];
    i = end + 1;
    if (s.kind == Kind::choose) {
      std::vector<float> largest(static_cast<size_t>(b.rows));
      const int64_t limit = call.limit ? call.limit : from.width;
      choose_rows(b.data[s.a], from.type, b.rows, from.width, limit, reinterpret_cast<int32_t*>(b.data[s.to]), largest.data());
    } else if (s.kind == Kind::linear) {
      thread_local std::vector<Factored> together;
      thread_local std::vector<Soon> soon;
      together.clear(), soon.clear();
      for (i = end; i < layers_from(end); i++) together.push_back({stages_[i].factor.get(), b.data[stages_[i].to]});
      read_soon(i, b, call, soon);
      multiply_rows(together, b.data[s.a], from.type, b.rows, soon);
    } else {
      attend(s, b, s.kind == Kind::attend ? call.own : call.lent[size_t(s.place)]);
    }
  }
}

// Additions that take as long as what a stage does with one row.
int64_t Program::effort(const Stage& s) const {
  const int64_t width = registers_[size_t(s.to)].width;
  switch (s.kind) {
    case Kind::linear: return s.factor->product.N * s.factor->product.K / 8;
    case Kind::norm: return 2 * width;
    case Kind::rotate: return 4 * width;
    case Kind::combine: return s.op == Rowwise::silu || s.op == Rowwise::gelu ? 4 * width : width;
    default: return width;
  }
}

// Runs stages `begin` to `end` row by row; of an attention, that is what it stores.
void Program::by_rows(size_t begin, size_t end, const Block& b, const Call& call) const {
  thread_local std::vector<const float*> waves;
  int64_t work = 0;
  waves.assign(end - begin, nullptr);
  const uint64_t asked = ++waves_asked;
  for (size_t i = begin; i < end; i++) {
    if (stages_[i].kind == Kind::rotate) waves[i - begin] = turns(stages_[i], b, call, asked);
    work += effort(stages_[i]);
  }
  const float* const* turned = waves.data();
  if (b.rows * work < SERIAL) return some_rows(begin, end, b, call, turned, 0, b.rows);
  if (b.rows < threads()) {  // no thread would find a row
    for (size_t i = begin; i < end; i++) in_parts(i, b, call, turned + (i - begin));
    return;
  }
  const int64_t step = std::min(ROWS, (b.rows + 2 * threads() - 1) / (2 * threads()));
  parallel_for((b.rows + step - 1) / step, [&](int64_t i) {
    some_rows(begin, end, b, call, turned, i * step, std::min(b.rows, (i + 1) * step));
  });
}

// One stage over few rows, divided among the threads where its elements do not depend on each other.
void Program::in_parts(size_t i, const Block& b, const Call& call, const float* const* turned) const {
  const Stage& s = stages_[i];
  const int64_t all = b.rows * registers_[size_t(s.to)].width, unit = s.kind == Kind::norm ? s.size : 1024;  // whole vectors
  const bool divides = s.kind == Kind::combine || (s.kind == Kind::norm && s.size < all);
  if (!divides || b.rows * effort(s) < SERIAL) return some_rows(i, i + 1, b, call, turned, 0, b.rows);
  const int64_t step = std::max<int64_t>(1, SERIAL / 4 / unit) * unit;
  parallel_for((all + step - 1) / step, [&](int64_t p) { some_elements(s, b, p * step, std::min(all, (p + 1) * step)); });
}

// Elements `first` to `last` of a combination, or of a norm.
void Program::some_elements(const Stage& s, const Block& b, int64_t first, int64_t last) const {
  const Kernels& k = kernels();
  const Register &from = registers_[size_t(s.a)], &to = registers_[size_t(s.to)];
  const Type type = from.type, y_type = to.type;
  const int64_t item = type == Type::f32 ? 4 : 2, y_item = y_type == Type::f32 ? 4 : 2;
  if (s.kind == Kind::combine) {
    k.rowwise(s.op, b.data[s.a] + first * item, b.data[s.b] + first * item, type, last - first, b.data[s.to] + first * y_item);
    return;
  }
  const void* weight = s.weight ? s.weight->data<char>() : nullptr;
  k.rms(b.data[s.a] + first * item, type, (last - first) / s.size, 1, weight, s.weight_type, s.size, s.number, b.data[s.to] + first * y_item, y_type);
}

// Stages `begin` to `end` over rows `first` to `last`, on this thread alone.
void Program::some_rows(size_t begin, size_t end, const Block& b, const Call& call, const float* const* turned, int64_t first, int64_t last) const {
  const Kernels& k = kernels();
  for (size_t i = begin; i < end; i++) {
    const Stage& s = stages_[i];
    const Register &from = registers_[size_t(s.a)], &to = registers_[size_t(s.to)];
    const int64_t item = from.type == Type::f32 ? 4 : 2, y_item = to.type == Type::f32 ? 4 : 2;  // ids have four bytes
    const char* x = b.data[s.a] + first * from.width * item;
    char* y = b.data[s.to] + first * to.width * y_item;
    switch (s.kind) {
      case Kind::norm:
      case Kind::combine: some_elements(s, b, first * to.width, last * to.width); break;
      case Kind::linear: multiply_here(*s.factor, x, from.type, last - first, y); break;
      case Kind::rotate: turn(s, b, turned[i - begin], first, last); break;
      case Kind::attend: store(s, b, call.own, first, last); break;
      case Kind::embed:
        for (int64_t r = first; r < last; r++, y += to.width * y_item) read_row(*s.table, reinterpret_cast<const int32_t*>(b.data[s.a])[r], y);
        break;
      case Kind::scale:
        for (int64_t r = first; r < last; r++, x += from.width * item, y += to.width * y_item) {
          k.rowwise(Rowwise::multiply, x, s.weight->data<char>(), from.type, to.width, y);
        }
        break;
      case Kind::join: {
        const int64_t left = from.width * item, right = (to.width - from.width) * item;
        const char* second = b.data[s.b] + first * right;
        for (int64_t r = first; r < last; r++, x += left, second += right, y += left + right) {
          memcpy(y, x, size_t(left));
          memcpy(y + left, second, size_t(right));
        }
        break;
      }
      case Kind::look:
      case Kind::choose: break;  // never among them
    }
  }
}

// Cosines of all rows, and behind them sines, as a rotation needs them.
const float* Program::turns(const Stage& s, const Block& b, const Call& call, uint64_t asked) const {
  const Kernels& k = kernels();
  const Type type = registers_[size_t(s.a)].type;
  const int64_t half = s.dims / 2, pitch = (half + k.width - 1) / k.width * k.width;
  const float* per_pair = s.weight->data<float>();
  thread_local std::vector<int> offsets;  // one for all, or one per batch
  offsets.assign(call.offsets ? call.offsets->size() : 1, call.offset);
  for (size_t i = 0; call.offsets && i < offsets.size(); i++) offsets[i] = call.offsets->data<int32_t>()[int64_t(i) * call.offsets->strides(0)];
  auto alike = [&](const Waves& w) {
    return w.kernels == &k && w.type == type && w.scale == s.number && w.first == b.first && w.rows == b.rows && w.L == b.L &&
           w.offsets == offsets && std::equal(w.wavelengths.begin(), w.wavelengths.end(), per_pair, per_pair + half);
  };
  Waves* oldest = nullptr;
  for (auto& one : waves_kept) {
    if (alike(*one)) {
      one->used = asked;
      return one->cosines;
    }
    if (!oldest || one->used < oldest->used) oldest = one.get();
  }
  if (waves_kept.size() < WAVES || oldest->used == asked) oldest = waves_kept.emplace_back(std::make_unique<Waves>()).get();
  Waves& w = *oldest;
  w.kernels = &k, w.type = type, w.scale = s.number, w.first = b.first, w.rows = b.rows, w.L = b.L;
  w.offsets = offsets, w.wavelengths.assign(per_pair, per_pair + half), w.used = asked;
  float *cosines = w.values.floats(size_t(3 * b.rows * pitch + 16)), *sines = cosines + b.rows * pitch, *angles = sines + b.rows * pitch;
  w.cosines = cosines;
  for (int64_t r = 0; r < b.rows; r++, cosines += pitch, sines += pitch) {
    const int64_t batch = (b.first + r) / b.L, l = (b.first + r) % b.L;
    const float position = (float(l) + float(offsets[offsets.size() == 1 ? 0 : size_t(batch)])) * s.number;
    for (int64_t i = 0; i < half; i++) angles[i] = position * per_pair[i];
    k.waves(angles, half, type, cosines, sines);
    for (int64_t i = half; i < pitch; i++) cosines[i] = sines[i] = 0;
  }
  return w.cosines;
}

// Rotates the heads of rows `first` to `last`.
void Program::turn(const Stage& s, const Block& b, const float* cosines, int64_t first, int64_t last) const {
  const Kernels& k = kernels();
  const Register& from = registers_[size_t(s.a)];
  const Type type = from.type;
  const int64_t pitch = (s.dims / 2 + k.width - 1) / k.width * k.width, item = type == Type::f32 ? 4 : 2;
  const float* sines = cosines + b.rows * pitch;
  for (int64_t r = first; r < last; r++) {
    for (int64_t e = r * from.width; e < (r + 1) * from.width; e += s.size) {
      k.rotate({b.data[s.a] + e * item, b.data[s.to] + e * item, type, 1, s.dims, s.size, s.neighbours, cosines + r * pitch, sines + r * pitch});
    }
  }
}

void Program::Store::lies_in(const mx::array& k, const mx::array& v) {
  auto lie = [&](int which, const mx::array& a, int64_t* strides) {
    if (a.strides(3) == 1) {
      strides[0] = a.strides(1), strides[1] = a.strides(2);
      return const_cast<char*>(a.data<char>());
    }
    copies[which] = std::make_shared<Contiguous>(a);
    strides[0] = int64_t(a.shape(2)) * a.shape(3), strides[1] = a.shape(3);
    return const_cast<char*>(static_cast<const char*>(copies[which]->get()));
  };
  keys = lie(0, k, key_strides), values = lie(1, v, value_strides);
}

// Stores the keys and values of rows `first` to `last`.
void Program::store(const Stage& s, const Block& b, const Store& into, int64_t first, int64_t last) const {
  const Register &key = registers_[size_t(s.b)], &value = registers_[size_t(s.c)];
  const int64_t D = key.width / s.key_heads, Dv = value.width / s.key_heads, item = int64_t(mx::size_of(key.dtype));
  for (int64_t r = first; r < last; r++) {
    for (int64_t h = 0; h < s.key_heads; h++) {
      const int64_t row = into.start + b.first + r;
      memcpy(into.keys + (h * into.key_strides[0] + row * into.key_strides[1]) * item, b.data[s.b] + (r * key.width + h * D) * item, size_t(D * item));
      memcpy(into.values + (h * into.value_strides[0] + row * into.value_strides[1]) * item, b.data[s.c] + (r * value.width + h * Dv) * item, size_t(Dv * item));
    }
  }
}

// Attends: a row sees what is stored up to its own place.
void Program::attend(const Stage& s, const Block& b, const Store& over) const {
  const Register &from = registers_[size_t(s.a)], &to = registers_[size_t(s.to)];
  const mx::Dtype stored = s.kind == Kind::attend ? registers_[size_t(s.b)].dtype : from.dtype;
  const int64_t D = from.width / s.heads, Dv = to.width / s.heads, group = s.heads / s.key_heads;
  const int64_t q_item = int64_t(mx::size_of(from.dtype)), item = int64_t(mx::size_of(stored));
  const int64_t start = over.start + b.first;
  Attention base{};
  base.q_stride = 1, base.keys.stride = over.key_strides[1] * item, base.values.stride = over.value_strides[1] * item;
  base.D = D, base.value_D = Dv, base.scale = s.number;
  base.q_type = *stored_type(from.dtype), base.type = *stored_type(stored), base.y_type = *stored_type(to.dtype);
  // the first stored row that row l sees
  auto low = [&](int64_t l) { return s.window ? std::max<int64_t>(over.low, start + l + 1 - s.window) : over.low; };
  // the rows of a task share a key head: query heads of its group and positions, positions slowest
  const int64_t rows = group * b.rows, blocks = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
  std::vector<Attention> tasks(size_t(s.key_heads * blocks), base);
  const int64_t longest = start + b.rows - low(0);
  for (size_t n = 0; n < tasks.size(); n++) {
    const int64_t place = int64_t(n) % blocks, kv_head = int64_t(n) / blocks;
    Attention& a = tasks[n];
    a.rows = int(std::min<int64_t>(ATTENTION_ROWS, rows - place * ATTENTION_ROWS));
    const int64_t first = place * ATTENTION_ROWS / group, last = (place * ATTENTION_ROWS + a.rows - 1) / group;
    const int64_t bottom = low(first);
    a.count = start + last + 1 - bottom;
    a.keys.data = over.keys + (kv_head * over.key_strides[0] + bottom * over.key_strides[1]) * item;
    a.values.data = over.values + (kv_head * over.value_strides[0] + bottom * over.value_strides[1]) * item;
    for (int r = 0; r < a.rows; r++) {
      const int64_t row = place * ATTENTION_ROWS + r, l = row / group, h = kv_head * group + row % group;
      a.q[r] = b.data[s.a] + (l * from.width + h * D) * q_item;
      a.y[r] = b.data[s.to] + (l * to.width + h * Dv) * q_item;
      a.first[r] = low(l) - bottom, a.visible[r] = start + l + 1 - bottom;
    }
  }
  attend_all(tasks, b.rows * s.heads * longest * (D + Dv));
}

}  // namespace spec
