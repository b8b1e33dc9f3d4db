// Eight rows of bfloat16 by packed codes, a column to a lane. Included by pairs.inl.
//
// The chains are those of pairs.inl, of the same products in the same order, so a row has the same bytes either way. There
// the lanes of a vector are the chains of two columns, and sums go over lanes after every unit and at the end. Here a
// vector is one chain of sixteen columns, and no sum goes over lanes; but the codes of the columns have to be turned
// around first, which takes as long as the products of a row or two: for fewer rows it does not pay.

constexpr int TURNED_ROWS = 8;        // at a time
constexpr int COLUMN_CHAINS = W / 2;  // of each column
constexpr int64_t LONGEST = 1536;     // bytes of a column's codes: those of long ones, and the rows, find no room in the first-level cache
constexpr int64_t NEAR_COLUMN = 512;  // bytes of codes: a block of such columns fits into the first-level cache beside the rows

// Four words of sixteen columns, those of columns i, 4 + i, 8 + i and 12 + i in v[i]: one of every column to a vector.
static inline void turn_quads(const __m512i (&v)[4], __m512i* word) {
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  word[0] = _mm512_unpacklo_epi64(a, c), word[1] = _mm512_unpackhi_epi64(a, c);
  word[2] = _mm512_unpacklo_epi64(b, d), word[3] = _mm512_unpackhi_epi64(b, d);
}

// Four words of codes of sixteen columns, from byte `from` on: one of every column to a vector. With items of two bytes, the
// first halves of four columns' words lie before the second halves.
template <int item>
static inline void turn_words(const uint8_t* const* at, int64_t from, __mmask8 some, __m512i* word) {
  asm volatile("" : "+r"(at));  // sixteen pointers stay in memory
  __m512i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    auto four = [&](int c) {
      const void* p = at[c] + from;
      return some == 0xf ? _mm_loadu_si128(static_cast<const __m128i*>(p)) : _mm_maskz_loadu_epi32(some, p);
    };
    v[i] = _mm512_castsi128_si512(four(i));
    v[i] = _mm512_inserti32x4(v[i], four(4 + i), 1);
    v[i] = _mm512_inserti32x4(v[i], four(8 + i), 2);
    v[i] = _mm512_inserti32x4(v[i], four(12 + i), 3);
  }
  if constexpr (item == 4) {
    turn_quads(v, word);
  } else {
    const __m512i a = _mm512_unpacklo_epi16(v[0], v[1]), b = _mm512_unpackhi_epi16(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi16(v[2], v[3]), d = _mm512_unpackhi_epi16(v[2], v[3]);
    word[0] = _mm512_unpacklo_epi32(a, c), word[1] = _mm512_unpackhi_epi32(a, c);
    word[2] = _mm512_unpacklo_epi32(b, d), word[3] = _mm512_unpackhi_epi32(b, d);
  }
}

// How a unit of V vectors is gone through: in so many steps, each with some words of every column and some chains, the
// first of them `ahead` of those of the step before.
template <class D, int V>
struct Steps {
  static constexpr int steps = V, words = 4, chains = V == 8 ? 1 : V == 4 ? 2 : 4, ahead = V == 8 ? 1 : 2, item = 4;
  static constexpr int chain(int i) { return i % 2 + i / 2 * 4; }  // from the first one on
  // Which fours of words a step takes.
  static inline int64_t place(int64_t step) { return V == 8 ? step % 2 * 4 + step / 2 : step; }
  // The t-th vectors of a chain's two lanes.
  static inline void decode(const D& code, const __m512i* word, int i, int t, pair_vec& even, pair_vec& odd) {
    const int at = V == 8 ? t / 4 * 2 : i % 2 * 2, nibble = V == 8 ? t % 4 : V == 4 ? t : t + i / 2 * 2;
    even = as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(word[at], unsigned(4 * nibble)), code.table));
    odd = as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(word[at + 1], unsigned(4 * nibble)), code.table));
  }
};

template <int V>
struct Steps<PairAffine8, V> {
  static constexpr int steps = 4, words = V == 4 ? 8 : 4, chains = 2, ahead = 2, item = 2;
  static constexpr int chain(int i) { return i; }
  static inline int64_t place(int64_t step) { return V == 4 ? 2 * step : step == 0 || step == 3 ? step : 3 - step; }
  static inline void decode(const PairAffine8& code, const __m512i* word, int i, int t, pair_vec& even, pair_vec& odd) {
    // q - 128 or its complement, whichever is not negative: where many rows are multiplied, GFNI takes the products' place
    const __m512i q = word[2 * t + i], signed_q = _mm512_xor_si512(q, _mm512_set1_epi8(char(0x80)));
    __m512i bottom, top;
    code.values(_mm512_max_epi8(signed_q, _mm512_xor_si512(q, _mm512_set1_epi8(0x7f))), signed_q, bottom, top);
    even = as_pairs(_mm512_unpacklo_epi8(bottom, top)), odd = as_pairs(_mm512_unpackhi_epi8(bottom, top));
  }
};

// sum + the pair of elements at x times w, in every lane. Compilers load the pair into a register of its own for that,
// which takes half as long again.
static inline vec add_pair(vec sum, const float* x, pair_vec w) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
  return sum;
}

// The chain of two columns' vectors that is a column's c-th.
constexpr int lane_of_chain(int64_t c) { return int(c / 2 * 4 + c % 2); }

template <class D, int group, int V>
struct ScaleOfChain {
  int of[COLUMN_CHAINS];
  constexpr ScaleOfChain() : of() {
    for (int c = 0; c < COLUMN_CHAINS; c++) of[c] = int(SCALE_OF_LANE<D, group, V>.whole[lane_of_chain(c)]) * W;
  }
};
template <class D, int group, int V>
constexpr ScaleOfChain<D, group, V> SCALE_OF_CHAIN{};

// The bfloat16 scales of up to eight groups of sixteen columns, `apart` from column to column: a vector of floats for each
// group. Two neighbouring ones are turned as one word.
template <bool whole>
static inline void turn_scales(const uint16_t* from, int64_t apart, int64_t last, int64_t count, vec (&out)[8]) {
  const __mmask8 some = __mmask8((1 << count) - 1);
  __m512i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    auto eight = [&](int c) {
      if constexpr (whole) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + c * apart));
      return _mm_maskz_loadu_epi16(some, from + (c < last ? c : last) * apart);
    };
    v[i] = _mm512_castsi128_si512(eight(i));
    v[i] = _mm512_inserti32x4(v[i], eight(4 + i), 1);
    v[i] = _mm512_inserti32x4(v[i], eight(8 + i), 2);
    v[i] = _mm512_inserti32x4(v[i], eight(12 + i), 3);
  }
  __m512i word[4];
  turn_quads(v, word);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) out[2 * i] = even_elements(word[i]), out[2 * i + 1] = odd_elements(word[i]);
}

// Groups behind a row's end that a unit may ask for.
template <class D, int group>
constexpr int GROUPS_BEHIND = groups_of<group, vectors_of_unit<D, group>> - 1;

// Floats of a block's scales, and of what its chains begin with.
template <class D, int group>
static int64_t turned_floats(int64_t K) {
  return (2 * (K / group) + GROUPS_BEHIND<D, group>) * W;
}

template <bool near>
[[gnu::always_inline]] static inline void fetch_lines(const void* from, int64_t bytes) {
  const char* p = static_cast<const char*>(from);
  for (const char* end = p + bytes; p < end; p += 64) {
    if constexpr (near) __builtin_prefetch(p, 0, 3);
    if constexpr (!near) __builtin_prefetch(p, 0, 2);
  }
}

// A block of columns.
template <class D, int group>
struct ColumnBlock {
  const Product& p;
  const D& code;
  const int64_t n, columns;
  const bool near;  // the next block may be fetched into the first-level cache
  const uint8_t* at[BLOCK];
  float *scales, *begins;  // a vector for every group; these: bias + scale * centre

  // `room` has `turned_floats`.
  ColumnBlock(const Product& p, const D& code, int64_t n, int64_t columns, float* room)
      : p(p), code(code), n(n), columns(columns), near(p.w.row_bytes <= NEAR_COLUMN) {
    const int64_t groups = p.K / group, last = columns - 1;
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    for (int64_t c = 0; c < BLOCK; c++) at[c] = codes + (c < last ? c : last) * p.w.row_bytes;
    begins = room, scales = begins + groups * W;
    const int64_t scale_bytes = groups * size_of(p.w.scale_type);
    fetch_lines<true>(static_cast<const char*>(p.w.scales) + (n + BLOCK) * scale_bytes, BLOCK * scale_bytes);
    if (p.w.biases) fetch_lines<true>(static_cast<const char*>(p.w.biases) + (n + BLOCK) * scale_bytes, BLOCK * scale_bytes);
    if constexpr (D::centre != 0) {
      const uint16_t *s = static_cast<const uint16_t*>(p.w.scales) + n * groups, *b = static_cast<const uint16_t*>(p.w.biases) + n * groups;
      auto turn = [&]<bool whole>(int64_t g, int64_t count) {
        vec scale[8], bias[8];
        turn_scales<whole>(s + g, groups, last, count, scale), turn_scales<whole>(b + g, groups, last, count, bias);
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; i++) {
          if (!whole && i >= count) break;
          store(scales + (g + i) * W, scale[i]);
          store(begins + (g + i) * W, fma(scale[i], ones(D::centre), bias[i]));
        }
      };
      const bool whole = columns == BLOCK && groups >= 8;
      for (int64_t g = 0; whole && g < groups; g += 8) turn.template operator()<true>(g + 8 <= groups ? g : groups - 8, 8);
      for (int64_t g = 0; !whole && g < groups; g += 8) turn.template operator()<false>(g, groups - g < 8 ? groups - g : 8);
    } else {
      const float* wide = scales_of<D, group>(p, n, columns).scales;
      for (int64_t c = 0; c < BLOCK; c++)
        for (int64_t g = 0; g < groups; g++) scales[g * W + c] = wide[(c < last ? c : last) * groups + g];
    }
    for (int i = 0; i < GROUPS_BEHIND<D, group>; i++) store(scales + (groups + i) * W, zero());
  }

  // What the c-th chains begin with.
  inline void begin(vec (&chain)[TURNED_ROWS], const float* const* x, int64_t c) const {
#pragma GCC unroll 8
    for (int r = 0; r < TURNED_ROWS; r++) chain[r] = zero();
    if constexpr (D::centre != 0) {
      const int64_t groups = p.K / group, first = sums_of(p.K) + lane_of_chain(c) - 2 * c;
      for (int64_t g = c; g < groups; g += COLUMN_CHAINS) {
        const vec begin = load(begins + g * W);
#pragma GCC unroll 8
        for (int r = 0; r < TURNED_ROWS; r++) chain[r] = add_times(chain[r], x[r] + first + 2 * g, begin);
      }
    }
  }

  // Follows the chains through V vectors from element k on, which for row r begin at pair[r], and moves those pointers on.
  // The columns have `bytes` of them, all unless it is not `whole`. What lies at `next` is fetched.
  template <int V, bool whole>
  inline void add(vec (&chains)[COLUMN_CHAINS][TURNED_ROWS], const float* const* x, const float* (&pair)[TURNED_ROWS], int64_t k, int64_t bytes, const uint8_t* next) const {
    using S = Steps<D, V>;
    constexpr int64_t step_bytes = 4 * S::words;
    const D& now = D::tables > 1 ? *held(&code) : code;
    const float* scale = scales + k / group * W;
    for (int64_t step = 0; step < S::steps; step++) {
      __m512i word[S::words];
      if (next) {
        if (near) fetch_lines<true>(next, BLOCK * step_bytes);
        if (!near) fetch_lines<false>(next, BLOCK * step_bytes);
        next += BLOCK * step_bytes;
      }
      if (whole) {  // what the next unit takes of the rows, which may be too long for the first-level cache
        const int64_t further = V * W + step * (W - 2 * S::ahead);
#pragma GCC unroll 8
        for (int r = 0; r < TURNED_ROWS; r++) __builtin_prefetch(pair[r] + further, 0, 3);
      }
      const int64_t skip = 16 * S::place(step);
#pragma GCC unroll 2
      for (int i = 0; i < S::words / 4; i++) {
        const int64_t left = whole ? 4 : (bytes - skip) / 4 - 4 * i;
        const __mmask8 some = left >= 4 ? 0xf : left <= 0 ? 0 : __mmask8((1 << left) - 1);
        turn_words<S::item>(at, k * D::bits / 8 + skip + 16 * i, some, word + 4 * i);
      }
#pragma GCC unroll 4
      for (int i = 0; i < S::chains; i++) {
        const int64_t c = step * S::ahead + S::chain(i);
        vec even[TURNED_ROWS], odd[TURNED_ROWS], chain[TURNED_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < TURNED_ROWS; r++) even[r] = odd[r] = zero();
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) {
          pair_vec a, b;
          S::decode(now, word, i, t, a, b);
#pragma GCC unroll 8
          for (int r = 0; r < TURNED_ROWS; r++) {
            const float* v = pair[r] + 2 * S::chain(i) + t * W;
            even[r] = add_pair(even[r], v, a), odd[r] = add_pair(odd[r], v + 1, b);
          }
        }
        if (k == 0) {
          begin(chain, x, c);
        } else {
#pragma GCC unroll 8
          for (int r = 0; r < TURNED_ROWS; r++) chain[r] = chains[c][r];
        }
        const vec s = load(scale + SCALE_OF_CHAIN<D, group, V>.of[c]);
#pragma GCC unroll 8
        for (int r = 0; r < TURNED_ROWS; r++) chains[c][r] = fma(plus(even[r], odd[r]), s, chain[r]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < TURNED_ROWS; r++) pair[r] = held(pair[r] + 2 * S::ahead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < TURNED_ROWS; r++) pair[r] = held(pair[r] + V * W - 2 * S::ahead * S::steps);
  }

  // The rows from m on.
  [[gnu::noinline]] void rows(int64_t m) const {
    constexpr int V = vectors_of_unit<D, group>;
    constexpr int64_t unit = V * PAIRS, unit_bytes = unit * D::bits / 8;
    const float *const* x = p.x + m, *pair[TURNED_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < TURNED_ROWS; r++) pair[r] = x[r];
    vec chains[COLUMN_CHAINS][TURNED_ROWS];
    const uint8_t* next = m ? nullptr : static_cast<const uint8_t*>(p.w.data) + (n + BLOCK) * p.w.row_bytes;
    int64_t k = 0;
    for (; k + unit <= p.K; k += unit) add<V, true>(chains, x, pair, k, unit_bytes, next ? next + k / unit * unit_bytes * BLOCK : next);
    if (k < p.K) {  // x is zero behind the row's end
      const int64_t left = p.K - k, bytes = left * D::bits / 8;
      if (next) fetch_lines<true>(next + k / unit * unit_bytes * BLOCK, bytes * BLOCK);
      if (left == HALF / 2) {
        add<2, true>(chains, x, pair, k, bytes, nullptr);
      } else if (left < HALF / 2) {
        add<2, false>(chains, x, pair, k, bytes, nullptr);
      } else if (V == 4 || left <= HALF) {
        add<4, false>(chains, x, pair, k, bytes, nullptr);
      } else if constexpr (V == 8) {
        add<8, false>(chains, x, pair, k, bytes, nullptr);
      }
    }
    const vec bias = p.bias ? load_any(p.bias, p.bias_type, n, 1, columns) : zero();
    auto both = [&](int a, int b, int r) { return plus(chains[a][r], chains[b][r]); };
#pragma GCC unroll 8
    for (int r = 0; r < TURNED_ROWS; r++) {
      const vec sum = plus(plus(both(0, 4, r), both(2, 6, r)), plus(both(1, 5, r), both(3, 7, r)));
      store_any(p.y[m + r], p.y_type, n, 1, columns, with_one_nan(p.bias ? plus(sum, bias) : sum));
    }
  }
};
