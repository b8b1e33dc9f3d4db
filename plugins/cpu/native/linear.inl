// Linear layers over the lanes of one instruction set. Included inside the kernel file's namespace.
//
// Row invariance: y[m][n] is one chain per lane, lane l adding x[m][k] * w[n][k] for the k that `prepare` and the
// codes' order put into lane l, in the order of the vectors, with fused multiply-adds, then one fixed tree over the
// lanes, then the bias. Tiles only choose which (m, n) are computed together, how far a chain is followed before
// its lanes are put aside, and whether w comes from packed codes or from a decoded panel; none changes a chain.

constexpr int FUSED_ROWS = 8;             // up to here weights are decoded into registers, above into a panel
constexpr int BLOCK = 16;                 // columns whose chains are followed together
constexpr int64_t PAGE = 4096;            // bytes of the smallest pages
constexpr int64_t TOUCHED = 8 * PAGE;     // bytes of weights whose pages are touched together
constexpr int64_t NEAR = 4096;            // floats of activations that should stay in the first-level cache
constexpr int64_t PANEL = 48 * 1024;      // floats of a decoded panel: it should stay in the second-level cache
constexpr int PANEL_COLUMNS = 256;        // at most

// A pointer that the compiler keeps apart: it would count all of a loop from one and run out of registers for the rest.
template <class T>
static inline const T* held(const T* p) {
#if defined(__GNUC__)
  asm("" : "+r"(p));
#endif
  return p;
}

static inline int64_t held(int64_t n) {
#if defined(__GNUC__)
  asm("" : "+r"(n));
#endif
  return n;
}

template <Type type>
struct Dense {
  static constexpr int64_t bytes = type == Type::f32 ? 4 : 2;
  static inline vec decode(const uint8_t* p) {
    if constexpr (type == Type::f32) return load(reinterpret_cast<const float*>(p));
    if constexpr (type == Type::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (type == Type::f16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  }
  // The last elements of a row, zeros after them.
  static inline vec tail(const uint8_t* p, int64_t count) {
    alignas(64) uint8_t buffer[W * bytes] = {};
    memcpy(buffer, p, size_t(count * bytes));
    return decode(buffer);
  }
};

// Floats of every byte that stores one.
struct ByteFloats {
  float of[2][256];  // e8m0, e4m3
  ByteFloats() {
    for (int i = 0; i < 256; i++) of[0][i] = e8m0_to_float(uint8_t(i)), of[1][i] = e4m3_to_float(uint8_t(i));
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
  } else {
    static const ByteFloats floats;
    const float* of = floats.of[type == Type::e4m3];
    const uint8_t* p = static_cast<const uint8_t*>(data) + first;
    for (; i < count; i++) out[i] = of[p[i]];
  }
  for (; i < count; i++) out[i] = element(data, type, first + i);
}

static void narrow(const float* in, int64_t count, void* out, Type type, int64_t first) {
  int64_t i = 0;
  if (type == Type::bf16) {
    for (; i + W <= count; i += W) store_bf16(static_cast<uint16_t*>(out) + first + i, load(in + i));
  } else if (type == Type::f16) {
    for (; i + W <= count; i += W) store_f16(static_cast<uint16_t*>(out) + first + i, load(in + i));
  } else {
    for (; i + W <= count; i += W) store(static_cast<float*>(out) + first + i, load(in + i));
  }
  for (; i < count; i++) put(out, type, first + i, in[i]);
}

// The lanes of MR rows by BLOCK columns, which `sum_lanes` adds up for a row, stored.
template <int MR, class Sum>
static void finish(const Product& p, const vec (&acc)[MR][BLOCK], int64_t m, int64_t n, int64_t columns, Sum&& sum_lanes) {
  float bias[BLOCK] = {};
  if (p.bias) widen(p.bias, p.bias_type, n, columns, bias);
  for (int i = 0; i < MR; i++) {
    float out[BLOCK];
    sum_lanes(acc[i], out);
    if (p.bias) {
      for (int j = 0; j < BLOCK; j++) out[j] += bias[j];
    }
    for (int j = 0; j < BLOCK; j += W) store(out + j, with_one_nan(load(out + j)));
    if constexpr (W == BLOCK) {
      store_any(p.y[m + i], p.y_type, n, 1, columns, load(out));
    } else {
      narrow(out, columns, p.y[m + i], p.y_type, n);
    }
  }
}

// MR rows by NR columns of one vector each. Rows that are fewer than the columns stay in registers.
template <int MR, int NR, class Decode>
static inline void step(vec (&acc)[MR][NR], const float* const* x, int64_t k, Decode&& decode) {
  if constexpr (MR < NR) {
    vec v[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) v[i] = held(load(x[i] + k));
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) {
      vec w = decode(j);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) acc[i][j] = fma(v[i], w, acc[i][j]);
    }
  } else {
    vec w[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) w[j] = decode(j);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      vec v = held(load(x[i] + k));
#pragma GCC unroll 8
      for (int j = 0; j < NR; j++) acc[i][j] = fma(v, w[j], acc[i][j]);
    }
  }
}

// The chains of MR rows by NR columns from j on: they begin as zeros, and wait in `acc` between two parts of K.
template <int MR, int NR>
struct Chains {
  vec now[MR][NR];
  [[gnu::always_inline]] inline void take(const vec (&acc)[MR][BLOCK], int64_t j, bool begin) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) now[i][c] = zero();
    if (begin) return;
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) now[i][c] = acc[i][j + c];
  }
  // At their end they are folded: columns before j have been taken out of where that puts them.
  [[gnu::always_inline]] inline void put_back(vec (&acc)[MR][BLOCK], int64_t j, bool end) const {
    if (FOLDS && end) {
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) acc[i][j / NR] = fold<NR>(now[i]);
      return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) acc[i][j + c] = now[i][c];
  }
};

// Where to fetch from, after a block's first byte, while bytes `from` to `to` of column j and its neighbours are
// read: the next block, from end to end, which memory delivers faster than pieces of its columns.
static inline int64_t ahead(int64_t row_bytes, int64_t j, int64_t from, int64_t to) {
  return BLOCK * (row_bytes + from) + j * (to - from);
}

// Fetches what lies at `data` for columns j to j + count of a block that has `bytes` of it.
static inline void fetch(const void* data, int64_t bytes, int64_t j, int64_t count) {
  const char* p = static_cast<const char*>(data) + bytes * j / BLOCK;
  for (const char* end = p + bytes * count / BLOCK; p < end; p += 64) __builtin_prefetch(p, 0, 2);
}

// Fetches a line of every page from `from` on. Addresses that a core has not translated lately are looked up together
// then; in its turn each page would be waited for. (Always inline: without results, calls of it would be left out.)
[[gnu::always_inline]] static inline void touch_pages(const char* from, const char* end) {
  for (; from < end; from += PAGE) __builtin_prefetch(from, 0, 2);
}

static int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1; }

// Scales and biases of the groups of the block of columns from n on, and what is fetched for the block after it.
struct Scales {
  const float *scales, *biases;  // (BLOCK, K / group) floats; no biases: they are ignored
  const char *next_scales, *next_biases;
  int64_t bytes;  // of the next ones

  Scales(const Product& p, int64_t n, int64_t columns, float* scratch) {
    const int64_t groups = p.K / p.w.group, count = columns * groups, item = size_of(p.w.scale_type);
    bytes = BLOCK * groups * item;
    next_scales = static_cast<const char*>(p.w.scales) + n * groups * item + bytes;
    next_biases = p.w.biases ? static_cast<const char*>(p.w.biases) + n * groups * item + bytes : nullptr;
    if (p.w.scale_type == Type::f32) {
      scales = static_cast<const float*>(p.w.scales) + n * groups;
      biases = p.w.biases ? static_cast<const float*>(p.w.biases) + n * groups : scales;
      return;
    }
    widen(p.w.scales, p.w.scale_type, n * groups, count, scratch);
    if (p.w.biases) widen(p.w.biases, p.w.scale_type, n * groups, count, scratch + count);
    scales = scratch, biases = p.w.biases ? scratch + count : scratch;
  }
  inline void fetch_next(int64_t j, int64_t count) const {
    fetch(next_scales, bytes, j, count);
    if (next_biases) fetch(next_biases, bytes, j, count);
  }
};

// A block of packed columns. Past the last column the last one is computed again and never stored.
template <class D, int bits, int group_size>
struct PackedBlock {
  static constexpr int64_t near = NEAR;
  const Product& p;
  const uint8_t* codes;  // of the first column
  const Scales& groups;

  // Continues the chains of columns j to j + NR from k = `from` to `to`, both multiples of any group.
  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    const int size = group_size ? group_size : p.w.group;
    const int64_t per_column = p.K / size, group_bytes = int64_t(size) * bits / 8;
    if (from == 0) groups.fetch_next(j, NR);
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
    int64_t place[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) {
      const int64_t column = j + c < columns ? j + c : columns - 1;
      at[c] = codes + column * p.w.row_bytes + from * bits / 8;
      place[c] = column * per_column + from / size;
    }
    const float *scales = groups.scales, *biases = groups.biases;
    const uint8_t* next = codes + ahead(p.w.row_bytes, j, from * bits / 8, to * bits / 8);
    for (int64_t first = from; first < to; first += size, next += NR * group_bytes) {
      typename D::Group group[NR];
      for (int64_t byte = 0; byte < NR * group_bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        group[c] = D::group(at[c], scales[place[c]], biases[place[c]], size);
      }
      auto one = [&](int k) {
        step<MR, NR>(chains.now, x, first + k, [&](int c) { return D::decode(at[c] + k * bits / 8, group[c], k); });
      };
      if constexpr (group_size != 0) {
#pragma GCC unroll 8
        for (int k = 0; k < group_size; k += W) one(k);
      } else {
        for (int k = 0; k < size; k += W) one(k);
      }
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) at[c] = held(at[c] + group_bytes), place[c] = held(place[c] + 1);
    }
    chains.put_back(acc, j, to == p.K);
  }
};

// A block of columns of plain elements, `stride` bytes apart.
template <class D>
struct PlainBlock {
  static constexpr int64_t near = NEAR;
  const Product& p;
  const uint8_t* data;  // of the first column
  int64_t stride, K;
  bool fetch;

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) at[c] = data + (j + c < columns ? j + c : columns - 1) * stride;
    const uint8_t* next = data + ahead(stride, j, from * D::bytes, to * D::bytes);
    int64_t k = from;
    for (; k + W <= to; k += W, next += NR * W * D::bytes) {
      if (fetch) {
        for (int byte = 0; byte < NR * W * D::bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      }
      step<MR, NR>(chains.now, x, k, [&](int c) { return D::decode(at[c] + k * D::bytes); });
    }
    if (k < to) step<MR, NR>(chains.now, x, k, [&](int c) { return D::tail(at[c] + k * D::bytes, to - k); });
    chains.put_back(acc, j, to == K);
  }
};

// MR rows from m on by `columns` (at most BLOCK) from n on.
template <int MR, int NR, class Source>
static inline void follow_block(const Product& p, const Source& source, int64_t K, int64_t m, int64_t n, int64_t columns) {
  constexpr int64_t chunk = Source::near / MR / 256 * 256;  // in whole units, however long
  static_assert(chunk > 0 && BLOCK % NR == 0 && BLOCK % 4 == 0);
  vec acc[MR][BLOCK];
  if (columns < BLOCK || K <= 0) {
    for (auto& row : acc)
      for (auto& a : row) a = zero();
  }
  if constexpr (requires { Source::columns_begin; }) source.begin(acc, p.x + m, columns);
  for (int64_t from = 0; from < K; from += chunk) {
    const int64_t to = from + chunk < K ? from + chunk : K;
    for (int64_t j = 0; j < columns; j += NR) source.template follow<MR, NR>(acc, p.x + m, j, columns, from, to);
  }
  if constexpr (requires { Source::sum_lanes; }) {
    finish(p, acc, m, n, columns, Source::sum_lanes);
  } else {  // NR of them lie together as `fold` leaves them
    finish(p, acc, m, n, columns, sum_block<NR>);
  }
}

// Fetches what is read soon after the product: of the call's part of it, what falls to the block of columns from n on.
[[gnu::always_inline]] static inline void fetch_soon(const Product& p, int64_t first, int64_t last, int64_t n) {
  const int64_t upto = n + BLOCK < last ? n + BLOCK : last;
  const double each = (p.soon_to - p.soon_from) / double(last - first);
  for (const Soon* s = p.soon; s < p.soon + p.soon_count; s++) {
    const double bytes = double(s->bytes * s->count);
    int64_t at = int64_t(bytes * (p.soon_from + each * double(n - first))) & ~int64_t(63);
    const int64_t end = int64_t(bytes * (p.soon_from + each * double(upto - first)));
    while (at < end) {
      const int64_t stretch = at / s->bytes, left = (stretch + 1) * s->bytes, stop = left < end ? left : end;
      const char* data = s->data + stretch * (s->apart - s->bytes);
      for (; at < stop; at += 64) __builtin_prefetch(data + at, 0, 2);
    }
  }
}

// Touches the pages of some blocks of columns, with all that belongs to them, before they are read; n is the next block of
// a product's columns from `first` to `last`. Fetches what is read soon besides.
[[gnu::always_inline]] static inline void touch_ahead(const Product& p, int64_t first, int64_t last, int64_t n) {
  if (p.soon) fetch_soon(p, first, last, n);
  const int64_t block = BLOCK * p.w.row_bytes, some = TOUCHED / (block + 1) + 1;
  if ((n - first) / BLOCK % some) return;
  const int64_t upto = n + 2 * some * BLOCK < p.N ? n + 2 * some * BLOCK : p.N, from = n == first ? n : n + some * BLOCK;
  auto touch = [&](const void* data, int64_t bytes) __attribute__((always_inline)) {  // of a column
    if (data) touch_pages(static_cast<const char*>(data) + from * bytes, static_cast<const char*>(data) + upto * bytes);
  };
  touch(p.w.data, p.w.row_bytes);
  if (p.w.format == Format::dense) return;
  const int64_t bytes = p.K / p.w.group * size_of(p.w.scale_type);
  touch(p.w.scales, bytes), touch(p.w.biases, bytes);
}

// group_size is 0 where the code does not know it.
template <class D, int bits, int group_size = 0>
struct Packed {
  template <int MR>
  static void fused(const Product& p, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += BLOCK) {
      touch_ahead(p, first, last, n);
      const int64_t columns = last - n < BLOCK ? last - n : BLOCK;
      const Scales groups(p, n, columns, p.scratch);
      const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
      follow_block<MR, tile_columns(MR)>(p, PackedBlock<D, bits, group_size>{p, codes, groups}, p.K, 0, n, columns);
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
    for (int64_t n = first; n < last; n += BLOCK) {
      touch_ahead(p, first, last, n);
      const int64_t columns = last - n < BLOCK ? last - n : BLOCK;
      const uint8_t* data = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
      follow_block<MR, tile_columns(MR)>(p, PlainBlock<D>{p, data, p.w.row_bytes, p.K, true}, p.K, 0, n, columns);
    }
  }

  static void decode_row(const Product& p, int64_t n, float* out) {
    const uint8_t* data = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    int64_t k = 0;
    for (; k + W <= p.K; k += W) store(out + k, D::decode(data + k * D::bytes));
    if (k < p.K) store(out + k, D::tail(data + k * D::bytes, p.K - k));
  }
};

static int64_t panel_columns(int64_t padded) {
  int64_t columns = PANEL / (padded ? padded : 1) / BLOCK * BLOCK;
  return columns < BLOCK ? BLOCK : columns > PANEL_COLUMNS ? PANEL_COLUMNS : columns;
}

template <int MR>
static void panel_rows(const Product& p, int64_t m, int64_t n, int64_t columns) {
  for (int64_t j = 0; j < columns; j += BLOCK) {
    const uint8_t* data = reinterpret_cast<const uint8_t*>(p.scratch + j * p.padded);
    const int64_t some = columns - j < BLOCK ? columns - j : BLOCK;
    follow_block<MR, BLOCK_COLUMNS>(p, PlainBlock<Dense<Type::f32>>{p, data, p.padded * 4, p.padded, false}, p.padded, m, n + j, some);
  }
}

// Many rows: decode a panel of columns once, then multiply every row with it.
template <class S>
static void blocked(const Product& p, int64_t first, int64_t last) {
  const int64_t step = panel_columns(p.padded);
  for (int64_t n = first; n < last; n += step) {
    int64_t columns = last - n < step ? last - n : step;
    for (int64_t j = 0; j < columns; j++) S::decode_row(p, n + j, p.scratch + j * p.padded);
    int64_t m = 0;
    for (; m + BLOCK_ROWS <= p.rows; m += BLOCK_ROWS) panel_rows<BLOCK_ROWS>(p, m, n, columns);
    switch (p.rows - m) {
      case 1: panel_rows<1>(p, m, n, columns); break;
      case 2: panel_rows<2>(p, m, n, columns); break;
      case 3: panel_rows<3>(p, m, n, columns); break;
      case 4: panel_rows<4>(p, m, n, columns); break;
      case 5: panel_rows<5>(p, m, n, columns); break;
    }
  }
}

#ifdef SPEC_PAIRS
#include "pairs.inl"
#else
static bool pairs(const Weights&, Type) { return false; }
static bool prepare_pairs(const Weights&, const void*, int64_t, int64_t, float*) { return false; }
static void product_of_pairs(const Product&, int64_t, int64_t) {}
static int64_t pair_scratch(const Product&) { return 0; }
static int64_t lane_floats(const Weights&, int64_t, int64_t) { return 0; }
static void put_in_lanes(const Weights&, int64_t, int64_t, float*) {}
#endif

#include "bytes.inl"

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

// Sizes of groups known when compiled, where that is worth its code.
template <class D, int bits>
static void by_size(const Product& p, int64_t first, int64_t last) {
  if constexpr (UNROLLED) {
    if (p.w.group == 32) return multiply<Packed<D, bits, 32>>(p, first, last);
    if (p.w.group == 64) return multiply<Packed<D, bits, 64>>(p, first, last);
  }
  multiply<Packed<D, bits>>(p, first, last);
}

template <int bytes>
static void product(const Product& p, int64_t first, int64_t last) {
  if constexpr (bytes > 0) {
    if (p.compact && in_bytes(p.w)) return product_of_bytes<bytes>(p, first, last);
  }
  if (p.compact) return product_of_pairs(p, first, last);
  if (p.w.format == Format::dense) {
    switch (p.w.type) {
      case Type::bf16: return multiply<Plain<Dense<Type::bf16>>>(p, first, last);
      case Type::f16: return multiply<Plain<Dense<Type::f16>>>(p, first, last);
      default: return multiply<Plain<Dense<Type::f32>>>(p, first, last);
    }
  }
  if (p.w.format == Format::fp4) return by_size<Fp4, 4>(p, first, last);
  switch (p.w.bits) {
    case 2: return multiply<Packed<Affine<2>, 2>>(p, first, last);
    case 3: return multiply<Packed<Affine<3>, 3>>(p, first, last);
    case 4: return by_size<Affine<4>, 4>(p, first, last);
    case 5: return multiply<Packed<Affine<5>, 5>>(p, first, last);
    case 6: return multiply<Packed<Affine<6>, 6>>(p, first, last);
    default: return by_size<Affine<8>, 8>(p, first, last);
  }
}

template <int bytes>
static int64_t scratch_floats(const Product& p) {
  if (p.compact) return bytes && in_bytes(p.w) ? byte_floats(p) : pair_scratch(p);
  if (p.rows > FUSED_ROWS) return panel_columns(p.padded) * p.padded;
  return p.w.format == Format::dense ? 0 : 2 * BLOCK * (p.K / p.w.group);
}

static int64_t columns(const Product&) { return BLOCK; }

static bool swapped(const Weights& w) {
  if (w.format == Format::fp4) return Fp4::swapped;
  return w.format == Format::affine && w.bits == 4 && Affine<4>::swapped;
}

template <int bytes>
static bool compacts(const Weights& w, Type type) {
  return (bytes && in_bytes(w)) || pairs(w, type);
}

template <int bytes>
static bool compact(const Weights& w, const void* x, Type type, int64_t stride, int64_t K, float* out) {
  if constexpr (bytes > 0) {
    if (in_bytes(w)) return prepare_bytes<bytes>(w, x, type, stride, K, out);
  }
  return prepare_pairs(w, x, stride, K, out);
}

// Rows of floats are copied also where nothing else is done to them: as they lie, vectors begin anywhere in a line, and
// rows of 1024 elements drive each other out of the first-level cache.
template <int bytes>
static bool direct(const Weights& w, Type type, int64_t K) {
  if (bytes && in_bytes(w)) return false;
  return pairs(w, type) && w.format == Format::dense && K % (lane_floats(w, 1, K) ? 2 : 2 * W) == 0;
}

static void prepare(const Weights& w, const void* x, Type type, int64_t stride, int64_t K, int64_t padded, float* out) {
  if (stride == 1) {
    widen(x, type, 0, K, out);
  } else {
    for (int64_t k = 0; k < K; k++) out[k] = element(x, type, k * stride);
  }
  for (int64_t k = K; k < padded; k++) out[k] = 0;
  if (!swapped(w)) return;
  for (int64_t k = 0; k < K; k += W) store(out + k, swap_lanes(load(out + k)));
}
