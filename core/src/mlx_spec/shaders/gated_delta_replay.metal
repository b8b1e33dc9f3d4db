// Body of a kernel for mx.fast.metal_kernel: a state after the first keep[b] steps of a tape.
// Template: InT, Hk, Hv, Dk, Dv. Grid (Dk, Dv, B * Hv), one thread per element of a state.
//
// The two products and the sum of a step are rounded one by one (fp contract is off), as in the run itself.

uint column = thread_position_in_grid.x;
uint row = thread_position_in_grid.y;
uint place = thread_position_in_grid.z;  // batch row * Hv + value head
uint steps = k_shape[1];
uint head = place % Hv;
int kept = keep[place / Hv];

size_t cell = (size_t(place) * Dv + row) * Dk + column;
size_t key = (size_t(place / Hv) * steps * Hk + head / (Hv / Hk)) * Dk + column;
size_t gate = size_t(place / Hv) * steps * Hv + head;
float held = state[cell];
for (int t = 0; t < kept; ++t) {
  float decayed = held * g[gate];
  float product = static_cast<float>(k[key]) * delta[gate * Dv + row];
  held = decayed + product;
  key += Hk * Dk;
  gate += Hv;
}
after[cell] = held;
