/* A Unigram tokenizer: its pieces, what its normalizer does to characters, and the words it has encoded. */
#ifndef PENSTOCK_UNIGRAM_H
#define PENSTOCK_UNIGRAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* A word is kept if it is at most this long; longer ones seldom occur twice. */
enum { MAX_KEPT = 64 };

/* How a word begins: as it is written, after a space, or with a ▁ that the tokenizer prepends. */
typedef enum { LEAD_NONE, LEAD_SPACE, LEAD_PREPENDED } Lead;

/* What became of a word or text. */
typedef enum { FAILED = -1, ENCODED, BESIDE_SPACE, SURROUNDINGS, UNANSWERED } Outcome;

typedef struct Node { /* its children are nodes[first] to nodes[first + count - 1], sorted by label */
    uint32_t first;
    int32_t piece; /* -1: none ends here */
    uint16_t count;
    uint8_t label;
} Node;

typedef struct Trie {
    Node *nodes;
    size_t n, capacity;
} Trie;

/* Tokens, with the place in the text where each ends. */
typedef struct Tokens {
    uint32_t *ids, *ends;
    size_t n, capacity;
} Tokens;

typedef struct Best { /* the best path to a place in a word: its score, and its last piece */
    double score;
    uint32_t start, id;
} Best;

typedef struct Kept { /* of a word in `Words.data`; hash 0: unused */
    uint32_t hash, at;
} Kept;

typedef struct Words { /* those that were encoded before */
    Kept *slots;
    uint32_t count;
    uint8_t *data;
    size_t used, capacity;
} Words;

typedef struct Unigram {
    Trie pieces, added;
    uint32_t *ids;  /* of pieces, in the trie's order */
    double *scores; /* of pieces */
    uint32_t *added_ids;
    bool added_starts[256];
    int64_t byte_ids[256]; /* -1: the vocabulary has no such byte */
    double unk_score;
    uint32_t unk;
    int rules; /* UNIGRAM_… */
    uint32_t *characters; /* for each code point: flags, and where its replacement is in `replaced`; 0: not yet known */
    uint8_t *replaced;
    size_t replaced_used, replaced_capacity;
    PyObject *character, *word; /* they answer what is not known here */
    Words words;
    /* scratch space of one word */
    uint8_t *spelled;
    uint32_t *bounds; /* for each byte of `spelled`, the end of the character it was written for */
    size_t spelled_size, spelled_capacity;
    Best *best;
    size_t best_capacity;
    Tokens own;
} Unigram;

/* Makes room for `needed` elements; false without memory. */
bool make_room(void **at, size_t *capacity, size_t needed, size_t item);
bool build_trie(Trie *trie, const uint8_t *const *texts, const size_t *sizes, size_t n);
/* The child of a node, or 0. */
uint32_t trie_child(const Trie *trie, uint32_t node, uint8_t label);
bool add_token(Tokens *tokens, uint32_t id, uint32_t end);
/* The flags of a character and its replacement, asked from Python when it is first met; 0 if that failed. */
uint32_t character_entry(Unigram *u, uint32_t point);
/* Encode a word and append its tokens; `at` is its place in the text. `flags` are those of its characters, or-ed. */
Outcome encode_word(Unigram *u, Lead lead, const uint8_t *word, size_t size, uint32_t flags, uint32_t at, Tokens *out);
void forget_words(Words *words);

#endif
