// What an instruction set's kernels take and return. Plain C++ only: each instruction set is a translation unit
// of its own, compiled with its own flags, and must not share inline code with the others.
#pragma once

#include <cstdint>

namespace spec {

enum class Type : int { f32, f16, bf16, e8m0, e4m3 };

// How a weight row is stored. `dense` holds elements of Weights::type; `affine` holds packed codes q with
// w = scale * q + bias per group; `fp4` holds E2M1 codes times a scale per group.
enum class Format : int { dense, affine, fp4 };

// A matrix (N, K), row-contiguous.
struct Weights {
  Format format;
  Type type;         // dense: of the elements
  int bits;          // affine: 2, 3, 4, 5, 6, 8; fp4: 4
  int group;         // weights that share a scale
  Type scale_type;   // of scales and biases
  const void* data;
  const void* scales;  // (N, K / group)
  const void* biases;  // (N, K / group), affine only
  int64_t row_bytes;   // of one row of data
  const float* lanes;  // what `put_in_lanes` made of it, or null
};

// What is read soon after a product, fetched meanwhile: `count` stretches of `bytes`, `apart` bytes from each other.
struct Soon {
  const char* data;
  int64_t bytes, apart, count;
};

// y[m][n] = sum_k x[m][k] * w[n][k] (+ bias[n]), for n in [first, last).
// x rows are float, padded with zeros to `padded` and in the order `prepare` gave them, as `compact` left them, or as they lie where `direct` says so.
struct Product {
  Weights w;
  const float* const* x;  // rows
  void* const* y;         // rows
  const void* bias;       // (N,) or null
  int64_t rows, N, K, padded;
  bool compact;  // x rows come from `compact`
  Type y_type, bias_type;
  float* scratch;  // `scratch_floats` of them, of the calling thread
  const Soon* soon;  // `soon_count` of them, of which a call fetches the part between two fractions; null for none
  int64_t soon_count;
  double soon_from, soon_to;
};

// Keys or values of one head: entry t lies `stride` bytes behind the one before it. Packed ones have a scale and a bias
// per group, as many elements on from entry to entry as their strides say.
struct Stored {
  const void* data;
  int64_t stride;
  const void *scales, *biases;
  int64_t scale_stride, bias_stride;
};

// Up to ATTENTION_ROWS queries that read the same keys and values, AT_ONCE of them in registers.
constexpr int ATTENTION_ROWS = 32, AT_ONCE = 8;
enum class Mask : int { none, flags, f32, f16, bf16 };

struct Attention {
  int rows;
  const void* q[ATTENTION_ROWS];
  void* y[ATTENTION_ROWS];
  int64_t first[ATTENTION_ROWS], visible[ATTENTION_ROWS];  // keys the row may see, from `first` up to `visible`; a mask hides more of them
  const void* mask[ATTENTION_ROWS];
  Mask mask_kind;
  int64_t mask_stride, q_stride, count, D, value_D;
  Stored keys, values;
  int bits, group;          // of packed keys and values, else 0: 4 or 8 bits; 32, 64 or 128
  Type q_type, type, y_type;  // `type` of keys and values, or of their scales and biases
  float scale;
  float* scratch;
};

// One row of x (D,) with its first `dims` elements turned by angles, one per pair; the rest is copied.
// Cosines and sines are `dims / 2` floats, rounded as `type` stores them and padded to whole vectors.
struct Rotation {
  const void* x;
  void* y;
  Type type;
  int64_t stride, dims, D;
  bool neighbours;  // pairs are elements 2i and 2i + 1, else i and i + dims / 2
  const float *cosines, *sines;
};

// Elements of step t begin `t * step` elements on and lie `apart` elements from each other.
struct Series {
  const void* data;
  Type type;
  int64_t step, apart;
};

// Some rows of the state of one head: through the `owed` steps of a tape, whose deltas are known, then through `steps`
// steps of the gated delta rule (mlx_spec/gated_delta.py).
struct Delta {
  int64_t rows, D;  // rows of the state, each of D elements
  const float* before;
  int64_t row_stride, column_stride;  // of `before`
  float *settled, *after;             // (rows, D) lying together: between the two, and at the end; null if not wanted
  int64_t owed;
  Series owed_decay, owed_keys, owed_deltas;  // one element, D and `rows` elements
  int64_t steps;
  Series decay, keys, rate, queries, values;  // one element, D, one, D and `rows` elements
  float* deltas;                              // of step t: `t * delta_step` elements on
  int64_t delta_step;
  void* y;  // of step t: `t * y_step` elements on
  Type y_type;
  int64_t y_step;
  float* scratch;  // `delta_floats` of them, of the calling thread
};

// Two rows to one: a + b, a * b, silu(a) * b, gelu(a) * b with the tanh approximation; activations as `activate` has them.
enum class Rowwise : int { add, multiply, silu, gelu };

// y = act(gate) * x over `count` elements, without x the activation alone.
enum class Act : int { silu, gelu_tanh };

struct Activation {
  Act act;
  Type type, gate_type, x_type;  // `type` of y
  bool precise;                  // rounded once, at the end; else as `type` stores it after every operation
  const void *gate, *x;
  int64_t gate_apart, x_apart;  // elements between neighbours
  void* y;
  int64_t count;
};

// One position of a convolution in which every channel has its own taps. w is (taps, channels).
struct Convolution {
  const void *x, *w, *bias;  // bias may be null
  void* y;
  Type type;
  int64_t channels, taps, step, apart;  // of x: elements between positions, and between channels
  int64_t w_step;
};

struct Kernels {
  const char* name;
  // Floats of scratch one call of `product` needs.
  int64_t (*scratch_floats)(const Product&);
  // Columns a call of `product` should cover, at least.
  int64_t (*columns)(const Product&);
  void (*product)(const Product&, int64_t first, int64_t last);
  // One row of activations as floats, zero-padded, in the order the weights are decoded in.
  void (*prepare)(const Weights&, const void* x, Type type, int64_t stride, int64_t K, int64_t padded, float* out);
  // Whether rows of this type are multiplied in a form of their own: two elements at a time, or rounded to whole numbers.
  bool (*compacts)(const Weights&, Type type);
  // One row in that form, in the room `prepare` takes but at least 128 floats; false for a row that holds NaN, infinity
  // or values so large that it has to be prepared as floats.
  bool (*compact)(const Weights&, const void* x, Type type, int64_t stride, int64_t K, float* out);
  // Floats that weights (N, K) take once more where those lie in lanes which multiply them faster so; 0 where they do not.
  int64_t (*lane_floats)(const Weights&, int64_t N, int64_t K);
  void (*put_in_lanes)(const Weights&, int64_t N, int64_t K, float* out);
  // Elements a row is padded to a multiple of.
  int width;
  // Whether a contiguous row of K elements may be read where it lies.
  bool (*direct)(const Weights&, Type type, int64_t K);
  // rms_norm of rows, D * stride elements apart: x * rsqrt(mean(x^2) + eps) * weight, weight null for ones.
  void (*rms)(const void* x, Type type, int64_t rows, int64_t stride, const void* weight, Type weight_type, int64_t D, float eps,
              void* y, Type y_type);
  int64_t (*attention_floats)(const Attention&);
  // Attention in four parts: queries, scores of some keys (from a multiple of 4 on), weights of some rows (from a multiple
  // of AT_ONCE on), and some elements of some results (elements from a multiple of `gathered_apart` on). All but the
  // first may be had in pieces, by any thread.
  void (*begin)(const Attention&);
  void (*score)(const Attention&, int64_t first, int64_t last);
  void (*weigh)(const Attention&, int row, int upto);
  int64_t (*gathered_apart)(const Attention&);
  void (*gather)(const Attention&, int row, int upto, int64_t first, int64_t last);
  // Cosines and sines of angles, as mlx computes them, rounded as `type` stores them.
  void (*waves)(const float* angles, int64_t count, Type type, float* cosines, float* sines);
  void (*rotate)(const Rotation&);
  void (*activate)(const Activation&);
  // y = cap * tanh(x / cap) of n elements of one type, rounded as it stores them after every operation.
  void (*soft_cap)(const void* x, Type type, int64_t n, float cap, void* y);
  void (*convolve)(const Convolution&);
  int64_t (*delta_floats)(const Delta&);
  void (*delta)(const Delta&);
  // Of n values: the largest, the sum of exp(x - shift), the first whose difference from shift is stored as best's.
  float (*largest)(const void*, Type, int64_t n);
  float (*exp_sum)(const void*, Type, int64_t n, float shift);
  int64_t (*first_best)(const void*, Type, int64_t n, float shift, float best);
  float (*round_to)(float value, Type);
  // n elements of one type.
  void (*rowwise)(Rowwise op, const void* a, const void* b, Type type, int64_t n, void* y);
  // What the machine can do, for benchmarks: the sum of n floats, and n rounds of independent multiply-adds.
  float (*read)(const float*, int64_t n);
  float (*multiply_add)(int64_t rounds);
  int multiply_adds_a_round;
};

// Of an instruction set: exact products (0), or those of rows rounded to one or two bytes where weights are packed codes of
// four or eight bits.
const Kernels* avx512bf16_kernels(int bytes);
const Kernels* avx512_kernels(int bytes);
const Kernels* avx2_kernels(int bytes);
const Kernels* neon_kernels(int bytes);
const Kernels* portable_kernels(int bytes);

}  // namespace spec
