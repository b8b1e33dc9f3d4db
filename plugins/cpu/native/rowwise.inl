// Operations on single elements. Included inside the kernel file's namespace.

template <Type type>
static inline void store_as(void* p, int64_t i, vec v) {
  if constexpr (type == Type::f32) store(static_cast<float*>(p) + i, v);
  if constexpr (type == Type::bf16) store_bf16(static_cast<uint16_t*>(p) + i, v);
  if constexpr (type == Type::f16) store_f16(static_cast<uint16_t*>(p) + i, v);
}

template <Rowwise op, Type type>
static inline vec combined(vec a, vec b) {
  if constexpr (op == Rowwise::add) return plus(a, b);
  if constexpr (op == Rowwise::multiply) return times(a, b);
  if constexpr (op == Rowwise::silu) return times(activated<type>(Act::silu, a), b);
  if constexpr (op == Rowwise::gelu) return times(activated<type>(Act::gelu_tanh, a), b);
}

template <Rowwise op, Type type>
static void rowwise_as(const void* a, const void* b, int64_t n, void* y) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store_as<type>(y, i, combined<op, type>(load_stored<type>(a, i), load_stored<type>(b, i)));
  if (i == n) return;
  float rest[W];
  store(rest, combined<op, type>(load_some<type>(a, i, n - i), load_some<type>(b, i, n - i)));
  for (int64_t j = 0; i + j < n; j++) put(y, type, i + j, rest[j]);
}

template <Rowwise op>
static void rowwise_typed(const void* a, const void* b, Type type, int64_t n, void* y) {
  switch (type) {
    case Type::bf16: return rowwise_as<op, Type::bf16>(a, b, n, y);
    case Type::f16: return rowwise_as<op, Type::f16>(a, b, n, y);
    default: return rowwise_as<op, Type::f32>(a, b, n, y);
  }
}

static void rowwise(Rowwise op, const void* a, const void* b, Type type, int64_t n, void* y) {
  switch (op) {
    case Rowwise::add: return rowwise_typed<Rowwise::add>(a, b, type, n, y);
    case Rowwise::multiply: return rowwise_typed<Rowwise::multiply>(a, b, type, n, y);
    case Rowwise::silu: return rowwise_typed<Rowwise::silu>(a, b, type, n, y);
    case Rowwise::gelu: return rowwise_typed<Rowwise::gelu>(a, b, type, n, y);
  }
}
