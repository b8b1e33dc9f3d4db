// Body of a kernel for mx.fast.cuda_kernel: a state after the first keep[b] steps of a tape.
// Template: InT, Hk, Hv, Dk, Dv. Grid (Dk, Dv, B * Hv), one thread per element of a state.
//
// The two products and the sum of a step are rounded one by one, as in the run itself.

unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
unsigned row = blockIdx.y * blockDim.y + threadIdx.y;
unsigned place = blockIdx.z;  // batch row * Hv + value head
if (column >= Dk || row >= Dv) {
  return;
}
unsigned steps = k_shape[1];
unsigned head = place % Hv;
int kept = keep[place / Hv];

size_t cell = (size_t(place) * Dv + row) * Dk + column;
size_t key = (size_t(place / Hv) * steps * Hk + head / (Hv / Hk)) * Dk + column;
size_t gate = size_t(place / Hv) * steps * Hv + head;
float held = state[cell];
for (int t = 0; t < kept; ++t) {
  float product = __fmul_rn(static_cast<float>(k[key]), delta[gate * Dv + row]);
  held = __fadd_rn(__fmul_rn(held, g[gate]), product);
  key += Hk * Dk;
  gate += Hv;
}
after[cell] = held;
