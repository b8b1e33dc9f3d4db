// Rows of bfloat16 by short columns of bfloat16, a column to a lane. Included by pairs.inl.
//
// Where a product's rows are short, sums over lanes take as long as the products themselves. So two elements of each
// of sixteen columns lie in one vector here, and no sum goes over lanes. Row invariance: a result is one chain over
// the pairs of elements from the first to the last, whatever rows and columns are computed with it.

constexpr int64_t SHORT_ROW = 512;  // elements up to which a column is one lane's chain

static bool columns_in_lanes(const Weights& w, int64_t K) { return w.format == Format::dense && w.type == Type::bf16 && K <= SHORT_ROW; }

static int64_t pairs_of(int64_t K) { return (K + 1) / 2; }

// The block of `count` columns from n on: a vector for each pair of elements, zeros where there is no column.
static void put_block(const Weights& w, int64_t K, int64_t n, int64_t count, float* out) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + n * w.row_bytes;
  for (int64_t k = 0; k < K; k += PAIRS, out += W * W) {
    __m512i v[W];
    const int64_t bytes = 2 * (K - k);
#pragma GCC unroll 16
    for (int j = 0; j < W; j++) v[j] = j < count ? load_bytes(data + j * w.row_bytes + 2 * k, bytes) : _mm512_setzero_si512();
    transpose(v);
    const int64_t some = pairs_of(K - k);
#pragma GCC unroll 16
    for (int j = 0; j < W; j++) {
      if (j < some) _mm512_storeu_si512(out + j * W, v[j]);
    }
  }
}

// The i-th pair of a row, which may lie at any even address.
static inline pair_vec pair_of(const float* row, int64_t i) {
  int32_t pair;
  memcpy(&pair, reinterpret_cast<const char*>(row) + 4 * i, 4);
  return as_pairs(_mm512_set1_epi32(pair));
}

// MR rows from m on by NC blocks, the first of them at `lanes`, column n its first.
template <int MR, int NC>
static void lane_tile(const Product& p, const float* lanes, int64_t m, int64_t n, int64_t last) {
  const int64_t pairs = pairs_of(p.K), apart = pairs * W;
  const float* x[MR];
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++) x[r] = p.x[m + r];
  vec sum[MR][NC];
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 12
    for (int c = 0; c < NC; c++) sum[r][c] = zero();
  for (int64_t i = 0; i < pairs; i++) {
    pair_vec w[NC];
#pragma GCC unroll 12
    for (int c = 0; c < NC; c++) {
      const float* at = lanes + c * apart + i * W;
      w[c] = reinterpret_cast<pair_vec>(load(at));
      __builtin_prefetch(at + NC * apart, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const pair_vec v = pair_of(x[r], i);
#pragma GCC unroll 12
      for (int c = 0; c < NC; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], v, w[c]);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < NC; c++) {
    const int64_t first = n + c * W, count = last - first;
    const vec bias = p.bias ? load_any(p.bias, p.bias_type, first, 1, count) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) store_any(p.y[m + r], p.y_type, first, 1, count, with_one_nan(p.bias ? plus(sum[r][c], bias) : sum[r][c]));
  }
}

// Blocks that registers hold the sums of, for so many rows.
constexpr int blocks_of_tile(int rows) { return rows == 1 ? 12 : rows == 2 ? 6 : rows <= 4 ? 4 : 2; }

// `blocks` of them, at most NC.
template <int MR, int NC>
static void some_blocks(const Product& p, const float* lanes, int64_t blocks, int64_t m, int64_t n, int64_t last) {
  if constexpr (NC > 0) {
    if (blocks == NC) return lane_tile<MR, NC>(p, lanes, m, n, last);
    some_blocks<MR, NC - 1>(p, lanes, blocks, m, n, last);
  }
}

// Columns n up to `last`, at most as many as lie at `lanes`, for MR rows from m on.
template <int MR>
static void lane_rows(const Product& p, const float* lanes, int64_t m, int64_t n, int64_t last) {
  constexpr int most = blocks_of_tile(MR);
  for (; n < last; n += most * W, lanes += most * W * pairs_of(p.K)) {
    const int64_t blocks = (last - n + W - 1) / W;
    some_blocks<MR, most>(p, lanes, blocks < most ? blocks : most, m, n, last);
  }
}

template <int MR>
static void last_lane_rows(const Product& p, const float* lanes, int64_t m, int64_t n, int64_t last) {
  if constexpr (MR > 0) {
    if (p.rows - m == MR) return lane_rows<MR>(p, lanes, m, n, last);
    last_lane_rows<MR - 1>(p, lanes, m, n, last);
  }
}

constexpr int LANE_ROWS = 8;         // rows at a time
constexpr int64_t LANE_COLUMNS = 12 * W; // columns that are put into lanes at a time when they lie otherwise

static void lane_product(const Product& p, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += LANE_COLUMNS) {
    const int64_t upto = last - n < LANE_COLUMNS ? last : n + LANE_COLUMNS, block = pairs_of(p.K) * W;
    const float* lanes = p.w.lanes ? p.w.lanes + n / W * block : p.scratch;
    for (int64_t j = n; !p.w.lanes && j < upto; j += W) put_block(p.w, p.K, j, upto - j, p.scratch + (j - n) / W * block);
    int64_t m = 0;
    for (; m + LANE_ROWS <= p.rows; m += LANE_ROWS) lane_rows<LANE_ROWS>(p, lanes, m, n, upto);
    last_lane_rows<LANE_ROWS - 1>(p, lanes, m, n, upto);
  }
}

// Floats that columns take in lanes; none where they stay as they are.
static int64_t lane_floats(const Weights& w, int64_t N, int64_t K) {
  return columns_in_lanes(w, K) ? rounded_up(N, W) * pairs_of(K) : 0;
}

static void put_in_lanes(const Weights& w, int64_t N, int64_t K, float* out) {
  for (int64_t n = 0; n < N; n += W) put_block(w, K, n, N - n, out + n * pairs_of(K));
}
