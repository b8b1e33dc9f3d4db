/* What the kernels need of libraries: images are linked without any, but for the C library of the Linux one. */
#include <stddef.h>

const void* neon_kernels_of_image(int bytes) __asm__(PREFIX "_ZN4spec12neon_kernelsEi");
const void* neon_table(int bytes) { return neon_kernels_of_image(bytes); }

/* Guards of statics; one thread runs. */
int __cxa_guard_acquire(unsigned char* guard) { return !*guard; }
void __cxa_guard_release(unsigned char* guard) { *guard = 1; }

#ifdef __APPLE__
/* Sines and cosines are those of the Linux image, put here when both are loaded. */
float (*sinf_at)(float) = 0;
float (*cosf_at)(float) = 0;
float sinf(float x) { return sinf_at(x); }
float cosf(float x) { return cosf_at(x); }

void* memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile char*)to)[i] = ((const char*)from)[i];
  return to;
}
void* memset(void* to, int byte, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile char*)to)[i] = (char)byte;
  return to;
}
void bzero(void* to, size_t n) { memset(to, 0, n); }
void memset_pattern16(void* to, const void* pattern, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile char*)to)[i] = ((const char*)pattern)[i % 16];
}
#else
/* Somebody has to use them. */
extern float sinf(float), cosf(float);
void* const kept[] = {(void*)sinf, (void*)cosf};
#endif
