// Four lanes of plain arrays. Included inside the kernel file's namespace.

constexpr int W = 4;

struct vec {
  float v[W];
};
static inline vec ones(float f) { return {{f, f, f, f}}; }
static inline vec zero() { return ones(0); }
static inline vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline void store(float* p, vec v) { memcpy(p, v.v, sizeof v); }
static inline vec fma(vec a, vec b, vec c) {
  vec r;
  for (int i = 0; i < W; i++) r.v[i] = c.v[i] + a.v[i] * b.v[i];
  return r;
}

static inline vec held(vec v) { return v; }

#define LANES(expression)                              \
  float p[W], q[W], r[W];                              \
  store(p, a), store(q, b);                            \
  for (int i = 0; i < W; i++) r[i] = (expression);     \
  return load(r)

static inline vec maximum(vec a, vec b) { LANES(p[i] > q[i] ? p[i] : q[i]); }
static inline vec times(vec a, vec b) { LANES(p[i] * q[i]); }
static inline vec plus(vec a, vec b) { LANES(p[i] + q[i]); }
static inline vec minus(vec a, vec b) { LANES(p[i] - q[i]); }
static inline vec over(vec a, vec b) { LANES(p[i] / q[i]); }
static inline vec nearest(vec a) {
  const vec b = a;
  LANES(q[i] != q[i] ? p[i] : rintf(p[i]));
}
static inline vec lower(vec a) {
  const vec b = a;
  LANES(q[i] != q[i] ? p[i] : floorf(p[i]));
}
static inline vec two_to(vec a) {  // a whole, -126 to 127
  const vec b = a;
  LANES(q[i] != q[i] ? p[i] : bits_to_float(uint32_t(int(p[i]) + 127) << 23));
}
// v where x >= limit (or x is NaN), else zero.
static inline vec unless_below(vec a, vec b, float limit) { LANES(q[i] < limit ? 0.0f : p[i]); }
// v, but for NaN, of which there is one: which of two an addition gives depends on what a compiler adds to what.
static inline vec with_one_nan(vec a) {
  const vec b = a;
  LANES(q[i] != q[i] ? bits_to_float(0x7fc00000) : p[i]);
}
// The values of the lanes after being stored as bfloat16 or float16.
static inline vec through_bf16(vec a) {
  const vec b = a;
  LANES(q[i] != q[i] ? p[i] : bf16_to_float(float_to_bf16(p[i])));
}
static inline vec through_f16(vec a) {
  const vec b = a;
  LANES(q[i] != q[i] ? p[i] : f16_to_float(float_to_f16(p[i])));
}
#undef LANES

// The pairwise tree of the lanes: halves are added until one is left.
static inline float sum(vec v) {
  float p[W];
  store(p, v);
  return (p[0] + p[2]) + (p[1] + p[3]);
}

static inline void sum4(const vec* v, float* out) {
  for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
}

#include "unfolded.inl"

static inline vec load_bf16(const uint16_t* p) {
  float f[W];
  for (int i = 0; i < W; i++) f[i] = bf16_to_float(p[i]);
  return load(f);
}

static inline vec load_f16(const uint16_t* p) {
  float f[W];
  for (int i = 0; i < W; i++) f[i] = f16_to_float(p[i]);
  return load(f);
}

// The lanes as bfloat16 or float16.
static inline void store_bf16(uint16_t* p, vec v) {
  float f[W];
  store(f, v);
  for (int i = 0; i < W; i++) p[i] = float_to_bf16(f[i]);
}

static inline void store_f16(uint16_t* p, vec v) {
  float f[W];
  store(f, v);
  for (int i = 0; i < W; i++) p[i] = float_to_f16(f[i]);
}

// Four words of 32 bits, or four bytes each.
struct ints {
  int32_t v[W];
};
static inline ints load_words(const void* p) {
  ints r;
  memcpy(r.v, p, sizeof r);
  return r;
}
// The first `bytes` of them, zeros after those.
static inline ints load_words(const void* p, int64_t bytes) {
  uint8_t room[4 * W] = {};
  memcpy(room, p, size_t(bytes));
  return load_words(room);
}
static inline void store_words(void* p, ints v) { memcpy(p, v.v, sizeof v); }
static inline ints words_of(vec v) { return load_words(v.v); }
static inline vec as_floats(ints v) {
  vec r;
  memcpy(r.v, v.v, sizeof r);
  return r;
}
static inline vec to_floats(ints v) { return {{float(v.v[0]), float(v.v[1]), float(v.v[2]), float(v.v[3])}}; }
static inline ints plus(ints a, ints b) {
  for (int i = 0; i < W; i++) a.v[i] += b.v[i];
  return a;
}
static inline ints all_words(int32_t n) { return {{n, n, n, n}}; }
static inline ints times_128(ints v) {
  for (int32_t& w : v.v) w *= 128;
  return v;
}
// Each half as the upper one of a word.
static inline ints low_halves(ints v) {
  for (int32_t& w : v.v) w = int32_t(uint32_t(w) << 16);
  return v;
}
static inline ints high_halves(ints v) {
  for (int32_t& w : v.v) w &= int32_t(0xffff0000u);
  return v;
}
static inline ints low_nibbles(ints v) {
  for (int32_t& w : v.v) w &= 0x0f0f0f0f;
  return v;
}
static inline ints high_nibbles(ints v) {
  for (int32_t& w : v.v) w = (w >> 4) & 0x0f0f0f0f;
  return v;
}

// sum + the products of four bytes of codes and the four signed bytes at x, from -127 to 127. With CENTRED, codes of eight
// bits come less 128.
constexpr bool CENTRED = true;
template <int bits>
static inline ints add_bytes(ints sum, ints codes, const float* x) {
  int8_t four[4], c[W][4];
  memcpy(four, x, sizeof four), memcpy(c, codes.v, sizeof c);
  for (int i = 0; i < W; i++)
    for (int j = 0; j < 4; j++) sum.v[i] += c[i][j] * four[j];
  return sum;
}
static inline ints less_128(ints codes) {
  for (int32_t& w : codes.v) w ^= int32_t(0x80808080u);
  return codes;
}

// Rows of four 32-bit words become columns.
static inline void transpose(ints (&v)[W]) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      const int32_t w = v[i].v[j];
      v[i].v[j] = v[j].v[i], v[j].v[i] = w;
    }
}

// A group is decoded as a whole into floats; `decode` reads them back.
static inline vec swap_lanes(vec v) { return v; }  // elements lie in lanes as they come

template <int bits>
struct Affine {
  static constexpr bool swapped = false;
  struct Group {
    float values[128];
  };

  static inline Group group(const uint8_t* codes, float scale, float bias, int size) {
    Group g;
    constexpr uint32_t mask = (1u << bits) - 1;
    for (int k = 0; k < size; k += 8) {  // eight codes are `bits` bytes
      uint64_t word = 0;
      for (int i = 0; i < bits; i++) word |= uint64_t(codes[i]) << (8 * i);
      for (int i = 0; i < 8; i++) g.values[k + i] = float(uint32_t(word >> (i * bits)) & mask) * scale + bias;
      codes += bits;
    }
    return g;
  }
  static inline vec decode(const uint8_t*, const Group& g, int k) { return load(g.values + k); }
};

struct Fp4 {
  static constexpr bool swapped = false;
  struct Group {
    float values[128];
  };
  static inline Group group(const uint8_t* codes, float scale, float, int size) {
    static const float values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    Group g;
    for (int k = 0; k < size; k++) g.values[k] = values[(codes[k / 2] >> (4 * (k & 1))) & 15] * scale;
    return g;
  }
  static inline vec decode(const uint8_t*, const Group& g, int k) { return load(g.values + k); }
};

constexpr int tile_columns(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 4;
constexpr int BYTE_ROWS = 2;
constexpr bool UNROLLED = false;  // whether loops over a group are
