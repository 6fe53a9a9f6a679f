/* Counts the tokens of each segment: aligns tokens with the text, then compares token ends with segment ends. */

#include "constants.h"
#include "native.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { CROSSED = 1 };

typedef struct {
    const uint8_t *bytes, *kinds;
    const uint8_t *foreign; /* for each ASCII character, whether it has no piece of its own */
    const uint32_t *starts;
    size_t count; /* number of tokens */
    int rule;
} Pieces;

static bool is_bar(const uint8_t *at, const uint8_t *end) { /* the character ▁ */
    return end - at >= 3 && at[0] == 0xE2 && at[1] == 0x96 && at[2] == 0x81;
}

static int width(uint8_t first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

static bool is_space(uint8_t c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/* The position after a piece in the text, or NULL if it does not match. ▁ matches a space or itself. */
static const uint8_t *after_piece(const uint8_t *piece, const uint8_t *piece_end, const uint8_t *at,
                                  const uint8_t *end) {
    while (piece < piece_end) {
        if (at == end) return NULL;
        if (*piece == *at) {
            piece++, at++;
        } else if (*at == ' ' && is_bar(piece, piece_end)) {
            piece += 3, at++;
        } else {
            return NULL;
        }
    }
    return at;
}

/* Whether the tokenizer prepended the first ▁ of a section's first piece. */
static bool is_prepended(int rule, bool first, const uint8_t *at, const uint8_t *end) {
    if (rule & RULE_PREPENDS) return true;
    if (!(rule & RULE_PREPENDS_UNLESS_SPACE) || ((rule & RULE_ONLY_FIRST) && !first)) return false;
    return at < end && *at != ' ' && !is_bar(at, end);
}

/* The position after a literal piece in the text, or NULL if it does not match. */
static const uint8_t *after_literal(const Pieces *p, uint32_t id, const uint8_t *at, const uint8_t *end) {
    const size_t length = p->starts[id + 1] - p->starts[id];
    if ((size_t)(end - at) < length || memcmp(p->bytes + p->starts[id], at, length)) return NULL;
    return at + length;
}

/* The position after the characters that the unknown token stands for: all without a piece, up to an added token. */
static const uint8_t *after_unknown(const Pieces *p, const uint32_t *ids, bool last, const uint8_t *at,
                                    const uint8_t *end) {
    const uint8_t *start = at;
    while (at < end && *at < 0x80 && p->foreign[*at]) {
        if (!last && ids[1] < p->count && p->kinds[ids[1]] == TOKEN_ADDED && after_literal(p, ids[1], at, end)) break;
        at++;
    }
    return at == start ? NULL : at;
}

/* Aligns tokens with their text; false if they don't account for all of it. A token that is only a prepended ▁ ends
   with the following character, as in the reference's offsets, so it belongs to that character's segment. */
static bool lay(const Pieces *p, const uint8_t *text, size_t size, const uint32_t *ids, int64_t n, int64_t *ends) {
    const uint8_t *at = text, *end = text + size;
    int64_t reached = 0;
    bool starts = true;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= p->count) return false;
        const uint8_t *piece = p->bytes + p->starts[ids[i]], *piece_end = p->bytes + p->starts[ids[i] + 1];
        const int kind = p->kinds[ids[i]];
        if (kind == TOKEN_UNKNOWN) return false;
        if (kind == TOKEN_PIECE) {
            const uint8_t *before = at;
            bool prepended = false;
            if (p->rule & RULE_DROPS_SPACE) {
                if (is_bar(piece, piece_end)) {
                    while (at < end && is_space(*at)) at++;
                    if (!starts && at == before) return false;
                    prepended = true;
                }
            } else if (starts) {
                prepended = is_prepended(p->rule, at == text, at, end);
            }
            if (prepended) {
                if (!is_bar(piece, piece_end)) return false;
                piece += 3;
                if (piece == piece_end) {
                    if (at == end) return false;
                    reached = at - text + width(*at);
                    ends[i] = reached;
                    starts = false;
                    continue;
                }
            }
        }
        if (kind >= TOKEN_ADDED && p->rule & RULE_DROPS_SPACE)
            while (at < end && is_space(*at)) at++;
        const bool is_piece = kind == TOKEN_PIECE || kind == TOKEN_ADDED_OR_PIECE;
        const uint8_t *next = is_piece ? after_piece(piece, piece_end, at, end) : after_literal(p, ids[i], at, end);
        starts = kind >= TOKEN_ADDED;
        if (!next && kind == TOKEN_UNK) {
            next = after_unknown(p, ids + i, i + 1 == n, at, end);
            starts = false;
        }
        if (!next) return false;
        at = next;
        if (at - text > reached) reached = at - text;
        ends[i] = reached;
    }
    if (p->rule & RULE_DROPS_SPACE)
        while (at < end && is_space(*at)) at++;
    return at == end;
}

/* The segments of one row: where they end, to which of them a token belongs that crosses an end, and what is found. */
typedef struct {
    const int64_t *cuts;
    const uint8_t *crossing;
    int64_t size; /* number of segments */
    int64_t *counts;
    uint8_t *crossed;
} Row;

/* Counts the tokens up to the end of segment s, `k` of which end there or before; the next one is text[start:end]. */
static void count_segment(const Row *row, int64_t s, int64_t k, int64_t start, int64_t end) {
    const int64_t cut = row->cuts[s];
    const bool crosses = start < cut && cut < end;
    row->crossed[s] = crosses ? CROSSED | (row->crossing[s] & CROSSING_ON_SPAN) : 0;
    if (crosses) {
        const int rule = row->crossing[s] & ~CROSSING_ON_SPAN;
        k += rule == CROSSING_OWN || (rule == CROSSING_NEXT && s + 1 < row->size && end <= row->cuts[s + 1]);
    }
    const int64_t last = s ? row->counts[s - 1] : 0;
    row->counts[s] = k > last ? k : last;
}

/* All tokens belong to some segment, so the last one has what is left. */
static void close_row(const Row *row, int64_t n) {
    if (!row->size) return;
    row->counts[row->size - 1] = n;
    row->crossed[row->size - 1] = 0;
}

static void count_row(const Row *row, const int64_t *ends, int64_t n) {
    for (int64_t s = 0, k = 0; s < row->size; s++) {
        while (k < n && ends[k] <= row->cuts[s]) k++;
        const int64_t start = k ? ends[k - 1] : 0;
        count_segment(row, s, k, start, k < n ? ends[k] : start);
    }
    close_row(row, n);
}

/* Both in one pass by the tokens' lengths alone, of one or two bytes each; false where they don't add up to the size. */
static bool count_row_by_lengths(const Row *row, const Py_buffer *lengths, size_t size, const uint32_t *ids, int64_t n) {
    const size_t count = (size_t)(lengths->len / lengths->itemsize);
    const uint8_t *narrow = lengths->itemsize == 1 ? lengths->buf : NULL;
    const uint16_t *wide = lengths->buf;
    int64_t k = 0, at = 0;
    for (int64_t s = 0; s <= row->size; s++) { /* beyond the last segment, what is left */
        const int64_t cut = s < row->size ? row->cuts[s] : INT64_MAX;
        int64_t next = at;
        for (; k < n; k++, at = next) {
            if (ids[k] >= count) return false;
            next = at + (narrow ? narrow[ids[k]] : wide[ids[k]]);
            if (next > cut) break;
        }
        if (s < row->size) count_segment(row, s, k, at, next);
    }
    close_row(row, n);
    return (size_t)at == size;
}

/* The same by ends that are known; false where one is beyond the text. */
static bool count_row_by_ends(const Row *row, const uint32_t *known, size_t size, int64_t n, int64_t *ends) {
    int64_t reached = 0;
    for (int64_t i = 0; i < n; i++) {
        if (known[i] > size) return false;
        ends[i] = reached = known[i] > reached ? known[i] : reached;
    }
    count_row(row, ends, n);
    return true;
}

static bool fits(const Py_buffer *b, int itemsize) { return b->itemsize == itemsize && b->len % itemsize == 0; }

typedef struct {
    Py_buffer ids, offsets, lengths, bytes, starts, kinds, foreign, segments, cuts, crossing, counts, crossed;
} Arrays;

static bool is_sound(const Arrays *a, PyObject *texts, int rule) {
    const Py_ssize_t rows = PyList_Size(texts);
    if (!fits(&a->ids, 4) || !fits(&a->offsets, 8) || !fits(&a->segments, 8) || !fits(&a->cuts, 8) ||
        !fits(&a->crossing, 1) || !fits(&a->crossed, 1) || !fits(&a->counts, 8) || !fits(&a->starts, 4) || !fits(&a->kinds, 1))
        return false;
    if (a->offsets.len / 8 != rows + 1 || a->segments.len / 8 != rows + 1) return false;
    const Py_ssize_t cuts = a->cuts.len / 8;
    if (a->counts.len / 8 != cuts || a->crossing.len != cuts || a->crossed.len != cuts) return false;
    const int64_t *offsets = a->offsets.buf, *segments = a->segments.buf;
    if (offsets[0] != 0 || segments[0] != 0) return false;
    for (Py_ssize_t i = 0; i < rows; i++)
        if (offsets[i + 1] < offsets[i] || segments[i + 1] < segments[i] ||
            !PyBytes_CheckExact(PyList_GetItem(texts, i)))
            return false;
    if (offsets[rows] > a->ids.len / 4 || segments[rows] > cuts) return false;
    if (!(rule & RULE_BY_PIECES) && a->lengths.itemsize == 4) return a->lengths.len == a->ids.len;
    if (!(rule & RULE_BY_PIECES)) return a->lengths.itemsize == 1 || a->lengths.itemsize == 2;
    const uint32_t *starts = a->starts.buf;
    const Py_ssize_t pieces = a->kinds.len;
    if (a->foreign.len != 128 || a->starts.len / 4 != pieces + 1 || starts[pieces] != (uint64_t)a->bytes.len) return false;
    for (Py_ssize_t i = 0; i < pieces; i++)
        if (starts[i + 1] < starts[i]) return false;
    return true;
}

static PyObject *counted(const Arrays *a, PyObject *texts, int rule) {
    const Pieces pieces = {a->bytes.buf,  a->kinds.buf,          a->foreign.buf,
                           a->starts.buf, (size_t)a->kinds.len, rule};
    const int64_t *offsets = a->offsets.buf, *segments = a->segments.buf;
    int64_t longest = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(texts); i++)
        if (offsets[i + 1] - offsets[i] > longest) longest = offsets[i + 1] - offsets[i];
    int64_t *ends = PyMem_New(int64_t, longest + 1);
    PyObject *exact = ends ? PyBytes_FromStringAndSize(NULL, PyList_Size(texts)) : PyErr_NoMemory();
    for (Py_ssize_t i = 0; exact && i < PyList_Size(texts); i++) {
        PyObject *text = PyList_GetItem(texts, i);
        const uint32_t *ids = (const uint32_t *)a->ids.buf + offsets[i];
        const int64_t n = offsets[i + 1] - offsets[i], first = segments[i];
        const size_t size = (size_t)PyBytes_Size(text);
        const Row row = {(const int64_t *)a->cuts.buf + first, (const uint8_t *)a->crossing.buf + first,
                         segments[i + 1] - first, (int64_t *)a->counts.buf + first, (uint8_t *)a->crossed.buf + first};
        bool found;
        if (!(rule & RULE_BY_PIECES) && a->lengths.itemsize == 4)
            found = count_row_by_ends(&row, (const uint32_t *)a->lengths.buf + offsets[i], size, n, ends);
        else if (!(rule & RULE_BY_PIECES))
            found = count_row_by_lengths(&row, &a->lengths, size, ids, n);
        else if ((found = lay(&pieces, (const uint8_t *)PyBytes_AsString(text), size, ids, n, ends)))
            count_row(&row, ends, n);
        PyBytes_AsString(exact)[i] = found;
    }
    PyMem_Free(ends);
    return exact;
}

enum { BUFFERS = 12, OUTPUTS = 2 };

PyObject *count_tokens(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *texts, *given[BUFFERS], *answer = NULL;
    Arrays a;
    Py_buffer *const buffers[BUFFERS] = {&a.ids,     &a.offsets,  &a.lengths, &a.bytes,    &a.starts, &a.kinds,
                                         &a.foreign, &a.segments, &a.cuts,    &a.crossing, &a.counts, &a.crossed};
    int rule, open = 0;
    if (!PyArg_ParseTuple(arguments, "O!OOO(OOOOi)OOOOO", &PyList_Type, &texts, &given[0], &given[1], &given[2],
                          &given[3], &given[4], &given[5], &given[6], &rule, &given[7], &given[8], &given[9],
                          &given[10], &given[11]))
        return NULL;
    for (; open < BUFFERS; open++) {
        const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (open >= BUFFERS - OUTPUTS ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(given[open], buffers[open], flags) < 0) goto done;
    }
    if (!is_sound(&a, texts, rule))
        PyErr_SetString(PyExc_ValueError, "texts as bytes, and arrays that fit them and each other");
    else
        answer = counted(&a, texts, rule);
done:
    while (open) PyBuffer_Release(buffers[--open]);
    return answer;
}
