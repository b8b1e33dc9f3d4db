// A run of row-wise operations as one mlx primitive: what lies between two attentions of a model, in one task of
// mlx's stream instead of a dozen. Every operation is the library's own, so the bytes are those of the operations
// one by one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "arrays.h"
#include "embedding.h"
#include "kernels.h"
#include "linear.h"

namespace spec {

// Built once, called often. A register is a number: it holds `width` values per row.
class Program {
 public:
  explicit Program(mx::Dtype dtype);  // of every input but ids; other registers follow mlx's rules of promotion

  Program(const Program&) = delete;

  // The next input of a call: (B, L, width), or (B, heads, L, width / heads) when heads > 0.
  int input(int64_t width, int heads);
  // The same, of token ids: (B, L) int32. Ids are only looked up, chosen, handed out and fed.
  int ids();
  // Rows of a table, as `rows` of embedding.h has them.
  int embed(int ids, const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, const Layout& layout);
  // Two registers of one dtype side by side.
  int join(int a, int b);
  // The best of every row of logits, as `greedy` chooses within the limit of the call.
  int choose(int logits);
  // rms_norm of every `size` values, which is the width or one head; weight (size,) or none.
  int norm(int from, const std::optional<mx::array>& weight, float eps, int64_t size);
  // As `linear`. Layers after one another that read the same register run side by side.
  int linear(int from, const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
             const std::optional<mx::array>& bias, const Layout& layout);
  // "add", "multiply", "silu" (silu(a) * b) or "gelu" (tanh-approximated gelu(a) * b) of two registers alike.
  int combine(const std::string& name, int a, int b);
  // As `rope`, on `heads` rows side by side, at the offset that comes with a call.
  int rotate(int from, int heads, int dims, bool neighbours, float scale, const mx::array& inverse);
  // Every row times weight (width,), or (1,) for all of them.
  int scale(int from, const mx::array& weight);
  // Attention of queries (heads side by side) over stored keys and values, to which the rows of `keys` and `values` are
  // added first: causal, of one batch; a row sees the last `window` keys, all of them when it is 0. Once per program;
  // the storage comes with a call.
  int attend(int queries, int keys, int values, int heads, int key_heads, float scale, int window);
  // The same over storage number `place` of those that are lent to a call, to which nothing is added: the last row of a
  // call sees its last key, the rows before it one less each.
  int look(int place, int queries, int heads, int key_heads, float scale, int window);
  // In a call that repeats the program, every run but the first finds in `input` what the run before left in `result`.
  void feed(int result, int input);
  // The next output of a call, in the shape `input` or `ids` would take.
  void output(int from, int heads);

  // Keys and values (1, key_heads, capacity, D), of which a call reads from row `low` on and fills from `start` on.
  struct Storage {
    mx::array keys, values;
    int low, start;
  };
  // Keys and values (1, key_heads, capacity, D) that are only read, from row `low` up to row `end`.
  struct Lent {
    mx::array keys, values;
    int low, end;
  };
  // The outputs of a program on inputs whose row l of batch b stands at position offset[b] + l, then the filled storage
  // if it attends; lazy. The storage is written in place when nobody else holds it. With `repeat` above 1 the program,
  // which may not attend, runs so often over one row at that position: outputs (B, repeat, width) hold a row per run.
  // `choose` chooses among the first `limit` logits, all of them when it is 0.
  static std::vector<mx::array> call(const std::shared_ptr<const Program>& program, std::vector<mx::array> inputs,
                                     const std::variant<int, mx::array>& offset, const std::optional<Storage>& storage,
                                     const std::vector<Lent>& lent, int repeat, int limit, mx::StreamOrDevice stream);

  // Stored keys and values while a call runs: read from row `low` on, of which row `start` belongs to the first row.
  struct Store {
    int low, start;
    char *keys, *values;
    int64_t key_strides[2], value_strides[2];  // elements, of a head and a row
    std::shared_ptr<Contiguous> copies[2];  // of what has its elements apart
    void lies_in(const mx::array& k, const mx::array& v);
  };
  // What a call computes with besides its inputs.
  struct Call {
    const mx::array* offsets;  // (B,) int32, or one for all
    int offset, repeat, limit;
    Store own;
    std::vector<Store> lent;
  };
  void run(const std::vector<mx::array>& inputs, const Call& call, std::vector<mx::array>& outputs) const;
  bool attends() const { return attends_; }

 private:
  enum class Kind { norm, linear, combine, rotate, scale, attend, look, embed, join, choose };
  struct Register {
    int64_t width;
    mx::Dtype dtype;
    Type type;  // of activations
  };
  struct Port {
    int place, heads;
  };
  struct Stage {
    Kind kind;
    int a, b, c, to;
    int heads, key_heads, window, place;
    Rowwise op;
    float number;  // epsilon of a norm, scale of positions or of scores
    int64_t size;  // values a norm or a head spans
    int dims;
    bool neighbours;
    std::optional<mx::array> weight;  // of a norm, or inverse wavelengths
    Type weight_type;                 // of a norm
    std::unique_ptr<Factor> factor;
    std::unique_ptr<Table> table;
  };
  struct Feed {
    int from, to;
  };
  int add(int64_t width, mx::Dtype dtype);
  const Register& any(int place) const;
  const Register& at(int place) const;      // of activations
  const Register& ids_at(int place) const;  // of ids
  Stage& stage(Kind kind, int a, int b, int to);
  // A block of rows: the first of them, and positions per batch.
  struct Block {
    char* const* data;
    int64_t first, rows, L;
  };
  size_t layers_from(size_t i) const;
  void read_soon(size_t i, const Block& b, const Call& call, std::vector<Soon>& soon) const;
  size_t rows_end(size_t i) const;
  int64_t effort(const Stage& s) const;
  void block(const Block& b, const Call& call) const;
  void by_rows(size_t begin, size_t end, const Block& b, const Call& call) const;
  void in_parts(size_t i, const Block& b, const Call& call, const float* const* turned) const;
  void some_elements(const Stage& s, const Block& b, int64_t first, int64_t last) const;
  void some_rows(size_t begin, size_t end, const Block& b, const Call& call, const float* const* turned, int64_t first, int64_t last) const;
  const float* turns(const Stage& s, const Block& b, const Call& call, uint64_t asked) const;
  void turn(const Stage& s, const Block& b, const float* cosines, int64_t first, int64_t last) const;
  void store(const Stage& s, const Block& b, const Store& into, int64_t first, int64_t last) const;
  void attend(const Stage& s, const Block& b, const Store& over) const;

  bool attends_ = false;
  int lent_ = 0;  // storages that a call has to lend
  mx::Dtype dtype_;
  std::vector<Register> registers_;
  std::vector<Port> inputs_, outputs_;
  std::vector<Feed> feeds_;
  std::vector<Stage> stages_;
};

}  // namespace spec
