/* Encodes words with a Unigram model, as tokenizers' `encode_optimized` does: the best path through all pieces, scores
 * added as doubles from left to right, the first of equal paths.
 *
 * A word is the text between two spaces (or a section, if the tokenizer does not split at spaces). Its normalization is
 * the concatenation of its characters' replacements; words in which characters affect each other are asked from Python.
 * Encoded words are kept until `MAX_WORDS` or `MAX_DATA` is reached, and then all forgotten. */

#include "constants.h"
#include "unigram.h"
#include "values.h"

enum { SLOTS = 1 << 19, MAX_WORDS = SLOTS / 8 * 5, MAX_DATA = 12 << 20, MAX_PROBES = 32, SMALL = 8 };
enum { HEADER = 3, BAR = 3 }; /* bytes before a kept word: lead, size, number of tokens; bytes of a ▁ */

bool make_room(void **at, size_t *capacity, size_t needed, size_t item) {
    if (needed <= *capacity) return true;
    const size_t wanted = needed < 64 ? 64 : needed + needed / 2;
    if (wanted < needed || wanted > PY_SSIZE_T_MAX / item) return false;
    void *grown = PyMem_Realloc(*at, wanted * item);
    if (!grown) return false;
    *at = grown;
    *capacity = wanted;
    return true;
}

/* ---- trie */

typedef struct Range { /* the texts below a node, which share their first `depth` bytes */
    size_t low, high, depth;
} Range;

/* Texts must be sorted and distinct. */
bool build_trie(Trie *trie, const uint8_t *const *texts, const size_t *sizes, size_t n) {
    Range *ranges = NULL;
    size_t capacity = 0;
    bool fits = make_room((void **)&trie->nodes, &trie->capacity, 1, sizeof *trie->nodes) &&
                make_room((void **)&ranges, &capacity, 1, sizeof *ranges);
    if (fits) {
        trie->nodes[0] = (Node){0, -1, 0, 0};
        ranges[0] = (Range){0, n, 0};
        trie->n = 1;
    }
    for (size_t k = 0; fits && k < trie->n; k++) {
        Range r = ranges[k];
        if (r.low < r.high && sizes[r.low] == r.depth) trie->nodes[k].piece = (int32_t)r.low++;
        trie->nodes[k].first = (uint32_t)trie->n;
        while (fits && r.low < r.high) {
            const uint8_t label = texts[r.low][r.depth];
            const size_t low = r.low;
            while (r.low < r.high && texts[r.low][r.depth] == label) r.low++;
            fits = trie->n < INT32_MAX &&
                   make_room((void **)&trie->nodes, &trie->capacity, trie->n + 1, sizeof *trie->nodes) &&
                   make_room((void **)&ranges, &capacity, trie->n + 1, sizeof *ranges);
            if (!fits) break;
            trie->nodes[trie->n] = (Node){0, -1, 0, label};
            ranges[trie->n++] = (Range){low, r.low, r.depth + 1};
            trie->nodes[k].count++;
        }
    }
    PyMem_Free(ranges);
    return fits;
}

uint32_t trie_child(const Trie *trie, uint32_t node, uint8_t label) {
    uint32_t low = trie->nodes[node].first, n = trie->nodes[node].count;
    while (n > SMALL) {
        const uint32_t half = n / 2;
        if (trie->nodes[low + half].label <= label) {
            low += half;
            n -= half;
        } else {
            n = half;
        }
    }
    for (; n; n--, low++)
        if (trie->nodes[low].label == label) return low;
    return 0;
}

/* ---- characters */

/* Python answers with flags and the character's replacement. */
static bool learn_character(Unigram *u, uint32_t point) {
    PyObject *answer = PyObject_CallFunction(u->character, "I", point);
    int flags = 0;
    const char *replacement;
    Py_ssize_t size;
    bool learnt = answer && PyTuple_Check(answer) && PyArg_ParseTuple(answer, "iy#", &flags, &replacement, &size);
    if (learnt && (size > 255 || flags < 0 || flags > 255)) {
        PyErr_SetString(PyExc_ValueError, "flags below 256, and a replacement of at most 255 bytes");
        learnt = false;
    }
    if (learnt && (u->replaced_used >= 1 << 24 || !make_room((void **)&u->replaced, &u->replaced_capacity,
                                                             u->replaced_used + 1 + (size_t)size, 1))) {
        PyErr_NoMemory();
        learnt = false;
    }
    if (learnt) {
        u->characters[point] = (uint32_t)(flags | CHARACTER_KNOWN) | (uint32_t)u->replaced_used << 8;
        u->replaced[u->replaced_used] = (uint8_t)size;
        memcpy(u->replaced + u->replaced_used + 1, replacement, (size_t)size);
        u->replaced_used += 1 + (size_t)size;
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "flags and the replacement of a character");
    }
    Py_XDECREF(answer);
    return learnt;
}

uint32_t character_entry(Unigram *u, uint32_t point) {
    if (!u->characters[point] && !learn_character(u, point)) return 0;
    return u->characters[point];
}

/* ---- one word */

static bool is_bar(const uint8_t *p, size_t size) { return size >= BAR && p[0] == 0xE2 && p[1] == 0x96 && p[2] == 0x81; }

static bool spell(Unigram *u, const uint8_t *bytes, size_t size, uint32_t end) {
    if (u->spelled_size + size > INT32_MAX) return false;
    if (u->spelled_size + size > u->spelled_capacity) {
        size_t capacity = u->spelled_capacity;
        if (!make_room((void **)&u->bounds, &capacity, u->spelled_size + size, sizeof *u->bounds)) return false;
        if (!make_room((void **)&u->spelled, &u->spelled_capacity, u->spelled_size + size, 1)) return false;
    }
    memcpy(u->spelled + u->spelled_size, bytes, size);
    for (size_t k = 0; k < size; k++) u->bounds[u->spelled_size + k] = end;
    u->spelled_size += size;
    return true;
}

/* Write the normalized word to `spelled`. A ▁ of its own ends with the first character, as in the reference's offsets;
   one for a space has ended where the word begins. */
static bool spell_word(Unigram *u, Lead lead, const uint8_t *word, size_t size) {
    static const uint8_t bar[BAR] = {0xE2, 0x96, 0x81};
    u->spelled_size = 0;
    if (lead == LEAD_SPACE && !spell(u, bar, BAR, 0)) return false;
    for (size_t at = 0; at < size;) {
        int width;
        const uint32_t entry = character_entry(u, decode((const char *)word + at, &width));
        const uint8_t *replacement = u->replaced + (entry >> 8);
        if (at == 0 && lead == LEAD_PREPENDED &&
            (u->rules & UNIGRAM_PREPENDS_ALWAYS || !is_bar(replacement + 1, replacement[0])) &&
            !spell(u, bar, BAR, (uint32_t)width))
            return false;
        at += (size_t)width;
        if (!spell(u, replacement + 1, replacement[0], (uint32_t)at)) return false;
    }
    return true;
}

static bool make_room_for(Tokens *tokens, size_t more) {
    if (tokens->capacity - tokens->n >= more) return true;
    size_t capacity = tokens->capacity;
    return make_room((void **)&tokens->ends, &capacity, tokens->n + more, sizeof *tokens->ends) &&
           make_room((void **)&tokens->ids, &tokens->capacity, tokens->n + more, sizeof *tokens->ids);
}

bool add_token(Tokens *tokens, uint32_t id, uint32_t end) {
    if (!make_room_for(tokens, 1)) return false;
    tokens->ids[tokens->n] = id;
    tokens->ends[tokens->n++] = end;
    return true;
}

/* Append the tokens of a run without pieces, last one first: its own piece if it has one after all, or its bytes. */
static bool add_unknown(Unigram *u, const uint8_t *run, size_t size, uint32_t end) {
    uint32_t node = 0;
    size_t k = 0;
    while (k < size && (node = trie_child(&u->pieces, node, run[k]))) k++;
    if (k == size && u->pieces.nodes[node].piece >= 0)
        return add_token(&u->own, u->ids[u->pieces.nodes[node].piece], end);
    for (k = 0; k < size && u->byte_ids[run[k]] >= 0; k++) {}
    if (k < size) return add_token(&u->own, u->unk, end);
    while (k)
        if (!add_token(&u->own, (uint32_t)u->byte_ids[run[--k]], end)) return false;
    return true;
}

static void improve(Best *best, double score, uint32_t start, uint32_t id) {
    if (best->start == UINT32_MAX || score > best->score) *best = (Best){score, start, id};
}

/* Append the tokens of the best path through one part of `spelled`. */
static bool add_best_path(Unigram *u, size_t from, size_t to) {
    const uint8_t *text = u->spelled + from;
    const uint32_t size = (uint32_t)(to - from), *bounds = u->bounds + from;
    if (!make_room((void **)&u->best, &u->best_capacity, (size_t)size + 1, sizeof *u->best)) return false;
    Best *best = u->best;
    best[0].score = 0;
    for (uint32_t k = 0; k <= size; k++) best[k].start = UINT32_MAX;
    int width;
    for (uint32_t at = 0; at < size; at += (uint32_t)width) {
        const double score = best[at].start == UINT32_MAX ? 0 : best[at].score;
        bool single = false;
        decode((const char *)text + at, &width);
        for (uint32_t end = at, node = 0; end < size && (node = trie_child(&u->pieces, node, text[end]));) {
            const int32_t piece = u->pieces.nodes[node].piece;
            end++;
            if (piece < 0) continue;
            improve(&best[end], u->scores[piece] + score, at, u->ids[piece]);
            single |= end - at == (uint32_t)width;
        }
        if (!single) improve(&best[at + (uint32_t)width], u->unk_score + score, at, u->unk);
    }
    const size_t first = u->own.n;
    for (uint32_t end = size, start; end; end = start) {
        start = best[end].start;
        if (best[end].id != u->unk) {
            if (!add_token(&u->own, best[end].id, bounds[end - 1])) return false;
            continue;
        }
        while (start && best[start].id == u->unk) start = best[start].start; /* unknown characters are one token */
        if (!add_unknown(u, text + start, end - start, bounds[end - 1])) return false;
    }
    for (size_t low = first, high = u->own.n; low + 1 < high; low++, high--) {
        const uint32_t id = u->own.ids[low], end = u->own.ends[low];
        u->own.ids[low] = u->own.ids[high - 1], u->own.ends[low] = u->own.ends[high - 1];
        u->own.ids[high - 1] = id, u->own.ends[high - 1] = end;
    }
    return true;
}

/* Encode a word of characters that don't affect each other. */
static Outcome compute(Unigram *u, Lead lead, const uint8_t *word, size_t size) {
    u->own.n = 0;
    bool done = spell_word(u, lead, word, size);
    size_t start = 0;
    for (size_t k = 1; done && u->rules & UNIGRAM_SPLITS && k < u->spelled_size; k++)
        if (is_bar(u->spelled + k, u->spelled_size - k)) {
            done = add_best_path(u, start, k);
            start = k;
        }
    if (done && start < u->spelled_size) done = add_best_path(u, start, u->spelled_size);
    if (!done) PyErr_NoMemory();
    return done ? ENCODED : FAILED;
}

/* Ask Python, which answers with ids and ends, or None. */
static Outcome ask(Unigram *u, Lead lead, const uint8_t *word, size_t size) {
    u->own.n = 0;
    PyObject *answer = PyObject_CallFunction(u->word, "iy#", (int)lead, word, (Py_ssize_t)size);
    if (!answer) return FAILED;
    if (answer == Py_None) {
        Py_DECREF(answer);
        return UNANSWERED;
    }
    Py_buffer ids, ends;
    if (!PyTuple_Check(answer) || !PyArg_ParseTuple(answer, "y*y*", &ids, &ends)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "ids and ends, or None");
        Py_DECREF(answer);
        return FAILED;
    }
    const size_t n = (size_t)ids.len / sizeof(uint32_t);
    Outcome outcome = ENCODED;
    if (ids.len != ends.len || ids.len % (Py_ssize_t)sizeof(uint32_t)) {
        PyErr_SetString(PyExc_ValueError, "as many ids as ends");
        outcome = FAILED;
    }
    for (size_t k = 0; outcome == ENCODED && k < n; k++) {
        uint32_t id, end;
        memcpy(&id, (const char *)ids.buf + k * sizeof id, sizeof id);
        memcpy(&end, (const char *)ends.buf + k * sizeof end, sizeof end);
        if (end <= size && add_token(&u->own, id, end)) continue;
        if (end > size) PyErr_SetString(PyExc_ValueError, "ends within the word");
        else PyErr_NoMemory();
        outcome = FAILED;
    }
    PyBuffer_Release(&ids);
    PyBuffer_Release(&ends);
    Py_DECREF(answer);
    return outcome;
}

/* ---- words encoded before */

static uint32_t word_hash(Lead lead, const uint8_t *word, size_t size) {
    uint64_t hash = 0x9E3779B97F4A7C15u ^ size << 8 ^ (uint64_t)lead, part;
    for (; size >= 8; word += 8, size -= 8) {
        memcpy(&part, word, 8);
        hash = (hash ^ part) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    part = 0;
    memcpy(&part, word, size);
    hash = (hash ^ part) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93u;
    return (uint32_t)(hash >> 32) | 1;
}

void forget_words(Words *words) {
    PyMem_Free(words->slots);
    PyMem_Free(words->data);
    *words = (Words){0};
}

/* The word's slot, or the free one where it belongs; NULL if neither is near. */
static Kept *slot_of(const Words *words, uint32_t hash, Lead lead, const uint8_t *word, size_t size) {
    for (uint32_t k = 0; k < MAX_PROBES; k++) {
        Kept *slot = &words->slots[(hash / 2 + k) % SLOTS];
        if (!slot->hash) return slot;
        const uint8_t *kept = words->data + slot->at;
        if (slot->hash == hash && kept[0] == lead && kept[1] == size && !memcmp(kept + HEADER, word, size)) return slot;
    }
    return NULL;
}

static bool add_kept(const uint8_t *kept, uint32_t at, Tokens *out) {
    const size_t n = kept[2];
    const uint8_t *ids = kept + HEADER + kept[1], *ends = ids + n * sizeof(uint32_t);
    if (!make_room_for(out, n)) return false;
    memcpy(out->ids + out->n, ids, n * sizeof(uint32_t));
    for (size_t k = 0; k < n; k++) out->ends[out->n + k] = at + ends[k];
    out->n += n;
    return true;
}

/* Keep the word in `own`, if there is memory for it. */
static void keep(Unigram *u, uint32_t hash, Lead lead, const uint8_t *word, size_t size) {
    Words *words = &u->words;
    const size_t n = u->own.n, needed = HEADER + size + n * (sizeof(uint32_t) + 1);
    if (n > UINT8_MAX) return;
    if (words->count >= MAX_WORDS || words->used + needed > MAX_DATA) forget_words(words);
    if (!words->slots) words->slots = PyMem_Calloc(SLOTS, sizeof *words->slots);
    if (!words->slots || !make_room((void **)&words->data, &words->capacity, words->used + needed, 1)) return;
    Kept *slot = slot_of(words, hash, lead, word, size);
    if (!slot) return;
    *slot = (Kept){hash, (uint32_t)words->used};
    uint8_t *kept = words->data + words->used;
    kept[0] = (uint8_t)lead, kept[1] = (uint8_t)size, kept[2] = (uint8_t)n;
    memcpy(kept + HEADER, word, size);
    memcpy(kept + HEADER + size, u->own.ids, n * sizeof(uint32_t));
    for (size_t k = 0; k < n; k++) kept[HEADER + size + n * sizeof(uint32_t) + k] = (uint8_t)u->own.ends[k];
    words->used += needed;
    words->count++;
}

Outcome encode_word(Unigram *u, Lead lead, const uint8_t *word, size_t size, uint32_t flags, uint32_t at, Tokens *out) {
    const uint32_t hash = size <= MAX_KEPT ? word_hash(lead, word, size) : 0;
    if (hash && u->words.slots) {
        const Kept *slot = slot_of(&u->words, hash, lead, word, size);
        if (slot && slot->hash) {
            if (add_kept(u->words.data + slot->at, at, out)) return ENCODED;
            PyErr_NoMemory();
            return FAILED;
        }
    }
    const Outcome outcome =
        flags & CHARACTER_INTERACTS ? ask(u, lead, word, size) : compute(u, lead, word, size);
    if (outcome != ENCODED) return outcome;
    if (hash) keep(u, hash, lead, word, size);
    for (size_t k = 0; k < u->own.n; k++)
        if (!add_token(out, u->own.ids[k], at + u->own.ends[k])) {
            PyErr_NoMemory();
            return FAILED;
        }
    return ENCODED;
}
