// Conversions between stored types and float. Included by every kernel file inside its own namespace.

static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

// To nearest, ties to even; NaN stays NaN.
static inline uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  if (f != f) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline float f16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | (mantissa << 13));
  if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  float small = float(mantissa) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(small));
}

// To nearest, ties to even; overflow gives infinity, NaN stays NaN.
static inline uint16_t float_to_f16(float f) {
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 1023));
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: let the float adder round at the right place
    float rounded = bits_to_float(magnitude) + 0.5f;
    return uint16_t(sign | (float_to_bits(rounded) - 0x3f000000));
  }
  uint32_t odd = (magnitude >> 13) & 1;
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

static inline float e4m3_to_float(uint8_t h) {
  int exponent = (h >> 3) & 15, mantissa = h & 7;
  float value;
  if (exponent == 15 && mantissa == 7) {
    value = bits_to_float(0x7fc00000);
  } else if (exponent == 0) {
    value = float(mantissa) * 0x1p-9f;
  } else {
    value = bits_to_float((uint32_t(exponent + 120) << 23) | (uint32_t(mantissa) << 20));
  }
  return h & 128 ? -value : value;
}

static inline float e8m0_to_float(uint8_t h) {
  if (h == 255) return bits_to_float(0x7fc00000);
  return h == 0 ? 0x1p-127f : bits_to_float(uint32_t(h) << 23);
}

static inline float element(const void* data, Type type, int64_t i) {
  switch (type) {
    case Type::f32: return static_cast<const float*>(data)[i];
    case Type::f16: return f16_to_float(static_cast<const uint16_t*>(data)[i]);
    case Type::bf16: return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    case Type::e4m3: return e4m3_to_float(static_cast<const uint8_t*>(data)[i]);
    case Type::e8m0: return e8m0_to_float(static_cast<const uint8_t*>(data)[i]);
  }
  return 0;
}

static inline void put(void* data, Type type, int64_t i, float value) {
  switch (type) {
    case Type::f16: static_cast<uint16_t*>(data)[i] = float_to_f16(value); break;
    case Type::bf16: static_cast<uint16_t*>(data)[i] = float_to_bf16(value); break;
    default: static_cast<float*>(data)[i] = value;
  }
}

// A float as the value it has after being stored as `type`.
static inline float rounded(float value, Type type) {
  if (type == Type::bf16) return bf16_to_float(float_to_bf16(value));
  if (type == Type::f16) return f16_to_float(float_to_f16(value));
  return value;
}
