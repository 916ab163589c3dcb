// Attention over packed documents on a CPU: what both passes are given, and in which parts they take it.
//
// FlashAttention-2 (arXiv:2307.08691), sections 3.1 and 3.2, for pieces of documents. A thread takes one row of the
// batch and one key-value head at a time, with all query heads that share it: keys are prepared once for some of these.
//
// Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C channels, W channels in whole blocks.
#pragma once

#include <algorithm>
#include <cmath>

#include "blocks.h"

namespace {

constexpr int64_t QUERIES = 128;  // whose scores are in the cache at once
constexpr int64_t KEYS = 256;
constexpr int64_t HEADS = 4;      // query heads for which keys are prepared once
constexpr float HIDDEN = -INFINITY;  // what is added to the score of a key that a query does not see

// A tensor (B, Q or S, H or G, C): where it begins, and how many numbers apart neighbours are; channels are one.
struct Heads {
  void* start;
  int64_t of_row, of_token, of_head;
  template <class Number>
  Number* at(int64_t row, int64_t token, int64_t head) const {
    return static_cast<Number*>(start) + row * of_row + token * of_token + head * of_head;
  }
};

// Some rows of the batch, their queries and keys (from, to), and what is added to the scores: (B or 1, H or 1, Q, S).
struct Piece {
  int64_t rows[2], queries[2], keys[2];
  const float* mask;
  int64_t mask_of_row, mask_of_head, mask_of_query;
};

struct Attention {
  int64_t n_queries, n_keys, n_heads, n_kv_heads, n_channels, n_pieces;
  float scale;
  Heads q, k, v, out;
  float* lse;              // (B, H, Q)
  const float* sinks;      // (H,), or null
  const Piece* pieces;     // each query is in one
  Heads grad, dq, dk, dv;  // the backward pass's own

  int64_t width() const { return blocks_of(n_channels) * BLOCK; }
  float* lse_at(int64_t row, int64_t query, int64_t head) const {
    return lse + (row * n_heads + head) * n_queries + query;
  }
};

enum class Seen : uint8_t { NOTHING, ALL, SOME };

struct Range {
  int64_t first, end;
  int64_t size() const { return end - first; }
};

// Some queries and keys of a piece, in blocks, and which of these blocks are seen.
struct Patch {
  const Piece* piece;
  int64_t row, query, key, n_queries, n_keys;  // the batch's row; the first ones, and how many
  const float* mask;                           // of the head that is computed
  Seen seen[QUERIES / BLOCK][KEYS / BLOCK];
  bool sees_any;

  int64_t query_blocks() const { return blocks_of(n_queries); }
  int64_t key_blocks() const { return blocks_of(n_keys); }
  int64_t queries_in(int64_t i) const { return std::min(BLOCK, n_queries - i * BLOCK); }
  int64_t keys_in(int64_t j) const { return std::min(BLOCK, n_keys - j * BLOCK); }

  // What is added to a query's scores of a block of keys.
  const float* added(int64_t at, int64_t j) const { return mask + at * piece->mask_of_query + j * BLOCK; }

  void look(int64_t head) {
    mask = piece->mask + (row - piece->rows[0]) * piece->mask_of_row + head * piece->mask_of_head +
           (query - piece->queries[0]) * piece->mask_of_query + key - piece->keys[0];
    sees_any = false;
    for (int64_t i = 0; i < query_blocks(); i++)
      for (int64_t j = 0; j < key_blocks(); j++) {
        seen[i][j] = seen_of(i, j);
        sees_any |= seen[i][j] != Seen::NOTHING;
      }
  }

  Seen seen_of(int64_t i, int64_t j) const {
    const int64_t n = keys_in(j);
    int32_t n_seen = 0, n_changed = 0;  // of pairs
    for (int64_t q = 0; q < queries_in(i); q++) {
      const float* at = added(i * BLOCK + q, j);
#pragma omp simd reduction(+ : n_seen, n_changed)
      for (int64_t k = 0; k < n; k++) {
        n_seen += !(at[k] == HIDDEN);
        n_changed += !(at[k] == 0);
      }
    }
    return n_seen == 0 ? Seen::NOTHING : n_changed == 0 && n == BLOCK ? Seen::ALL : Seen::SOME;
  }

  // The blocks of keys from the first to the last that the queries of a block see; and the other way round.
  Range keys_of(int64_t i) const {
    Range range{0, key_blocks()};
    while (range.first < range.end && seen[i][range.first] == Seen::NOTHING) range.first++;
    while (range.first < range.end && seen[i][range.end - 1] == Seen::NOTHING) range.end--;
    return range;
  }
  Range queries_of(int64_t j) const {
    Range range{0, query_blocks()};
    while (range.first < range.end && seen[range.first][j] == Seen::NOTHING) range.first++;
    while (range.first < range.end && seen[range.end - 1][j] == Seen::NOTHING) range.end--;
    return range;
  }
};

// Calls ``compute(piece, first query, how many, first head, how many)`` for all queries of a row and a key-value head.
template <class Compute>
void each_group(const Attention& all, int64_t row, int64_t kv_head, Compute compute) {
  const int64_t n_shared = all.n_heads / all.n_kv_heads;
  for (const Piece* piece = all.pieces; piece < all.pieces + all.n_pieces; piece++) {
    if (row < piece->rows[0] || row >= piece->rows[1]) continue;
    for (int64_t query = piece->queries[0]; query < piece->queries[1]; query += QUERIES)
      for (int64_t head = 0; head < n_shared; head += HEADS)
        compute(*piece, query, std::min(QUERIES, piece->queries[1] - query), kv_head * n_shared + head,
                std::min(HEADS, n_shared - head));
  }
}

// Calls ``compute(patch, head)`` for all keys of a piece and some heads, where ``head`` is counted from the first of
// them, and ``prepare(patch)`` once for those keys before it.
template <class Prepare, class Compute, class End>
void each_patch(const Piece& piece, int64_t row, int64_t query, int64_t n_queries, int64_t head, int64_t n_heads,
                Prepare prepare, Compute compute, End end) {
  for (int64_t key = piece.keys[0]; key < piece.keys[1]; key += KEYS) {
    Patch patch{&piece, row, query, key, n_queries, std::min(KEYS, piece.keys[1] - key)};
    bool is_prepared = false;
    for (int64_t each = 0; each < n_heads; each++) {
      if (each == 0 || piece.mask_of_head != 0) patch.look(head + each);
      if (!patch.sees_any) continue;
      if (!is_prepared) prepare(patch);
      is_prepared = true;
      compute(patch, each);
    }
    if (is_prepared) end(patch);
  }
}

// Calls ``pass(all, row, key-value head, room)`` for n of the B * G key-value heads. 1: there is no memory.
template <class Pass>
int each_kv_head(const Attention& all, int64_t first, int64_t n, size_t bytes, Pass pass) {
  Room room(bytes);
  if (!room.is_there()) return 1;
  for (int64_t each = first; each < first + n; each++) pass(all, each / all.n_kv_heads, each % all.n_kv_heads, room);
  return 0;
}

}  // namespace
