// NEON of any ARM64 processor: 4 lanes. Included inside the kernel file's namespace.

constexpr int W = 4;
typedef float32x4_t vec;

static inline vec zero() { return vdupq_n_f32(0); }
static inline vec ones(float f) { return vdupq_n_f32(f); }
static inline vec load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, vec v) { vst1q_f32(p, v); }
static inline vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }

static inline vec held(vec v) { return v; }

static inline vec maximum(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vec times(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec plus(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec minus(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec over(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec nearest(vec v) { return vrndnq_f32(v); }
static inline vec lower(vec v) { return vrndmq_f32(v); }
static inline vec two_to(vec n) {  // n whole, -126 to 127
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// v where x >= limit (or x is NaN), else zero.
static inline vec unless_below(vec v, vec x, float limit) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, ones(limit))));
}
// v, but for NaN, of which there is one: which of two an addition gives depends on what a compiler adds to what.
static inline vec with_one_nan(vec v) { return vbslq_f32(vceqq_f32(v, v), v, ones(bits_to_float(0x7fc00000))); }

// The pairwise tree of the lanes: halves are added until one is left.
static inline float sum(vec v) { return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v))); }

// The same tree for four vectors at once.
static inline void sum4(const vec* v, float* out) {
  float32x2_t half[4];
  for (int i = 0; i < 4; i++) half[i] = vadd_f32(vget_low_f32(v[i]), vget_high_f32(v[i]));
  vst1q_f32(out, vpaddq_f32(vcombine_f32(half[0], half[1]), vcombine_f32(half[2], half[3])));
}

#include "unfolded.inl"

// The bits of bfloat16 in the upper halves of the lanes: to nearest, ties to even; NaN stays NaN.
static inline uint32x4_t bits_of_bf16(vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
static inline vec widen_bf16(uint16x4_t v) { return vreinterpretq_f32_u32(vshll_n_u16(v, 16)); }

static inline vec load_bf16(const uint16_t* p) { return widen_bf16(vld1_u16(p)); }
static inline vec load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

// The lanes as bfloat16 or float16.
static inline void store_bf16(uint16_t* p, vec v) { vst1_u16(p, vshrn_n_u32(bits_of_bf16(v), 16)); }
static inline void store_f16(uint16_t* p, vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

// The values of the lanes after being stored as bfloat16 or float16.
static inline vec through_bf16(vec v) {
  return vreinterpretq_f32_u32(vandq_u32(bits_of_bf16(v), vdupq_n_u32(0xffff0000)));
}
static inline vec through_f16(vec v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }

// Four words of 32 bits, or four bytes each.
typedef int32x4_t ints;
static inline ints load_words(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
// The first `bytes` of them, zeros after those.
static inline ints load_words(const void* p, int64_t bytes) {
  uint8_t room[4 * W] = {};
  memcpy(room, p, size_t(bytes));
  return load_words(room);
}
static inline void store_words(void* p, ints v) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(v)); }
static inline ints words_of(vec v) { return vreinterpretq_s32_f32(v); }
static inline vec as_floats(ints v) { return vreinterpretq_f32_s32(v); }
static inline vec to_floats(ints v) { return vcvtq_f32_s32(v); }
static inline ints plus(ints a, ints b) { return vaddq_s32(a, b); }
static inline ints all_words(int32_t n) { return vdupq_n_s32(n); }
static inline ints times_128(ints v) { return vshlq_n_s32(v, 7); }
// Each half as the upper one of a word.
static inline ints low_halves(ints v) { return vshlq_n_s32(v, 16); }
static inline ints high_halves(ints v) { return vandq_s32(v, vdupq_n_s32(int32_t(0xffff0000u))); }
static inline ints low_nibbles(ints v) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(v), vdupq_n_u8(15))); }
static inline ints high_nibbles(ints v) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(v), 4)); }

// sum + the products of four bytes of codes and the four signed bytes at x, from -127 to 127. With CENTRED, codes of eight
// bits come less 128.
constexpr bool CENTRED = true;
template <int bits>
static inline ints add_bytes(ints sum, ints codes, const float* x) {
  int32_t four;
  memcpy(&four, x, 4);
  const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four)), c = vreinterpretq_s8_s32(codes);
  const int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(v)), high = vmull_high_s8(c, v);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
static inline ints less_128(ints codes) { return veorq_s32(codes, vdupq_n_s32(int32_t(0x80808080u))); }

// Rows of four 32-bit words become columns.
static inline void transpose(ints (&v)[W]) {
  const int64x2_t a = vreinterpretq_s64_s32(vtrn1q_s32(v[0], v[1])), b = vreinterpretq_s64_s32(vtrn2q_s32(v[0], v[1]));
  const int64x2_t c = vreinterpretq_s64_s32(vtrn1q_s32(v[2], v[3])), d = vreinterpretq_s64_s32(vtrn2q_s32(v[2], v[3]));
  v[0] = vreinterpretq_s32_s64(vtrn1q_s64(a, c)), v[1] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
  v[2] = vreinterpretq_s32_s64(vtrn2q_s64(a, c)), v[3] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
}

static inline vec swap_lanes(vec v) { return v; }  // elements lie in lanes as they come

// Four codes from element k of a group on, which begin within a byte's upper half where `bits` is odd: bytes that hold
// them go to every lane, which is shifted to its own.
template <int bits>
static inline uint32x4_t four_codes(const uint8_t* codes, int k) {
  const int32_t begin = bits & 1 ? -((k * bits) & 7) : 0;
  if constexpr (bits <= 4) {
    uint16_t word = 0;
    memcpy(&word, codes, bits == 2 ? 1 : 2);
    constexpr int16_t apart[4] = {0, -bits, -2 * bits, -3 * bits};
    const int16x4_t shift = bits & 1 ? vadd_s16(vld1_s16(apart), vdup_n_s16(int16_t(begin))) : vld1_s16(apart);
    return vmovl_u16(vand_u16(vshl_u16(vdup_n_u16(word), shift), vdup_n_u16((1 << bits) - 1)));
  } else {
    uint32_t word = 0;
    memcpy(&word, codes, bits == 8 ? 4 : 3);
    constexpr int32_t apart[4] = {0, -bits, -2 * bits, -3 * bits};
    const int32x4_t shift = bits & 1 ? vaddq_s32(vld1q_s32(apart), vdupq_n_s32(begin)) : vld1q_s32(apart);
    return vandq_u32(vshlq_u32(vdupq_n_u32(word), shift), vdupq_n_u32((1 << bits) - 1));
  }
}

// A group is its scale and bias; `decode` reads the codes, four at a time.
template <int bits>
struct Affine {
  static constexpr bool swapped = false;
  struct Group {
    vec scale = zero(), bias = zero();
  };

  static inline Group group(const uint8_t*, float scale, float bias, int) { return {ones(scale), ones(bias)}; }
  static inline vec decode(const uint8_t* codes, const Group& g, int k) {
    return vaddq_f32(vmulq_f32(vcvtq_f32_u32(four_codes<bits>(codes, k)), g.scale), g.bias);
  }
};

// Values of E2M1 codes are bfloat16, whose bytes are looked up.
struct Fp4 {
  static constexpr bool swapped = false;
  struct Group {
    vec scale = zero();
  };
  static inline Group group(const uint8_t*, float scale, float, int) { return {ones(scale)}; }
  static inline vec decode(const uint8_t* codes, const Group& g, int k) {
    static constexpr uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    static constexpr uint8_t high[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                         0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x8_t wide = vreinterpret_u8_u16(vmovn_u32(four_codes<4>(codes, k))), at = vuzp1_u8(wide, wide);
    const uint8x8_t bytes = vzip1_u8(vqtbl1_u8(vld1q_u8(low), at), vqtbl1_u8(vld1q_u8(high), at));
    return vmulq_f32(widen_bf16(vreinterpret_u16_u8(bytes)), g.scale);
  }
};

constexpr int tile_columns(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 4;
constexpr int BYTE_ROWS = 8;
constexpr bool UNROLLED = false;  // whether loops over a group are
