// Copies whole blocks of one layer within the pool, in place.
//
// Inputs   k_pool   (blocks, H * BS * DK) of KT; written
//          v_pool   (blocks, H * BS * DV) of KT; written
//          pairs    (C, 2) int32, padded to 8 elements; source and target of each copy, no target
//                   named twice or as a source; negative: skip
//          token    the newest token
// Output   written  (8,) int32, zeros: the next token
// Grid     C * COPY_THREADS threads; threadgroups of COPY_THREADS, one for each pair
// Threadgroup memory: none. Work of a thread: 1 / COPY_THREADS of a block, 4 elements at a time.
// Constants: KT (type); K_BLOCK, V_BLOCK (elements of a block); COPY_THREADS.

const uint thread_index = thread_index_in_threadgroup;
const uint pair = threadgroup_position_in_grid.x;
if (pair == 0 && thread_index < 8) written[thread_index] = 0;
if (pair >= uint(pairs_shape[0])) return;
const long source = pairs[2 * pair];
const long target = pairs[2 * pair + 1];
if (source < 0 || target < 0) return;

{
  const device vec<KT, 4>* from =
      reinterpret_cast<const device vec<KT, 4>*>(k_pool + source * K_BLOCK);
  device vec<KT, 4>* to =
      reinterpret_cast<device vec<KT, 4>*>(const_cast<device KT*>(k_pool) + target * K_BLOCK);
  for (uint i = thread_index; i < K_BLOCK / 4; i += COPY_THREADS) to[i] = from[i];
}
{
  const device vec<KT, 4>* from =
      reinterpret_cast<const device vec<KT, 4>*>(v_pool + source * V_BLOCK);
  device vec<KT, 4>* to =
      reinterpret_cast<device vec<KT, 4>*>(const_cast<device KT*>(v_pool) + target * V_BLOCK);
  for (uint i = thread_index; i < V_BLOCK / 4; i += COPY_THREADS) to[i] = from[i];
}
