// Lanes in which chains that end together are not folded but summed one by one. Included by vec_avx2.h, vec_neon.h and
// vec_plain.h.

constexpr bool FOLDS = false;
template <int NR>
static inline vec fold(const vec* v) {
  return v[0];
}
template <int NR>
static inline void sum_block(const vec* v, float* out) {
  for (int i = 0; i < 16; i += 4) sum4(v + i, out + i);
}
