// Rows of bfloat16 by packed codes or by bfloat16, two products an instruction (AVX-512 BF16, VBMI and GFNI). Included by
// linear.inl.
//
// Codes less a centre are exact in bfloat16, and so is every product; sums are floats. Row invariance: a column has a
// chain in each of eight lanes. They start with (bias + scale * centre) * sum(x), eight groups at a time, and go on unit
// after unit with scale * sum(x * (q - centre)), where sum adds up two neighbouring lanes of the products, which take
// codes of one group. At the end comes a fixed tree. Chains of two columns share a vector, so that one multiplication
// scales both. What is left of a row after its units may be half or a fourth of one. Rows that could overflow on that way,
// with infinities or NaN, are left to the products of single floats. By eights: code_columns.inl.

typedef __m512bh pair_vec;

constexpr int PAIRS = 2 * W;                  // elements of one vector
constexpr int HALF = 4 * PAIRS;               // elements of half a long unit, or of a short one
constexpr uint16_t LARGE = (127 + 112) << 7;  // 2 ^ 112 as bfloat16

static inline pair_vec as_pairs(__m512i v) { return reinterpret_cast<pair_vec>(v); }

static inline __m512i as_bfloat16(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

static inline __m512i load_bytes(const uint8_t* p, int64_t bytes) {
  return _mm512_maskz_loadu_epi8(bytes < 64 ? (uint64_t(1) << bytes) - 1 : ~uint64_t(0), p);
}

// Stored codes of V vectors: those of V / 8, V / 4 or V / 2 lines, the rest of them zeros. Elements of lane l belong to
// the `part_of_lane`-th PAIRS of them.

// Four-bit codes: nibbles t of the 16-bit words of a line belong together, and words of two lines by fours. In a fourth
// of a long unit the words come twice, and places of the second half hold nibble t + 2. Only the low five bits of an index
// into 32 words count, and both halves of the table are alike.
struct Nibbles {
  static constexpr int bits = 4, tables = 1, long_unit = 8;
  __m512i table;
  template <int V>
  struct Codes {
    __m512i line[V > 4 ? 2 : 1];
  };
  template <int V>
  static constexpr int part_of_lane(int lane) {
    return V == 8 ? lane / 4 + lane % 4 / 2 * 4 : V == 4 ? lane / 4 : lane % 8 / 4;
  }
  template <int V>
  static inline Codes<V> load(const uint8_t* p, int64_t bytes) {
    if constexpr (V == 8) {
      const __m512i a = load_bytes(p, bytes), b = bytes > 64 ? load_bytes(p + 64, bytes - 64) : _mm512_setzero_si512();
      return {{_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)}};
    }
    if constexpr (V == 4) return {{load_bytes(p, bytes)}};
    if constexpr (V == 2) return {{_mm512_broadcast_i64x4(_mm512_castsi512_si256(load_bytes(p, bytes)))}};
  }
  template <int V>
  inline pair_vec decode(const Codes<V>& codes, int t) const {
    if constexpr (V > 2) return as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes.line[t / 4], unsigned(4 * (t % 4))), table));
    const __m512i shift = _mm512_inserti64x4(_mm512_set1_epi16(short(4 * t)), _mm256_set1_epi16(short(4 * t + 8)), 1);
    return as_pairs(_mm512_permutexvar_epi16(_mm512_srlv_epi16(codes.line[0], shift), table));
  }
  // Where place l of vector t, of four or two, comes from.
  static constexpr int place(int t, int l) { return 4 * l + t; }
  static constexpr int half_place(int t, int l) { return 4 * (l % 16) + t + l / 16 * 2; }
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

// Eight-bit codes: q - 127.5 is i + 0.5 or its negative, i from 0 to 127, looked up byte by byte. Sixteens of codes are
// put in an order in which each fourth of a vector holds those of one 32.
struct PairAffine8 {
  static constexpr int bits = 8, tables = 4, long_unit = 4;
  static constexpr float centre = 127.5f;
  __m512i low[2], high[2];
  template <int V>
  struct Codes {
    __m512i line[V / 2];
  };

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
  template <int V>
  static constexpr int part_of_lane(int lane) {
    return V == 4 ? lane / 4 : lane / 4 % 2;
  }
  template <int V>
  static inline Codes<V> load(const uint8_t* p, int64_t bytes) {
    const __m512i a = load_bytes(p, bytes);
    if constexpr (V == 2) return {{_mm512_shuffle_i64x2(a, a, 0xd8)}};
    const __m512i b = bytes > 64 ? load_bytes(p + 64, bytes - 64) : _mm512_setzero_si512();
    if constexpr (V == 4) return {{_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd)}};
  }
  // The two bytes of values by their i, of which the highest bits do not count, and those bits of `signs`.
  inline void values(__m512i i, __m512i signs, __m512i& bottom, __m512i& top) const {
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], i, high[1]);
    bottom = _mm512_permutex2var_epi8(low[0], i, low[1]);
    top = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi8(char(0x80)), magnitude, 0xea);  // signs & 0x80 | magnitude
  }
  template <int V>
  inline pair_vec decode(const Codes<V>& stored, int t) const {
    // bits of i are those of q, or their complements where its highest is zero; that one is the sign
    const __m512i i = _mm512_gf2p8affine_epi64_epi8(stored.line[t / 2], _mm512_set1_epi64(int64_t(0x8182848890a0c080)), 0xff);
    __m512i bottom, top;
    values(i, i, bottom, top);
    return as_pairs(t % 2 ? _mm512_unpackhi_epi8(bottom, top) : _mm512_unpacklo_epi8(bottom, top));
  }
  static constexpr int place(int t, int l) { return 32 * (l / 8) + 16 * (t / 2) + 8 * (t % 2) + l % 8; }
  static constexpr int half_place(int t, int l) { return 32 * (l / 8 % 2) + 16 * (l / 16) + 8 * t + l % 8; }
};

static int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Vectors of what is left of a row after its long units.
static int vectors_left(int64_t elements) { return elements <= HALF / 2 ? elements <= 0 ? 0 : 2 : elements <= HALF ? 4 : 8; }

// Floats from the beginning of a row of pairs to the sums of its groups: sixteen for eight groups, in the order of the lanes.
static int64_t sums_of(int64_t K) { return K / (2 * HALF) * HALF + vectors_left(K % (2 * HALF)) * W; }

// Lane l of two columns' chains belongs to the first or the second, and to which of eight groups at their start.
constexpr int column_of(int lane) { return lane % 4 / 2; }
constexpr int group_of(int lane) { return lane / 4 * 2 + lane % 2; }

// The two columns' sums from those of their products.
static inline vec neighbours(vec a, vec b) {
  return plus(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// The chains of sixteen columns, two in a vector, summed.
static inline void sum_columns(const vec* v, float* out) {
  const vec a = quarters(halves(v[0], v[1]), halves(v[2], v[3])), b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  const __m512i columns = _mm512_set_epi32(15, 14, 7, 6, 11, 10, 3, 2, 13, 12, 5, 4, 9, 8, 1, 0);
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(columns, neighbours(a, b)));
}

// Vectors of a unit: a lane has codes of one group in all of them.
template <class D, int group>
constexpr int vectors_of_unit = group < PAIRS ? 4 : D::long_unit;

// Groups of V vectors, at least one.
template <int group, int V>
constexpr int groups_of = V * PAIRS > group ? V * PAIRS / group : 1;

// Which of two columns' scales of V vectors a lane of their chains takes, those of the second a vector further on: in
// whole 32 bits, or in the upper half of them. Without a V: at their start, eight groups.
template <class D, int group, int V>
struct ScaleOfLane {
  alignas(64) uint32_t whole[W], upper[W];
  constexpr ScaleOfLane() : whole(), upper() {
    for (int lane = 0; lane < W; lane++) {
      const int product = lane / 4 * 4 + lane % 2 * 2;  // the first of two neighbours
      int scale = group_of(lane);
      // groups of less than PAIRS: a lane has eight neighbouring elements, and in a fourth of a unit all are there twice
      if (V > 0) scale = group < PAIRS ? product * 8 / group % groups_of<group, V> : D::template part_of_lane<V>(product) * PAIRS / group;
      whole[lane] = uint32_t(scale + column_of(lane) * W), upper[lane] = uint32_t(scale + column_of(lane) * PAIRS) << 16;
    }
  }
};
template <class D, int group, int V>
constexpr ScaleOfLane<D, group, V> SCALE_OF_LANE{};

// Affine scales and biases, read where they are stored: bfloat16.
template <class D, int group>
struct StoredScales {
  const uint16_t *scales, *biases;  // (BLOCK, K / group)
  int64_t groups;

  // Some of two columns' scales in the lanes of their chains, zero for the other groups.
  template <int V>
  static inline vec spread(const uint16_t* a, const uint16_t* b, __mmask8 some) {
    const __m512i first = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(some, a)), second = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(some, b));
    const __m512i which = _mm512_load_si512(SCALE_OF_LANE<D, group, V>.upper);
    return _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xaaaaaaaa, first, which, second));
  }
  // The `count` scales of V vectors.
  template <int V>
  static inline vec lanes(const uint16_t* a, const uint16_t* b, int64_t count) {
    constexpr int most = groups_of<group, V>;
    return spread<V>(a, b, __mmask8(count < most ? (1 << count) - 1 : (1 << most) - 1));
  }
  const uint16_t* at(int64_t column, int64_t g) const { return scales + column * groups + g; }

  // What the chains of a block's columns begin with: (bias + scale * centre) * sum(x).
  template <int MR>
  inline void begin(vec (&acc)[MR][BLOCK], const float* const* x, int64_t from, int64_t columns, float centre) const {
    const float* sums[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) sums[i] = x[i] + from;
    const int64_t whole = groups / 8 * 8;
    const __mmask8 rest = __mmask8((1 << (groups - whole)) - 1);
    for (int64_t j = 0; j < columns; j += 2) {
      const int64_t a = j * groups, b = j + 1 < columns ? a + groups : a;
      vec now[MR];
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) now[i] = zero();
      auto add = [&](int64_t g, __mmask8 some) {
        const uint16_t *s = scales + g, *t = biases + g;
        const vec begin = fma(spread<0>(s + a, s + b, some), ones(centre), spread<0>(t + a, t + b, some));
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) now[i] = fma(load(sums[i] + 2 * g), begin, now[i]);
      };
      for (int64_t g = 0; g < whole; g += 8) add(g, 0xff);
      if (rest) add(whole, rest);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) acc[i][j / 2] = now[i];
    }
  }
};

// Scales alone, as floats: (BLOCK, K / group).
template <class D, int group>
struct FloatScales {
  const float* scales;
  int64_t stride;

  template <int V>
  static inline vec lanes(const float* a, const float* b, int64_t count) {
    constexpr int most = groups_of<group, V>;
    const __mmask8 some = __mmask8(count < most ? (1 << count) - 1 : (1 << most) - 1);
    const vec first = _mm512_castps256_ps512(_mm256_maskz_loadu_ps(some, a)), second = _mm512_castps256_ps512(_mm256_maskz_loadu_ps(some, b));
    return _mm512_permutex2var_ps(first, _mm512_load_si512(SCALE_OF_LANE<D, group, V>.whole), second);
  }
  const float* at(int64_t column, int64_t g) const { return scales + column * stride + g; }
  template <int MR>
  inline void begin(vec (&acc)[MR][BLOCK], const float* const*, int64_t, int64_t, float) const {
    for (auto& row : acc)
      for (auto& a : row) a = zero();
  }
};

template <class D, int group>
using ScalesOf = std::conditional_t<D::centre == 0, FloatScales<D, group>, StoredScales<D, group>>;

template <class D, int group>
struct PairBlock {
  static constexpr int64_t near = 2 * NEAR;
  static constexpr int rows = 8;  // at a time
  using S = ScalesOf<D, group>;
  const Product& p;
  const D& code;
  const uint8_t* codes;  // of the first column
  S scales;
  const char *next_scales, *next_biases;  // as stored, of the block after this one

  template <int MR>
  static constexpr int columns_of_tile = MR <= 2 ? 4 : 2;

  static inline void sum_lanes(const vec* chains, float* out) { sum_columns(chains, out); }

  static constexpr bool columns_begin = true;
  template <int MR>
  inline void begin(vec (&acc)[MR][BLOCK], const float* const* x, int64_t columns) const {
    scales.begin(acc, x, sums_of(p.K), columns, D::centre);
  }

  // V vectors of x from element `first` on with the stored codes of NR columns, added to the chains with their scales.
  template <int V, int MR, int NR>
  inline void add(vec (&chains)[MR][NR / 2], const float* const* x, int64_t first, const typename D::template Codes<V> (&stored)[NR],
                  const vec (&s)[NR / 2]) const {
    const D& now = D::tables > 1 ? *held(&code) : code;  // many tables stay in memory
    vec sum[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) sum[i][c] = zero();
#pragma GCC unroll 8
    for (int t = 0; t < V; t++) {
      pair_vec w[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) w[c] = now.template decode<V>(stored[c], t);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const pair_vec v = reinterpret_cast<pair_vec>(held(load(x[i] + first / 2 + t * W)));
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) sum[i][c] = _mm512_dpbf16_ps(sum[i][c], v, w[c]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR / 2; c++) chains[i][c] = fma(neighbours(sum[i][2 * c], sum[i][2 * c + 1]), s[c], chains[i][c]);
  }

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    constexpr int V = vectors_of_unit<D, group>, together = groups_of<group, V>;
    constexpr int64_t unit = V * PAIRS, unit_bytes = unit * D::bits / 8;
    if (from == 0) {
      const int64_t bytes = BLOCK * (p.K / group) * size_of(p.w.scale_type);
      fetch(next_scales, bytes, j, NR);
      if (next_biases) fetch(next_biases, bytes, j, NR);
    }
    vec chains[MR][NR / 2];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR / 2; c++) chains[i][c] = acc[i][j / 2 + c];
    const uint8_t* at[NR];
    decltype(scales.at(0, 0)) scale[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) {
      const int64_t column = j + c < columns ? j + c : columns - 1;
      at[c] = codes + column * p.w.row_bytes + from * D::bits / 8;
      scale[c] = scales.at(column, from / group);
    }
    const uint8_t* next = codes + ahead(p.w.row_bytes, j, from * D::bits / 8, to * D::bits / 8);
    int64_t first = from;
    for (; first + unit <= to; first += unit, next += NR * unit_bytes) {
      typename D::template Codes<V> stored[NR];
      vec s[NR / 2];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
#pragma GCC unroll 8
        for (int64_t byte = 0; byte < unit_bytes; byte += 64) __builtin_prefetch(next + c * unit_bytes + byte, 0, 2);
        stored[c] = D::template load<V>(at[c], unit_bytes);
        if (c % 2) s[c / 2] = S::template lanes<V>(scale[c - 1], scale[c], together);
      }
      add<V>(chains, x, first, stored, s);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        at[c] = held(at[c] + unit_bytes);
        scale[c] = held(scale[c] + together);
      }
    }
    if (first < to) {  // x is zero behind the row's end
      const int64_t bytes = (to - first) * D::bits / 8, groups = (to - first) / group;
      for (int64_t byte = 0; byte < NR * bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      auto rest = [&]<int some>() {
        typename D::template Codes<some> stored[NR];
        vec s[NR / 2];
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) {
          stored[c] = D::template load<some>(at[c], bytes);
          if (c % 2) s[c / 2] = S::template lanes<some>(scale[c - 1], scale[c], groups);
        }
        add<some>(chains, x, first, stored, s);
      };
      if (to - first <= HALF / 2) {
        rest.template operator()<2>();
      } else if (V == 4 || to - first <= HALF) {
        rest.template operator()<4>();
      } else if constexpr (V == 8) {
        rest.template operator()<8>();
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR / 2; c++) acc[i][j / 2 + c] = chains[i][c];
  }
};

// A block of columns of bfloat16. A lane's chain takes two elements of every vector.
struct PairPlainBlock {
  static constexpr int64_t near = 2 * NEAR;
  static constexpr int rows = 4;  // at a time
  const Product& p;
  const uint8_t* data;  // of the first column

  template <int MR>
  static constexpr int columns_of_tile = 4;

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) at[c] = data + (j + c < columns ? j + c : columns - 1) * p.w.row_bytes;
    const uint8_t* next = data + ahead(p.w.row_bytes, j, from * 2, to * 2);
    auto add = [&](int64_t k, const __m512i (&w)[NR]) {
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const pair_vec v = reinterpret_cast<pair_vec>(held(load(x[i] + k / 2)));
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) chains.now[i][c] = _mm512_dpbf16_ps(chains.now[i][c], v, as_pairs(w[c]));
      }
    };
    int64_t k = from;
    for (; k + PAIRS <= to; k += PAIRS, next += NR * 64) {
      __m512i w[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        __builtin_prefetch(next + 64 * c, 0, 2);
        w[c] = _mm512_loadu_si512(at[c] + 2 * k);
      }
      add(k, w);
    }
    if (k < to) {  // x is zero behind the row's end
      __m512i w[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) w[c] = load_bytes(at[c] + 2 * k, 2 * (to - k));
      add(k, w);
    }
    chains.put_back(acc, j, to == p.K);
  }
};

template <int MR, class Block>
static void pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  follow_block<MR, Block::template columns_of_tile<MR>>(p, block, p.K, m, n, columns);
}

// The rows from m on, at most MR.
template <int MR, class Block>
static void last_pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  if constexpr (MR > 0) {
    if (p.rows - m == MR) return pair_rows<MR>(p, block, m, n, columns);
    last_pair_rows<MR - 1>(p, block, m, n, columns);
  }
}

// Every row from m on, some at a time.
template <class Block>
static void all_pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  for (; m + Block::rows <= p.rows; m += Block::rows) pair_rows<Block::rows>(p, block, m, n, columns);
  last_pair_rows<Block::rows - 1>(p, block, m, n, columns);
}

// Floats of a thread for a block's scales where they are stored as something else.
template <class D, int group>
static int64_t scale_floats(const Product& p) {
  return D::centre == 0 ? BLOCK * (p.K / group) : 0;
}

template <class D, int group>
static ScalesOf<D, group> scales_of(const Product& p, int64_t n, int64_t count) {
  const int64_t groups = p.K / group;
  if constexpr (D::centre != 0) {
    return {static_cast<const uint16_t*>(p.w.scales) + n * groups, static_cast<const uint16_t*>(p.w.biases) + n * groups, groups};
  } else {
    widen(p.w.scales, p.w.scale_type, n * groups, count * groups, p.scratch);
    return {p.scratch, groups};
  }
}

#include "code_columns.inl"

template <class D, int group>
static void pair_product(const Product& p, int64_t first, int64_t last) {
  const D code;
  for (int64_t n = first; n < last; n += BLOCK) {
    touch_ahead(p, first, last, n);
    const int64_t count = last - n < BLOCK ? last - n : BLOCK;
    int64_t m = 0;
    if (p.rows >= TURNED_ROWS && p.w.row_bytes <= LONGEST) {
      const ColumnBlock<D, group> turned(p, code, n, count, p.scratch + scale_floats<D, group>(p));
      for (; m + TURNED_ROWS <= p.rows; m += TURNED_ROWS) turned.rows(m);
      if (m == p.rows) continue;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    const int64_t after = (n + BLOCK) * (p.K / group) * size_of(p.w.scale_type);
    const PairBlock<D, group> block{p, code, codes, scales_of<D, group>(p, n, count), static_cast<const char*>(p.w.scales) + after,
                                    p.w.biases ? static_cast<const char*>(p.w.biases) + after : nullptr};
    all_pair_rows(p, block, m, n, count);
  }
}

#include "columns.inl"

static void plain_pair_product(const Product& p, int64_t first, int64_t last) {
  if (columns_in_lanes(p.w, p.K)) return lane_product(p, first, last);
  for (int64_t n = first; n < last; n += BLOCK) {
    touch_ahead(p, first, last, n);
    all_pair_rows(p, PairPlainBlock{p, static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes}, 0, n, last - n < BLOCK ? last - n : BLOCK);
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
  if (w.format == Format::dense) return w.type == Type::bf16;
  return w.format == Format::fp4 || (w.format == Format::affine && w.scale_type == Type::bf16 && (w.bits == 4 || w.bits == 8));
}

// V vectors of elements, four or two, in the order their codes are decoded in.
template <int V>
static inline void order_vectors(const __m512i* order, const uint16_t* from, __m512i (&out)[V]) {
  __m512i in[V];
  for (int t = 0; t < V; t++) in[t] = _mm512_loadu_si512(from + t * PAIRS);
  for (int t = 0; t < V; t++) {
    out[t] = _mm512_permutex2var_epi16(in[0], order[t], in[1]);
    if constexpr (V == 4) {
      const __mmask32 second = _mm512_test_epi16_mask(order[t], _mm512_set1_epi16(2 * PAIRS));
      out[t] = _mm512_mask_mov_epi16(out[t], second, _mm512_permutex2var_epi16(in[2], order[t], in[3]));
    }
  }
}

// Sums of the groups of ordered vectors, one after the other: of what the lanes of a group add up, the tree.
template <int together, int V>
static inline void sum_groups(const __m512i (&x)[V], float* sums) {
  const pair_vec one = as_pairs(_mm512_set1_epi16(0x3f80));
  vec total = zero();
  for (int t = 0; t < V; t++) total = _mm512_dpbf16_ps(total, as_pairs(x[t]), one);
  if (V < 4) total = plus(total, _mm512_shuffle_f32x4(total, total, 0x4e));  // every group is there twice
  if (together < 2 && V == 4) total = plus(total, _mm512_shuffle_f32x4(total, total, 0x4e));
  if (together < 4) total = plus(total, _mm512_shuffle_f32x4(total, total, 0xb1));
  total = plus(total, _mm512_permute_ps(total, 0x4e));
  total = plus(total, _mm512_permute_ps(total, 0xb1));
  const __m512i first = _mm512_slli_epi32(lane_numbers(), together == 4 ? 2 : together == 2 ? 3 : 4);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, total)));
}

template <class D>
struct Order {
  alignas(64) uint16_t half[4][PAIRS], fourth[2][PAIRS];
  constexpr Order() : half(), fourth() {
    for (int l = 0; l < PAIRS; l++) {
      for (int t = 0; t < 4; t++) half[t][l] = uint16_t(D::place(t, l));
      for (int t = 0; t < 2; t++) fourth[t][l] = uint16_t(D::half_place(t, l));
    }
  }
};
template <class D>
constexpr Order<D> ORDER{};

template <class D, int group>
static bool order_row(const uint16_t* x, int64_t stride, int64_t K, float* out) {
  constexpr int together = groups_of<group, 4>;
  constexpr bool longer = vectors_of_unit<D, group> > 4;
  __m512i half[4], fourth[2], largest = _mm512_setzero_si512();
  for (int t = 0; t < 4; t++) half[t] = _mm512_load_si512(ORDER<D>.half[t]);
  for (int t = 0; t < 2; t++) fourth[t] = _mm512_load_si512(ORDER<D>.fourth[t]);
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  float *const in_order = out + sums_of(K) + (K / group + 7) / 8 * 8, *sums = in_order;
  uint16_t room[2 * HALF];
  auto put = [&](const auto& vectors) {
    for (const __m512i& v : vectors) {
      _mm512_storeu_si512(to, v);
      to += PAIRS;
      largest = _mm512_max_epu16(largest, _mm512_and_si512(v, _mm512_set1_epi16(0x7fff)));
    }
  };
  auto sum_up = [&](const auto& vectors) {
    if constexpr (D::centre != 0) sum_groups<together>(vectors, sums);
    sums += together;
  };
  for (int64_t k = 0; k < K;) {
    const int64_t most = longer && K - k > HALF ? 2 * HALF : HALF, count = K - k < most ? K - k : most;
    const int64_t read = count <= HALF / 2 ? HALF / 2 : most;
    const uint16_t* from = x + k * stride;
    if (stride != 1 || count < read) {
      if (stride == 1) memcpy(room, from, size_t(2 * count));
      for (int64_t i = 0; stride != 1 && i < count; i++) room[i] = from[i * stride];
      memset(room + count, 0, size_t(2 * (read - count)));
      from = room;
    }
    if (most > HALF) {
      __m512i a[4], b[4], both[8];
      order_vectors(half, from, a), order_vectors(half, from + HALF, b);
      for (int t = 0; t < 4; t++) both[t] = _mm512_unpacklo_epi64(a[t], b[t]), both[4 + t] = _mm512_unpackhi_epi64(a[t], b[t]);
      put(both), sum_up(a), sum_up(b);
    } else if (count <= HALF / 2) {
      __m512i few[2];
      order_vectors(fourth, from, few);
      put(few), sum_up(few);
    } else {
      __m512i vectors[4];
      order_vectors(half, from, vectors);
      put(vectors), sum_up(vectors);
    }
    k += count;
  }
  if constexpr (D::centre != 0) {
    const int64_t groups = K / group, eights = (groups + 7) / 8;
    for (int64_t g = groups; g < 8 * eights; g++) in_order[g] = 0;
    const __m512i place = _mm512_load_si512(SCALE_OF_LANE<D, group, 0>.whole);  // of sixteen, those of both columns are alike
    for (int64_t e = 0; e < eights; e++) {  // what is written ends before what is read next
      const __m512 eight = _mm512_castps256_ps512(_mm256_loadu_ps(in_order + 8 * e));
      _mm512_storeu_ps(out + sums_of(K) + W * e, _mm512_permutexvar_ps(place, eight));
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(LARGE))) == 0;
}

static bool prepare_pairs(const Weights& w, const void* x, int64_t stride, int64_t K, float* out) {
  const uint16_t* from = static_cast<const uint16_t*>(x);
  if (w.format == Format::dense) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    if (stride == 1) memcpy(to, from, size_t(2 * K));
    for (int64_t k = 0; stride != 1 && k < K; k++) to[k] = from[k * stride];
    for (int64_t k = K; k < rounded_up(K, PAIRS); k++) to[k] = 0;
    return true;
  }
  return with_pairs(w, [&]<class D, int group>() { return order_row<D, group>(from, stride, K, out); });
}

static void product_of_pairs(const Product& p, int64_t first, int64_t last) {
  if (p.w.format == Format::dense) return plain_pair_product(p, first, last);
  with_pairs(p.w, [&]<class D, int group>() { pair_product<D, group>(p, first, last); });
}

static int64_t pair_scratch(const Product& p) {
  if (p.w.format == Format::dense) return columns_in_lanes(p.w, p.K) && !p.w.lanes ? LANE_COLUMNS * pairs_of(p.K) : 0;
  return with_pairs(p.w, [&]<class D, int group>() { return scale_floats<D, group>(p) + turned_floats<D, group>(p.K); });
}
