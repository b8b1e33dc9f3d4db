// Body of a kernel for mx.fast.metal_kernel: the gated delta rule over L steps, with what each step added.
// Template: InT, Hk, Hv, Dk (a multiple of 32), Dv. Grid (32, Dv, B * Hv), one simdgroup per row of a state.
//
// A sum over a key is made of 32 sums of neighbours, one per lane, front to back, added in pairs at distance
// 1, 2, 4, 8, 16: an order that L has no part in. Products and sums are rounded one by one (fp contract is off),
// so that the state is the one a replay reaches.

constexpr int N = Dk / 32;  // elements of the state's row that a lane holds
uint lane = thread_index_in_simdgroup;
uint row = thread_position_in_grid.y;
uint place = thread_position_in_grid.z;  // batch row * Hv + value head
uint steps = k_shape[1];
uint head = place % Hv;

size_t cell = (size_t(place) * Dv + row) * Dk + lane * N;
float held[N];
for (int i = 0; i < N; ++i) {
  held[i] = state[cell + i];
}

size_t key = (size_t(place / Hv) * steps * Hk + head / (Hv / Hk)) * Dk + lane * N;
size_t gate = size_t(place / Hv) * steps * Hv + head;
for (uint t = 0; t < steps; ++t) {
  float sum = 0.0f;
  for (int i = 0; i < N; ++i) {
    held[i] = held[i] * g[gate];
    float product = held[i] * static_cast<float>(k[key + i]);
    sum = sum + product;
  }
  for (ushort distance = 1; distance < 32; distance *= 2) {
    sum = sum + simd_shuffle_xor(sum, distance);
  }
  float difference = static_cast<float>(v[gate * Dv + row]) - sum;
  float added = difference * static_cast<float>(beta[gate]);

  float read = 0.0f;
  for (int i = 0; i < N; ++i) {
    float product = static_cast<float>(k[key + i]) * added;
    held[i] = held[i] + product;
    float seen = held[i] * static_cast<float>(q[key + i]);
    read = read + seen;
  }
  for (ushort distance = 1; distance < 32; distance *= 2) {
    read = read + simd_shuffle_xor(read, distance);
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
