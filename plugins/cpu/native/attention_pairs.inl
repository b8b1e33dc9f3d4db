// Attention over keys and values of bfloat16, two elements a lane of AVX-512. Included by attention.inl.
//
// Sixteen keys at a time are brought into lanes, a key to a lane, so that no score needs a sum over lanes, and stay
// there for all rows of a task. Row invariance: a score is two chains in the lane of its key, one over the even pairs
// of elements and one over the odd, which are added and then scaled; it does not matter which lane that is. Queries of
// bfloat16 take the power of two of the scale beforehand, which is exact, and are multiplied in pairs where the
// machine can; others are floats. Values are gathered as in attention.inl, even elements apart from odd ones.

constexpr int64_t SLAB = 256;    // elements of sixteen keys that lie in lanes at a time
constexpr int64_t SPAN = 2 * W;  // elements of one vector

static bool in_lanes(const Attention& a) { return !a.bits && a.type == Type::bf16; }

#ifdef SPEC_PAIRS
static bool in_pairs(const Attention& a) { return a.q_type == Type::bf16; }
static inline vec pair_product(vec sum, __m512i keys, const float* query) { return add_pair(sum, query, as_pairs(keys)); }
#else
static bool in_pairs(const Attention&) { return false; }
static inline vec pair_product(vec sum, __m512i, const float*) { return sum; }
#endif

// The elements of a vector from place d on, zeros behind the last.
static inline __mmask32 elements_from(int64_t d, int64_t D) {
  return D - d >= SPAN ? ~__mmask32(0) : __mmask32((uint64_t(1) << (D - d)) - 1);
}

// A scale as a power of two and the rest, in that order.
static inline void split_scale(float scale, float& power, float& rest) {
  int exponent = 0;
  rest = 2 * frexpf(scale, &exponent);  // of [1, 2)
  power = ldexpf(1.0f, exponent - 1);
}

// The queries in pairs.
static void take_pairs(const Attention& a) {
  const Room room(a);
  float power, rest;
  split_scale(a.scale, power, rest);
  for (int r = 0; r < a.rows; r++) {
    uint16_t* q = reinterpret_cast<uint16_t*>(room.q + r * room.width);
    for (int64_t d = 0; d < room.width; d += W) {
      store_bf16(q + d, times(load_any(a.q[r], a.q_type, d * a.q_stride, a.q_stride, a.D - d), ones(power)));
    }
  }
}

// Copies what a loop writes into registers, and back: a compiler would write arrays of its caller in every round.
template <int R, int N>
static inline void take_sums(vec (*to)[N], const vec (*from)[N]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) to[r][i] = from[r][i];
  }
}

// Follows the chains of R rows through `pairs` pairs of elements; they begin at zero or go on.
template <int R, bool paired>
static void multiply_lanes(vec (*acc)[2], bool begin, const __m512i* lanes, int64_t pairs, const float* const* q) {
  vec now[R][2];
  if (begin) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) now[r][0] = now[r][1] = zero();
  } else {
    take_sums<R>(now, acc);
  }
  for (int64_t i = 0; i < pairs; i += 2) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m512i k = lanes[i + half];
      const vec even = even_elements(k), odd = odd_elements(k);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        if constexpr (paired) {
          now[r][half] = pair_product(now[r][half], k, q[r] + i + half);
        } else {
          const float* two = q[r] + 2 * (i + half);
          now[r][half] = fma(odd, ones(two[1]), fma(even, ones(two[0]), now[r][half]));
        }
      }
    }
  }
  take_sums<R>(acc, now);
}

// Scores of the keys from `first` to `last` for all rows.
template <bool paired>
static void score_lanes(const Attention& a, int64_t first, int64_t last) {
  const Room room(a);
  const int64_t ahead = Ahead(a, a.keys, a.D).rows * a.keys.stride;
  float power, rest = 1;
  if (paired) split_scale(a.scale, power, rest);
  __m512i lanes[SLAB / 2];  // a pair of elements of every key
  vec acc[ATTENTION_ROWS][2];
  for (int64_t t = first; t < last; t += W) {
    touch_rows(a.keys, first, t, last);
    const int64_t count = last - t < W ? last - t : W;
    const char* keys[W];
    for (int64_t j = 0; j < W; j++) {
      keys[j] = static_cast<const char*>(a.keys.data) + (t + (j < count ? j : count - 1)) * a.keys.stride;
    }
    for (int64_t slab = 0; slab < a.D; slab += SLAB) {
      const int64_t upto = slab + SLAB < a.D ? slab + SLAB : a.D;
      __m512i* to = lanes;
      for (int64_t d = slab; d < upto; d += SPAN, to += W) {
        __m512i v[W];
        const __mmask32 some = elements_from(d, a.D);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
          v[j] = _mm512_maskz_loadu_epi16(some, keys[j] + 2 * d);
          __builtin_prefetch(keys[j] + 2 * d + ahead, 0, 3);
        }
        transpose(v);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) to[j] = v[j];
      }
      with_rows<AT_ONCE>(0, a.rows, [&]<int R>(int row) {
        if (seen_keys(a, row, row + R) <= t) return;
        const float* q[R];
        for (int r = 0; r < R; r++) q[r] = room.q + (row + r) * room.width + (paired ? slab / 2 : slab);
        multiply_lanes<R, paired>(acc + row, slab == 0, lanes, to - lanes, q);
      });
    }
    const __mmask16 some = __mmask16((1 << count) - 1);
    for (int r = 0; r < a.rows; r++) {
      const vec score = times(plus(acc[r][0], acc[r][1]), ones(rest));
      _mm512_mask_storeu_ps(room.scores + r * room.pitch + t, some, score);
    }
  }
}

// Adds values to the results of R rows, but where they weigh nothing.
template <int R, int C, bool some_weigh_nothing>
static void add_values(vec (&acc)[R][2 * C], const char* value, int64_t stride, int64_t ahead, int64_t count,
                       const __mmask32 (&some)[C], const float* weights, int64_t pitch) {
  vec now[R][2 * C];
  take_sums<R>(now, acc);
  for (int64_t t = 0; t < count; t++, value += stride) {
    vec v[2 * C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const __m512i both = _mm512_maskz_loadu_epi16(some[c], value + c * 2 * SPAN);
      __builtin_prefetch(value + c * 2 * SPAN + ahead, 0, 3);
      v[2 * c] = even_elements(both), v[2 * c + 1] = odd_elements(both);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vec weight = ones(weights[r * pitch + t]);
      const __mmask16 weighs = some_weigh_nothing ? _mm512_cmp_ps_mask(weight, zero(), _CMP_NEQ_UQ) : __mmask16(0xffff);
#pragma GCC unroll 4
      for (int c = 0; c < 2 * C; c++) {
        now[r][c] = some_weigh_nothing ? _mm512_mask3_fmadd_ps(weight, v[c], now[r][c], weighs) : fma(weight, v[c], now[r][c]);
      }
    }
  }
  take_sums<R>(acc, now);
}

// Elements of the results from `first` to `last` for R rows from `row` on, C vectors of values at a time.
template <int R, int C>
static void gather_lanes(const Attention& a, int row, int64_t first, int64_t last) {
  const Room room(a);
  const int64_t ahead = Ahead(a, a.values, a.value_D).rows * a.values.stride;
  const int64_t limit = seen_keys(a, row, row + R);
  const float* weights = room.scores + row * room.pitch;
  for (int64_t d = first; d < last; d += C * SPAN) {
    __mmask32 some[C];
    for (int c = 0; c < C; c++) some[c] = d + c * SPAN < last ? elements_from(d + c * SPAN, a.value_D) : 0;
    vec acc[R][2 * C];
    for (auto& sums : acc)
      for (auto& v : sums) v = zero();
    const char* data = static_cast<const char*>(a.values.data) + 2 * d;
    for (int64_t t = 0; t < limit; t += W) {
      if (d == first) touch_rows(a.values, 0, t, limit);
      const int64_t upto = t + W < limit ? t + W : limit;
      __mmask16 none = 0;
      for (int r = 0; r < R; r++) none |= _mm512_cmp_ps_mask(load(weights + r * room.pitch + t), zero(), _CMP_EQ_OQ);
      auto* add = none ? add_values<R, C, true> : add_values<R, C, false>;
      add(acc, data + t * a.values.stride, a.values.stride, ahead, upto - t, some, weights + t, room.pitch);
    }
    for (int r = 0; r < R; r++) {
      const vec scale = ones(1.0f / room.totals[row + r]);
      for (int c = 0; c < C; c++) {
        const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(W / 2));
        const vec even = times(acc[r][2 * c], scale), odd = times(acc[r][2 * c + 1], scale);
        const int64_t at = d + c * SPAN, left = (last < a.value_D ? last : a.value_D) - at;
        if (left > 0) store_any(a.y[row + r], a.y_type, at, 1, left, _mm512_permutex2var_ps(even, low, odd));
        if (left > W) store_any(a.y[row + r], a.y_type, at + W, 1, left - W, _mm512_permutex2var_ps(even, high, odd));
      }
    }
  }
}
