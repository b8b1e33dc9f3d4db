// Linear layers over the lanes of one instruction set. Included inside the kernel file's namespace.
//
// Row invariance: y[m][n] is one chain per lane, lane l adding x[m][k] * w[n][k] for k = l, l + W, l + 2W, ... with
// fused multiply-adds, then one fixed tree over the lanes, then the bias. Tiles only choose which (m, n) are
// computed together and whether w comes from packed codes or from a decoded panel; neither changes a chain.

constexpr int FUSED_ROWS = 8;         // up to here weights are decoded into registers, above into a panel
constexpr int64_t PANEL = 48 * 1024;  // floats of a decoded panel: it should stay in the second-level cache
constexpr int64_t SHORT_ROW = 2048;   // bytes of a row that ends before the hardware has learnt to fetch ahead

template <Type type>
struct Dense {
  static constexpr bool swapped = false;
  static constexpr int64_t size = type == Type::f32 ? 4 : 2;
  static inline vec decode(const uint8_t* p) {
    if constexpr (type == Type::f32) return load(reinterpret_cast<const float*>(p));
    if constexpr (type == Type::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (type == Type::f16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  }
  // The last elements of a row, zeros after them.
  static inline vec tail(const uint8_t* p, int64_t count) {
    alignas(64) uint8_t buffer[W * size] = {};
    memcpy(buffer, p, size_t(count * size));
    return decode(buffer);
  }
};

// Stored elements as floats.
static void widen(const void* data, Type type, int64_t first, int64_t count, float* out) {
  int64_t i = 0;
  if (type == Type::f32) {
    memcpy(out, static_cast<const float*>(data) + first, size_t(count) * sizeof(float));
    return;
  }
  if (type == Type::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(data) + first;
    for (; i + W <= count; i += W) store(out + i, load_bf16(p + i));
  } else if (type == Type::f16) {
    const uint16_t* p = static_cast<const uint16_t*>(data) + first;
    for (; i + W <= count; i += W) store(out + i, load_f16(p + i));
  }
  for (; i < count; i++) out[i] = element(data, type, first + i);
}

template <int MR, int NR>
static inline void finish(const Product& p, vec (&acc)[MR][NR], int64_t m, int64_t n) {
  int64_t columns = p.N - n < NR ? p.N - n : NR;
  for (int i = 0; i < MR; i++) {
    float out[NR];
    if constexpr (NR % 4 == 0) {
      for (int j = 0; j < NR; j += 4) sum4(&acc[i][j], out + j);
    } else {
      for (int j = 0; j < NR; j++) out[j] = sum(acc[i][j]);
    }
    if (p.bias) {
      for (int64_t j = 0; j < columns; j++) out[j] += element(p.bias, p.bias_type, n + j);
    }
    for (int64_t j = 0; j < columns; j++) put(p.y[m + i], p.y_type, n + j, out[j]);
  }
}

template <int MR, int NR>
static inline void step(vec (&acc)[MR][NR], const vec (&w)[NR], const float* const* x, int64_t k) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    vec v = load(x[i] + k);
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) acc[i][j] = fma(v, w[j], acc[i][j]);
  }
}

// MR rows by NR columns straight from packed codes. scales and biases: (NR, K / group) floats.
template <class D, int bits, int MR, int NR>
static void packed_tile(const Product& p, int64_t m, int64_t n, const float* scales, const float* biases) {
  vec acc[MR][NR];
  for (auto& row : acc)
    for (auto& a : row) a = zero();
  const uint8_t* codes[NR];
  for (int j = 0; j < NR; j++) {
    int64_t column = n + j < p.N ? n + j : p.N - 1;  // past the end: computed again, never stored
    codes[j] = static_cast<const uint8_t*>(p.w.data) + column * p.w.row_bytes;
  }
  const int size = p.w.group;
  const int64_t groups = p.K / size, group_bytes = int64_t(size) * bits / 8, ahead = NR * p.w.row_bytes;
  const bool near = p.w.row_bytes <= SHORT_ROW;
  for (int64_t g = 0; g < groups; g++) {
    typename D::Group group[NR];
    if (near) {
      for (int j = 0; j < NR; j++) __builtin_prefetch(codes[j] + ahead, 0, 2);
    }
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) {
      group[j] = D::group(codes[j], scales[j * groups + g], biases[j * groups + g], size);
    }
    for (int k = 0; k < size; k += W) {
      vec w[NR];
#pragma GCC unroll 8
      for (int j = 0; j < NR; j++) w[j] = D::decode(codes[j] + k * bits / 8, group[j], k);
      step<MR, NR>(acc, w, p.x + m, g * size + k);
    }
    for (int j = 0; j < NR; j++) codes[j] += group_bytes;
  }
  finish<MR, NR>(p, acc, m, n);
}

template <class D, int MR, int NR>
static void dense_tile(const Product& p, int64_t m, int64_t n) {
  vec acc[MR][NR];
  for (auto& row : acc)
    for (auto& a : row) a = zero();
  const uint8_t* data[NR];
  for (int j = 0; j < NR; j++) {
    int64_t column = n + j < p.N ? n + j : p.N - 1;
    data[j] = static_cast<const uint8_t*>(p.w.data) + (column - p.origin) * p.w.row_bytes;
  }
  int64_t k = 0;
  for (; k + W <= p.K; k += W) {
    vec w[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) w[j] = D::decode(data[j] + k * D::size);
    step<MR, NR>(acc, w, p.x + m, k);
  }
  if (k < p.K) {
    vec w[NR];
    for (int j = 0; j < NR; j++) w[j] = D::tail(data[j] + k * D::size, p.K - k);
    step<MR, NR>(acc, w, p.x + m, k);
  }
  finish<MR, NR>(p, acc, m, n);
}

// Scales and biases of `columns` columns from n on, as floats.
static void group_floats(const Product& p, int64_t n, int columns, float* scales, float* biases) {
  const int64_t groups = p.K / p.w.group;
  for (int j = 0; j < columns; j++) {
    int64_t column = n + j < p.N ? n + j : p.N - 1;
    widen(p.w.scales, p.w.scale_type, column * groups, groups, scales + j * groups);
    if (p.w.biases) {
      widen(p.w.biases, p.w.scale_type, column * groups, groups, biases + j * groups);
    } else {
      for (int64_t g = 0; g < groups; g++) biases[j * groups + g] = 0;
    }
  }
}

template <class D, int bits>
struct Packed {
  template <int MR>
  static void fused(const Product& p, int64_t first, int64_t last) {
    constexpr int NR = tile_columns(MR);
    const int64_t groups = p.K / p.w.group;
    float *scales = p.scratch, *biases = p.scratch + NR * groups;
    for (int64_t n = first; n < last; n += NR) {
      group_floats(p, n, NR, scales, biases);
      packed_tile<D, bits, MR, NR>(p, 0, n, scales, biases);
    }
  }

  static void decode_row(const Product& p, int64_t n, float* out) {
    const int size = p.w.group;
    const int64_t groups = p.K / size, group_bytes = int64_t(size) * bits / 8;
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    for (int64_t g = 0; g < groups; g++, codes += group_bytes) {
      float scale = element(p.w.scales, p.w.scale_type, n * groups + g);
      float bias = p.w.biases ? element(p.w.biases, p.w.scale_type, n * groups + g) : 0.0f;
      typename D::Group group = D::group(codes, scale, bias, size);
      for (int k = 0; k < size; k += W) store(out + g * size + k, D::decode(codes + k * bits / 8, group, k));
    }
  }
};

template <class D>
struct Plain {
  template <int MR>
  static void fused(const Product& p, int64_t first, int64_t last) {
    constexpr int NR = tile_columns(MR);
    for (int64_t n = first; n < last; n += NR) dense_tile<D, MR, NR>(p, 0, n);
  }

  static void decode_row(const Product& p, int64_t n, float* out) {
    const uint8_t* data = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    int64_t k = 0;
    for (; k + W <= p.K; k += W) store(out + k, D::decode(data + k * D::size));
    if (k < p.K) store(out + k, D::tail(data + k * D::size, p.K - k));
  }
};

static int64_t panel_columns(int64_t padded) {
  int64_t columns = PANEL / (padded ? padded : 1) / BLOCK_COLUMNS * BLOCK_COLUMNS;
  return columns < BLOCK_COLUMNS ? BLOCK_COLUMNS : columns > 256 ? 256 : columns;
}

// Many rows: decode a panel of columns once, then multiply every row with it.
template <class S>
static void blocked(const Product& p, int64_t first, int64_t last) {
  const int64_t step = panel_columns(p.padded);
  for (int64_t n = first; n < last; n += step) {
    int64_t columns = last - n < step ? last - n : step;
    for (int64_t j = 0; j < columns; j++) S::decode_row(p, n + j, p.scratch + j * p.padded);
    Product panel = p;
    panel.w = {Format::dense, Type::f32, 32, 0, Type::f32, p.scratch, nullptr, nullptr, p.padded * 4};
    panel.origin = n;
    panel.K = p.padded;
    panel.N = n + columns;
    int64_t m = 0;
    for (; m + BLOCK_ROWS <= p.rows; m += BLOCK_ROWS)
      for (int64_t j = n; j < n + columns; j += BLOCK_COLUMNS)
        dense_tile<Dense<Type::f32>, BLOCK_ROWS, BLOCK_COLUMNS>(panel, m, j);
    for (; m < p.rows; m++)
      for (int64_t j = n; j < n + columns; j += BLOCK_COLUMNS)
        dense_tile<Dense<Type::f32>, 1, BLOCK_COLUMNS>(panel, m, j);
  }
}

template <class S>
static void multiply(const Product& p, int64_t first, int64_t last) {
  switch (p.rows) {
    case 0: return;
    case 1: return S::template fused<1>(p, first, last);
    case 2: return S::template fused<2>(p, first, last);
    case 3: return S::template fused<3>(p, first, last);
    case 4: return S::template fused<4>(p, first, last);
    case 5: return S::template fused<5>(p, first, last);
    case 6: return S::template fused<6>(p, first, last);
    case 7: return S::template fused<7>(p, first, last);
    case 8: return S::template fused<8>(p, first, last);
    default: return blocked<S>(p, first, last);
  }
}

static void product(const Product& p, int64_t first, int64_t last) {
  if (p.w.format == Format::dense) {
    switch (p.w.type) {
      case Type::bf16: return multiply<Plain<Dense<Type::bf16>>>(p, first, last);
      case Type::f16: return multiply<Plain<Dense<Type::f16>>>(p, first, last);
      default: return multiply<Plain<Dense<Type::f32>>>(p, first, last);
    }
  }
  if (p.w.format == Format::fp4) return multiply<Packed<Fp4, 4>>(p, first, last);
  switch (p.w.bits) {
    case 2: return multiply<Packed<Affine<2>, 2>>(p, first, last);
    case 3: return multiply<Packed<Affine<3>, 3>>(p, first, last);
    case 4: return multiply<Packed<Affine<4>, 4>>(p, first, last);
    case 5: return multiply<Packed<Affine<5>, 5>>(p, first, last);
    case 6: return multiply<Packed<Affine<6>, 6>>(p, first, last);
    default: return multiply<Packed<Affine<8>, 8>>(p, first, last);
  }
}

static int64_t scratch_floats(const Product& p) {
  if (p.rows > FUSED_ROWS) return panel_columns(p.padded) * p.padded;
  return p.w.format == Format::dense ? 0 : 2 * tile_columns(int(p.rows)) * (p.K / p.w.group);
}

static int64_t columns(const Product& p) {
  return p.rows > FUSED_ROWS ? panel_columns(p.padded) : tile_columns(int(p.rows));
}

static bool swapped(const Weights& w) {
  if (w.format == Format::fp4) return Fp4::swapped;
  return w.format == Format::affine && w.bits == 4 && Affine<4>::swapped;
}

static bool direct(const Weights& w, Type type, int64_t K) {
  return type == Type::f32 && K % W == 0 && !swapped(w);
}

static void prepare(const Weights& w, const void* x, Type type, int64_t stride, int64_t K, int64_t padded, float* out) {
  if (stride == 1) {
    widen(x, type, 0, K, out);
  } else {
    for (int64_t k = 0; k < K; k++) out[k] = element(x, type, k * stride);
  }
  for (int64_t k = K; k < padded; k++) out[k] = 0;
  if (!swapped(w)) return;
  for (int64_t k = 0; k < K; k += 16) {  // lane 2i holds element i, lane 2i + 1 element 8 + i
    float block[16];
    memcpy(block, out + k, sizeof block);
    for (int i = 0; i < 8; i++) out[k + 2 * i] = block[i], out[k + 2 * i + 1] = block[8 + i];
  }
}
