// Body of a kernel for mx.fast.cuda_kernel: the gated delta rule over L steps, with what each step added.
// Template: InT, Hk, Hv, Dk (a multiple of 32), Dv. Grid (32, Dv, B * Hv), one warp per row of a state.
//
// A sum over a key is made of 32 sums of neighbours, one per lane, front to back, added in pairs at distance
// 1, 2, 4, 8, 16: an order that L has no part in. Products and sums are rounded one by one (__fmul_rn and
// __fadd_rn are never fused), so that the state is the one a replay reaches.

constexpr int N = Dk / 32;  // elements of the state's row that a lane holds
unsigned lane = threadIdx.x;
unsigned row = blockIdx.y * blockDim.y + threadIdx.y;
unsigned place = blockIdx.z;  // batch row * Hv + value head
unsigned steps = k_shape[1];
unsigned head = place % Hv;
if (row >= Dv) {
  return;  // a whole warp: rows are rounded up to blocks
}

size_t cell = (size_t(place) * Dv + row) * Dk + lane * N;
float held[N];
for (int i = 0; i < N; ++i) {
  held[i] = state[cell + i];
}

size_t key = (size_t(place / Hv) * steps * Hk + head / (Hv / Hk)) * Dk + lane * N;
size_t gate = size_t(place / Hv) * steps * Hv + head;
for (unsigned t = 0; t < steps; ++t) {
  float sum = 0.0f;
  for (int i = 0; i < N; ++i) {
    held[i] = __fmul_rn(held[i], g[gate]);
    sum = __fadd_rn(sum, __fmul_rn(held[i], static_cast<float>(k[key + i])));
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  float difference = __fsub_rn(static_cast<float>(v[gate * Dv + row]), sum);
  float added = __fmul_rn(difference, static_cast<float>(beta[gate]));

  float read = 0.0f;
  for (int i = 0; i < N; ++i) {
    held[i] = __fadd_rn(held[i], __fmul_rn(static_cast<float>(k[key + i]), added));
    read = __fadd_rn(read, __fmul_rn(held[i], static_cast<float>(q[key + i])));
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    read = __fadd_rn(read, __shfl_xor_sync(0xffffffffu, read, distance));
  }
  if (lane == 0) {
    y[gate * Dv + row] = static_cast<InT>(read);
    delta[gate * Dv + row] = added;
  }
  key += Hk * Dk;
  gate += Hv;
}

for (int i = 0; i < N; ++i) {
  after[cell + i] = held[i];
}
