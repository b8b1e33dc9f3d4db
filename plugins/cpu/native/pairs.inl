// Rows of bfloat16 by packed codes, two products an instruction (AVX-512 BF16). Included by linear.inl.
//
// Codes less their centre c are exact in bfloat16, and so is every product; sums are floats. A group adds
// scale * sum(x * (q - c)), and (bias + scale * c) * sum(x) of sixteen groups at a time start the chain: one order
// for every row, whatever is computed next to it. Values that could overflow on that way, infinities and NaN are
// left to the products of single floats.

typedef __m512bh pair_vec;

constexpr int PAIRS = 2 * W;                  // elements of one vector
constexpr int CODES_CENTRE_4 = 8, CODES_CENTRE_8 = 128;
constexpr uint16_t LARGE = (127 + 112) << 7;  // 2 ^ 112 as bfloat16

static inline pair_vec as_pairs(__m512i v) { return reinterpret_cast<pair_vec>(v); }

static inline __m512i word_numbers() {
  __m512i low = lane_numbers(), even = _mm512_slli_epi32(low, 1);
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(1)), 16));
}

// Four-bit codes of a group: vector t, place l holds nibble t + l / d * vectors of 16-bit word l % d, d = size / 4.
template <int group_size>
struct PairCodes4 {
  static constexpr int size = group_size, bits = 4, vectors = size / PAIRS, words = size / 4;
  struct Group {
    __m512i codes;
  };

  static int place(int t, int l) { return l % words * 4 + t + l / words * vectors; }

  static inline Group group(const uint8_t* codes) {
    __m512i v;
    if constexpr (size == 128) return {_mm512_loadu_si512(codes)};
    if constexpr (size == 64) v = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    if constexpr (size == 32) v = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    constexpr int log = size == 64 ? 4 : 3;  // of words
    return {_mm512_srlv_epi16(v, _mm512_mullo_epi16(_mm512_srli_epi16(word_numbers(), log), _mm512_set1_epi16(size / 8)))};
  }

  // Only the low five bits of an index count, and both halves of the table are alike.
  static inline pair_vec decode(const uint8_t*, const Group& g, int t, __m512i table) {
    return as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(g.codes, unsigned(4 * t)), table));
  }
};

template <int group_size>
struct PairAffine4 : PairCodes4<group_size> {
  static constexpr float centre = CODES_CENTRE_4;
  static inline __m512i table() {
    __m512 values = _mm512_sub_ps(_mm512_cvtepi32_ps(lane_numbers()), _mm512_set1_ps(centre));
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values, values));
  }
};

struct PairFp4 : PairCodes4<32> {
  static constexpr float centre = 0;
  static inline __m512i table() {
    __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values, values));
  }
};

template <int group_size>
struct PairAffine8 {
  static constexpr int size = group_size, bits = 8, vectors = size / PAIRS;
  static constexpr float centre = CODES_CENTRE_8;
  struct Group {};

  static int place(int t, int l) { return t * PAIRS + l; }
  static inline __m512i table() { return _mm512_setzero_si512(); }
  static inline Group group(const uint8_t*) { return {}; }

  static inline __m512 centred(const uint8_t* codes) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(bytes, _mm_set1_epi8(char(0x80)))));
  }
  static inline pair_vec decode(const uint8_t* codes, const Group&, int t, __m512i) {
    codes += t * PAIRS;
    return _mm512_cvtne2ps_pbh(centred(codes + W), centred(codes));
  }
};

static int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats from the beginning of a row of pairs to the sums of its groups; both are in whole vectors.
static int64_t sums_of(int64_t K) { return rounded_up(K / 2, W); }

template <class D>
struct PairBlock {
  const Product& p;
  const uint8_t* codes;           // of the first column
  const float *scales, *biases;   // (BLOCK, K / group), (BLOCK, K / group in whole vectors)

  template <int MR>
  inline void start(vec (&acc)[MR][BLOCK], const float* const* x, int64_t columns) const {
    const int64_t groups = rounded_up(p.K / D::size, W), sums = sums_of(p.K);
    for (int64_t j = 0; j < columns; j++) {
      for (int i = 0; i < MR; i++) acc[i][j] = zero();
      if (D::centre == 0) continue;  // no biases either
      for (int64_t g = 0; g < groups; g += W) {
        vec b = load(biases + j * groups + g);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) acc[i][j] = fma(load(x[i] + sums + g), b, acc[i][j]);
      }
    }
  }

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    constexpr int V = D::vectors;
    constexpr int64_t group_bytes = D::size * D::bits / 8;
    const int64_t groups = p.K / D::size;
    const __m512i table = D::table();
    Chains<MR, NR> chains;
    chains.take(acc, j);
    const uint8_t* at[NR];
    const float* scale[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) {
      const int64_t column = j + c < columns ? j + c : columns - 1;
      at[c] = codes + column * p.w.row_bytes + from * D::bits / 8;
      scale[c] = scales + column * groups + from / D::size;
    }
    const uint8_t* next = codes + ahead(p.w.row_bytes, j, from * D::bits / 8, to * D::bits / 8);
    for (int64_t first = from; first < to; first += D::size, next += NR * group_bytes) {
      pair_vec w[NR][V];
      for (int64_t byte = 0; byte < NR * group_bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        typename D::Group group = D::group(at[c]);
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) w[c][t] = D::decode(at[c], group, t, table);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        pair_vec v[V];
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) v[t] = reinterpret_cast<pair_vec>(held(load(x[i] + first / 2 + t * W)));
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) {
          vec sum = zero();
#pragma GCC unroll 8
          for (int t = 0; t < V; t++) sum = _mm512_dpbf16_ps(sum, v[t], w[c][t]);
          chains.now[i][c] = fma(sum, ones(*scale[c]), chains.now[i][c]);
        }
      }
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) at[c] = held(at[c] + group_bytes), scale[c] = held(scale[c] + 1);
    }
    chains.put_back(acc, j);
  }
};

// Scales of `count` columns from n on, and what a group's sum of x is to be multiplied with. `room` and `scales`
// hold a vector more than the groups of a block.
static void pair_floats(const Product& p, int64_t n, int64_t count, float centre, float* scales, float* biases, float* room) {
  const int64_t groups = p.K / p.w.group, stride = rounded_up(groups, W);
  widen(p.w.scales, p.w.scale_type, n * groups, count * groups, scales);
  if (!p.w.biases) return;
  widen(p.w.biases, p.w.scale_type, n * groups, count * groups, room);
  for (int64_t j = 0; j < count; j++) {
    for (int64_t g = 0; g < groups; g += W) {
      const int64_t left = groups - g, at = j * groups + g;
      vec b = fma(load(scales + at), ones(centre), load(room + at));
      store(biases + j * stride + g, _mm512_maskz_mov_ps(left < W ? __mmask16((1 << left) - 1) : __mmask16(-1), b));
    }
  }
}

template <class D, int MR>
static void pair_rows(const Product& p, const PairBlock<D>& block, int64_t m, int64_t n, int64_t columns) {
  follow_block<MR, (MR <= 4 ? 4 : 2)>(p, block, p.K, m, n, columns);
}

template <class D>
static void pair_product(const Product& p, int64_t first, int64_t last) {
  const int64_t groups = p.K / D::size;
  float *biases = p.scratch, *scales = biases + BLOCK * rounded_up(groups, W), *room = scales + BLOCK * groups + W;
  for (int64_t n = first; n < last; n += BLOCK) {
    const int64_t count = last - n < BLOCK ? last - n : BLOCK;
    pair_floats(p, n, count, D::centre, scales, biases, room);
    const PairBlock<D> block{p, static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes, scales, biases};
    int64_t m = 0;
    for (; m + 8 <= p.rows; m += 8) pair_rows<D, 8>(p, block, m, n, count);
    switch (p.rows - m) {
      case 1: pair_rows<D, 1>(p, block, m, n, count); break;
      case 2: pair_rows<D, 2>(p, block, m, n, count); break;
      case 3: pair_rows<D, 3>(p, block, m, n, count); break;
      case 4: pair_rows<D, 4>(p, block, m, n, count); break;
      case 5: pair_rows<D, 5>(p, block, m, n, count); break;
      case 6: pair_rows<D, 6>(p, block, m, n, count); break;
      case 7: pair_rows<D, 7>(p, block, m, n, count); break;
    }
  }
}

// f(D{}) for the codes of w.
template <class F>
static auto with_pairs(const Weights& w, F&& f) {
  if (w.format == Format::fp4) return f(PairFp4{});
  if (w.bits == 4) {
    if (w.group == 32) return f(PairAffine4<32>{});
    return w.group == 64 ? f(PairAffine4<64>{}) : f(PairAffine4<128>{});
  }
  if (w.group == 32) return f(PairAffine8<32>{});
  return w.group == 64 ? f(PairAffine8<64>{}) : f(PairAffine8<128>{});
}

static bool pairs(const Weights& w, Type type) {
  if (type != Type::bf16 || w.format == Format::dense || w.group < PAIRS) return false;
  return w.format == Format::fp4 || w.bits == 4 || w.bits == 8;
}

// Elements of a group in the order their codes are decoded in.
template <class D>
static inline void order_group(const __m512i (&order)[D::vectors], const uint16_t* from, uint16_t* to) {
  __m512i in[D::vectors];
  for (int t = 0; t < D::vectors; t++) in[t] = _mm512_loadu_si512(from + t * PAIRS);
  for (int t = 0; t < D::vectors; t++) {
    __m512i out;
    if constexpr (D::vectors == 1) out = _mm512_permutexvar_epi16(order[t], in[0]);
    if constexpr (D::vectors == 2) out = _mm512_permutex2var_epi16(in[0], order[t], in[1]);
    if constexpr (D::vectors == 4) {
      out = _mm512_mask_mov_epi16(_mm512_permutex2var_epi16(in[0], order[t], in[1]),
                                  _mm512_test_epi16_mask(order[t], _mm512_set1_epi16(2 * PAIRS)),
                                  _mm512_permutex2var_epi16(in[2], order[t], in[3]));
    }
    _mm512_storeu_si512(to + t * PAIRS, out);
  }
}

template <class D>
static bool order_row(const uint16_t* x, int64_t stride, int64_t K, float* out) {
  uint16_t places[D::size], group[D::size];
  __m512i order[D::vectors], largest = _mm512_setzero_si512();
  for (int i = 0; i < D::size; i++) places[i] = uint16_t(D::place(i / PAIRS, i % PAIRS));
  for (int t = 0; t < D::vectors; t++) order[t] = _mm512_loadu_si512(places + t * PAIRS);
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  float* sums = out + sums_of(K);
  for (int64_t k = 0; k < K; k += D::size, x += D::size * stride, to += D::size) {
    const uint16_t* from = x;
    if (stride != 1) {
      for (int i = 0; i < D::size; i++) group[i] = x[i * stride];
      from = group;
    }
    order_group<D>(order, from, to);
    vec total = zero();
    for (int i = 0; i < D::size; i += W) total = fma(load_bf16(to + i), ones(1), total);
    *sums++ = sum(total);
    for (int i = 0; i < D::size; i += PAIRS) {
      __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(to + i), _mm512_set1_epi16(0x7fff));
      largest = _mm512_max_epu16(largest, magnitude);
    }
  }
  for (int64_t g = K / D::size; g < rounded_up(K / D::size, W); g++) *sums++ = 0;
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(LARGE))) == 0;
}

static bool prepare_pairs(const Weights& w, const void* x, int64_t stride, int64_t K, float* out) {
  return with_pairs(w, [&](auto d) { return order_row<decltype(d)>(static_cast<const uint16_t*>(x), stride, K, out); });
}

static void product_of_pairs(const Product& p, int64_t first, int64_t last) {
  with_pairs(p.w, [&](auto d) { pair_product<decltype(d)>(p, first, last); });
}

static int64_t pair_scratch(const Product& p) {
  const int64_t groups = p.K / p.w.group;
  return BLOCK * (2 * groups + rounded_up(groups, W)) + 2 * W;
}
