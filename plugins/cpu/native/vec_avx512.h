// AVX-512 (F, BW, VL, DQ): 16 lanes. Included inside the kernel file's namespace.

#define SPEC_KEYS_IN_LANES 1  // attention_pairs.inl

constexpr int W = 16;
typedef __m512 vec;

static inline vec zero() { return _mm512_setzero_ps(); }
static inline vec ones(float f) { return _mm512_set1_ps(f); }
static inline vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }

// v, in a register: a compiler would read it again for every product it is in.
static inline vec held(vec v) {
  asm("" : "+v"(v));
  return v;
}

// The pairwise tree of the lanes: halves are added until one is left.
static inline float sum(vec v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// The same tree for four vectors at once.
static inline void sum4(const vec* v, float* out) {
  __m128 q[4];
  for (int i = 0; i < 4; i++) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    q[i] = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  }
  __m128 l01 = _mm_add_ps(_mm_movelh_ps(q[0], q[1]), _mm_movehl_ps(q[1], q[0]));
  __m128 l23 = _mm_add_ps(_mm_movelh_ps(q[2], q[3]), _mm_movehl_ps(q[3], q[2]));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(l01, l23, 0x88), _mm_shuffle_ps(l01, l23, 0xdd)));
}

// The same trees of several vectors together, level by level: lanes of one are added to lanes of another, which come
// to lie beside each other. What a sum's terms are does not depend on their order.
static inline vec halves(vec a, vec b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
static inline vec quarters(vec a, vec b) {
  const vec other = _mm512_mask_blend_ps(0x0f0f, a, b);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a, b), _mm512_shuffle_f32x4(other, other, 0xb1));
}
static inline vec eighths(vec a, vec b) {
  const vec other = _mm512_castpd_ps(_mm512_shuffle_pd(_mm512_castps_pd(a), _mm512_castps_pd(b), 0x55));
  return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), other);
}
static inline vec sixteenths(vec a, vec b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permute_ps(_mm512_mask_blend_ps(0x5555, a, b), 0xb1));
}

// As many levels as NR vectors can share one.
constexpr bool FOLDS = true;
template <int NR>
static inline vec fold(const vec* v) {
  static_assert(NR == 2 || NR == 4);
  if constexpr (NR == 2) return halves(v[0], v[1]);
  if constexpr (NR == 4) return quarters(halves(v[0], v[1]), halves(v[2], v[3]));
}

// The sums of sixteen vectors, folded NR at a time.
template <int NR>
static inline void sum_block(const vec* v, float* out) {
  vec q[4];
  for (int i = 0; i < 4; i++) q[i] = NR == 4 ? v[i] : quarters(v[2 * i], v[2 * i + 1]);
  const vec r = sixteenths(eighths(q[0], q[1]), eighths(q[2], q[3]));
  const __m512i columns = _mm512_set_epi32(15, 7, 11, 3, 13, 5, 9, 1, 14, 6, 10, 2, 12, 4, 8, 0);
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(columns, r));
}

static inline vec maximum(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec nearest(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vec lower(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline vec two_to(vec n) {  // n whole, -126 to 127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline vec times(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec plus(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec minus(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec over(vec a, vec b) { return _mm512_div_ps(a, b); }
// v where x >= limit (or x is NaN), else zero.
static inline vec unless_below(vec v, vec x, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, ones(limit), _CMP_NLT_UQ), v);
}

// v, but for NaN, of which there is one: which of two an addition gives depends on what a compiler adds to what.
static inline vec with_one_nan(vec v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), ones(bits_to_float(0x7fc00000)));
}

static inline vec load_bf16(const uint16_t* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static inline vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The bfloat16 elements in the lower and the upper halves of lanes.
static inline vec even_elements(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
static inline vec odd_elements(__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000u)))); }

// The values of the lanes after being stored as bfloat16 or float16.
static inline vec through_bf16(vec v) {
  const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_epi32(u, _mm512_set1_epi32(0x400000));
  const __m512i chosen = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
  return _mm512_castsi512_ps(_mm512_and_epi32(chosen, _mm512_set1_epi32(int(0xffff0000u))));
}

static inline vec through_f16(vec v) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The lanes as bfloat16 or float16.
static inline void store_bf16(uint16_t* p, vec v) {
  const __m512i h = _mm512_srli_epi32(_mm512_castps_si512(through_bf16(v)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(h));
}

static inline void store_f16(uint16_t* p, vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline __m512i lane_numbers() {
  return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

static inline __m512i times(__m512i v, int n) { return _mm512_mullo_epi32(v, _mm512_set1_epi32(n)); }

// Rows of sixteen 32-bit words become columns.
static inline void transpose(__m512i (&v)[W]) {
  __m512i t[W], u[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd), d = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
    v[i] = _mm512_shuffle_i32x4(a, b, 0x88), v[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88), v[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

// Sixteen words of 32 bits, or four bytes each.
typedef __m512i ints;
static inline ints load_words(const void* p) { return _mm512_loadu_si512(p); }
// The first `bytes` of them, zeros after those.
static inline ints load_words(const void* p, int64_t bytes) { return _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, p); }
static inline void store_words(void* p, ints v) { _mm512_storeu_si512(p, v); }
static inline ints words_of(vec v) { return _mm512_castps_si512(v); }
static inline vec as_floats(ints v) { return _mm512_castsi512_ps(v); }
static inline vec to_floats(ints v) { return _mm512_cvtepi32_ps(v); }
static inline ints plus(ints a, ints b) { return _mm512_add_epi32(a, b); }
static inline ints all_words(int32_t n) { return _mm512_set1_epi32(n); }
static inline ints times_128(ints v) { return _mm512_slli_epi32(v, 7); }
// Each half as the upper one of a word.
static inline ints low_halves(ints v) { return _mm512_slli_epi32(v, 16); }
static inline ints high_halves(ints v) { return _mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000u))); }
static inline ints low_nibbles(ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline ints high_nibbles(ints v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }

#define SPEC_BROADCASTS 1
// sum + x * v in every lane, x read by the instruction: compilers load it into a register of its own.
static inline vec add_times(vec sum, const float* x, vec v) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(v), "m"(*x));
  return sum;
}

// sum + the products of four bytes of codes and the four signed bytes at x, from -127 to 127. With CENTRED, codes of eight
// bits come less 128.
#ifdef SPEC_PAIRS
constexpr bool CENTRED = false;
template <int bits>
static inline ints add_bytes(ints sum, ints codes, const float* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
  return sum;
}
#else
constexpr bool CENTRED = true;
template <int bits>
static inline ints add_bytes(ints sum, ints codes, const float* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m512i v = _mm512_set1_epi32(four);
  if constexpr (bits == 8) {
    v = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), v);
    codes = _mm512_abs_epi8(codes);
  }
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, v), _mm512_set1_epi16(1)));
}
#endif
#define SPEC_GROUPS 1
// As bytes.inl has both for any lanes.
static inline uint32_t largest_of_group(const float* x) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  return uint32_t(_mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(words_of(load(x)), magnitude), _mm512_and_si512(words_of(load(x + W)), magnitude))));
}
template <int bits, int bytes>
static inline int32_t round_group(const float* x, float inverse, int8_t* out) {
  const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(load(x), ones(inverse))), b = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + W), ones(inverse)));
  const __m128i order = bits == 4 ? _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0) : _mm_set_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m128i* to = reinterpret_cast<__m128i*>(out);
  auto put = [&](__m512i q) {
    if constexpr (bytes == 1) {
      _mm_storeu_si128(to++, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(q), order));
    } else {
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order);
      const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(_mm512_sub_epi32(q, times_128(high))), order);
      _mm_storeu_si128(to++, _mm_unpacklo_epi32(h, l)), _mm_storeu_si128(to++, _mm_unpackhi_epi32(h, l));
    }
  };
  put(a), put(b);
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

static inline ints less_128(ints codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80))); }

// Sixteen 4-bit codes as indices of which the low four bits count: lane 2i holds code i and lane 2i + 1 code 8 + i.
static inline __m512i nibbles(const uint8_t* codes) {
  const __m512i both = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return _mm512_srlv_epi32(both, times(_mm512_srli_epi32(lane_numbers(), 1), 4));
}

// The same order for sixteen values: lane 2i holds element i, lane 2i + 1 element 8 + i.
static inline vec swap_lanes(vec v) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0), v);
}

// Codes of up to four bits select from a table of the sixteen values a group can take.
template <int bits>
struct Affine {
  static constexpr bool swapped = bits == 4;
  struct Group {
    vec low, high;  // tables; or scale and bias for bits > 5
  };

  static inline Group group(const uint8_t*, float scale, float bias, int) {
    Group g;
    vec s = ones(scale), b = ones(bias);
    if constexpr (bits > 5) {
      g.low = s, g.high = b;
    } else {
      __m512i codes = _mm512_and_epi32(lane_numbers(), _mm512_set1_epi32((1 << bits) - 1));
      g.low = fma(_mm512_cvtepi32_ps(codes), s, b);
      g.high = bits == 5 ? fma(_mm512_cvtepi32_ps(_mm512_add_epi32(codes, _mm512_set1_epi32(16))), s, b) : g.low;
    }
    return g;
  }

  // Sixteen weights from their packed codes. For 4 bits, lane 2i holds code i and lane 2i + 1 code 8 + i.
  static inline vec decode(const uint8_t* codes, const Group& g, int) {
    if constexpr (bits == 4) {
      return _mm512_permutexvar_ps(nibbles(codes), g.low);
    } else if constexpr (bits == 2) {
      int word;
      memcpy(&word, codes, 4);
      return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(word), times(lane_numbers(), 2)), g.low);
    } else if constexpr (bits == 8) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
      return fma(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), g.low, g.high);
    } else {
      __m128i bytes = _mm_maskz_loadu_epi8((1 << (2 * bits)) - 1, codes);
      __m512i place = times(lane_numbers(), bits);
      __m512i first = _mm512_srli_epi32(place, 3), shift = _mm512_and_epi32(place, _mm512_set1_epi32(7));
      __m512i pick = _mm512_add_epi32(_mm512_add_epi32(first, _mm512_slli_epi32(first, 8)),
                                     _mm512_set1_epi32(int(0x80800100u)));
      __m512i idx = _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), pick), shift);
      if constexpr (bits == 3) return _mm512_permutexvar_ps(idx, g.low);
      if constexpr (bits == 5) return _mm512_permutex2var_ps(g.low, idx, g.high);
      return fma(_mm512_cvtepi32_ps(_mm512_and_epi32(idx, _mm512_set1_epi32((1 << bits) - 1))), g.low, g.high);
    }
  }
};

struct Fp4 {
  static constexpr bool swapped = true;
  struct Group {
    vec low;
  };
  static inline Group group(const uint8_t*, float scale, float, int) {
    vec values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    return {_mm512_mul_ps(values, ones(scale))};
  }
  static inline vec decode(const uint8_t* codes, const Group& g, int) {
    return _mm512_permutexvar_ps(nibbles(codes), g.low);
  }
};

// Rows times columns of the register tile, by rows; what a tile of many rows has.
constexpr int tile_columns(int rows) { return rows <= 4 ? 4 : 2; }
constexpr int BLOCK_ROWS = 6, BLOCK_COLUMNS = 4;
constexpr int BYTE_ROWS = 8;  // of rounded rows at a time: their sums and chains stay in registers
constexpr bool UNROLLED = true;  // whether loops over a group are
