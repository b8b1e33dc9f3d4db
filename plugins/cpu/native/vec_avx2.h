// AVX2 with FMA and F16C: 8 lanes. Included inside the kernel file's namespace.

constexpr int W = 8;
typedef __m256 vec;

static inline vec zero() { return _mm256_setzero_ps(); }
static inline vec ones(float f) { return _mm256_set1_ps(f); }
static inline vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }

// v, in a register: a compiler would read it again for every product it is in.
static inline vec held(vec v) {
  asm("" : "+x"(v));
  return v;
}

// The pairwise tree of the lanes: halves are added until one is left.
static inline float sum(vec v) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// The same tree for four vectors at once.
static inline void sum4(const vec* v, float* out) {
  __m128 q[4];
  for (int i = 0; i < 4; i++) q[i] = _mm_add_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps(v[i], 1));
  __m128 l01 = _mm_add_ps(_mm_movelh_ps(q[0], q[1]), _mm_movehl_ps(q[1], q[0]));
  __m128 l23 = _mm_add_ps(_mm_movelh_ps(q[2], q[3]), _mm_movehl_ps(q[3], q[2]));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(l01, l23, 0x88), _mm_shuffle_ps(l01, l23, 0xdd)));
}

#include "unfolded.inl"

static inline vec maximum(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec nearest(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vec lower(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline vec two_to(vec n) {  // n whole, -126 to 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vec times(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec plus(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec minus(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec over(vec a, vec b) { return _mm256_div_ps(a, b); }
// v where x >= limit (or x is NaN), else zero.
static inline vec unless_below(vec v, vec x, float limit) {
  return _mm256_and_ps(_mm256_cmp_ps(x, ones(limit), _CMP_NLT_UQ), v);
}
// v, but for NaN, of which there is one: which of two an addition gives depends on what a compiler adds to what.
static inline vec with_one_nan(vec v) {
  return _mm256_blendv_ps(v, ones(bits_to_float(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

static inline vec load_bf16(const uint16_t* p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline vec load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The values of the lanes after being stored as bfloat16 or float16.
static inline vec through_bf16(vec v) {
  const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const vec chosen = _mm256_blendv_ps(_mm256_castsi256_ps(near), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_and_ps(chosen, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u))));
}

static inline vec through_f16(vec v) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The lanes as bfloat16 or float16.
static inline void store_bf16(uint16_t* p, vec v) {
  const __m256i h = _mm256_srli_epi32(_mm256_castps_si256(through_bf16(v)), 16);
  const __m256i packed = _mm256_packus_epi32(h, h);  // each half twice
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

static inline void store_f16(uint16_t* p, vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline __m256i lane_numbers() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }

static inline __m256i times(__m256i v, int n) { return _mm256_mullo_epi32(v, _mm256_set1_epi32(n)); }

// Eight words of 32 bits, or four bytes each.
typedef __m256i ints;
static inline ints load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
// The first `bytes` of them, zeros after those.
static inline ints load_words(const void* p, int64_t bytes) {
  uint8_t room[4 * W] = {};
  memcpy(room, p, size_t(bytes));
  return load_words(room);
}
static inline void store_words(void* p, ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
static inline ints words_of(vec v) { return _mm256_castps_si256(v); }
static inline vec as_floats(ints v) { return _mm256_castsi256_ps(v); }
static inline vec to_floats(ints v) { return _mm256_cvtepi32_ps(v); }
static inline ints plus(ints a, ints b) { return _mm256_add_epi32(a, b); }
static inline ints all_words(int32_t n) { return _mm256_set1_epi32(n); }
static inline ints times_128(ints v) { return _mm256_slli_epi32(v, 7); }
// Each half as the upper one of a word.
static inline ints low_halves(ints v) { return _mm256_slli_epi32(v, 16); }
static inline ints high_halves(ints v) { return _mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u))); }
static inline ints low_nibbles(ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
static inline ints high_nibbles(ints v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

// sum + the products of four bytes of codes and the four signed bytes at x, from -127 to 127. With CENTRED, codes of eight
// bits come less 128.
constexpr bool CENTRED = true;
template <int bits>
static inline ints add_bytes(ints sum, ints codes, const float* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i v = _mm256_set1_epi32(four);
  if constexpr (bits == 8) v = _mm256_sign_epi8(v, codes), codes = _mm256_abs_epi8(codes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, v), _mm256_set1_epi16(1)));
}
static inline ints less_128(ints codes) { return _mm256_xor_si256(codes, _mm256_set1_epi8(char(0x80))); }

// Rows of eight 32-bit words become columns.
static inline void transpose(ints (&v)[W]) {
  ints t[W], u[W];
  for (int i = 0; i < W; i += 2) t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  for (int i = 0; i < W; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

static inline vec swap_lanes(vec v) { return v; }  // elements lie in lanes as they come

template <int bits>
struct Affine {
  static constexpr bool swapped = false;
  struct Group {
    vec scale, bias;
  };

  static inline Group group(const uint8_t*, float scale, float bias, int) { return {ones(scale), ones(bias)}; }

  // Eight weights from their packed codes, which are exactly `bits` bytes.
  static inline vec decode(const uint8_t* codes, const Group& g, int) {
    __m256i q;
    if constexpr (bits == 8) {
      q = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    } else if constexpr (bits == 4 || bits == 2) {
      uint32_t word = 0;
      memcpy(&word, codes, bits);
      q = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), times(lane_numbers(), bits));
      q = _mm256_and_si256(q, _mm256_set1_epi32((1 << bits) - 1));
    } else {
      uint64_t word = 0;
      memcpy(&word, codes, bits);
      __m256i place = times(lane_numbers(), bits);
      __m256i first = _mm256_srli_epi32(place, 3), shift = _mm256_and_si256(place, _mm256_set1_epi32(7));
      __m256i pick = _mm256_add_epi32(_mm256_add_epi32(first, _mm256_slli_epi32(first, 8)),
                                     _mm256_set1_epi32(int(0x80800100u)));
      q = _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x((long long)word), pick), shift);
      q = _mm256_and_si256(q, _mm256_set1_epi32((1 << bits) - 1));
    }
    return fma(_mm256_cvtepi32_ps(q), g.scale, g.bias);
  }
};

struct Fp4 {
  static constexpr bool swapped = false;
  struct Group {
    vec magnitudes;
  };
  static inline Group group(const uint8_t*, float scale, float, int) {
    return {_mm256_mul_ps(_mm256_set_ps(6, 4, 3, 2, 1.5f, 1, 0.5f, 0), ones(scale))};
  }
  static inline vec decode(const uint8_t* codes, const Group& g, int) {
    uint32_t word;
    memcpy(&word, codes, 4);
    __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), times(lane_numbers(), 4));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(q, 28), _mm256_set1_epi32(int(0x80000000u)));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(g.magnitudes, q), _mm256_castsi256_ps(sign));
  }
};

constexpr int tile_columns(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 2;
constexpr int BYTE_ROWS = 4;
constexpr bool UNROLLED = false;  // whether loops over a group are
