// Rows of bfloat16 by packed codes, two products an instruction (AVX-512 BF16 and VBMI). Included by linear.inl.
//
// Codes less a centre are exact in bfloat16, and so is every product; sums are floats. Row invariance: a chain per
// lane starts with (bias + scale * centre) * sum(x), sixteen groups at a time, and goes on unit after unit with
// scale * sum(x * (q - centre)). A unit is what 64 bytes hold; a lane takes codes of one group in it, so that lanes of
// several groups are scaled together. Rows that could overflow on that way, with infinities or NaN, are left to the
// products of single floats.

typedef __m512bh pair_vec;

constexpr int PAIRS = 2 * W;                  // elements of one vector
constexpr int UNIT_BYTES = 64;
constexpr int LARGEST_UNIT = 128;             // elements
constexpr uint16_t LARGE = (127 + 112) << 7;  // 2 ^ 112 as bfloat16

static inline pair_vec as_pairs(__m512i v) { return reinterpret_cast<pair_vec>(v); }

static inline __m512i as_bfloat16(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

// Four-bit codes: place l of vector t holds nibble t of 16-bit word l. Only the low five bits of an index into 32
// words count, and both halves of the table are alike.
struct Nibbles {
  static constexpr int unit = 128, vectors = 4, bits = 4, tables = 1;  // a lane takes 8 codes in a row
  __m512i table;
  static int place(int t, int l) { return 4 * l + t; }
  inline pair_vec decode(__m512i codes, int t) const {
    return as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, unsigned(4 * t)), table));
  }
};

struct PairAffine4 : Nibbles {
  static constexpr float centre = 8;
  PairAffine4() {
    __m512 values = _mm512_sub_ps(_mm512_cvtepi32_ps(lane_numbers()), _mm512_set1_ps(centre));
    table = as_bfloat16(values, values);
  }
};

struct PairFp4 : Nibbles {
  static constexpr float centre = 0;
  PairFp4() {
    __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    table = as_bfloat16(values, values);
  }
};

// Eight-bit codes: q - 127.5 is i + 0.5 or its negative, i from 0 to 127, looked up byte by byte.
struct PairAffine8 {
  static constexpr int unit = 64, vectors = 2, bits = 8, tables = 4;  // four lanes share 16 codes in a row
  static constexpr float centre = 127.5f;
  __m512i low[2], high[2];

  PairAffine8() {
    for (int half = 0; half < 2; half++) {
      uint8_t bytes[2][64];
      for (int i = 0; i < 64; i++) {
        const uint32_t value = float_to_bits(float(64 * half + i) + 0.5f);
        bytes[0][i] = uint8_t(value >> 16), bytes[1][i] = uint8_t(value >> 24);
      }
      low[half] = _mm512_loadu_si512(bytes[0]), high[half] = _mm512_loadu_si512(bytes[1]);
    }
  }
  static int place(int t, int l) { return l / 8 * 16 + 8 * t + l % 8; }
  inline pair_vec decode(__m512i codes, int t) const {
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    const __mmask64 negative = _mm512_testn_epi8_mask(codes, sign);
    const __m512i i = _mm512_mask_sub_epi8(codes, negative, _mm512_set1_epi8(-1), codes);  // seven bits of it count
    const __m512i bottom = _mm512_permutex2var_epi8(low[0], i, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], i, high[1]);
    const __m512i top = _mm512_mask_add_epi8(magnitude, negative, magnitude, sign);
    return as_pairs(t ? _mm512_unpackhi_epi8(bottom, top) : _mm512_unpacklo_epi8(bottom, top));
  }
};

static int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats from the beginning of a row of pairs to the sums of its groups; both are in whole vectors.
static int64_t sums_of(int64_t K) { return rounded_up(K, LARGEST_UNIT) / 2; }

// Groups in a unit, at least one; scales of a column are stored in whole units.
template <class D, int group>
constexpr int groups_of_unit = D::unit > group ? D::unit / group : 1;

// Affine scales and biases, read where they are stored: bfloat16.
template <int together>
struct StoredScales {
  const uint16_t *scales, *biases;  // (BLOCK, K / group)
  int64_t groups;

  // Scales of the groups of a unit, `count` of them, in the lanes that read their codes.
  static inline vec lanes(const uint16_t* scale, int64_t count) {
    if constexpr (together == 1) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_set1_epi16(short(*scale)), 16));
    } else {
      uint64_t few = 0;
      if (count < together) {
        for (int64_t g = 0; g < count; g++) few |= uint64_t(scale[g]) << (16 * g);
      } else {
        memcpy(&few, scale, 2 * together);
      }
      constexpr int log = together == 2 ? 3 : 2;  // of the lanes that share a scale
      const __m512i which = _mm512_slli_epi32(_mm512_srli_epi32(lane_numbers(), log), 16);
      return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, which, _mm512_set1_epi64((long long)few)));
    }
  }
  const uint16_t* at(int64_t column, int64_t group) const { return scales + column * groups + group; }

  // What the chains of NR columns begin with: (bias + scale * centre) * sum(x), lane l taking groups l, l + W, ...
  template <int MR, int NR>
  inline void start(vec (&now)[MR][NR], const float* const* sums, const int64_t (&column)[NR], float centre) const {
    for (int64_t g = 0; g < groups; g += W) {
      const __mmask16 some = groups - g < W ? __mmask16((1 << (groups - g)) - 1) : __mmask16(0xffff);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        const int64_t first = column[c] * groups + g;
        const vec b = fma(widened(some, scales + first), ones(centre), widened(some, biases + first));
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) now[i][c] = fma(load(sums[i] + g), b, now[i][c]);
      }
    }
  }
  static inline vec widened(__mmask16 some, const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
  }
};

// Scales alone, as floats: (BLOCK, K / group), a column in whole units.
template <int together>
struct FloatScales {
  const float* scales;
  int64_t stride;

  static inline vec lanes(const float* scale, int64_t) {
    constexpr int log = together == 1 ? 4 : together == 2 ? 3 : together == 4 ? 2 : 1;
    const __m512i which = _mm512_srli_epi32(lane_numbers(), log);
    if constexpr (together == 1) return ones(*scale);
    if constexpr (together == 2) {
      return _mm512_permutexvar_ps(which, _mm512_castpd_ps(_mm512_castpd128_pd512(_mm_load_sd(reinterpret_cast<const double*>(scale)))));
    }
    if constexpr (together == 4) return _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_loadu_ps(scale)));
    return _mm512_permutexvar_ps(which, _mm512_castps256_ps512(_mm256_loadu_ps(scale)));
  }
  const float* at(int64_t column, int64_t group) const { return scales + column * stride + group; }
  template <int MR, int NR>
  inline void start(vec (&)[MR][NR], const float* const*, const int64_t (&)[NR], float) const {}
};

template <class D, int group>
using ScalesOf = std::conditional_t<D::centre == 0, FloatScales<groups_of_unit<D, group>>, StoredScales<groups_of_unit<D, group>>>;

template <class D, int group>
struct PairBlock {
  static constexpr int64_t near = 2 * NEAR;
  static constexpr int together = groups_of_unit<D, group>;
  using S = ScalesOf<D, group>;
  const Product& p;
  const D& code;
  const uint8_t* codes;  // of the first column
  S scales;
  const char *next_scales, *next_biases;  // as stored, of the block after this one

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    constexpr int V = D::vectors;
    if (from == 0) {
      const int64_t bytes = BLOCK * (p.K / group) * size_of(p.w.scale_type);
      fetch(next_scales, bytes, j, NR);
      if (next_biases) fetch(next_biases, bytes, j, NR);
    }
    const int64_t whole = from + (to - from) / D::unit * D::unit;
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
    decltype(scales.at(0, 0)) scale[NR];
    int64_t column[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) {
      column[c] = j + c < columns ? j + c : columns - 1;
      at[c] = codes + column[c] * p.w.row_bytes + from * D::bits / 8;
      scale[c] = scales.at(column[c], from / group);
    }
    if (from == 0 && D::centre != 0) {
      const float* sums[MR];
      for (int i = 0; i < MR; i++) sums[i] = x[i] + sums_of(p.K);
      scales.start(chains.now, sums, column, D::centre);
    }
    const uint8_t* next = codes + ahead(p.w.row_bytes, j, from * D::bits / 8, to * D::bits / 8);
    auto one = [&](int64_t first, const __m512i (&stored)[NR], int64_t some) {
      pair_vec w[NR][V];
      vec s[NR];
      const D& now = D::tables > 1 ? *held(&code) : code;  // many tables stay in memory: chains need the registers
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        s[c] = S::lanes(scale[c], some);
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) w[c][t] = now.decode(stored[c], t);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        vec sum[NR];
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) sum[c] = zero();
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) {
          const pair_vec v = reinterpret_cast<pair_vec>(NR > 1 ? held(load(x[i] + first / 2 + t * W)) : load(x[i] + first / 2 + t * W));
#pragma GCC unroll 8
          for (int c = 0; c < NR; c++) sum[c] = _mm512_dpbf16_ps(sum[c], v, w[c][t]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) chains.now[i][c] = fma(sum[c], s[c], chains.now[i][c]);
      }
    };
    int64_t first = from;
    for (; first < whole; first += D::unit, next += NR * UNIT_BYTES) {
      __m512i stored[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        __builtin_prefetch(next + c * UNIT_BYTES, 0, 2);
        stored[c] = _mm512_loadu_si512(at[c]);
      }
      one(first, stored, together);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        at[c] = held(at[c] + UNIT_BYTES);
        const int64_t over = first + D::unit - from;  // groups that a unit is part of are left when they end
        if (D::unit >= group || over % group == 0) scale[c] = held(scale[c] + together);
      }
    }
    if (first < to) {  // less than a unit: x is zero behind the row's end
      const __mmask64 bytes = (uint64_t(1) << ((to - first) * D::bits / 8)) - 1;
      __m512i stored[NR];
      for (int64_t byte = 0; byte < NR * (to - first) * D::bits / 8; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      for (int c = 0; c < NR; c++) stored[c] = _mm512_maskz_loadu_epi8(bytes, at[c]);
      one(first, stored, (to - first) / group);
    }
    chains.put_back(acc, j);
  }
};

template <int MR, class Block>
static void pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  follow_block<MR, (MR <= 2 ? 4 : 2)>(p, block, p.K, m, n, columns);
}

// Floats of a thread for the scales of a block.
template <class D, int group>
static int64_t scale_floats(const Product& p) {
  return D::centre == 0 ? BLOCK * rounded_up(p.K / group, groups_of_unit<D, group>) + W : 0;
}

template <class D, int group>
static ScalesOf<D, group> scales_of(const Product& p, int64_t n, int64_t count) {
  const int64_t groups = p.K / group;
  if constexpr (D::centre != 0) {
    return {static_cast<const uint16_t*>(p.w.scales) + n * groups, static_cast<const uint16_t*>(p.w.biases) + n * groups, groups};
  } else {
    const int64_t stride = rounded_up(groups, groups_of_unit<D, group>);
    for (int64_t j = 0; j < count; j++) {
      widen(p.w.scales, p.w.scale_type, (n + j) * groups, groups, p.scratch + j * stride);
      for (int64_t g = groups; g < stride; g++) p.scratch[j * stride + g] = 0;
    }
    return {p.scratch, stride};
  }
}

template <class D, int group>
static void pair_product(const Product& p, int64_t first, int64_t last) {
  const D code;
  for (int64_t n = first; n < last; n += BLOCK) {
    const int64_t count = last - n < BLOCK ? last - n : BLOCK;
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    const int64_t after = (n + BLOCK) * (p.K / group) * size_of(p.w.scale_type);
    const PairBlock<D, group> block{p, code, codes, scales_of<D, group>(p, n, count), static_cast<const char*>(p.w.scales) + after,
                                    p.w.biases ? static_cast<const char*>(p.w.biases) + after : nullptr};
    int64_t m = 0;
    for (; m + 8 <= p.rows; m += 8) pair_rows<8>(p, block, m, n, count);
    switch (p.rows - m) {
      case 1: pair_rows<1>(p, block, m, n, count); break;
      case 2: pair_rows<2>(p, block, m, n, count); break;
      case 3: pair_rows<3>(p, block, m, n, count); break;
      case 4: pair_rows<4>(p, block, m, n, count); break;
      case 5: pair_rows<5>(p, block, m, n, count); break;
      case 6: pair_rows<6>(p, block, m, n, count); break;
      case 7: pair_rows<7>(p, block, m, n, count); break;
    }
  }
}

// f.template operator()<D, group>() for the codes of w.
template <class F>
static auto with_pairs(const Weights& w, F&& f) {
  if (w.format == Format::fp4) return w.group == 16 ? f.template operator()<PairFp4, 16>() : f.template operator()<PairFp4, 32>();
  if (w.bits == 4) {
    if (w.group == 32) return f.template operator()<PairAffine4, 32>();
    return w.group == 64 ? f.template operator()<PairAffine4, 64>() : f.template operator()<PairAffine4, 128>();
  }
  if (w.group == 32) return f.template operator()<PairAffine8, 32>();
  return w.group == 64 ? f.template operator()<PairAffine8, 64>() : f.template operator()<PairAffine8, 128>();
}

static bool pairs(const Weights& w, Type type) {
  if (type != Type::bf16) return false;
  return w.format == Format::fp4 || (w.format == Format::affine && w.scale_type == Type::bf16 && (w.bits == 4 || w.bits == 8));
}

// Elements of a unit in the order their codes are decoded in.
template <class D>
static inline void order_unit(const __m512i (&order)[D::vectors], const uint16_t* from, uint16_t* to) {
  __m512i in[D::vectors];
  for (int t = 0; t < D::vectors; t++) in[t] = _mm512_loadu_si512(from + t * PAIRS);
  for (int t = 0; t < D::vectors; t++) {
    __m512i out = _mm512_permutex2var_epi16(in[0], order[t], in[1]);
    if constexpr (D::vectors == 4) {
      const __mmask32 second = _mm512_test_epi16_mask(order[t], _mm512_set1_epi16(2 * PAIRS));
      out = _mm512_mask_mov_epi16(out, second, _mm512_permutex2var_epi16(in[2], order[t], in[3]));
    }
    _mm512_storeu_si512(to + t * PAIRS, out);
  }
}

template <class D, int group>
static bool order_row(const uint16_t* x, int64_t stride, int64_t K, float* out) {
  uint16_t places[D::unit];
  __m512i order[D::vectors], largest = _mm512_setzero_si512();
  for (int i = 0; i < D::unit; i++) places[i] = uint16_t(D::place(i / PAIRS, i % PAIRS));
  for (int t = 0; t < D::vectors; t++) order[t] = _mm512_loadu_si512(places + t * PAIRS);
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  float* sums = out + sums_of(K);
  vec total = zero();
  for (int64_t k = 0; k < K; k += D::unit, to += D::unit) {
    const int64_t count = K - k < D::unit ? K - k : D::unit;
    uint16_t unit[D::unit] = {};
    const uint16_t* from = x + k * stride;
    if (stride != 1 || count < D::unit) {
      for (int64_t i = 0; i < count; i++) unit[i] = from[i * stride];
      from = unit;
    }
    order_unit<D>(order, from, to);
    for (int64_t i = 0; i < count; i += W) {
      total = fma(load_bf16(from + i), ones(1), total);
      if ((k + i + W) % group == 0) *sums++ = sum(total), total = zero();
    }
    for (int t = 0; t < D::vectors; t++) {
      const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(to + t * PAIRS), _mm512_set1_epi16(0x7fff));
      largest = _mm512_max_epu16(largest, magnitude);
    }
  }
  for (int64_t g = K / group; g < rounded_up(K / group, W); g++) *sums++ = 0;
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(LARGE))) == 0;
}

static bool prepare_pairs(const Weights& w, const void* x, int64_t stride, int64_t K, float* out) {
  return with_pairs(w, [&]<class D, int group>() { return order_row<D, group>(static_cast<const uint16_t*>(x), stride, K, out); });
}

static void product_of_pairs(const Product& p, int64_t first, int64_t last) {
  with_pairs(p.w, [&]<class D, int group>() { pair_product<D, group>(p, first, last); });
}

static int64_t pair_scratch(const Product& p) {
  return with_pairs(p.w, [&]<class D, int group>() { return scale_floats<D, group>(p); });
}
